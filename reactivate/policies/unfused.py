"""Attention that runs as many ops instead of one kernel: to save such a call is to save what each of these ops saves.

A name is not enough for it: the same function calls one kernel, if there is one for its arguments.
"""

from __future__ import annotations

from typing import Any

OPS = frozenset({"scaled_dot_product_attention"})


def is_unfused(op: str | None, args: Any, kwargs: Any) -> bool:
    """Return whether a call of an op is attention with dropout on a CPU, which has no kernel for that."""
    if op not in OPS:
        return False
    query = args[0] if args else kwargs.get("query")
    dropout = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
    return bool(dropout) and getattr(getattr(query, "device", None), "type", None) == "cpu"
