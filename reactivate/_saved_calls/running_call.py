"""A saved call while it runs in the forward: what it is given, what it saves, what it does."""

from __future__ import annotations

from numbers import Number
from sys import _getframe
from typing import Any, NamedTuple
from weakref import ref

from torch import Tensor

from reactivate._passes.places import user_frame_inside
from reactivate._passes.stale import refuse_stale, watches
from reactivate._saved_calls.choice import CallDecision
from reactivate._saved_calls.collective_writes import rely_on
from reactivate._saved_calls.derivation import Sources
from reactivate._saved_calls.effects import Effects, versions_of
from reactivate._saved_calls.log import objects_in
from reactivate._saved_calls.saved_call import SavedCall, Slot
from reactivate._torch.autograd import is_outside_of_functions, next_node_number, not_a_users_hook
from reactivate._torch.flags import is_any_autocast_enabled
from reactivate._torch.modes import is_function_mode_active, without_function_modes
from reactivate._torch.ops import tensors_in
from reactivate._types import Storage


class RunningCall:
    """A saved call while it runs.

    Args:
        log: of the forward.
        reason: why it has to run again, if that is known beforehand. Then nothing is noted of it.

    Attributes:
        saved: what autograd saved for the call: each slot, with the tensor and its version.
        objects: the objects among its arguments.
        effect: an effect of the call that a recomputation which skips it would lack.
    """

    __slots__ = (
        *("_effects", "_region", "_versions", "decision", "effect", "objects", "saved", "saved_call", "sources"),
        *("storage", "users_hooks"),
    )

    def __init__(
        self,
        log: Any,
        decision: CallDecision,
        number: int,
        storage: Storage,
        fn: Any,
        args: Any,
        kwargs: Any,
        reason: str | None,
    ) -> None:
        region = log.region
        arguments = tensors_in(args, kwargs) if reason is None else []
        decision = decision.of_call(fn, args, kwargs)
        self.decision, self.storage = decision, storage
        self._region, self.users_hooks = region, region.users_hooks
        self.saved: list[tuple[Slot, Tensor, int]] = []
        self.effect: str | None = None
        self.objects = objects_in(args, kwargs) if decision.is_users and reason is None else []
        self._effects: Effects | None = None
        self._versions = versions_of(arguments)
        if not decision.is_quiet and reason is None:
            self._effects = Effects(region, decision, fn, args, kwargs, arguments)
            if log.is_distributed:
                rely_on(self._effects, self._effects.tensors)
        leaves: dict[int, int] = {}
        if decision.module is not None and decision.is_users and reason is None and is_any_autocast_enabled():
            leaves = {id(parameter): parameter._version for parameter in decision.module.parameters()}
        self.sources = Sources(arguments, next_node_number(), decision.is_quiet, leaves, log.casts)
        frame, is_inside = user_frame_inside(_getframe(2))  # the first frames are ours
        scalars = scalars_in(args, kwargs) if region.check is not None and not decision.is_users else None
        location, start = (frame.f_code, frame.f_lasti), len(region.saved)
        self.saved_call = SavedCall(
            number, decision.label, decision.path, reason, location, is_inside, start, len(arguments), scalars
        )

    @not_a_users_hook
    def pack(self, tensor: Tensor) -> Slot:
        """Autograd saves `tensor` for the backward of the call."""
        if is_function_mode_active():
            with without_function_modes():
                return self.pack(tensor)
        if watches:
            refuse_stale(tensor)
        region, version = self._region, tensor._version
        number = len(region.saved)
        slot = Slot(number)
        self.saved.append((slot, tensor, version))
        region.saved.append(((tensor.shape, tensor.dtype, tensor.device, version), *self.saved_call.location))
        region.slots.append(ref(slot))
        region.note_read_again(number)
        if region.check is not None:
            region.check.note(number, tensor)
        return slot

    def returned(self) -> None:
        """See what the call did besides what it returns."""
        effects = self._effects
        if self._versions is None or self._versions != versions_of(self.sources.arguments):
            self.effect = "it writes into its arguments"
        elif effects is not None:
            self.effect = effects.changed()
            if self.effect is None:
                self.saved_call.streams, self.saved_call.written_on_device = (
                    effects.streams(),
                    effects.written_on_device,
                )

    def let_go(self) -> None:
        """Hold no tensor any more: what was saved for the graph knows `pack`, in a cycle that no collector sees."""
        self.saved.clear()
        self._effects, self._region, self.objects = None, None, []
        del self.sources


class Pending(NamedTuple):
    """A custom function whose forward has returned, and which has not saved yet.

    Attributes:
        result: what its forward returned.
        versions: of the tensors in it, by their ids.
        number: of the next node of autograd's. The function's own is there by now; any other op makes one, then saves.
    """

    call: RunningCall
    result: Any
    versions: dict[int, int]
    number: int

    def pack(self, tensor: Tensor) -> Slot:
        """Autograd saves `tensor` for the backward of the function."""
        self.call.saved_call.is_nested = not is_outside_of_functions()
        return self.call.pack(tensor)


def scalars_in(args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """The numbers and texts among the arguments of a call, in their order, as text: one that is not a number is itself."""
    values = (*args, *kwargs.values()) if kwargs else args
    return [repr(value) for value in values if isinstance(value, (Number, str))]
