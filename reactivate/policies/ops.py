"""Policies that save the results of ops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.autograd import Function

from reactivate._types import DEVICE, Action, Save, Site, Storage
from reactivate.errors import UsageError
from reactivate.policies._base import Interest, ReadyMade, written
from reactivate.policies._select import matches
from reactivate.policies.canonical import check, name_of

# What torchtitan saves, by the names that users call: the matrix products, attention and convolutions, whose time grows
# faster than the bytes of their results; reductions over ranks, which cost communication; and the row maxima of FP8
# scaling, which are tiny.
COMPUTE_INTENSIVE = (
    *("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "bilinear", "tensordot"),
    "scaled_dot_product_attention",
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    *("max", "_c10d_functional.reduce_scatter_tensor", "_c10d_functional.all_to_all_single"),
)


_OUT_OF_SIGHT = frozenset({"flex_attention"})


@dataclass(frozen=True, repr=False)
class _Ops(ReadyMade):
    ops: tuple[str, ...]
    functions: tuple[type[Function], ...]
    within: tuple[str, ...]
    storage: Storage
    is_a_list: bool = False

    def __repr__(self) -> str:
        return (
            written("compute_intensive")
            if self.is_a_list
            else written(
                "save_ops",
                *self.ops,
                *self.functions,
                within=self.within or None,
                storage=self.storage,
            )
        )

    def __call__(self, site: Site) -> Action | None:
        if site.function is None or site.name is not None:
            return None
        if site.function not in self.functions and site.op not in self.ops:
            return None
        if self.within and not any(matches(pattern, site.path) for pattern in self.within):
            return None
        return Save(self.storage)

    def interest(self) -> Interest:
        return Interest(frozenset(self.ops), frozenset(self.functions), paths=bool(self.within))

    @property
    def may_match_nothing(self) -> bool:
        return self.is_a_list


def save_ops(*ops: Any, within: str | tuple[str, ...] = (), storage: Storage = DEVICE) -> ReadyMade:
    """Inside of regions, keep what these ops compute: a replay skips them.

    Args:
        ops: the names that users call ("linear", "matmul", "scaled_dot_product_attention"), functions of torch, ops of
            `torch.ops` (an overload stands for all of them), and classes of custom `torch.autograd.Function`s.
        within: only in modules with such a path: one pattern or several, as for `recompute_modules`.
        storage: where to keep it.

    Raises:
        UsageError: there is no such op, it works in place, or none is given.

    Example:
        >>> import torch, reactivate
        >>> policy = reactivate.policies.save_ops("linear", torch.matmul, torch.ops.aten.mm.default)
        >>> policy.ops
        ('linear', 'matmul', 'mm')
    """
    if not ops:
        raise UsageError("save_ops takes at least one op to save.")
    names: list[str] = []
    functions: list[type[Function]] = []
    for op in ops:
        if isinstance(op, type) and issubclass(op, Function):
            functions.append(op)
        else:
            names.append(_checked_name(op))
    patterns = within if isinstance(within, tuple) else (within,)
    if not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise UsageError(f"save_ops(within=...) takes the end of a module's path, as text; got {within!r}.")
    return _Ops(tuple(names), tuple(functions), patterns, storage)


def _checked_name(op: Any) -> str:
    name = op if isinstance(op, str) else name_of(op) if callable(op) else None
    if name is None:
        raise UsageError(f"save_ops takes names of ops, functions of torch and Function classes; got {op!r}.")
    if name in _OUT_OF_SIGHT:
        raise UsageError(
            f"save_ops cannot see calls of {name!r}: it is a Python function around a kernel that torch.compile makes. "
            f"Call it as reactivate.site({name}, name='attention') and use save_names('attention'), or save the module "
            "that calls it with save_modules(...)."
        )
    check(name, "save_ops")
    if name.endswith("_"):
        raise UsageError(
            f"save_ops cannot save {name!r}: it writes into its argument, so there is no result of its own to keep. "
            f"Save the op that makes that argument, or use {name[:-1]!r}."
        )
    return name


def compute_intensive(storage: Storage = DEVICE) -> ReadyMade:
    """Inside of regions, keep what costs much to compute for each byte: matrix products, attention, convolutions.

    This is what torchtitan's selective mode saves, less its habit of recomputing every second matrix product; see the
    page on policies for how to have that as well.

    Args:
        storage: where to keep it.

    Example:
        >>> import torch, reactivate
        >>> from reactivate import policies
        >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        >>> handle = reactivate.apply(model, policies.first_match(policies.compute_intensive(), policies.full()))
    """
    return _Ops(COMPUTE_INTENSIVE, (), (), storage, True)
