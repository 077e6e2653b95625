"""A recomputation: the function runs again, and every saved tensor of its region gets its value.

It runs with the arguments, closures, context variables and guarded state of the forward. The tensors that autograd saves are
matched with those of the forward by their order. It ends as soon as the last one that is needed is there (Rule 8).
Afterwards everything is as if it had not run (Rules 12, 13).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import repeat
from operator import attrgetter
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, is_grad_enabled

from reactivate._passes.check import Check
from reactivate._passes.current import enter_recomputation
from reactivate._passes.observing import observers, tell
from reactivate._passes.places import calls_regions
from reactivate._passes.stale import StaleReads, is_of_a_write
from reactivate._region import errors_text, naming
from reactivate._region.accounts import note_shortage
from reactivate._region.compare import compare, disproved
from reactivate._region.graphed import hide_graphs
from reactivate._region.left_behind import LeftBehind
from reactivate._region.matching import Matching
from reactivate._region.proof import RenormsOnce
from reactivate._saved_calls.life import RecomputationLog
from reactivate._snapshot.geometry import memory_of
from reactivate._snapshot.held import WeakTensor, original_of
from reactivate._snapshot.inputs import Memo, rebuild
from reactivate._snapshot.rewound_moment import RewoundMoment
from reactivate._snapshot.shadows import note_written
from reactivate._snapshot.state_lock import STATE_LOCK, LockEntry
from reactivate._storing.requests import idle as idle_storages, refuse_silence
from reactivate._torch.autograd import (
    is_profiling,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    same,
    set_grad_enabled,
)
from reactivate._torch.dynamo import leave_to_eager
from reactivate._torch.modes import is_batched, is_function_mode_active, run_beside_function_modes, unbatched
from reactivate._types import Unrestored
from reactivate._xla.recomputation import FencedRecomputation
from reactivate.errors import ReactivateError

if TYPE_CHECKING:
    from reactivate._region.region import Region

_TENSOR = attrgetter("tensor")


def recompute(region: Region, gradient: Tensor | None = None) -> Tensor | None:
    """Run the function of a region again, for all that it saved.

    Args:
        region: the region.
        gradient: what a backward has brought to an exit; it is returned behind the fence that the device needs.

    Raises:
        MutationError: something that the recomputation would read was changed.
        RecomputeMismatchError: the function does not do what it did.
        Exception: whatever the function raises. State is as before, and the same backward can be tried again.
    """
    if idle_storages:
        refuse_silence()
    try:
        # A copy, since one context cannot be entered twice: a recomputation may be inside another of the same region.
        if region.is_ordinary:
            region.context.copy().run(_recompute, region)
            return None
        return _recompute_for_more(region, gradient)
    except BaseException as error:
        region.forget()  # what it had filled in by then
        note_shortage(error, type(region))
        raise


def _recompute_for_more(region: Region, gradient: Tensor | None) -> Tensor | None:
    """Recompute a region with a fence, observers, a log of ops, a comparison or a proof."""
    context = region.context
    behind = None if region.fence is None else FencedRecomputation(region.fence[0], region.fence[1], gradient)
    # If the forward is still running, its log is open, and these are not its ops.
    run = _recompute if region.log is None else region.log.unseen(_recompute)
    is_compared = region.check is not None and not region.is_in_forward
    # What hooks of the user's unpack: they may do so once, and a comparison may need more than one recomputation.
    unpacked: Memo | None = {} if is_compared and region.users_hooks else None
    left_behind = LeftBehind(region) if is_compared else None
    if observers:
        tell(context, "recomputation_begins", region)
    context.copy().run(run, region, behind, unpacked)
    if left_behind is not None:
        left_behind.refuse()
    if is_compared:
        compare(region, lambda: context.copy().run(run, region, behind, unpacked))
        if region.proof is not None:
            region.proof.holds_now()
    if observers:
        tell(context, "recomputation_done", region)
    return None if behind is None else behind.gradient


def _recompute(region: Region, behind: FencedRecomputation | None = None, unpacked: Memo | None = None) -> None:
    """Run the function with the arguments and in the state of the forward.

    Args:
        region: the region.
        behind: the fence that the device needs.
        unpacked: tensors that hooks gave an earlier one, and what they give this one; None if there is no other.
    """
    was_enabled = is_grad_enabled()
    entered: list[Any] = []  # contexts, the outermost first; an `ExitStack` would cost microseconds
    memo: Memo = {} if unpacked is None else unpacked.copy()
    lock = LockEntry(functools.partial(_memory_read_by, region, memo))
    try:  # around all that is set: an interrupt may come at any moment
        enter_recomputation(region.identity)
        set_grad_enabled(True)
        if is_batched():
            _enter(unbatched(), entered)
        hide_graphs(region)
        if behind is None:
            args, kwargs = _arguments(region, memo)
            if unpacked is not None:
                keys = {*map(id, region.specs)}.difference(region.replaced)
                unpacked.update((key, memo[key]) for key in keys.intersection(memo))
            _enter_state_of_forward(region, memo, lock, entered)
            _run_again(region, args, kwargs)
        else:
            try:
                behind.read(region, rebuild)
            except RuntimeError as error:
                raise _in_words(region, error) from None
            _enter_state_of_forward(region, memo, lock, entered)
            _run_behind(region, behind)
        while entered:
            entered.pop().__exit__(None, None, None)
    except BaseException as error:
        _leave(entered, error)
        raise
    finally:
        try:
            set_grad_enabled(was_enabled)
            for holder in region.cells:
                holder.let_go()
        finally:
            try:
                lock.leave()
            except BaseException:  # an interrupt: other threads would wait for good
                lock.leave()
                raise


# -- the arguments and the state of the forward -----------------------------------------------------------------------


def _arguments(region: Region, memo: Memo) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments, and get the closed-over tensors: that may recompute a region around this one.

    Args:
        region: the region.
        memo: what stands for some of the arguments.
    """
    try:
        if region.replaced:
            for key, spec in region.replaced.items():
                if key not in memo:
                    memo[key] = rebuild(spec, {})
        args = list(map(rebuild, region.args, repeat(memo)))
        kwargs = {name: rebuild(spec, memo) for name, spec in region.kwargs.items()} if region.kwargs else {}
        for holder in region.cells:
            holder.prepare(memo)
    except RuntimeError as error:
        raise _in_words(region, error) from None
    return args, kwargs


def _in_words(region: Region, error: RuntimeError) -> BaseException:
    """Return the error to raise for one that came while the arguments were read."""
    if isinstance(error, ReactivateError) or not is_of_a_write(error):
        return error  # from the recomputation of a region around this one
    return region.options.exception(errors_text.written_before_recomputation(region, error))


def _enter_state_of_forward(region: Region, memo: Memo, lock: LockEntry, entered: list[Any]) -> None:
    """Enter the contexts in which everything is as the forward saw it, and add each to `entered`.

    Args:
        region: the region.
        memo: what stands for its specs.
        lock: how the recomputation takes part in the lock of state.
        entered: the contexts.
    """
    if is_profiling():
        _enter(torch.profiler.record_function(f"reactivate::recompute {naming.name_of(region)}"), entered)
    STATE_LOCK.join(lock)
    unrestored = region.unrestored()
    stale = _stale(region, unrestored) if unrestored else None
    innermost: Any = region.options.innermost
    late: tuple[Any, ...] = ()
    snapshots = region.take_snapshots() if region.is_in_forward else region.snapshots
    for rewind, snapshot in zip(region.options.recomputations, snapshots):
        context = None if snapshot is None else rewind(snapshot)
        if context is not None:
            if innermost and rewind in innermost:
                late = (*late, context)
            else:
                context.__enter__()
                entered.append(context)
    if region.reached is not None:
        for context in region.reached.rewindings():
            _enter(context, entered)
    given = list(map(memo.get, map(id, region.specs)))
    if region.inputs:
        given += map(original_of, map(_TENSOR, region.inputs))
    others = (*region.args, *region.kwargs.values()) if region.kwargs else region.args  # what is a spec is no tensor
    rewound: Any = RewoundMoment(region.moment, given, others)
    if is_function_mode_active():
        rewound = _BesideFunctionModes(rewound)
    rewound.__enter__()
    entered.append(rewound)
    for context in late:
        _enter(context, entered)
    if region.proof is not None:
        _enter(RenormsOnce(tensor for tensor, _ in region.proof.tensors()), entered)
    if stale:
        refuse = functools.partial(_refusal, region, stale)
        _enter(StaleReads([tensor for tensor, _ in stale], refuse), entered)


class _BesideFunctionModes:
    """A context that begins and ends unseen by function modes of the user's: it puts back what these have counted."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def __enter__(self) -> None:
        run_beside_function_modes(self._context.__enter__)

    def __exit__(self, *error: object) -> None:
        run_beside_function_modes(self._context.__exit__, *error)


def _memory_read_by(region: Region, memo: Memo) -> frozenset[int] | None:
    """Return the memory of the tensors that a recomputation reads as they are; None where that cannot be told.

    Args:
        region: the region. A large tree of modules is noted as the region reaches them.
        memo: what stands for its specs.
    """
    if region.reached is not None:
        return None
    found = {*memo.values(), *map(original_of, map(_TENSOR, region.inputs))}
    memory = frozenset(
        map(memory_of, [*region.moment.tensors(), *(item for item in found if isinstance(item, Tensor))])
    )
    return None if None in memory else memory  # type: ignore[return-value]


def _enter(context: Any, entered: list[Any]) -> None:
    context.__enter__()
    entered.append(context)


def _stale(region: Region, unrestored: list[Unrestored]) -> list[tuple[Tensor, str]]:
    """Return what was modified since the forward, and may not be read: no comparison will show that it does not matter.

    Of a tensor that requires no gradient regions have a copy from the next one on.
    """
    proof = region.proof
    copied = {id(item.tensor) for item in region.moment.states.written if item.left is not None}
    found = []
    for item, place, _ in unrestored:
        tensor = item.get() if isinstance(item, WeakTensor) else item
        is_proved = (
            not region.is_in_forward
            and proof is not None
            and (id(tensor) in copied or proof.covers(item, is_checked=region.check is not None))
        )
        if is_proved:
            continue
        is_data = isinstance(tensor, Tensor) and not tensor.requires_grad
        if is_data:
            note_written(tensor)
        if is_data and proof is None and region.check is not None and not region.is_in_forward:
            region.check.doubtful.append(errors_text.modified_input(region, place, tensor))
        else:
            found.append((tensor, place))
    return found


def _refusal(region: Region, stale: list[tuple[Tensor, str]], tensor: Tensor) -> Any:
    place = next((place for item, place in stale if item is tensor), "an input")
    if region.proof is not None:
        region.proof.ask_for_copies()
    return region.options.exception(errors_text.modified_input(region, place, tensor))


def _leave(entered: list[Any], error: BaseException) -> None:
    """Leave the contexts that an error has left open, the last one first; all of them, also if one fails."""
    while entered:
        try:
            entered.pop().__exit__(type(error), error, error.__traceback__)
        except BaseException as raised:
            _leave(entered, raised)
            raise


def _run_behind(region: Region, behind: FencedRecomputation) -> None:
    """Do as `_run_again`, where the state of the forward is read through aliases as well."""
    memo = behind.begin(region)
    try:
        args, kwargs = _arguments(region, memo)
        for holder in region.cells:  # rewound before their aliases were there
            holder.put((holder.spec,))
        _run_again(region, args, kwargs, behind)
    finally:
        behind.end()


# -- the function again -----------------------------------------------------------------------------------------------


def _run_again(
    region: Region, args: list[Any], kwargs: dict[str, Any], behind: FencedRecomputation | None = None
) -> None:
    """Run the function, and match what autograd saves with what the forward saved."""
    matching = Matching(region)
    fn = region.fn
    if region.closed_code is not None and fn.__code__ is not region.closed_code:
        fn = FunctionType(region.closed_code, fn.__globals__)
    if not region.is_ordinary:
        _run_for_more(region, matching, fn, args, kwargs, behind)
        return
    try:
        push_saved_tensor_hooks(matching.pack, matching.unpack_in_forward if region.is_in_forward else same)
        fn(*args, **kwargs)
        matching.finish()
    except BaseException as error:
        if not matching.is_enough(error):
            raise
    finally:
        pop_saved_tensor_hooks()
        matching.let_go()


def _run_for_more(
    region: Region,
    matching: Matching,
    fn: Callable[..., Any],
    args: list[Any],
    kwargs: dict[str, Any],
    behind: FencedRecomputation | None,
) -> None:
    """Run the function of a region with a policy, a log of ops, a comparison, filled memory or a proof."""
    if region.log is not None:
        fn = matching.compare_ops_of(fn, region.log)
    if region.filled is not None:
        fn = region.filled.around(fn)
    choice = region.options.choice
    log = None if choice is None else RecomputationLog(region, choice, matching, behind)
    pack = matching.pack if matching.check is None else matching.pack_checked
    proof = None if region.is_in_forward else region.proof
    is_proved = proof is None or proof.is_settled
    may_stop = is_proved or (matching.check is not None and matching.stops)  # what it saves is the proof: see `compare`
    try:
        push_saved_tensor_hooks(pack, matching.unpack_in_forward if region.is_in_forward else same)
        if log is not None:
            log.open()
        result = fn(*args, **kwargs)
        matching.finish()
        if matching.check is not None:
            matching.check.note_outputs(result)
            _note_end(region, matching.check)
        is_proved = is_proved or (proof is not None and proof.holds(result))
        if matching.check is not None:  # which sees more than the outputs; and what was kept proves nothing
            is_computed = all(call.reason is not None for call in region.saved_calls)
            matching.check.has_same_results, is_proved = is_proved and is_computed, True
    except BaseException as error:
        if not matching.is_enough(error, may_stop):
            raise
        is_proved = may_stop
        if matching.check is not None:
            _note_end(region, matching.check)
    finally:
        try:
            pop_saved_tensor_hooks()
        finally:
            if log is not None:
                try:
                    log.close()
                except BaseException:  # an interrupt: what is open yet
                    log.close()
                    raise
        matching.let_go()
    if proof is not None and not is_proved:
        raise disproved(region, proof)


calls_regions(_run_again.__code__)
calls_regions(_run_for_more.__code__)


def _note_end(region: Region, check: Check) -> None:
    """Let the checksums of a pass that came to its end be those that are compared with the forward's."""
    if region.check is not None:
        region.check.recomputed = check


leave_to_eager(same.__code__)
