"""The life of a saved call, from the decision to save it until a recomputation skips it.

1. The policy decides, in the forward (`ForwardLog.call`). Forward and recomputation number the calls that it decides on,
   and match them by these numbers.
2. The call runs under hooks of its own, which take what autograd saves for its backward (`ForwardLog.run`).
3. It returns. If it had any effect besides its result and its random numbers, or its result cannot be kept, it has a
   `reason` to be run again in every recomputation, as if it were not saved; `reactivate.explain` says which.
   Otherwise each saved tensor is either derived from an argument, which a recomputation makes anyway, or kept, and the
   results are kept (`ForwardLog.finish`).
4. Things may happen to it until the region ends: its result is written to, a backward inside of the region reads it, the
   region writes to what there is no copy of (`rerun_all`, `settle`).
5. The region ends: what is kept goes to its storage, but for results of calls after which nothing is recomputed (`settle`).
6. In a recomputation the call is not made: its slots are filled from the arguments, random streams go to where it left them,
   and its results are handed back (`RecomputationLog.call`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from sys import _getframe
from typing import Any
from weakref import ref

import torch
from torch import Tensor, is_inference_mode_enabled
from torch.nn import Parameter

from reactivate._passes.check import BitsBefore
from reactivate._passes.logs import is_seen, is_seen_by_users, unseen
from reactivate._passes.observing import observers, tell
from reactivate._passes.places import user_frame_inside
from reactivate._passes.stale import is_of_a_write
from reactivate._saved_calls.choice import CallDecision, Choice
from reactivate._saved_calls.collective_writes import watch
from reactivate._saved_calls.effects import was_there
from reactivate._saved_calls.functions import mark, versions_in
from reactivate._saved_calls.log import Log, objects_in
from reactivate._saved_calls.results import Contents, has_attributes
from reactivate._saved_calls.running_call import Pending, RunningCall, scalars_in
from reactivate._saved_calls.saved_call import Kept, SavedCall, is_parameter, keep, last_needed
from reactivate._torch.autograd import (
    as_a_result,
    base_of,
    hook_backward,
    innermost_pack_hook,
    is_forward_mode_active,
    is_of_a_region,
    next_node_number,
    pop_hooks_of,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
)
from reactivate._torch.dynamo import close_checkpoints_within
from reactivate._torch.modes import current_transform, is_dispatch_mode_active
from reactivate._torch.modules import has_memory, is_distributed_run
from reactivate._torch.ops import arrived, tensors_in
from reactivate._types import DEVICE, Save

_IN_TRANSFORM = "a transform of torch.func inside of the region is around it"
_IN_FORWARD_MODE = "it runs where forward-mode derivatives are computed, which what is kept would lack"
_IN_INFERENCE = "it runs in inference mode"
_OF_INFERENCE = "it returns a tensor that was made in inference mode"
_OF_STATE = "it returns a parameter, a buffer or another tensor that was there before"
_OF_SUBCLASS = "it returns a tensor of a subclass without `__torch_dispatch__`, which would come back without its class"
_IN_MODE = "a dispatch mode inside of the region is around it, which sees its ops"
_OTHER_HOOKS = "saved-tensor hooks inside of the region are around it, as those of torch.utils.checkpoint are"
_BACKWARD_INSIDE = "a backward inside of the region goes through it"
_RAISED = "it raised an error"
_ON_DEVICE = "it writes to a tensor without a new version"


# -- the forward pass ---------------------------------------------------------------------------------------------------


class ForwardLog(Log):
    """The saved calls of a forward pass.

    Attributes:
        calls: the calls that returned, in order.
        pending: a custom function that has returned and has not saved yet.
    """

    def __init__(self, region: Any, choice: Choice) -> None:
        super().__init__(region, choice, region.log, list(choice.find_modules()))
        region.seen_modules = self.modules
        self.calls: list[SavedCall] = []
        self.pending: Pending | None = None
        self.is_distributed = is_distributed_run()
        self.casts: dict[Any, int] = {}  # of leaves: {node: version of the leaf}
        self._counts: dict[Any, int] = {}
        self._must_rerun: str | None = None
        self._from_here: str | None = None  # why the calls that follow are not saved
        self._hooks: dict[int, Any] = {0: functools.partial(_went_through, ref(self))}  # of nodes that saved calls made
        self._dispatch_modes = self._transforms = 0  # around the region
        self._pack: Any = None  # the region's own hook, while the log is open
        watch(choice)
        call = region.call
        # Leaves that hooks around the region have moved: code may write to them before the backward reads the copies.
        # Ranks decide alike, whichever bytes a write has changed.
        self._checks_bits = call.may_write_unseen() and not self.is_distributed
        self._moved = {id(tensor) for tensor in call.given if tensor.is_leaf} if call.is_hooked else ()

    def open(self) -> None:
        super().open()
        self._pack, self._dispatch_modes, self._transforms = innermost_pack_hook(), is_dispatch_mode_active(), _level()

    def close(self) -> None:
        super().close()
        self._pack = None  # which has the region, which has the log

    def call(self, decision: CallDecision, fn: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        call = self.begin(decision, fn, args, kwargs)
        if call is None:
            return fn(*args, **kwargs)
        if self.ops is not None:
            return self.unlogged(self._save)(call, fn, args, kwargs)
        return self._save(call, fn, args, kwargs)

    def _save(self, call: RunningCall, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        result = self.run(call, fn, args, kwargs)
        self.finish(call, result, None)
        return result

    def call_function(self, decision: CallDecision, forward: Callable[..., Any], args: Any, is_split: bool) -> Any:
        call = self.begin(decision, forward, args if is_split else args[1:], {})
        if call is None:
            return self.run_function(forward, args, is_split)
        result = self.unlogged(self.run)(call, functools.partial(self.run_function, forward), (args, is_split), {})
        call.saved_call.is_function = True
        self.pending = Pending(call, result, unseen(versions_in, result), next_node_number())
        return result

    def begin(self, decision: CallDecision, fn: Any, args: Any, kwargs: dict[str, Any]) -> RunningCall | None:
        """Ask the policy about a call: None if it is not to be saved."""
        number = self.number
        self.number += 1
        action = decision.action or self.choice.ask(decision, self.path, self._counts, args, kwargs)
        if type(action) is not Save:
            return None
        if self.pending is not None:
            self.finish_pending()
        reason = self._from_here or (self._why_not_saved() if innermost_pack_hook() is self._pack else _OTHER_HOOKS)
        if is_seen_by_users():
            decision = decision.of_users()
        what = self, decision, number, action.storage, fn, args, kwargs, reason
        call: RunningCall = unseen(RunningCall, *what) if is_seen() else RunningCall(*what)
        if observers:
            tell(self.region.context, "call_begins", call.saved_call)
        return call

    def _why_not_saved(self) -> str | None:
        """Return why nothing could be kept, or may be left out, of a call that begins now; None if it may be saved."""
        if _level() > self._transforms:
            return _IN_TRANSFORM
        if is_forward_mode_active():
            return _IN_FORWARD_MODE
        if is_dispatch_mode_active() > self._dispatch_modes:
            return _IN_MODE
        return _IN_INFERENCE if is_inference_mode_enabled() else None

    def run(self, call: RunningCall, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Make a call that is saved. Other saved calls inside of it are part of it."""
        if call.saved_call.reason is not None:
            return self.run_again(fn, args, kwargs)
        region = self.region
        try:
            push_saved_tensor_hooks(call.pack, region.unpack_slot)
            self.is_inside = True
            result = fn(*args, **kwargs)
            pop_saved_tensor_hooks()
        except BaseException as error:
            close_checkpoints_within(error)
            # The region may catch it, and the calls inside of this one have no numbers.
            call.saved_call.reason = _RAISED
            pop_hooks_of(call)
            self.finish(call, None, None)
            raise
        finally:
            self.is_inside = False
        if is_seen():
            unseen(call.returned)
        else:
            call.returned()
        return result

    def finish_pending(self) -> None:
        """Take down the custom function that has returned: all has been saved that it saves."""
        pending, self.pending = self.pending, None
        if pending is not None:
            self.unlogged(self.finish)(pending.call, pending.result, pending.versions)

    def give_up(self) -> None:
        """Let go of all: the forward pass has failed."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.call.let_go()

    def finish(self, call: RunningCall, result: Any, versions: dict[int, int] | None) -> None:
        """Take down what is to be kept of a call that has returned."""
        saved_call = call.saved_call
        saved_call.stop = saved_call.start
        if saved_call.reason is None:
            saved_call.stop = len(self.region.saved)
            if is_seen():
                unseen(self._take_down, call, result, versions)
            else:
                self._take_down(call, result, versions)
        call.let_go()
        if saved_call.reason is not None:
            self._keep_nothing(saved_call)
        self.calls.append(saved_call)

    def _take_down(self, call: RunningCall, result: Any, versions: dict[int, int] | None) -> None:
        """Sort what was saved and what came out into what is kept and what is derived."""
        saved_call, storage = call.saved_call, call.storage
        kept: dict[Any, Kept] = {}
        self._take_down_saved(call, kept)
        if isinstance(result, Tensor) and not has_attributes(result):
            leaves, saved_call.contents = [result], None
        else:
            given = {id(item): index for index, item in enumerate(call.objects)}
            contents = saved_call.contents = Contents(result, given, functools.partial(was_there, self.region))
            leaves, contents.leaves = contents.leaves, []  # which have the graph
            saved_call.reason = contents.problem
        computed: list[Tensor] = []
        saved_call.outputs, saved_call.requires = [], []
        for leaf in arrived(leaves):
            if leaf.is_inference():
                saved_call.reason = _OF_INFERENCE
                continue
            if storage is DEVICE and _loses_class(type(leaf)):
                saved_call.reason = _OF_SUBCLASS
            saved_call.requires.append(leaf.requires_grad)
            index = call.sources.which(leaf)
            if index >= 0:
                saved_call.outputs.append(index)
            elif call.decision.is_users and self._was_there(leaf):
                saved_call.reason = _OF_STATE
            elif call.sources.sharing_memory(leaf) >= 0:
                saved_call.reason = "its result is a view of an argument"
            else:
                version = leaf._version if versions is None else versions.get(id(leaf), leaf._version)
                saved_call.outputs.append(keep(leaf, version, storage, kept, self.is_distributed))
                computed.append(leaf)
        is_op = call.decision.module is None and call.decision.name is None
        useless = "it computes no tensor" if is_op and not computed else None  # but may set something
        saved_call.reason = saved_call.reason or self._must_rerun or call.effect or useless
        if saved_call.reason is None:
            for leaf in computed:
                if leaf.grad_fn is not None:
                    hook_backward(leaf, leaf.detach(), self._hooks)
            if self._checks_bits:
                bits = ((item.tensor, saved_call.label) for item in kept.values() if item.tensor is not None)
                saved_call.bits = BitsBefore(bits)

    def _was_there(self, leaf: Tensor) -> bool:
        """Return whether a result is a parameter, a buffer or another tensor that was there before the call."""
        if leaf.grad_fn is not None:
            return False
        return leaf.requires_grad or was_there(self.region, leaf) is not None

    def _take_down_saved(self, call: RunningCall, kept: dict[Any, Kept]) -> None:
        sources = call.sources
        for number, (slot, tensor, version) in enumerate(call.saved, call.saved_call.start):
            if is_parameter(tensor) and id(base_of(tensor)) not in self._moved:
                slot.kept = Kept(tensor, version, DEVICE, is_there_anyway=True)
                continue
            if tensor._version == version:
                slot.derivation = sources.derivation_of(tensor)
            if slot.derivation is not None:
                call.saved_call.derived = number
            elif sources.is_earlier_cast(tensor):
                # Not for hooks around the region to see: one around this one would find it in one of its passes only.
                slot.kept = Kept(tensor.detach(), version, DEVICE, is_there_anyway=True)
            else:
                slot.kept = keep(tensor, version, call.storage, kept, self.is_distributed)

    def rerun_all(self, reason: str, *, keeps: bool = False) -> None:
        """Let recomputations make every saved call again.

        Args:
            reason: why.
            keeps: whether what is kept stays: it is right, though arguments may not be, and a region around has seen it.
        """
        self.finish_pending()
        self._must_rerun = reason
        for call in self.calls:
            call.reason = call.reason or reason
            if not keeps:
                self._keep_nothing(call)

    def rerun_from_here(self, reason: str) -> None:
        """Let recomputations make the saved calls that follow again."""
        if is_dispatch_mode_active() >= self._dispatch_modes:  # otherwise a mode around the region asks, not the region
            self._from_here = reason

    def _keep_nothing(self, call: SavedCall) -> None:
        call.outputs, call.streams = None, ()
        for number in range(call.start, call.stop):
            slot = self.region.slot_of(number)
            if slot is not None:
                slot.kept = slot.derivation = None

    def settle(self) -> None:
        """Keep what is to be kept: the forward pass is over."""
        self.finish_pending()
        self._hooks.clear()  # which the graph has
        for call in self.calls:
            bits, call.bits = call.bits, None
            is_written = any(item.is_written() for item in call.kept())
            if is_written or (bits is not None and call.reason is None and bits.written()):
                call.reason = "its result is written to afterwards"
                self._keep_nothing(call)
        region, pack = self.region, innermost_pack_hook()
        has_others_hooks = pack is not None and not is_of_a_region(pack)
        last = last_needed(region) if region.early_stop else len(region.saved)
        for call in self.calls:
            if last < call.stop:
                call.outputs = None
            name = f"what {call.label} keeps"
            for item in call.outputs or ():
                if isinstance(item, Kept):
                    item.settle(name)
                    item.is_shared = has_others_hooks and item.storage is DEVICE
            for index in range(call.start, call.stop):
                slot = region.slot_of(index)
                if slot is not None and slot.kept is not None:
                    slot.kept.settle(name)
        # Nothing is saved where torch.fx calls the region with proxies.
        if self.choice.unmatched.parts and region.saved:
            self.choice.unmatched.region_has_run(self.choice.region)


def _loses_class(kind: type[Tensor]) -> bool:
    """Return whether autograd keeps a tensor of this class as a plain one: its class has only a Python name for it."""
    return kind is not Tensor and kind is not Parameter and has_memory(kind)


def _level() -> int:
    """Return how many transforms of torch.func are around the call, with its functionalization."""
    transform = current_transform()
    return 0 if transform is None else int(transform.level())


def _went_through(log: ref[ForwardLog], gradients: Any) -> None:
    found = log()
    if found is not None:
        found.rerun_all(_BACKWARD_INSIDE)


# -- a recomputation ----------------------------------------------------------------------------------------------------


class RecomputationLog(Log):
    """The saved calls of a recomputation: they are skipped.

    Args:
        matching: fills the slots.
        behind: the fence that results are given out behind, if the device needs one.
    """

    def __init__(self, region: Any, choice: Choice, matching: Any, behind: Any) -> None:
        super().__init__(region, choice, matching.log, region.seen_modules)
        self._behind = behind
        self._todo = iter(region.saved_calls)
        self._next: SavedCall | None = next(self._todo, None)
        self._matching = matching
        self._is_lost = False
        self._skipped: list[SavedCall] = []  # custom functions, until `apply` has been told of their results

    def call(self, decision: CallDecision, fn: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        number, call = self.number, self._next
        self.number += 1
        if call is None or call.number != number or self._is_lost or self._matching.is_complete:
            return fn(*args, **kwargs)
        if call.label != decision.label or not _is_here(call):
            if call.start != call.stop:
                raise self._matching.refuse_call(call, decision.label)
            call = self._later(call, decision.label)
            if call is None:
                return fn(*args, **kwargs)
        self._next = next(self._todo, None)
        if self.ops is not None:
            return self.unlogged(self._skip)(call, fn, args, kwargs)
        return self._skip(call, fn, args, kwargs)

    def _later(self, call: SavedCall, label: str) -> SavedCall | None:
        """Return the saved call that this one is, where recomputation omits calls before it that saved nothing.

        A cache was filled in the forward: it has their results. If this call is none of the saved ones, the numbers do not
        tell any more which calls are: all that follow run again.
        """
        found: SavedCall | None = call
        while found is not None and (found.label != label or not _is_here(found)):
            found = next(self._todo, None) if found.start == found.stop else None
        if found is None:
            self._is_lost = True
        else:
            self.number = found.number + 1
        return found

    def call_function(self, decision: CallDecision, forward: Callable[..., Any], args: Any, is_split: bool) -> Any:
        skipped = len(self._skipped)
        result = self.call(
            decision, lambda *_: self.run_function(forward, args, is_split), args if is_split else args[1:], {}
        )
        if len(self._skipped) > skipped and not is_split:
            mark(args[0], result, self._skipped.pop())
        return result

    def set_up_function(self, setup: Callable[..., Any], context: Any, inputs: Any, output: Any) -> Any:
        if self._skipped:
            return mark(context, output, self._skipped.pop())
        return super().set_up_function(setup, context, inputs, output)

    def _skip(self, call: SavedCall, fn: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Return what the call returned in the forward. If it has a reason to run again, it runs."""
        if call.written_on_device is not None and call.written_on_device():
            call.reason = call.reason or _ON_DEVICE
        if call.reason is not None:
            return self.run_again(fn, args, kwargs)
        are_seen = is_seen()
        arguments = unseen(self._fill, call, args, kwargs) if are_seen else self._fill(call, args, kwargs)
        results = None if call.outputs is None else self._load(call, call.outputs)
        if results is None:
            return self.run_again(fn, args, kwargs)
        if self._behind is not None:
            results = self._behind.fenced(results)
        if call.is_function:
            self._skipped.append(call)
        if call.streams:
            for bring in call.streams:
                bring()
        if are_seen:
            return unseen(_hand_back, call, results, arguments, args, kwargs)
        return _hand_back(call, results, arguments, args, kwargs)

    def _fill(self, call: SavedCall, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
        arguments = tensors_in(args, kwargs)
        self._matching.skip(call, arguments)
        if call.scalars is not None and call.scalars != scalars_in(args, kwargs):
            raise self._matching.refuse_scalars(call)
        return arguments

    def _load(self, call: SavedCall, outputs: Sequence[Any]) -> list[Any] | None:
        """Load what the call returned; None if it was written to since the region ended, so that it runs again."""
        # Saved-tensor hooks around the region may run ops to unpack it: none is a call of the region.
        self.is_inside = True
        try:
            if not any(isinstance(item, Kept) and item.is_overwritten for item in outputs):
                # To load may recompute a region around this one.
                results = [item.load() if isinstance(item, Kept) else item for item in outputs]
                both = zip(outputs, results)
                shared = {id(item): result for item, result in both if isinstance(item, Kept) and item.is_shared}
                if shared:
                    self._matching.share(call, shared)
                return results
        except RuntimeError as error:
            if not is_of_a_write(error):
                raise
        finally:
            self.is_inside = False
        self._matching.go_back_to(call)
        return None


_GENERATED = "<eval_with_key>"  # the file of what torch.fx writes, maybe in each pass anew (`torch.func.linearize`)


def _is_here(call: SavedCall) -> bool:
    """Return whether the code that is running is that which made the saved call, as far as both are inside of the region."""
    frame, is_inside = user_frame_inside(_getframe(2))  # the first frames are ours
    code, _ = call.location
    is_generated = frame.f_code.co_filename.startswith(_GENERATED) and code.co_filename.startswith(_GENERATED)
    return not (is_inside and call.is_inside) or is_generated or (frame.f_code, frame.f_lasti) == call.location


def _hand_back(
    call: SavedCall, results: Iterable[Any], arguments: Sequence[Tensor], args: Any, kwargs: dict[str, Any]
) -> Any:
    """Return what the call returned: tensors with a place in a graph where they had one, so that what follows saves."""
    leaves: list[Any] = []
    for item, requires in zip(results, call.requires):
        if isinstance(item, Tensor):
            tensor = item.detach()
            leaves.append(as_a_result(tensor) if requires and torch.is_grad_enabled() else tensor)
        else:
            leaves.append(arguments[item])
    if call.contents is None:
        return leaves[0]
    return call.contents.make(leaves, objects_in(args, kwargs) if call.contents.has_given else ())
