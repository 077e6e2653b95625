"""Modules (Rule 12): a recomputation sees them as the forward did, and does not advance them a second time.

Of every module that the region can reach:

- attributes (`training`, a counter, a list of losses), children and hooks are what they were; what the recomputation does
  to them is undone;
- buffers, and tensors in attributes, have the bytes that they had, in the same memory (see `_snapshot/shadows.py`);
- parameters that something wrote to since are refused where the recomputation reads them (Rule 15);
- a module with `recompute_state()`, which returns a copy, and `load_recompute_state(state)`, which sets what that gave, keeps
  whatever else it needs: state in nested objects, in a kernel library.
"""

from __future__ import annotations

from reactivate._types import Guard


class Modules(Guard):
    """Attributes, children, hooks, buffers and parameters of modules. The engine restores these itself (`_snapshot`)."""

    name = "modules"
    is_of_modules = True
