"""Modules (Rule 12): a replay sees them as the forward pass did, and does not advance them a second time.

Of every module that the region can reach:

- attributes (`training`, a counter, a list of losses) are what they were, and what the replay does to them is undone;
- buffers, and tensors in attributes, that the forward pass wrote to are read as they were before it;
- parameters must not have been written to: that is refused (Rule 15);
- a module with `replay_state()` and `load_replay_state(state)` keeps whatever else it needs.

What a tensor held has to be copied before it is known whether the forward pass will write to it. So the first call of a
module in a mode (training or not) copies all its buffers, and later ones copy those that were written to. Floating-point
buffers of one dimension are copied in every training call: batch norm's kernels write to running statistics
without a new version, so that nobody can tell. So are scalars, which are cheap.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.jit import ScriptModule
from torch.nn import Module

from reactivate._compat import copy_unseen, may_be_written_unseen
from reactivate._types import Call, Guard
from reactivate.guards._base import undisturbed
from reactivate.guards._module_state import ChangedModules, Held, ModuleState, RewoundModules


class Stateful(Protocol):
    """A module with state that is neither in buffers nor in attributes: in nested objects, in a kernel library."""

    def replay_state(self) -> Any:
        """A copy of the state."""

    def load_replay_state(self, state: Any) -> None:
        """Set what `replay_state` gave."""


class Modules(Guard):
    """Attributes, buffers and parameters of modules.

    Args:
        copies_all: copy every buffer at every call, whether the forward pass is known to write to it or not.
    """

    name = "modules"

    def __init__(self, *, copies_all: bool = False) -> None:
        self._copies_all = copies_all
        # Does the forward pass write to it? {module: {(name, training): written}}
        self._known: WeakKeyDictionary[Module, dict[tuple[Any, bool], bool]] = WeakKeyDictionary()

    def __reduce__(self) -> Any:
        return functools.partial(Modules, copies_all=self._copies_all), ()

    def before(self, call: Call) -> ModuleState | None:
        modules = call.modules
        if not modules:
            return None
        special = [module for module in modules if not _is_torchs(type(module))]  # type: ignore[arg-type]
        scripted = [module for module in special if isinstance(module, ScriptModule)]  # their tensors live in C++
        if scripted:
            modules = [module for module in modules if not isinstance(module, ScriptModule)]
        seen = ModuleState(modules)
        for module, namespace in zip(modules, seen.namespaces):
            buffers = namespace["_buffers"]
            for name in buffers:
                if buffers[name] is not None:
                    self._hold(seen, module, buffers, name, buffers[name])
        for module in special:
            if isinstance(module, ScriptModule):
                self._see_script_module(seen, module)
            else:
                self._see_attributes(seen, module, module.__dict__)
        return seen

    def _see_attributes(self, seen: ModuleState, module: Module, attributes: dict[str, Any]) -> None:
        for name, value in attributes.items():
            kind = type(value)
            if kind in _WITHOUT_STATE or name in _OF_EVERY_MODULE:
                continue
            if issubclass(kind, Tensor):
                self._hold(seen, module, attributes, name, value)
            elif kind in _CONTAINERS:
                seen.containers.append((value, value.copy()))
                for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                    if isinstance(item, Tensor):
                        self._hold(seen, module, value, key, item)
        if hasattr(type(module), "replay_state"):
            stateful: Any = module
            seen.states.append((module, stateful.replay_state()))

    def _hold(self, seen: ModuleState, module: Module, namespace: Any, name: Any, tensor: Tensor) -> None:
        if tensor.requires_grad:  # the product of a forward pass, not state
            seen.held.append(Held(module, namespace, name, tensor, False))
            seen.copies.append(None)
            return
        # A scalar counts something, mostly. Of a module that another region runs it is written to unexpectedly, too.
        is_silent = module.training and (tensor.ndim == 0 or may_be_written_unseen(tensor))
        seen.held.append(Held(module, namespace, name, tensor, is_silent))
        is_needed = (
            is_silent or self._copies_all or self._known.get(module, _NOTHING).get((name, module.training), True)
        )
        seen.copies.append(copy_unseen(tensor) if is_needed else None)

    def _see_script_module(self, seen: ModuleState, module: Module) -> None:
        for name, buffer in module.named_buffers(recurse=False):
            seen.held.append(Held(module, None, name, buffer, True))
            seen.copies.append(copy_unseen(buffer))
        seen.watch(module.parameters(recurse=False))

    def after(self, token: ModuleState | None) -> ModuleState | None:
        if token is None:
            return None
        written = token.written_parameters()
        if written:
            raise token.refuse(written[0], "was written to in the forward pass of a region that reads it")
        if not token.held:
            return token
        return token.keeping([self._what_to_keep(token, *pair) for pair in zip(token.held, token.copies)])

    def _what_to_keep(self, token: ModuleState, held: Held, copy: Tensor | None) -> Tensor | None:
        if held.is_silent:
            return copy
        is_written = held.tensor._version != held.version
        self._known.setdefault(held.module, {})[held.name, held.module.training] = is_written
        if is_written and copy is None:
            raise token.refuse(
                held.tensor,
                "was written to in the forward pass of a region, after calls that did not write to it, so that no copy "
                "had been made of what it held",
            )
        return copy if is_written else None

    def replay(self, snapshot: ModuleState) -> AbstractContextManager[Any]:
        rewound = RewoundModules(snapshot)
        return undisturbed(rewound) if snapshot.is_written_to() else rewound

    def skip(self, call: Call, token: ModuleState | None) -> Callable[[], None] | None:
        changed = ChangedModules(token) if token is not None and token.has_changed() else None
        return changed.bring if changed else None

    @staticmethod
    def rewound(state: ModuleState) -> AbstractContextManager[None]:
        """As `replay`, for a whole step: without the lock, which replays on other threads would wait for."""
        return RewoundModules(state)


_CONTAINERS = frozenset({list, dict, set, OrderedDict, defaultdict, deque})
_OF_EVERY_MODULE = frozenset(Module().__dict__)
_NOTHING: Mapping[Any, bool] = {}
_WITHOUT_STATE = frozenset({type(None), bool, int, float, str})


@functools.cache
def _is_torchs(kind: type) -> bool:
    """Whether it is one of torch's own, whose attributes are plain values."""
    return kind.__module__.startswith("torch.nn.modules.") and not issubclass(kind, ScriptModule)
