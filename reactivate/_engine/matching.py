"""Matching: the tensors that a recomputation saves go, by their order, into the slots that are still alive."""

from __future__ import annotations

from collections.abc import Callable
from operator import length_hint
from sys import _getframe
from typing import Any

import torch
from torch import Tensor

from reactivate._engine.kept_calls.choice import Choice
from reactivate._engine.kept_calls.kept import SavedSite, last_needed
from reactivate._engine.kept_calls.skipped_sites import RecomputationLog
from reactivate._engine.mismatch import refusals
from reactivate._engine.mismatch.check import Check
from reactivate._engine.mismatch.oplog import LoggedOp, OpLog, difference
from reactivate._engine.mismatch.stale import is_watched, refuse_stale, watches
from reactivate._engine.record import Record, Saved, metadata_of
from reactivate._engine.state.memory import memory_of
from reactivate._engine.state.rewound import rewound_memory
from reactivate._torch.autograd import (
    is_outside_of_functions,
    next_node_number,
    not_a_users_hook,
)
from reactivate._torch.dynamo import leave_to_eager
from reactivate._torch.modes import copy_unseen, is_function_mode_active, without_function_modes
from reactivate._torch.modules import is_distributed_run
from reactivate.errors import ReactivateError


class RecomputationComplete(BaseException):
    """Ends the function when nothing that it could still compute is needed.

    No `Exception`, as that is what a function catches when it falls back from one kernel to another.
    """


class Matching:
    """The saved-tensor hook of one recomputation."""

    __slots__ = (
        *("check", "detach", "entries", "is_complete", "last", "last_index", "log", "record", "refused"),
        *("stops", "without_graph"),
    )

    def __init__(self, record: Record) -> None:
        saved = record.saved
        self.record = record
        self.entries: Any = iter(saved)
        self.last, self.last_index = None, len(saved) - 1
        self.check = None if record.check is None or record.tokens is not None else Check()
        is_unproved = record.proof is not None and not record.proof.is_settled
        if is_unproved and self.check is not None and is_distributed_run():  # perhaps one rank alone has written
            is_unproved = not record.check.has_all(len(saved))
        self.stops = record.early_stop and (record.tokens is not None or not is_unproved)
        if record.early_stop or record.tokens is not None:
            if saved[-1][0]() is None or record.options.choice is not None:
                self.last_index = last_needed(saved, record.sites)
            self.last = saved[self.last_index] if self.last_index >= 0 else None
        self.log: OpLog | None = None
        self.detach: Callable[[Tensor], Tensor] = Tensor.detach
        self.is_complete = False
        self.without_graph = -1  # the number of the next node, when a tensor without a graph was saved last
        self.refused: BaseException | None = None

    @not_a_users_hook
    def pack(self, tensor: Tensor) -> Tensor:
        """Autograd saves `tensor`. What is returned goes into the recomputation's own graph.

        That graph is for a function that differentiates inside itself; otherwise it ends with the recomputation.
        """
        if is_function_mode_active():
            with without_function_modes():
                return self.pack(tensor)
        saved = next(self.entries, None)
        if saved is None:
            return self._save_more(tensor)
        metadata, has_graph = metadata_of(tensor), tensor.requires_grad
        if metadata != saved[1]:
            self._check(saved, tensor)
        # A slot must not hold the recomputation's graph.
        value = self.detach(tensor) if has_graph and not tensor.is_leaf else tensor
        slot = saved[0]()
        if slot is not None:
            version = metadata[3]
            if watches:
                refuse_stale(tensor)
            if rewound_memory and (present := rewound_memory.get(memory_of(value))) is not None:
                value, version = self._outlasting(value, present, saved[1][3])
            slot.version = version  # first, as another thread may take the value at once
            slot.value = value
        if saved is self.last:
            self.is_complete = True
            self.entries = iter(())  # nothing more is expected
            if not self._may_be_filling(tensor):
                self._stop_if_possible()
        elif not has_graph:
            self.without_graph = next_node_number()
        return value

    @not_a_users_hook
    def pack_checked(self, tensor: Tensor) -> Tensor:
        """Do as `pack`, and take a checksum of what a backward may still read."""
        saved = self.record.saved
        number = len(saved) - length_hint(self.entries)
        if not self.is_complete and self.check is not None and number < len(saved) and saved[number][0]() is not None:
            self.check.note(number, tensor)
        return self.pack(tensor)

    leave_to_eager(pack.__code__)
    leave_to_eager(pack_checked.__code__)

    @property
    def users_hooks(self) -> tuple[Any, Any] | None:
        """Return the saved-tensor hooks of the user's around the region."""
        return self.record.users_hooks

    def _may_be_filling(self, tensor: Tensor) -> bool:
        """Return whether the op that saves `tensor` may yet write to what it has saved.

        An op may fill a tensor that is no part of the graph after it had it saved, as rrelu does with its noise. All that
        is saved before the next node of autograd's is made may be of one op.
        """
        number = next_node_number()
        if not tensor.requires_grad:
            self.without_graph = number
        return self.without_graph == number

    def _outlasting(self, value: Tensor, present: int, saved_version: int) -> tuple[Tensor, int]:
        """Return what the slot gets of a tensor whose memory may be put back when the recomputation is over.

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
        if present == saved_version:  # the tensor itself, as autograd keeps it: somebody may give it other memory
            return value, present
        copied = copy_unseen(value)
        return copied, copied._version

    def follow_sites(self, choice: Choice, behind: Any) -> RecomputationLog:
        """Return the log that skips the calls that the policy saved, and gives their results out behind a fence, if any."""
        return RecomputationLog(self.record, choice, self.record.sites, self, behind)

    def skip(self, site: SavedSite, arguments: list[Tensor]) -> None:
        """A saved call is not made: fill its slots from its arguments, and go on behind them."""
        saved = self.record.saved
        position = len(saved) - length_hint(self.entries)  # how many entries the forward pass has had by now
        if position != site.start or len(arguments) != site.count:
            raise self._refuse(refusals.different_site(self.record, site))
        for index in range(site.start, site.stop):
            slot: Any = saved[index][0]()
            if slot is not None and slot.recipe is not None:
                source = slot.recipe.source(arguments)
                if source._version > slot.recipe.version and self.record.options.checks_versions:
                    raise self._refuse(refusals.written_before_saved(self.record, index, source))
                tensor = slot.recipe.follow(arguments)
                if (tensor.shape, tensor.dtype, tensor.device) != saved[index][1][:3]:
                    self._check(saved[index], tensor)
                if watches:
                    refuse_stale(tensor)
                if self.check is not None:
                    self.check.note(index, tensor)
                slot.version = tensor._version
                slot.value = tensor
        self.entries.__setstate__(site.stop)
        if self.last is not None and self.last_index < site.stop:
            self.is_complete = True
            self.entries = iter(())
            if not site.is_function:
                self._stop_if_possible()
            elif self.stops and not site.is_nested:  # its own forward has not begun: it may be left out
                raise RecomputationComplete

    def go_back_to(self, site: SavedSite) -> None:
        """The call is made after all: it saves what it saved."""
        if not self.is_complete:
            self.entries.__setstate__(site.start)

    def refuse_site(self, site: SavedSite, label: str) -> BaseException:
        """The error for a call that is not the one that was saved."""
        return self._refuse(refusals.different_site(self.record, site, label))

    def refuse_scalars(self, site: SavedSite) -> BaseException:
        """The error for a saved call that is given other numbers than it was."""
        return self._refuse(refusals.missed_state_before(self.record, site))

    def _stop_if_possible(self) -> None:
        if self.stops and is_outside_of_functions():  # the forward of a custom function is not cut short (Rule 8)
            raise RecomputationComplete

    def unpack_in_forward(self, tensor: Tensor) -> Tensor:
        """Return what a backward inside of the recomputation reads while the forward pass is still running.

        It runs such a backward, and this is it. What comes after has not run, so no guard knows what it does.
        """
        if self.is_complete:
            raise RecomputationComplete
        return tensor

    def finish(self) -> None:
        """The function has run to its end: was that all?"""
        if self.refused is not None:  # raised before, and swallowed by the function
            raise self.refused
        missing = 0 if self.is_complete else len(list(self.entries))
        if missing:
            raise self._refuse(refusals.fewer_tensors(self.record, len(self.record.saved) - missing, self._details()))

    def let_go(self) -> None:
        """Hold nothing of the region any more: the recomputation is over, but perhaps not its graph, which has `pack`.

        Hooks inside of the function that give back an op's own output tie that graph into a cycle. No backward goes
        through it and opens the cycle, and no collector sees it (Rule 2).
        """
        del self.record, self.entries, self.last, self.log, self.detach, self.refused, self.check

    def compare_ops_of(self, fn: Callable[..., Any], forward: OpLog) -> Callable[..., Any]:
        """`fn`, with each op held against that of the forward pass (`determinism="values"`)."""

        def check(ops: list[LoggedOp]) -> None:
            if self.is_complete:  # the function has caught `RecomputationComplete`, and does something else
                return
            index = len(ops) - 1
            if index >= len(forward.ops):
                if self.record.tokens is not None:  # a backward inside the forward pass: that is as far as it got
                    return
            elif forward.ops[index].is_like(ops[index]):
                return
            if self.record.proof is not None or is_watched():  # what counts is what autograd saves
                return
            raise self._refuse(refusals.different_values(self.record, difference(forward.ops, ops)))

        self.log = OpLog(check)
        self.detach = self.log.unseen(Tensor.detach)
        return self.log.around(fn)

    def _details(self) -> str:
        forward = self.record.log
        return "" if forward is None or self.log is None else difference(forward.ops, self.log.ops)

    def _check(self, saved: Saved, tensor: Tensor) -> None:
        """Refuse a tensor whose metadata differ, if that matters."""
        record = self.record
        index = next(i for i, entry in enumerate(record.saved) if entry is saved)
        if tensor._version > saved[1][3] and record.options.checks_versions:
            # A copy that stands in for the original counts from 0, so that only the original can be ahead.
            raise self._refuse(refusals.written_before_saved(record, index, tensor))
        if record.options.determinism != "none" and (tensor.shape, tensor.dtype, tensor.device) != saved[1][:3]:
            raise self._refuse(refusals.different_tensor(record, index, tensor, _getframe(1)))

    def _save_more(self, tensor: Tensor) -> Tensor:
        # Without early stop a backward inside the forward pass recomputes more than the forward pass has saved by then.
        # And a function that swallows `RecomputationComplete` goes on, with nothing that is needed.
        if self.is_complete:
            if not self._may_be_filling(tensor):
                self._stop_if_possible()
        elif self.record.tokens is None:
            raise self._refuse(refusals.more_tensors(self.record, tensor, _getframe(1)))
        return tensor.detach()

    def _refuse(self, error: ReactivateError) -> BaseException:
        self.refused = self.record.options.exception(error)
        return self.refused


def unpack(tensor: Tensor) -> Tensor:
    return tensor


leave_to_eager(unpack.__code__)
