"""Policies that make regions: which modules are recomputed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from reactivate._text.keywords import refuse_unknown
from reactivate._types import DEVICE, Action, Recompute, Site, Storage
from reactivate.errors import UsageError
from reactivate.policies._base import ReadyMade, check_every, check_storage, shortened, written
from reactivate.policies._select import SelectedModules, Selector, check
from reactivate.policies.combine import first_match
from reactivate.policies.ops import KINDS, ops_of, save as save_kinds


@dataclass(frozen=True, repr=False)
class _Full(ReadyMade):
    inputs: Storage

    def __repr__(self) -> str:
        return written("full", inputs=self.inputs)

    def __call__(self, site: Site) -> Action | None:
        return Recompute(self.inputs) if site.block is not None else None


@refuse_unknown
def full(*, save: Sequence[Any] = (), inputs: Storage = DEVICE) -> ReadyMade:
    """Recompute every block, but for the results of some calls inside.

    Blocks are the layers in the lists of a model, under whatever name: the children of its `ModuleList`s, and those of a
    `ModuleDict` or `Sequential` in which two share a class; the outermost ones. A child that is not made of modules itself
    (an embedding, a norm) is no block; `print(handle)` says which these are.

    Args:
        save: the calls whose results are kept: ops ("linear", `torch.matmul`), as for `save_ops`, and kinds of calls
            ("attention", "routing", "collectives"), as for `save`.
        inputs: where to keep what the blocks are called with: `storage.Host()` for the memory of the host.

    Raises:
        UsageError: there is no such op or kind.

    Examples:
        >>> import torch, reactivate
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 4)
        >>> with reactivate.apply(model, reactivate.policies.full()) as handle:
        ...     handle.regions
        ('layers.0', 'layers.1', 'layers.2', 'layers.3')
        >>> reactivate.policies.full(save=["linear", "attention"])
        first_match(save_ops('linear'), save('attention'), full())
    """
    check_storage(inputs, "full(inputs=...)")
    if isinstance(save, str) or not isinstance(save, Iterable):
        raise UsageError(f"full(save=...) takes a list of ops and kinds of calls; got {save!r}.")
    kinds = [name for name in save if isinstance(name, str) and name in KINDS]
    ops = [op for op in save if not isinstance(op, str) or op not in KINDS]
    kept = [*([ops_of(ops, "full(save=...)", KINDS)] if ops else []), *([save_kinds(*kinds)] if kinds else [])]
    return first_match(*kept, _Full(inputs)) if kept else _Full(inputs)


@dataclass(frozen=True, repr=False)
class _None(ReadyMade):
    def __repr__(self) -> str:
        return written("none")

    def __call__(self, site: Site) -> Action | None:
        return None

    @property
    def _may_match_nothing(self) -> bool:
        return True


def none() -> ReadyMade:
    """Keep everything, as without a policy."""
    return _None()


@dataclass(frozen=True, repr=False)
class _Every(ReadyMade):
    k: int
    offset: int
    inputs: Storage

    def __repr__(self) -> str:
        return written("recompute_every", self.k, offset=self.offset or None, inputs=self.inputs)

    def __call__(self, site: Site) -> Action | None:
        return Recompute(self.inputs) if site.block is not None and site.block % self.k == self.offset else None

    def _check_blocks(self, blocks: Sequence[str]) -> None:
        if 0 < len(blocks) < self.k:
            raise UsageError(
                f"apply: {self} counts further than the {len(blocks)} blocks of the model ({shortened(blocks)}). It takes 1 "
                f"to {len(blocks)}; recompute_every({len(blocks)}) recomputes one block."
            )


@refuse_unknown
def recompute_every(k: int, offset: int = 0, *, inputs: Storage = DEVICE) -> ReadyMade:
    """Recompute every k-th block: those whose number, from 0, leaves the remainder `offset`.

    Args:
        k: at least 1; at most the number of blocks, which `apply` checks.
        offset: from 0 to k - 1.
        inputs: where to keep what these blocks are called with.

    Raises:
        UsageError: `k` or `offset` is out of range.

    Examples:
        >>> import torch, reactivate
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 4)
        >>> reactivate.apply(model, reactivate.policies.recompute_every(2, offset=1)).regions
        ('layers.1', 'layers.3')
    """
    check_every(k, offset, "recompute_every")
    check_storage(inputs, "recompute_every(inputs=...)")
    return _Every(k, offset, inputs)


@refuse_unknown
def recompute_modules(*modules: Selector, inputs: Storage = DEVICE) -> ReadyMade:
    """Recompute these modules, each a region of its own; one inside of another is a region inside of a region.

    Args:
        modules: the end of a path in `model.named_modules()`, where `*` stands for one name and `**` for any number
            of them ("layers.*", "encoder.**.mlp"); a class of modules; a function of the site. Consecutive members of a
            `Sequential` are one region if they are named as Python slices them, with both ends: "layers[8:16]".
        inputs: where to keep what these modules are called with.

    Raises:
        UsageError: a selector is none of these, or there is none. From `apply`: a span is not within a `Sequential`, or two
            spans overlap.

    Examples:
        >>> import torch, reactivate
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 2)
        >>> reactivate.apply(model, reactivate.policies.recompute_modules("*.self_attn")).regions
        ('layers.0.self_attn', 'layers.1.self_attn')
        >>> stack = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(6)))
        >>> reactivate.apply(stack, reactivate.policies.recompute_modules("[0:3]", "[3:6]")).regions
        ('[0:3]', '[3:6]')
    """
    if not modules:
        raise UsageError("recompute_modules takes at least one module to recompute; full() takes every block.")
    check(modules, "recompute_modules", takes_spans=True)
    check_storage(inputs, "recompute_modules(inputs=...)")
    return SelectedModules("recompute_modules", modules, Recompute(inputs))
