"""Calls inside of a region that are saved: a recomputation skips them.

In the forward pass a saved call runs under hooks of its own. What it saves for its backward is either had again from
its arguments (see `derive`), which a recomputation makes anyway, or kept. Its results are kept as well, if a recomputation
has to go on after it. In a recomputation the call is not made: slots are filled from the arguments, and its results are
handed back.

A call that cannot be skipped runs again in every recomputation, as if it were not saved: one that writes into its arguments,
whose result is written to afterwards or is a view of an argument, or that a backward inside of the region reads.
`reason` says which; so does `reactivate.explain`.

Calls are matched by number: of all calls that a policy has a say in, which one it was.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from weakref import ref

from torch import Tensor, is_inference_mode_enabled
from torch.nn import Parameter

from reactivate._engine.barriers.aliases import base_of
from reactivate._engine.kept_calls.choice import CallDecision, Choice
from reactivate._engine.kept_calls.collective_writes import watch
from reactivate._engine.kept_calls.kept import (
    Argument,
    Kept,
    There,
    is_parameter,
    keep,
)
from reactivate._engine.kept_calls.results import Contents, has_attributes
from reactivate._engine.kept_calls.saved_call import IN_INFERENCE, IN_TRANSFORM, OF_INFERENCE, Pending, SavedCall
from reactivate._engine.kept_calls.saved_functions import versions_in
from reactivate._engine.kept_calls.settled_log import SettledLog
from reactivate._engine.kept_calls.side_effects import versions_of
from reactivate._engine.kept_calls.site_log import unseen
from reactivate._engine.kept_calls.surroundings import Surroundings
from reactivate._engine.kept_calls.unseen_writes import UnseenWrites, may_write_unseen
from reactivate._engine.mismatch.check import BitsBefore
from reactivate._engine.mismatch.oplog import OpLog
from reactivate._engine.record import observers, tell
from reactivate._engine.state.changes import Noted
from reactivate._torch.autograd import (
    hook_backward,
    innermost_pack_hook,
    next_node_number,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
)
from reactivate._torch.checkpoints import close_checkpoints_within
from reactivate._torch.classes import has_memory
from reactivate._torch.collectives import arrived
from reactivate._torch.modes import is_function_mode_active, without_function_modes
from reactivate._torch.modules import is_distributed_run
from reactivate._torch.transforms import current_transform, name_of_transform
from reactivate._types import DEVICE, Save

_OF_SUBCLASS = "it returns a tensor of a subclass without `__torch_dispatch__`, which would come back without its class"
_OTHER_HOOKS = "saved-tensor hooks inside of the region are around it, as those of torch.utils.checkpoint are"
_BACKWARD_INSIDE = "a backward inside of the region goes through it"


class ForwardLog(SettledLog):
    """The saved calls of a forward pass."""

    def __init__(self, record: Any, choice: Choice) -> None:
        super().__init__(record, choice)
        self.counts: dict[Any, int] = {}
        self.pending: Pending | None = None
        self.casts: dict[Any, int] = {}  # of leaves: {node: version of the leaf}
        self._pack: Any = None  # the region's own hook, while the log is open
        watch(choice)
        capture = record.capture
        # Leaves that hooks around the region have moved: somebody may write to them before the backward reads the copies.
        self._moved = {id(tensor) for tensor, *_ in capture.saved if tensor.is_leaf} if capture.is_hooked else ()
        # Ranks decide alike, whichever bytes a write has changed.
        self._checks_bits = capture.may_write_unseen() and not is_distributed_run()
        self._hooks[0] = functools.partial(_went_through, ref(self))

    def open(self) -> None:
        super().open()
        self._pack = innermost_pack_hook()

    def close(self) -> None:
        super().close()
        self._pack = None  # which has the region, which has the log

    def call(self, decision: CallDecision, fn: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        call = self.begin(decision, fn, args, kwargs)
        if call is None:
            return fn(*args, **kwargs)
        if self.values is not None:
            return self.unlogged(self._save)(call, fn, args, kwargs)
        result = self.run(call, fn, args, kwargs)
        self.finish(call, result, None)
        return result

    def call_function(self, decision: CallDecision, forward: Callable[..., Any], args: Any, is_split: bool) -> Any:
        call = self.begin(decision, None, args if is_split else args[1:], {})
        if call is None:
            return self.run_function(forward, args, is_split)
        result = self.unlogged(self.run)(call, functools.partial(self.run_function, forward), (args, is_split), {})
        call.site.is_function = True
        self.pending = Pending(call, result, unseen(versions_in, result), next_node_number())
        return result

    @property
    def values(self) -> OpLog | None:
        return self.record.log  # type: ignore[no-any-return]

    def begin(self, decision: CallDecision, fn: Any, args: Any, kwargs: dict[str, Any]) -> SavedCall | None:
        """A call that the policy has a say in: None if it is not to be saved."""
        number = self.number
        self.number += 1
        action = decision.action or self.choice.ask(decision, self.counts, args, kwargs)
        if type(action) is not Save:
            return None
        if self.pending is not None:
            self.finish_pending()
        reason = _why_not_saved()
        what = self.record, decision, number, action.storage, fn, args, kwargs, reason, self.noted, self.casts
        call: SavedCall = unseen(SavedCall, *what) if is_function_mode_active() else SavedCall(*what)
        if innermost_pack_hook() is not self._pack:
            call.site.reason = _OTHER_HOOKS
        if observers:
            tell(self.record.context, "call_begins", call.site)
        return call

    def _save(self, call: SavedCall, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        result = self.run(call, fn, args, kwargs)
        self.finish(call, result, None)
        return result

    def run(self, call: SavedCall, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Make a call that is saved: what is saved inside of it is its own."""
        if call.site.reason is not None:
            return self.run_again(fn, args, kwargs)
        writes = None
        if call.reached is not None and may_write_unseen(fn):
            writes = UnseenWrites(call.reached.tensors(), self.noted().tensors())
        surroundings = Surroundings() if call.decision.is_users else None
        push_saved_tensor_hooks(call.pack, self.record.unpack)
        self.is_inside = True
        try:
            with writes or nullcontext():
                result = fn(*args, **kwargs)
        except BaseException as error:
            close_checkpoints_within(error)
            call.let_go()
            raise
        finally:
            self.is_inside = False
            pop_saved_tensor_hooks()
        if not call.decision.is_quiet:
            call.site.changes = self.changes()
            if call.noted is not None:
                with without_function_modes():
                    call.change, more = call.noted.changes()
                call.site.changes += more
        if surroundings is not None:
            change, more = surroundings.changes()
            call.change = call.change or change
            call.site.changes = [*call.site.changes, *more]
        if writes is not None:
            call.change = call.change or writes.change()
        return result

    def finish_pending(self) -> None:
        """All has been saved that a custom function saves."""
        pending, self.pending = self.pending, None
        if pending is not None:
            self.unlogged(self.finish)(pending.call, pending.result, pending.versions)

    def give_up(self) -> None:
        """The forward pass has failed."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.call.let_go()

    def finish(self, call: SavedCall, result: Any, versions: dict[int, int] | None) -> None:
        """A saved call has returned: take down what is to be kept of it."""
        site = call.site
        if site.reason is None:
            site.stop = len(call.entries)
            if is_function_mode_active():
                unseen(self._take_down, call, result, versions)
            else:
                self._take_down(call, result, versions)
        else:
            site.stop = site.start
        call.let_go()
        del call.sources
        if site.reason is not None:
            self._let_go(site)
        self.sites.append(site)

    def _why_again(self, call: SavedCall, computes: bool) -> str | None:
        if self._must_rerun is not None:
            return self._must_rerun
        if call.is_overwritten or call.versions is None or call.versions != versions_of(call.sources.arguments):
            return "it writes into its arguments"
        change = call.change if call.reached is None else call.change or call.reached.change()
        if change is not None:
            return change
        if not computes and call.decision.module is None and call.decision.name is None:
            return "it computes no tensor"  # but may set something, as `set_grad_enabled` does
        return None

    def noted(self) -> Noted:
        """Return the notes of the region, as the state is now."""
        record = self.record
        states = record.states
        inputs = (item.tensor for item in record.inputs)
        given = (tensor for tensor, *_ in record.capture.saved)
        return Noted(record.notes, (*(() if states is None else states.tensors), *inputs, *given), states)

    def changes(self) -> list[Callable[[], Any]]:
        """Return what brings guarded state to where it is now."""
        record = self.record
        with without_function_modes():
            pairs = zip(record.options.guards, record.tokens)
            changes = [guard.skip(record.capture, token) for guard, token in pairs]
        return [change for change in changes if change is not None]

    def _take_down(self, call: SavedCall, result: Any, versions: dict[int, int] | None) -> None:
        """Sort what was saved and what came out into what is kept and what is derived."""
        site, sources, storage = call.site, call.sources, call.storage
        kept: dict[Any, Kept] = {}
        for number, (slot, tensor, version) in enumerate(call.saved, site.start):
            if is_parameter(tensor) and id(base_of(tensor)) not in self._moved:
                slot.kept = There(tensor, version)
                continue
            if tensor._version == version:
                slot.recipe = sources.recipe_for(tensor)
            if slot.recipe is None and sources.is_earlier_cast(tensor):
                # Not for hooks around the region to see: one around this one would find it in one of its passes only.
                slot.kept = There(tensor.detach(), version)
            elif slot.recipe is None:
                slot.kept = keep(tensor, version, storage, kept)
            else:
                site.derived = number
        site.outputs, site.requires, site.contents = [], [], None
        if isinstance(result, Tensor) and not has_attributes(result):
            leaves = [result]
        else:
            contents = site.contents = Contents(result, {id(item): index for index, item in enumerate(call.objects)})
            leaves, contents.leaves = contents.leaves, []  # which have the graph
            site.reason = contents.problem
        computed: list[Tensor] = []
        for leaf in arrived(leaves):
            if leaf.is_inference():
                site.reason = OF_INFERENCE
                continue
            if storage is DEVICE and _loses_class(type(leaf)):
                site.reason = _OF_SUBCLASS
            site.requires.append(leaf.requires_grad)
            index = sources.which(leaf)
            if index >= 0:
                site.outputs.append(Argument(index))
            elif sources.sharing_memory(leaf) >= 0:
                site.reason = "its result is a view of an argument"
            else:
                version = leaf._version if versions is None else versions.get(id(leaf), leaf._version)
                site.outputs.append(keep(leaf, version, storage, kept))
                computed.append(leaf)
        site.reason = site.reason or self._why_again(call, bool(computed))
        if site.reason is None:
            for leaf in computed:
                if leaf.grad_fn is not None:
                    hook_backward(leaf, leaf.detach(), self._hooks)
            if self._checks_bits:
                site.bits = BitsBefore((item.tensor, site.label) for item in kept.values() if item.tensor is not None)


def _loses_class(kind: type[Tensor]) -> bool:
    """Return whether autograd keeps a tensor of this class as a plain one: its class has only a Python name for it."""
    return kind is not Tensor and kind is not Parameter and has_memory(kind)


def _why_not_saved() -> str | None:
    """Return why autograd saves nothing that could be kept of a call that begins now, None if it may."""
    if current_transform() is not None and name_of_transform() is not None:
        return IN_TRANSFORM
    return IN_INFERENCE if is_inference_mode_enabled() else None


def _went_through(log: ref[ForwardLog], gradients: Any) -> None:
    found = log()
    if found is not None:
        found.rerun_all(_BACKWARD_INSIDE)
