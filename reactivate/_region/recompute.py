"""A recomputation: the function runs again, and every saved tensor of its region gets its value.

It runs with the arguments, closures, context variables and guarded state of the forward. The tensors that autograd saves are
matched with those of the forward by their order. It ends as soon as the last one that is needed is there (Rule 8).
Afterwards everything is as if it had not run (Rules 12, 13).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from reactivate._passes.current import enter_recomputation
from reactivate._passes.observing import observers, tell
from reactivate._passes.places import calls_regions
from reactivate._passes.stale import StaleReads, is_of_a_write
from reactivate._region import errors_text, naming
from reactivate._region.compare import compare, disproved
from reactivate._region.matching import Matching, RecomputationComplete
from reactivate._region.proof import RenormsOnce
from reactivate._saved_calls.life import RecomputationLog
from reactivate._snapshot.call import CellTensorHolder
from reactivate._snapshot.held import WeakTensor
from reactivate._snapshot.inputs import Memo, rebuild
from reactivate._snapshot.rewound import RewoundMoment
from reactivate._torch.autograd import (
    is_profiling,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    set_grad_enabled,
)
from reactivate._torch.dynamo import close_checkpoints_within, leave_to_eager
from reactivate._xla.recomputation import FencedRecomputation
from reactivate.errors import ReactivateError

Region = Any


# -- the state of the forward -----------------------------------------------------------------------------------------


def recompute(region: Region, behind: FencedRecomputation | None = None) -> None:
    """Run the function of a region again, for all that it saved.

    Args:
        region: the region.
        behind: the fence that its device needs.

    Raises:
        MutationError: something that the recomputation would read was changed.
        RecomputeMismatchError: the function does not do what it did.
        Exception: whatever the function raises. State is as before, and the same backward can be tried again.
    """
    context = region.context
    # A copy, since one context cannot be entered twice: a recomputation may be inside another of the same region.
    # And if the forward is still running, its log is open, and these are not its ops.
    run = _recompute if region.log is None else region.log.unseen(_recompute)
    try:
        context.copy().run(run, region, behind)
        if region.check is not None and region.tokens is None:
            compare(region, lambda: context.copy().run(run, region, behind))
            if region.proof is not None:
                region.proof.holds_now()
    except BaseException:
        region.forget()  # what it had filled in by then
        raise
    if observers:
        tell(context, "recomputation_done", region)


def _recompute(region: Region, behind: FencedRecomputation | None) -> None:
    """Run the function with the arguments and in the state of the forward."""
    enter_recomputation(region.identity)
    was_enabled = is_grad_enabled()
    set_grad_enabled(True)
    holders = region.moment.holders
    cells = [holder for holder in holders if type(holder) is CellTensorHolder] if holders else ()
    try:
        if behind is None:
            args, kwargs = _arguments(region, cells, {})
            run = functools.partial(_run_again, region, args, kwargs)
        else:
            try:
                behind.read(region, rebuild)
            except RuntimeError as error:
                raise _in_words(region, error) from None
            args, kwargs = [], {}
            run = functools.partial(_run_behind, region, cells, behind)
        _run_inside(_state_of_forward(region, args, kwargs), run)
    finally:
        set_grad_enabled(was_enabled)
        for holder in cells:
            holder.let_go()


def _arguments(region: Region, cells: Sequence[CellTensorHolder], memo: Memo) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments, and get the closed-over tensors: that may recompute a region around this one.

    Args:
        region: the region.
        cells: holders of the closed-over tensors.
        memo: what stands for some of the arguments.
    """
    try:
        for key, spec in region.replaced.items():
            if key not in memo:
                memo[key] = rebuild(spec, {})
        args = [rebuild(spec, memo) for spec in region.args]
        kwargs = {name: rebuild(spec, memo) for name, spec in region.kwargs.items()} if region.kwargs else {}
        for holder in cells:
            holder.prepare(memo)
    except RuntimeError as error:
        raise _in_words(region, error) from None
    return args, kwargs


def _in_words(region: Region, error: RuntimeError) -> BaseException:
    """Return the error to raise for one that came while the arguments were read."""
    if isinstance(error, ReactivateError) or not is_of_a_write(error):
        return error  # from the recomputation of a region around this one
    return region.options.exception(errors_text.written_before_recomputation(region, error))  # type: ignore[no-any-return]


def _state_of_forward(region: Region, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return the contexts in which everything is as the forward saw it, the outermost first."""
    contexts: list[Any] = []
    if is_profiling():
        contexts.append(torch.profiler.record_function(f"reactivate::recompute {naming.name_of(region)}"))
    innermost: list[Any] = []
    for rewind, snapshot in region.snapshots if region.tokens is None else region.take_snapshots():
        context = rewind(snapshot)
        if context is not None:
            (innermost if rewind in region.options.innermost else contexts).append(context)
    if region.reached is not None:
        contexts.append(region.reached.rewound())
    tensors = [item for item in (*args, *kwargs.values()) if isinstance(item, Tensor)]
    contexts.append(RewoundMoment(region.moment, tensors))
    contexts += innermost
    if region.proof is not None:
        contexts.append(RenormsOnce(tensor for tensor, _ in region.proof.tensors()))
    stale = _stale(region)
    if stale:
        refuse = functools.partial(_refusal, region, stale)
        contexts.append(StaleReads([tensor for tensor, _ in stale], refuse))
    return contexts


def _stale(region: Region) -> list[tuple[Tensor, str]]:
    """Return what was modified since the forward ended, and what shows by no comparison that it does not matter."""
    proof = region.proof
    unrestored = region.unrestored()
    if not unrestored:
        return []
    copied = {id(item.tensor) for item in region.moment.states.written if item.left is not None}
    found = []
    for item, place, _ in unrestored:
        tensor = item.get() if isinstance(item, WeakTensor) else item
        is_proved = (
            region.tokens is None
            and proof is not None
            and (id(tensor) in copied or proof.covers(item, is_checked=region.check is not None))
        )
        if not is_proved:
            found.append((tensor, place))
    return found


def _refusal(region: Region, stale: list[tuple[Tensor, str]], tensor: Tensor) -> Any:
    place = next((place for item, place in stale if item is tensor), "an input")
    if region.proof is not None:
        region.proof.ask_for_copies()
    return region.options.exception(errors_text.modified_input(region, place, tensor))


def _run_inside(contexts: Sequence[Any], function: Callable[[], None]) -> None:
    """Call a function inside of contexts, the first one outermost. An `ExitStack` would cost microseconds."""
    entered = []
    try:
        for context in contexts:
            context.__enter__()
            entered.append(context)
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


def _run_behind(region: Region, cells: Sequence[CellTensorHolder], behind: FencedRecomputation) -> None:
    """Do as `_run_again`, where the state of the forward is read through aliases as well."""
    memo = behind.begin(region)
    try:
        args, kwargs = _arguments(region, cells, memo)
        for holder in cells:  # rewound before their aliases were there
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
    fn, pack = region.fn, matching.pack
    if region.log is not None:
        fn = matching.compare_ops_of(fn, region.log)
    choice = region.options.choice
    log = None if choice is None else RecomputationLog(region, choice, matching, behind)
    if matching.check is not None:
        pack = matching.pack_checked
    push_saved_tensor_hooks(pack, _same if region.tokens is None else matching.unpack_in_forward)
    if log is not None:
        log.open()
    is_proved = region.proof is None or region.proof.is_settled or region.tokens is not None
    may_stop = is_proved or (matching.check is not None and matching.stops)  # what it saves is the proof: see `compare`
    try:
        result = fn(*args, **kwargs)
        matching.finish()
        if matching.check is not None:
            matching.check.note_outputs(result)
            region.check.recomputed = matching.check
        is_proved = is_proved or region.proof.holds(result)
        if matching.check is not None:  # which sees more than the outputs; and what was kept proves nothing
            is_computed = all(call.reason is not None for call in region.saved_calls)
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
            region.check.recomputed = matching.check
    finally:
        if log is not None:
            log.close()
        pop_saved_tensor_hooks()
        matching.let_go()
    if not is_proved:
        raise disproved(region)


calls_regions(_run_again.__code__)


def _same(tensor: Tensor) -> Tensor:
    return tensor


leave_to_eager(_same.__code__)
