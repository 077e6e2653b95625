"""Policies that save what a module computes, or a function that model code gave a name."""

from __future__ import annotations

from dataclasses import dataclass

from reactivate._text.keywords import refuse_unknown
from reactivate._types import DEVICE, Action, Save, Site, Storage
from reactivate.errors import UsageError
from reactivate.policies._base import Interest, ReadyMade, written
from reactivate.policies._select import SelectedModules, Selector, check


@refuse_unknown
def save_modules(*modules: Selector, storage: Storage = DEVICE) -> ReadyMade:
    """Inside of regions, keep what these modules compute: a recomputation skips them.

    The cheapest kind of site: nothing is intercepted but the call of the module.

    Args:
        modules: as for `recompute_modules`.
        storage: where to keep it.

    Raises:
        UsageError: a selector is not one, or there is none.

    Examples:
        >>> import torch, reactivate
        >>> from reactivate import policies
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 2)
        >>> handle = reactivate.apply(model, policies.first_match(policies.save_modules("*.linear2"), policies.full()))
        >>> handle.saved
        ('layers.0.linear2', 'layers.1.linear2')
    """
    if not modules:
        raise UsageError("save_modules takes at least one module to save.")
    check(modules, "save_modules")
    return SelectedModules("save_modules", modules, Save(storage))


@dataclass(frozen=True, repr=False)
class _SaveNames(ReadyMade):
    names: tuple[str, ...]
    storage: Storage

    def __repr__(self) -> str:
        return written("save_names", *self.names, storage=self.storage)

    def __call__(self, site: Site) -> Action | None:
        return Save(self.storage) if site.name is not None and site.name in self.names else None

    def _interest(self) -> Interest:
        return Interest(names=True)


@refuse_unknown
def save_names(*names: str, storage: Storage = DEVICE) -> ReadyMade:
    """Inside of regions, keep what the calls with these names compute: those made with `reactivate.site`.

    Args:
        names: as given to `reactivate.site(fn, name=...)`.
        storage: where to keep it.

    Raises:
        UsageError: a name is no text, or there is none.

    Examples:
        >>> import torch, reactivate
        >>> project = torch.nn.Linear(4, 4)
        >>> def block(x):
        ...     return reactivate.site(project, name="projection")(x).exp()
        >>> policy = reactivate.policies.save_names("projection")
        >>> reactivate.checkpoint(block, policy=policy)(torch.ones(2, 4, requires_grad=True)).shape
        torch.Size([2, 4])
    """
    if not names or not all(isinstance(name, str) and name for name in names):
        raise UsageError(f"save_names takes names as given to reactivate.site(fn, name=...); got {names!r}.")
    return _SaveNames(names, storage)
