"""The options of a call of `torch.utils.checkpoint`, as options of a region: their errors say it in torch's words too."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from operator import is_
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch.utils.checkpoint import noop_context_fn

from reactivate._region.options import Options
from reactivate._types import Storage
from reactivate.dropin._offload import OffloadingPair
from reactivate.errors import ReactivateError, RecomputeMismatchError, UsageError
from reactivate.guards import DEFAULT, Guards

# What existing code (and torch's own tests) look for in the messages.
_WORDS_OF_TORCH = {
    "fewer": "A different number of tensors was saved",
    "more": "trying to save more tensors during recomputation",
    "metadata": "Recomputed values for the following tensors have different metadata",
    "values": "Recomputed values for the following tensors have different values",
}


class _TorchOptions(Options):
    """Options whose errors say it in torch's words too."""

    def exception(self, error: ReactivateError) -> BaseException:
        if not isinstance(error, RecomputeMismatchError):
            return error
        lines = [
            str(error).replace('`check="every"`', "`debug=True`"),
            f"(In torch.utils.checkpoint: {_WORDS_OF_TORCH[error.kind]}.)",
        ]
        if self.check == "every":
            lines.append("You are seeing this error because you passed `debug=True` to checkpoint.")
        return RecomputeMismatchError("\n".join(lines), kind=error.kind)


class Asked(NamedTuple):
    """The options that a call gives for its region."""

    preserve_rng_state: bool = True
    context_fn: Callable[[], Any] = noop_context_fn
    determinism_check: str = "default"
    debug: bool = False
    early_stop: bool = True
    respect_saved_tensors_hooks: bool | None = None

    def options(self, guards: Guards, storage: Storage, is_debugging: bool | None, stops: bool | None) -> Options:
        """Return the options of the region.

        Args:
            guards: of every region.
            storage: where policies of selective checkpointing offload to.
            is_debugging, stops: in the place of `debug` and `early_stop`, unless None.

        Raises:
            UsageError: an option has a value that it cannot have, or does not go with another.
        """
        if all(map(is_, (*self, is_debugging, stops, guards), _USUAL)):
            return _USUAL_OPTIONS
        if _is_of_phases(self.context_fn):
            return self._replace(context_fn=noop_context_fn).options(guards, storage, is_debugging, stops)
        is_debugging = self.debug if is_debugging is None else is_debugging
        if is_debugging and self.context_fn is not noop_context_fn:
            raise UsageError("debug=True is incompatible with non-default context_fn.")
        asked = self.determinism_check
        if asked not in ("default", "none"):
            raise UsageError(f"determinism_check should be one of ['default', 'none'], but got {asked!r}.")
        check = "every" if is_debugging else "first" if asked == "default" else "none"
        keeps = self.preserve_rng_state
        options = _options(guards, keeps, self.early_stop if stops is None else stops, check)
        if self.context_fn is noop_context_fn:
            return options
        pair = OffloadingPair(functools.partial(_contexts, self), storage, keeps_random_numbers=keeps)
        return _TorchOptions((*options.guards, pair), options.early_stop, options.check)


def warn_reentrant(name: str, stacklevel: int) -> None:
    """Warn that `use_reentrant` was not given, as torch does."""
    warnings.warn(
        f"{name}: the use_reentrant parameter should be passed explicitly. torch will raise without it. With "
        "reactivate both variants run on the same engine, so pass use_reentrant=False.",
        stacklevel=stacklevel,
    )


_USUAL = (*Asked(), None, None, DEFAULT)  # as mostly: found by identities
_USUAL_OPTIONS = _TorchOptions(tuple(DEFAULT))


_made: WeakKeyDictionary[Guards, dict[Any, Options]] = WeakKeyDictionary()  # for as long as the guards live


def _options(guards: Guards, *asked: Any) -> Options:
    made = _made.setdefault(guards, {})
    if asked not in made:
        made[asked] = _new_options(guards, *asked)
    return made[asked]


def _new_options(guards: Guards, preserve_rng_state: bool, early_stop: bool, check: str) -> Options:
    if not preserve_rng_state and check == "first":  # other random numbers are no mistake there
        check = "metadata"
    if not preserve_rng_state and "rng" in guards.names():
        guards = guards.without("rng")
    return _TorchOptions(tuple(guards), early_stop, check)


def _is_of_phases(context_fn: Any) -> bool:
    """Return whether a pair of contexts only tells TransformerEngine's layers to keep state, which is rewound here."""
    module = sys.modules.get("transformer_engine.pytorch.distributed")
    return module is not None and context_fn is getattr(module, "get_activation_recompute_contexts", None)


def _contexts(asked: Asked) -> Any:
    forward, recompute = asked.context_fn()
    if hasattr(forward, "respect_saved_tensors_hooks"):  # torch's selective checkpointing: torch tells it as well
        forward.respect_saved_tensors_hooks = asked.respect_saved_tensors_hooks
    return forward, recompute
