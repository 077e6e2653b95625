"""Matching: the tensors that a recomputation saves are those of the forward, by their order."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from sys import _getframe
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from reactivate._passes.check import Check
from reactivate._passes.logs import unseen
from reactivate._passes.oplog import LoggedOp, OpLog, difference
from reactivate._passes.stale import is_watched, refuse_stale, watches
from reactivate._region import errors_text
from reactivate._saved_calls.saved_call import SavedCall, last_needed
from reactivate._snapshot.geometry import memory_of
from reactivate._snapshot.rewound_tensors import rewound_memory
from reactivate._torch.autograd import is_outside_of_functions, next_node_number, not_a_users_hook
from reactivate._torch.dynamo import close_checkpoints_within, leave_to_eager
from reactivate._torch.modes import (
    copy_unseen,
    is_dispatch_mode_active,
    is_function_mode_active,
    is_tracing,
    run_unseen,
    without_function_modes,
)
from reactivate._torch.modules import is_distributed_run
from reactivate.errors import ReactivateError

if TYPE_CHECKING:
    from reactivate._region.region import Region


Metadata = tuple[torch.Size, torch.dtype, torch.device, int]  # the last is the version
metadata_of: Callable[[Tensor], Metadata] = attrgetter("shape", "dtype", "device", "_version")

Values = dict[int, tuple[Tensor, int]]
"""Recomputed tensors by their number, each with its version."""


class RecomputationComplete(BaseException):
    """Ends the function when nothing that it could still compute is needed.

    No `Exception`, as that is what a function catches when it falls back from one kernel to another.
    """


class Matching:
    """The saved-tensor hook of one recomputation.

    Attributes:
        region: the region.
        values: those of the region, which are filled.
        index, end: how many tensors were saved so far, and how many will be; -1 when all that is needed is there.
        last: the number of the last one that is needed.
        is_traced: whether the whole recomputation is traced, and not run.
        stops: whether the function is ended then.
        check: the checksums of this pass, where they are to be compared with those of the forward; otherwise None.
        refused: the error that was raised, as the function may swallow it.
    """

    index = end = 0
    is_traced = False
    check: Check | None = None
    log: OpLog | None = None
    without_graph = -1  # the number of the next node, when a tensor without a graph was saved last
    refused: BaseException | None = None

    def __init__(self, region: Region) -> None:
        self.region = region
        if is_dispatch_mode_active():
            self.is_traced = is_tracing()
        self.saved = saved = region.saved
        self.values: Values = {}
        region.values = self.values
        self.end = len(saved)
        self.last, self.stops = self.end - 1, region.early_stop
        if not region.is_ordinary:
            self._look_at_more()
        if not (region.early_stop or region.is_in_forward):
            self.last = -1

    def _look_at_more(self) -> None:
        region = self.region
        if region.slots is not None:
            self.last = last_needed(region)
        if region.is_in_forward:
            return
        if region.check is not None:
            self.check = Check()
        if region.proof is not None and not region.proof.is_settled:
            # In a distributed run perhaps this rank alone has written: where all that is saved is compared, that is proof.
            is_proved = region.check is not None and is_distributed_run() and region.check.has_all(len(self.saved))
            self.stops = self.stops and is_proved

    @not_a_users_hook
    def pack(self, tensor: Tensor) -> Tensor:
        """Autograd saves `tensor`. What is returned goes into the recomputation's own graph.

        That graph is for a function that differentiates inside itself; otherwise it ends with the recomputation.
        """
        if is_function_mode_active():
            with without_function_modes():
                return self.pack(tensor)
        index = self.index
        if index >= self.end:
            return self._save_more(tensor)
        metadata = metadata_of(tensor)
        if metadata != self.saved[index][0]:
            self._check(index, tensor)
        if watches:
            refuse_stale(tensor)
        has_graph = tensor.requires_grad
        # What waits for the backward must not hold the recomputation's graph.
        value = tensor
        if has_graph and not tensor.is_leaf:
            value = self._detach(tensor) if is_dispatch_mode_active() else tensor.detach()
        if rewound_memory and (present := rewound_memory.get(memory_of(value))) is not None:
            value, version = self._outlasting(value, present, self.saved[index][0][3])
            self.values[index] = value, version
        else:
            self.values[index] = value, metadata[3]
        self.index = index + 1
        if index == self.last:
            self.end = -1
            self._stop_unless_filling(tensor)
        elif not has_graph:
            self.without_graph = next_node_number()
        return value

    @not_a_users_hook
    def pack_checked(self, tensor: Tensor) -> Tensor:
        """Do as `pack`, and take a checksum of what a backward may still read."""
        index = self.index
        if not self.is_complete and self.check is not None and index < len(self.saved) and self.region.slot_of(index):
            self.check.note(index, tensor)
            if self.region.filled is not None:
                self.region.filled.saves(index, tensor, _getframe(1))
        return self.pack(tensor)

    leave_to_eager(pack.__code__)
    leave_to_eager(pack_checked.__code__)

    @property
    def is_complete(self) -> bool:
        """Return whether all that is needed is there."""
        return self.end < 0

    @property
    def users_hooks(self) -> tuple[Any, Any] | None:
        """Return the saved-tensor hooks of the user's around the region."""
        return self.region.users_hooks

    def _stop_unless_filling(self, tensor: Tensor) -> None:
        """End the function, unless the op that saves `tensor` may yet write to what it has saved.

        An op may fill a tensor that is no part of the graph after it had it saved, as rrelu does with its noise. All that
        is saved before the next node of autograd's is made may be of one op.
        """
        number = next_node_number()
        if not tensor.requires_grad:
            self.without_graph = number
        if self.without_graph != number and self.stops and is_outside_of_functions():
            raise RecomputationComplete

    def _outlasting(self, value: Tensor, present: int, saved_version: int) -> tuple[Tensor, int]:
        """Return what the backward gets of a tensor whose memory may be put back when the recomputation is over.

        Where autograd would read the present memory, this does; where it would refuse to, the bytes of the forward. Hooks
        of the user's around the region decide: autograd would keep what they make of the tensor, a copy maybe.

        Args:
            value: the tensor.
            present: the version that it has outside of the recomputation.
            saved_version: the version with which the forward saved it.
        """
        if self.users_hooks is not None:
            memory, (pack, unpack) = memory_of(value), self.users_hooks
            with torch.no_grad():
                found = unpack(pack(value))
            return found, present if memory_of(found) == memory else found._version
        if present == saved_version:  # the tensor itself, as autograd keeps it: it may get other memory
            return value, present
        copied = copy_unseen(value)
        return copied, copied._version

    def skip(self, call: SavedCall, arguments: list[Tensor]) -> None:
        """A saved call is not made: derive its saved tensors from its arguments, and go on behind them."""
        region = self.region
        if self.index != call.start or len(arguments) != call.count:
            raise self._refuse(errors_text.different_call(region, call))
        for index in range(call.start, call.stop):
            slot = region.slot_of(index)
            if slot is not None and slot.derivation is not None:
                self._derive(index, slot.derivation, arguments)
        self.index = call.stop
        if 0 <= self.last < call.stop:
            self.end = -1
            if not call.is_function:
                self._stop_if_possible()
            elif self.stops and not call.is_nested:  # its own forward has not begun: it may be left out
                raise RecomputationComplete

    def _derive(self, index: int, derivation: Any, arguments: list[Tensor]) -> None:
        source = derivation.source(arguments)
        if source._version > derivation.version and self.region.options.checks_versions:
            raise self._refuse(errors_text.written_before_saved(self.region, index, source))
        tensor = derivation.follow(arguments)
        if (tensor.shape, tensor.dtype, tensor.device) != self.saved[index][0][:3]:
            self._check(index, tensor)
        if watches:
            refuse_stale(tensor)
        if self.check is not None:
            self.check.note(index, tensor)
            if self.region.filled is not None:
                self.region.filled.given.add(index)  # it is made of what the call was given
        self.values[index] = tensor, tensor._version

    def share(self, call: SavedCall, results: dict[int, Tensor]) -> None:
        """Hand the results of a saved call to the backward too, where hooks around the region unpack them once.

        Args:
            call: the call.
            results: of each that it keeps, by the `id` of that.
        """
        for index in range(call.start, call.stop):
            slot = self.region.slot_of(index)
            result = None if slot is None or slot.kept is None else results.get(id(slot.kept))
            if result is not None:
                self.values[index] = result, result._version

    def go_back_to(self, call: SavedCall) -> None:
        """The call is made after all: it saves what it saved."""
        if not self.is_complete:
            self.index = call.start

    def refuse_call(self, call: SavedCall, label: str) -> BaseException:
        """Return the error for a call that is not the one that was saved."""
        return self._refuse(errors_text.different_call(self.region, call, label))

    def refuse_scalars(self, call: SavedCall) -> BaseException:
        """Return the error for a saved call that is given other numbers than it was."""
        return self._refuse(errors_text.missed_state_before(self.region, call))

    def _stop_if_possible(self) -> None:
        if self.stops and is_outside_of_functions():  # the forward of a custom function is not cut short (Rule 8)
            raise RecomputationComplete

    def unpack_in_forward(self, tensor: Tensor) -> Tensor:
        """Return what a backward inside of the recomputation reads while the forward is still running.

        It runs such a backward, and this is it. What comes after has not run, so no guard knows what it does.
        """
        if self.is_complete:
            raise RecomputationComplete
        return tensor

    def finish(self) -> None:
        """Raise if the function has run to its end and that was not all."""
        if self.refused is not None:  # raised before, and swallowed by the function
            raise self.refused
        if not self.is_complete and self.index < len(self.saved):
            raise self._refuse(errors_text.fewer_tensors(self.region, self.index, self._details()))

    def is_enough(self, error: BaseException, may_stop: bool = True) -> bool:
        """Return whether all that is needed is there, now that an error has ended the function.

        Args:
            error: the error.
            may_stop: whether the function may be ended as soon as that is so.

        Raises:
            ReactivateError: the recomputation is refused, whatever the function has made of that.
        """
        # What counts is what was said here: TorchScript's interpreter makes errors of its own of ours.
        is_ours = isinstance(error, (Exception, RecomputationComplete))
        if is_ours and self.refused is None and self.end < 0 and may_stop:
            return True
        close_checkpoints_within(error)
        if is_ours and self.refused is not None:
            raise self.refused from None
        return False

    def let_go(self) -> None:
        """Hold nothing of the region any more: the recomputation is over, but perhaps not its graph, which has `pack`.

        Hooks inside of the function that give back an op's own output tie that graph into a cycle. No backward goes
        through it and opens the cycle, and no collector sees it (Rule 2).
        """
        vars(self).clear()

    def compare_ops_of(self, fn: Callable[..., Any], forward: OpLog) -> Callable[..., Any]:
        """Return `fn`, with each op compared with that of the forward (`check="every"`)."""
        expected = forward.ops.copy()

        def check(ops: list[LoggedOp]) -> None:
            if self.is_complete:  # the function has caught `RecomputationComplete`, and does something else
                return
            index = len(ops) - 1
            if index >= len(expected):
                if self.region.is_in_forward:  # a backward inside the forward: that is as far as it got
                    return
            elif expected[index].is_like(ops[index]):
                return
            elif forward.may_omit and (omitted := _omitted(expected[index:], ops[index])):
                del expected[index : index + omitted]
                return
            if self.region.proof is not None or is_watched():  # what counts is what autograd saves
                return
            raise self._refuse(errors_text.different_values(self.region, difference(expected, ops)))

        self.log = OpLog(check)
        return self.log.around(fn)

    def _details(self) -> str:
        forward = self.region.log
        return "" if forward is None or self.log is None else difference(forward.ops, self.log.ops)

    def _check(self, index: int, tensor: Tensor) -> None:
        """Refuse a tensor whose metadata differ, if that matters."""
        region = self.region
        saved = self.saved[index][0]
        if tensor._version > saved[3] and region.options.checks_versions:
            # A copy that stands in for the original counts from 0, so that only the original can be ahead; and a constant of
            # compiled code, if the forward was the call that compiled it.
            error = errors_text.written_before_saved(region, index, tensor)
            if self.check is None or region.check is None:
                raise self._refuse(error)
            region.check.doubtful.append(error)
        if region.options.check != "none" and (tensor.shape, tensor.dtype, tensor.device) != saved[:3]:
            raise self._refuse(errors_text.different_tensor(region, index, tensor, _getframe(1)))

    def _save_more(self, tensor: Tensor) -> Tensor:
        # Without early stop a backward inside the forward recomputes more than the forward has saved by then.
        # And a function that swallows `RecomputationComplete` goes on, with nothing that is needed.
        if self.is_complete:
            self._stop_unless_filling(tensor)
        elif not self.region.is_in_forward:
            raise self._refuse(errors_text.more_tensors(self.region, tensor, _getframe(1)))
        return self._detach(tensor)

    def _detach(self, tensor: Tensor) -> Tensor:
        """Return an alias that no mode of the user's sees, and which is in no graph that is traced inside of the region."""
        is_traced_inside = is_tracing() and not self.is_traced and type(tensor) in (Tensor, Parameter)
        alias: Tensor = (run_unseen if is_traced_inside else unseen)(Tensor.detach, tensor)
        return alias

    def _refuse(self, error: ReactivateError) -> BaseException:
        self.refused = self.region.options.exception(error)
        return self.refused


def _omitted(expected: list[LoggedOp], op: LoggedOp) -> int:
    """Return how many of the ops that are expected are left out before one like `op`; 0 if none is like that."""
    return next((count for count, other in enumerate(expected) if other.is_like(op)), 0)
