"""Policies that save the results of ops."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from torch.autograd import Function
from torch.nn import Module

from reactivate._text.keywords import refuse_unknown
from reactivate._text.words import described
from reactivate._types import DEVICE, Action, Save, Site, Storage
from reactivate.errors import UsageError
from reactivate.policies._base import Interest, ReadyMade, written
from reactivate.policies._select import matches
from reactivate.policies.canonical import check, name_of

_ATTENTION = (
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"),
    *("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    *("_flash_attention_forward", "_efficient_attention_forward"),
    *("scaled_dot_product_attention", "torch_attn._varlen_attn", "flex_attention"),
)

# What torchtitan 0.3 saves, by the names that users call.
COMPUTE_INTENSIVE = (
    # matrix products, convolutions and attention: their time grows faster than the bytes of their results
    *("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "bilinear", "tensordot"),
    *("_scaled_mm", "scaled_mm"),
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution"),
    *_ATTENTION,
    *("_scaled_dot_product_attention_math", "_scaled_dot_product_fused_attention_overrideable", "upsample_bilinear2d"),
    "inductor_compiled_code",
    # the row maxima of FP8 scaling, which are tiny; and which expert gets which token
    *("max", "topk"),
    # communication
    *("_c10d_functional.reduce_scatter_tensor", "_c10d_functional.all_to_all_single"),
    *("deepep.dispatch", "deepep.combine", "hybridep.dispatch", "hybridep.combine"),
)


@dataclass(frozen=True, repr=False)
class _Ops(ReadyMade):
    ops: tuple[str, ...]
    functions: tuple[type[Function], ...]
    within: tuple[str, ...]
    storage: Storage
    asked: tuple[str, ...] = ()  # the call that stands for a list of ops: its name, and its arguments
    arguments: bool = False  # whether copies to the host are saved as well, and attention only in one kernel

    def __repr__(self) -> str:
        if self.asked == ("compute_intensive",):
            return written("compute_intensive", storage=self.storage)
        asked: tuple[Any, ...] = self.asked or ("save_ops", *self.ops, *self.functions)
        return written(*asked, within=self.within or None, storage=self.storage)

    def __call__(self, site: Site) -> Action | None:
        if site.function is None or site.name is not None:
            return None
        if site.function not in self.functions and not self._takes(site):
            return None
        return Save(self.storage) if self._is_within(site.path) else None

    def _is_within(self, path: str) -> bool:
        return not self.within or any(matches(pattern, path) for pattern in self.within)

    def _kept_in(self, path: str) -> Hashable:
        return (*self.ops, *self.functions, repr(self.storage)) if self.within and self._is_within(path) else None

    def _takes(self, site: Site) -> bool:
        if site.op in self.ops:
            return not (self.arguments and site.is_unfused)
        return self.arguments and site.is_copy_to_host

    def _patterns(self) -> tuple[str, ...]:
        return self.within

    def _interest(self) -> Interest:
        ops, functions = frozenset(self.ops), frozenset(self.functions)
        return Interest(ops, functions, paths=bool(self.within), arguments=self.arguments)

    @property
    def _may_match_nothing(self) -> bool:
        return self.asked == ("compute_intensive",)


@refuse_unknown
def save_ops(*ops: Any, within: str | tuple[str, ...] = (), storage: Storage = DEVICE) -> ReadyMade:
    """Inside of regions, keep what these ops compute: a recomputation skips them.

    Args:
        ops: the names that users call ("linear", "matmul", "scaled_dot_product_attention"), functions of torch, ops of
            `torch.ops` (an overload stands for all of them), and classes of custom `torch.autograd.Function`s.
        within: only in modules with such a path: one pattern or several, as for `recompute_modules`.
        storage: where to keep it.

    Raises:
        UsageError: there is no such op, it works in place, or none is given.

    Examples:
        >>> import torch, reactivate
        >>> policy = reactivate.policies.save_ops("linear", torch.matmul, torch.ops.aten.mm.default)
        >>> policy.ops
        ('linear', 'matmul', 'mm')
    """
    if not ops:
        raise UsageError("save_ops takes at least one op to save.")
    return ops_of(ops, "save_ops", within=within, storage=storage)


def ops_of(
    ops: Iterable[Any],
    asked_by: str,
    kinds: Iterable[str] = (),
    within: str | tuple[str, ...] = (),
    storage: Storage = DEVICE,
) -> ReadyMade:
    """Return the policy that `save_ops` makes of `ops`.

    Args:
        asked_by: the function that was given them.
        kinds: the kinds of calls that this function takes as well.

    Raises:
        UsageError: there is no such op, or it works in place.
    """
    names: list[str] = []
    functions: list[type[Function]] = []
    for op in ops:
        if isinstance(op, type) and issubclass(op, Function):
            functions.append(op)
        else:
            names.append(_checked_name(op, asked_by, kinds))
    return _Ops(tuple(names), tuple(functions), _patterns(within, asked_by), storage)


def _patterns(within: Any, asked_by: str) -> tuple[str, ...]:
    patterns = within if isinstance(within, tuple) else (within,)
    if not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise UsageError(f"{asked_by}(within=...) takes the end of a module's path, as text; got {within!r}.")
    return patterns


def _checked_name(op: Any, asked_by: str, kinds: Iterable[str]) -> str:
    if isinstance(op, Module) or (isinstance(op, type) and issubclass(op, Module)):
        kind = op.__name__ if isinstance(op, type) else type(op).__name__
        raise UsageError(f"{asked_by} takes ops; got {described(op)}. To save modules, write save_modules({kind}).")
    name = op if isinstance(op, str) else name_of(op) if callable(op) else None
    if name is None:
        others = f", and kinds of calls ({', '.join(map(repr, kinds))})" if kinds else ""
        raise UsageError(f"{asked_by} takes names of ops, functions of torch and Function classes{others}; got {op!r}.")
    check(name, asked_by, kinds)
    if name.endswith("_"):
        raise UsageError(
            f"{asked_by} cannot save {name!r}: it writes into its argument, so there is no result of its own to keep. "
            f"Save the op that makes that argument, or use {name[:-1]!r}."
        )
    return name


@refuse_unknown
def compute_intensive(storage: Storage = DEVICE) -> ReadyMade:
    """Inside of regions, keep what costs much to compute for each byte: matrix products, attention, convolutions.

    Kept as well: top-k, which chooses experts, communication between ranks, and copies from a device to the host, such as
    those of split sizes, which the device waits for. Attention with dropout on a CPU is not kept: there it is many ops, which
    save several times what one kernel does. This is what torchtitan 0.3 saves, less its habit of recomputing every second
    matrix product; see the page on policies for how to have that as well.

    Args:
        storage: where to keep it.

    Examples:
        >>> import torch, reactivate
        >>> from reactivate import policies
        >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        >>> handle = reactivate.apply(model, policies.first_match(policies.compute_intensive(), policies.full()))
    """
    return _Ops(COMPUTE_INTENSIVE, (), (), storage, ("compute_intensive",), arguments=True)


KINDS = {
    "attention": (
        *_ATTENTION,
        "multi_head_attention_forward",
        *("flash_attn._flash_attn_forward", "flash_attn._flash_attn_varlen_forward"),
    ),
    "routing": ("topk", "sort", "argsort", "bincount", "histc", "nonzero"),
    "collectives": tuple(
        f"{library}.{op}"
        for library in ("_c10d_functional", "_c10d_functional_autograd")
        for op in ("all_to_all_single", "reduce_scatter_tensor", "all_gather_into_tensor", "all_reduce", "wait_tensor")
    ),
}


@refuse_unknown
def save(*kinds: str, within: str | tuple[str, ...] = (), storage: Storage = DEVICE) -> ReadyMade:
    """Inside of regions, keep what calls of these kinds compute, by whatever op: a recomputation skips them.

    Args:
        kinds: "attention" (scaled dot products, `nn.MultiheadAttention`, sequences of several lengths, flash attention),
            "routing" (top-k, orders and counts: which expert gets which token), "collectives" (functional ones of
            `torch.distributed`). The ops are in the policy's `ops`; those that a model calls are in its `explain`.
        within: only in modules with such a path: one pattern or several, as for `recompute_modules`.
        storage: where to keep it.

    Raises:
        UsageError: there is no such kind, or none is given.

    Examples:
        >>> import torch, reactivate
        >>> policy = reactivate.policies.save("attention", "routing")
        >>> "scaled_dot_product_attention" in policy.ops, "topk" in policy.ops
        (True, True)
    """
    wrong = [kind for kind in kinds if not isinstance(kind, str) or kind not in KINDS]
    if wrong or not kinds:
        found = f"{wrong[0]!r} is none" if wrong else "none is given"
        raise UsageError(
            f"save takes kinds of calls, {', '.join(map(repr, KINDS))}; {found}. Ops are saved with save_ops('linear'), "
            "modules with save_modules('*.attn'), calls that reactivate.site names with save_names('attention')."
        )
    ops = tuple(dict.fromkeys(op for kind in kinds for op in KINDS[kind]))
    return _Ops(ops, (), _patterns(within, "save"), storage, ("save", *kinds))
