"""A recomputation: the function runs again, for the tensors that the backward needs.

It runs with the arguments, closures, context variables and guarded state of the forward pass, and puts the tensors that
autograd saves, matched by their order, into the slots that are still alive. It ends as soon as the last of these is
filled (Rule 8). Afterwards everything is as if it had not run (Rules 12, 13).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from operator import length_hint
from sys import _getframe
from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from reactivate._engine.barriers.fencing import FencedRecomputation
from reactivate._engine.inputs.cells import CellTensorNote
from reactivate._engine.inputs.specs import Memo, rebuild
from reactivate._engine.kept_calls.kept import SavedSite, last_needed
from reactivate._engine.kept_calls.skipped_sites import RecomputationLog
from reactivate._engine.mismatch import refusals
from reactivate._engine.mismatch.check import OUTPUTS, Check
from reactivate._engine.mismatch.oplog import LoggedOp, OpLog, difference
from reactivate._engine.mismatch.proof import RenormsOnce
from reactivate._engine.mismatch.stale import StaleReads, refuse_stale, watches
from reactivate._engine.record import Record, Saved, observers, tell
from reactivate._engine.state.contents import WeakTensor
from reactivate._engine.state.memory import memory_of
from reactivate._engine.state.notes import RewoundNotes
from reactivate._engine.state.shadows import RewoundTensors, rewound_memory
from reactivate._engine.state.tensor_hooks import KeptHooks
from reactivate._torch.autograd import (
    is_outside_of_functions,
    is_profiling,
    next_node_number,
    not_a_users_hook,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    set_grad_enabled,
)
from reactivate._torch.dynamo import leave_to_eager
from reactivate._torch.modes import copy_unseen, is_function_mode_active, without_function_modes
from reactivate._torch.modules import is_distributed_run
from reactivate.errors import ReactivateError

_is_recomputing: ContextVar[bool] = ContextVar("reactivate.is_recomputing", default=False)


def is_recomputing() -> bool:
    """Return whether the calling code runs in a recomputation: exactly then, on this thread (Rule 19).

    For code with side effects that no guard knows, which would otherwise happen twice: metrics, logging, counters.

    Example:
        >>> import torch, reactivate
        >>> seen = []
        >>> def f(x):
        ...     if not reactivate.is_recomputing():
        ...         seen.append(x.shape)
        ...     return x.sin().cos()
        >>> reactivate.checkpoint(f)(torch.ones(2, requires_grad=True)).sum().backward()
        >>> len(seen)
        1
    """
    return _is_recomputing.get()


class RecomputationComplete(BaseException):
    """Ends the function when nothing that it could still compute is needed.

    No `Exception`, as that is what a function catches when it falls back from one kernel to another.
    """


def recompute(record: Record, behind: FencedRecomputation | None = None) -> None:
    """Fill every slot of `record` that is still alive.

    Args:
        record: the call.
        behind: the fence that its device needs.

    Raises:
        MutationError: something that the recomputation would read was changed.
        RecomputeMismatchError: the function does not do what it did.
        Exception: whatever the function raises. State is as before, and the same backward can be tried again.
    """
    context = record.context
    # A copy, since one context cannot be entered twice: a recomputation may be inside another of the same region.
    # And if the forward pass is still running, its log is open, and these are not its ops.
    run = _recompute if record.log is None else record.log.unseen(_recompute)
    try:
        context.copy().run(run, record, behind)
        if record.check is not None and record.tokens is None:
            _compare(record, lambda: context.copy().run(run, record, behind))
            if record.proof is not None:
                record.proof.holds_now()
    except BaseException:
        record.forget()  # what it had filled in by then
        raise
    if observers:
        tell(context, "recomputation_done", record)


def _compare(record: Record, again: Callable[[], Any]) -> None:
    """Compare a recomputation with its forward; where they differ, recompute once more to see which of two it is."""
    forward: Check = record.check
    record.check = None
    first, forward.recomputed = forward.recomputed, None
    if first is None:
        return
    number = forward.difference(first)
    is_read_the_same = (number is None or number >= OUTPUTS) and forward.proves(first, _refilled(record))
    if record.proof is not None:
        if not is_read_the_same and (number is not None or not first.has_same_results):
            raise _disproved(record)
        record.proof.is_settled = True
        return
    if number is None or is_read_the_same:
        return
    is_deterministic = None
    if not is_distributed_run():  # other ranks would wait in the collectives of a second one
        record.check = forward
        again()
        second, record.check = forward.recomputed, None
        is_deterministic = second is not None and first.difference(second) is None
    # An op that adds up in any order may choose another expert on an accelerator; on the CPU there is none.
    if (is_deterministic or forward.is_on_cpu()) and not forward.is_rounding(first):
        raise record.options.exception(refusals.missed_state(record, number))
    warnings.warn(refusals.differs(record, number, is_deterministic), stacklevel=2)


def _refilled(record: Record) -> list[int]:
    """Return the numbers of the saved tensors that a recomputation has filled."""
    slots = [reference() for reference, *_ in record.saved]
    return [index for index, slot in enumerate(slots) if slot is not None and getattr(slot, "kept", None) is None]


def _recompute(record: Record, behind: FencedRecomputation | None) -> None:
    """Run the function with the arguments and in the state of the forward pass."""
    _is_recomputing.set(True)
    was_enabled = is_grad_enabled()
    set_grad_enabled(True)
    try:
        if behind is None:
            call = _call_again(record, {})
            refill = functools.partial(_refill, record, *call)
        else:
            _read(record, behind)
            call = record.fn, [], {}
            refill = functools.partial(_refill_behind, record, behind)
        _run_inside(_rewound(record, call[1:]), refill)
    finally:
        set_grad_enabled(was_enabled)
        for note in record.notes:
            if type(note) is CellTensorNote:
                note.let_go()


def _run_inside(managers: Sequence[Any], function: Callable[[], None]) -> None:
    """Call a function inside of contexts, the first one outermost. An `ExitStack` would cost microseconds."""
    entered = []
    try:
        for manager in managers:
            manager.__enter__()
            entered.append(manager)
        function()
    except BaseException as error:
        _leave(entered, error)
        raise
    _leave(entered, None)


def _leave(entered: list[Any], error: BaseException | None) -> None:
    """Leave contexts, the last one first; all of them, also if one fails."""
    while entered:
        try:
            if error is None:
                entered.pop().__exit__(None, None, None)
            else:
                entered.pop().__exit__(type(error), error, error.__traceback__)
        except BaseException as raised:
            _leave(entered, raised)
            raise


def _rewound(record: Record, arguments: Any) -> list[AbstractContextManager[Any]]:
    """Return the contexts in which everything is as the forward saw it."""
    managers: list[Any] = []
    if is_profiling():
        managers.append(torch.profiler.record_function(f"reactivate::recompute {refusals.name_of(record)}"))
    for rewind, snapshot in record.snapshots if record.tokens is None else record.take_snapshots():
        manager = rewind(snapshot)
        if manager is not None:
            managers.append(manager)
    if record.notes:
        managers.append(RewoundNotes(record.notes))
    proof = record.proof
    if record.states is not None:
        managers.append(RewoundTensors(record.states))
    if record.gradients is not None and not record.gradients.is_quiet():
        managers.append(record.gradients)
    tensors = [item for item in (*arguments[0], *arguments[1].values()) if isinstance(item, Tensor)]
    if tensors:
        managers.append(KeptHooks(tensors))
    if proof is not None:
        managers.append(RenormsOnce(tensor for tensor, _ in proof.tensors()))
    gradients = record.gradients
    has_more = record.inputs or record.asked or (gradients is not None and not gradients.is_quiet())
    stale = _stale(record) if has_more else []
    if stale:
        managers.append(StaleReads([tensor for tensor, _ in stale], functools.partial(_refusal, record, stale)))
    return managers


def _stale(record: Record) -> list[tuple[Tensor, str]]:
    """Return what was modified since the forward ended, and what shows by no comparison that it does not matter."""
    proof = record.proof
    copied = {id(item.tensor) for item in record.states.written if item.left is not None} if record.states else ()
    found = []
    for item, place, _ in record.unrestored():
        tensor = item.get() if isinstance(item, WeakTensor) else item
        is_proved = (
            record.tokens is None
            and proof is not None
            and (id(tensor) in copied or proof.covers(item, is_checked=record.check is not None))
        )
        if not is_proved:
            found.append((tensor, place))
    return found


def _refusal(record: Record, stale: list[tuple[Tensor, str]], tensor: Tensor) -> Any:
    place = next((place for item, place in stale if item is tensor), "an input")
    if record.proof is not None:
        record.proof.ask_for_copies()
    return record.options.exception(refusals.modified_input(record, place, tensor))


def _read(record: Record, behind: FencedRecomputation) -> None:
    try:
        behind.read(record)
    except RuntimeError as error:
        raise _in_words(record, error) from None


def _refill_behind(record: Record, behind: FencedRecomputation) -> None:
    """As `_refill`, where the state of the forward pass is read through aliases as well."""
    with behind.standing(record) as memo:
        call = _call_again(record, memo)
        for note in record.notes:
            if type(note) is CellTensorNote:  # rewound before its alias was there
                note.put(note.spec)
        _refill(record, *call)


def _call_again(record: Record, memo: Memo) -> tuple[Callable[..., Any], list[Any], dict[str, Any]]:
    """Return the function and its arguments, but for those that `memo` has something else for."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    replaced = record.replaced
    try:
        for key, spec in replaced.items():
            if key not in memo:
                memo[key] = rebuild(spec, {})
        for spec in record.args:
            args.append(rebuild(spec, memo))
        for name, spec in record.kwargs.items():
            kwargs[name] = rebuild(spec, memo)
        for note in record.notes:
            if type(note) is CellTensorNote:
                note.prepare(memo)
    except RuntimeError as error:
        raise _in_words(record, error) from None
    return record.fn, args, kwargs


def _in_words(record: Record, error: RuntimeError) -> BaseException:
    """Return the error to raise for one that came while the arguments were read."""
    if isinstance(error, ReactivateError) or not refusals.is_of_a_write(error):
        return error  # from the recomputation of a region around this one
    return record.options.exception(refusals.written_before_recomputation(record, error))


def _refill(record: Record, fn: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> None:
    """Run the function, and put what autograd saves into the slots, matched by order."""
    matching = _Matching(record)
    sites = matching.follow_sites()
    if record.log is not None:
        fn = matching.compare_ops_of(fn, record.log)
    pack = matching.pack if matching.check is None else matching.pack_checked
    push_saved_tensor_hooks(pack, _unpack if record.tokens is None else matching.unpack_in_forward)
    if sites is not None:
        sites.open()
    is_proved = record.proof is None or record.proof.is_settled or record.tokens is not None
    try:
        result = fn(*args, **kwargs)
        matching.finish()
        if matching.check is not None:
            matching.check.note_outputs(result)
            record.check.recomputed = matching.check
        is_proved = is_proved or record.proof.holds(result)
        if matching.check is not None:  # which sees more than the outputs; and what was kept proves nothing
            is_computed = all(site.reason is not None for site in record.sites)
            matching.check.has_same_results, is_proved = is_proved and is_computed, True
    except (Exception, RecomputationComplete):
        # What counts is what was said here: TorchScript's interpreter makes errors of its own of ours.
        if matching.refused is not None:
            raise matching.refused from None
        if not (matching.is_complete and is_proved):
            raise
    finally:
        if sites is not None:
            sites.close()
        pop_saved_tensor_hooks()
        matching.let_go()
    if not is_proved:
        raise _disproved(record)


def _disproved(record: Record) -> BaseException:
    """Return the error for a forward that wrote to what it reads; from the next call on there is a copy of it."""
    record.proof.ask_for_copies()
    return record.options.exception(refusals.disproved(record))


class _Matching:
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
        is_unproved = record.proof is not None and not record.proof.is_settled
        is_needed_whole = record.tokens is None and (is_unproved or record.check is not None)
        self.check = None if record.check is None or record.tokens is not None else Check()
        self.stops = record.early_stop and not is_needed_whole
        if record.early_stop or record.tokens is not None:
            if saved[-1][0]() is None or record.options.choice is not None:
                self.last_index = last_needed(saved)
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
        version = tensor._version
        if (tensor.shape, tensor.dtype, tensor.device, version) != saved[1]:
            self._check(saved, tensor)
        # A slot must not hold the recomputation's graph.
        value = self.detach(tensor) if tensor.requires_grad and not tensor.is_leaf else tensor
        slot = saved[0]()
        if slot is not None:
            if watches:
                refuse_stale(tensor)
            if rewound_memory:
                value, version = self._outlasting(value, saved[1][3])
            slot.version = version  # first, as another thread may take the value at once
            slot.value = value
        if saved is self.last:
            self.is_complete = True
            self.entries = iter(())  # nothing more is expected
            if not self._may_be_filling(tensor):
                self._stop_if_possible()
        elif not tensor.requires_grad:
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

    def _outlasting(self, value: Tensor, saved_version: int) -> tuple[Tensor, int]:
        """Return what the slot gets of a tensor whose memory may be put back when the recomputation is over.

        Where autograd would read the present memory, this does; where it would refuse to, the bytes of the forward. Hooks
        of the user's around the region decide: autograd would keep what they make of the tensor, a copy maybe.
        """
        memory = memory_of(value)
        present = None if memory is None else rewound_memory.get(memory)
        if present is None:
            return value, value._version
        if self.users_hooks is not None:
            pack, unpack = self.users_hooks
            with torch.no_grad():
                found = unpack(pack(value))
            return (found, found._version) if memory_of(found) != memory else (self.detach(value), present)
        if present == saved_version:
            return self.detach(value), present
        copied = copy_unseen(value)
        return copied, copied._version

    def follow_sites(self) -> RecomputationLog | None:
        """Return the log that skips the calls that the policy saved, if any."""
        record = self.record
        if record.options.choice is None:
            return None
        return RecomputationLog(record, record.options.choice, record.sites, self)

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
            if self.record.proof is not None or watches:  # what counts is what autograd saves
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
            raise self._refuse(refusals.different_tensor(record, index, tensor, _getframe(2)))

    def _save_more(self, tensor: Tensor) -> Tensor:
        # Without early stop a backward inside the forward pass recomputes more than the forward pass has saved by then.
        # And a function that swallows `RecomputationComplete` goes on, with nothing that is needed.
        if self.is_complete:
            if not self._may_be_filling(tensor):
                self._stop_if_possible()
        elif self.record.tokens is None:
            raise self._refuse(refusals.more_tensors(self.record, tensor, _getframe(2)))
        return tensor.detach()

    def _refuse(self, error: ReactivateError) -> BaseException:
        self.refused = self.record.options.exception(error)
        return self.refused


def _unpack(tensor: Tensor) -> Tensor:
    return tensor


leave_to_eager(_unpack.__code__)
