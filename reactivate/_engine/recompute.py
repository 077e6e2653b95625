"""A recomputation: the function runs again, for the tensors that the backward needs.

It runs with the arguments, closures, context variables and guarded state of the forward pass, and puts the tensors that
autograd saves, matched by their order, into the slots that are still alive. It ends as soon as the last of these is
filled (Rule 8). Afterwards everything is as if it had not run (Rules 12, 13).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from reactivate._engine.barriers.fencing import FencedRecomputation
from reactivate._engine.current import enter_recomputation
from reactivate._engine.inputs.cells import CellTensorNote
from reactivate._engine.inputs.specs import Memo, rebuild
from reactivate._engine.matching import Matching, RecomputationComplete, unpack
from reactivate._engine.mismatch import naming, refusals
from reactivate._engine.mismatch.compare import compare, disproved
from reactivate._engine.mismatch.proof import RenormsOnce
from reactivate._engine.mismatch.stale import StaleReads
from reactivate._engine.record import Record, observers, tell
from reactivate._engine.sites import calls_regions
from reactivate._engine.state.held import WeakTensor
from reactivate._engine.state.rewound import RewoundState
from reactivate._engine.state.tensor_hooks import KeptHooks
from reactivate._engine.state.turns import undisturbed
from reactivate._torch.autograd import (
    is_profiling,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    set_grad_enabled,
)
from reactivate._torch.checkpoints import close_checkpoints_within
from reactivate.errors import ReactivateError


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
            compare(record, lambda: context.copy().run(run, record, behind))
            if record.proof is not None:
                record.proof.holds_now()
    except BaseException:
        record.forget()  # what it had filled in by then
        raise
    if observers:
        tell(context, "recomputation_done", record)


def _recompute(record: Record, behind: FencedRecomputation | None) -> None:
    """Run the function with the arguments and in the state of the forward pass."""
    enter_recomputation(record.region_call)
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
        while entered:
            entered.pop().__exit__(None, None, None)
    except BaseException as error:
        _leave(entered, error)
        raise


def _leave(entered: list[Any], error: BaseException) -> None:
    """Leave the contexts that an error has left open, the last one first; all of them, also if one fails."""
    while entered:
        try:
            entered.pop().__exit__(type(error), error, error.__traceback__)
        except BaseException as raised:
            _leave(entered, raised)
            raise


def _rewound(record: Record, arguments: Any) -> list[AbstractContextManager[Any]]:
    """Return the contexts in which everything is as the forward saw it."""
    managers: list[Any] = []
    if is_profiling():
        managers.append(torch.profiler.record_function(f"reactivate::recompute {naming.name_of(record)}"))
    innermost: list[Any] = []
    for rewind, snapshot in record.snapshots if record.tokens is None else record.take_snapshots():
        manager = rewind(snapshot)
        if manager is not None:
            (innermost if rewind in record.options.innermost else managers).append(manager)
    if record.notes or record.states is not None:
        state = RewoundState(record.notes, record.states)
        managers.append(undisturbed(state, state.differs))
    proof = record.proof
    managers += innermost
    if record.gradients is not None:
        managers.append(record.gradients)
    tensors = [item for item in (*arguments[0], *arguments[1].values()) if isinstance(item, Tensor)]
    if tensors:
        managers.append(KeptHooks(tensors))
    if proof is not None:
        managers.append(RenormsOnce(tensor for tensor, _ in proof.tensors()))
    stale = _stale(record) if record.inputs or record.asked or record.gradients is not None else []
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
    memo = behind.begin(record)
    try:
        call = _call_again(record, memo)
        for note in record.notes:
            if type(note) is CellTensorNote:  # rewound before its alias was there
                note.put(note.spec)
        _refill(record, *call, behind=behind)
    finally:
        behind.end()


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


def _refill(
    record: Record,
    fn: Callable[..., Any],
    args: list[Any],
    kwargs: dict[str, Any],
    behind: FencedRecomputation | None = None,
) -> None:
    """Run the function, and put what autograd saves into the slots, matched by order."""
    matching = Matching(record)
    choice = record.options.choice
    sites = None if choice is None else matching.follow_sites(choice, behind)
    pack = matching.pack
    if record.log is not None:
        fn = matching.compare_ops_of(fn, record.log)
    if matching.check is not None:
        pack = matching.pack_checked
    push_saved_tensor_hooks(pack, unpack if record.tokens is None else matching.unpack_in_forward)
    if sites is not None:
        sites.open()
    is_proved = record.proof is None or record.proof.is_settled or record.tokens is not None
    may_stop = is_proved or (matching.check is not None and matching.stops)  # what it saves is the proof: see `compare`
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
    except BaseException as error:
        # What counts is what was said here: TorchScript's interpreter makes errors of its own of ours.
        is_ours = isinstance(error, (Exception, RecomputationComplete))
        if not (is_ours and matching.refused is None and matching.is_complete and may_stop):
            close_checkpoints_within(error)
            if is_ours and matching.refused is not None:
                raise matching.refused from None
            raise
        is_proved = may_stop
        if matching.check is not None:
            record.check.recomputed = matching.check
    finally:
        if sites is not None:
            sites.close()
        pop_saved_tensor_hooks()
        matching.let_go()
    if not is_proved:
        raise disproved(record)


calls_regions(_refill.__code__)
