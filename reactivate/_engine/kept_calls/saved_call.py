"""One call that a policy saves: what it is given, what it saves, what it returns."""

from __future__ import annotations

from collections.abc import Callable
from sys import _getframe
from typing import Any, NamedTuple
from weakref import ref

from torch import Tensor

from reactivate._engine.kept_calls.choice import CallDecision
from reactivate._engine.kept_calls.collective_writes import rely_on
from reactivate._engine.kept_calls.derive import Sources
from reactivate._engine.kept_calls.kept import (
    SavedSite,
    SiteSlot,
)
from reactivate._engine.kept_calls.side_effects import Reached, versions_of
from reactivate._engine.kept_calls.site_log import objects_in, scalars_in, tensors_in
from reactivate._engine.mismatch.stale import refuse_stale, watches
from reactivate._engine.record import Metadata, Record
from reactivate._engine.sites import user_frame_inside
from reactivate._engine.state.changes import Noted
from reactivate._torch.autograd import (
    is_outside_of_functions,
    next_node_number,
    not_a_users_hook,
)
from reactivate._torch.flags import is_any_autocast_enabled
from reactivate._torch.modes import is_function_mode_active, without_function_modes
from reactivate._torch.modules import is_distributed_run
from reactivate._types import Storage

IN_TRANSFORM = "a transform of torch.func inside of the region is around it"


IN_INFERENCE = "it runs in inference mode"


OF_INFERENCE = "it returns a tensor that was made in inference mode"


class SavedCall:
    """A saved call while it runs.

    Attributes:
        is_overwritten: whether a collective in place has written to its arguments or to what it closes over.

    Args:
        record: of the region.
        fn: what is called: what it closes over is within its reach.
        reason: why it has to run again, if that is known beforehand. Then nothing is noted of it.
        noted: returns the notes of the region as it is now.
        casts: what autocast made of leaves so far.
    """

    __slots__ = (
        "__weakref__",
        "change",
        "check",
        "decision",
        "entries",
        "is_overwritten",
        "noted",
        "objects",
        "reached",
        "saved",
        "site",
        "sources",
        "storage",
        "users_hooks",
        "versions",
    )

    def __init__(
        self,
        record: Record,
        decision: CallDecision,
        number: int,
        storage: Storage,
        fn: Any,
        args: Any,
        kwargs: Any,
        reason: str | None,
        noted: Callable[[], Noted],
        casts: dict[Any, int],
    ) -> None:
        self.decision = decision
        self.storage = storage
        self.entries = record.saved
        self.is_overwritten = False
        self.users_hooks = record.users_hooks
        self.check = record.check
        self.saved: list[tuple[SiteSlot, Tensor, int]] = []
        arguments = tensors_in(args, kwargs) if reason is None else []
        self.versions = versions_of(arguments)
        self.reached: Reached | None = None
        self.noted = None if decision.is_quiet or reason is not None else noted()
        self.change: str | None = None
        self.objects: list[Any] = []
        leaves: dict[int, int] = {}
        if decision.is_users and reason is None:
            self.reached = Reached(fn, (args, kwargs), self.noted or noted())
            self.objects = objects_in(args, kwargs)
            if decision.module is not None and is_any_autocast_enabled():
                leaves = {id(parameter): parameter._version for parameter in decision.module.parameters()}
        if not decision.is_quiet and is_distributed_run():
            rely_on(self, arguments if self.reached is None else (*arguments, *self.reached.tensors()))
        self.sources = Sources(arguments, next_node_number(), decision.is_quiet, leaves, casts)
        site = self.site = SavedSite()
        site.number, site.label, site.path = number, decision.label, decision.path
        site.is_function = site.is_nested = False
        site.reason, site.changes, site.bits = reason, (), None
        site.start, site.derived = len(self.entries), -1
        site.count = len(arguments)
        frame, site.is_placed = user_frame_inside(_getframe(2))  # the first frames are ours
        site.place = (frame.f_code, frame.f_lasti)
        site.scalars = scalars_in(args, kwargs) if self.check is not None and not decision.is_users else None

    @not_a_users_hook
    def pack(self, tensor: Tensor) -> SiteSlot:
        """Autograd saves `tensor` for the backward of the call."""
        if is_function_mode_active():
            with without_function_modes():
                return self.pack(tensor)
        if watches:
            refuse_stale(tensor)
        slot = SiteSlot()
        slot.value = slot.kept = slot.recipe = None
        version = tensor._version
        self.saved.append((slot, tensor, version))
        metadata: Metadata = (tensor.shape, tensor.dtype, tensor.device, version)
        self.entries.append((ref(slot), metadata, *self.site.place))
        if self.check is not None:
            self.check.note(len(self.entries) - 1, tensor)
        return slot

    def let_go(self) -> None:
        """Hold no tensor any more: what was saved for the graph knows `pack`, in a cycle that no collector sees."""
        self.saved.clear()
        self.reached = self.noted = None
        self.objects = []


class Pending(NamedTuple):
    """A custom function whose forward has returned, and which has not saved yet.

    Attributes:
        result: what its forward returned.
        versions: of the tensors in it, by their ids.
        number: of the next node of autograd's. The function's own is there by now; any other op makes one, then saves.
    """

    call: SavedCall
    result: Any
    versions: dict[int, int]
    number: int

    def pack(self, tensor: Tensor) -> SiteSlot:
        """Autograd saves `tensor` for the backward of the function."""
        self.call.site.is_nested = not is_outside_of_functions()
        return self.call.pack(tensor)
