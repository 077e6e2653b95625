"""One region's life: a forward pass that keeps nothing, and a backward that finds everything.

A region puts saved-tensor hooks around its function. For whatever autograd wants to save it gets an empty `Slot`; when
the backward asks for the first one, a recomputation fills those that are still alive. The graph owns the slots, the hooks
beside them own the region, and the region knows its slots weakly: when autograd lets go of its saved tensors the region
goes too, and no cycle is left (Rule 2). Inputs are kept as saved tensors of autograd's own, outside of the region's
hooks: so a region around this one, or an offloader, sees them as it sees any saved tensor (Rules 7, 9).

The rules cited here and in the tests are those of `docs/semantics.md`.
"""

from __future__ import annotations

import functools
from _thread import RLock
from contextlib import ExitStack
from itertools import chain
from operator import attrgetter
from sys import _getframe
from types import FrameType
from typing import Any
from weakref import ref

from torch import Tensor

from reactivate._backends import fences
from reactivate._engine.accounts import note_shortage
from reactivate._engine.backward import BackwardSide
from reactivate._engine.barriers.exits import through_exit
from reactivate._engine.barriers.fencing import fence_of, given_tensors, named_tensors, tensors_of, unwritten
from reactivate._engine.current import Place, enter_region, leave_region
from reactivate._engine.inputs.capture import Capture
from reactivate._engine.inputs.scripts import call_watched, is_being_watched, refuse_watched
from reactivate._engine.inputs.specs import WrittenInput
from reactivate._engine.kept_calls.kept import SETTLING_CODE
from reactivate._engine.kept_calls.saved_sites import ForwardLog
from reactivate._engine.kept_calls.site_log import tensors_in
from reactivate._engine.mismatch import naming
from reactivate._engine.mismatch.calls import is_due, note_writer, owner_of
from reactivate._engine.mismatch.check import BitsBefore, Check
from reactivate._engine.mismatch.oplog import OpLog
from reactivate._engine.mismatch.places import Places, SavePlace, are_known, remember
from reactivate._engine.mismatch.proof import WriteProof
from reactivate._engine.mismatch.stale import refuse_stale, watches
from reactivate._engine.record import Options, SharedSlot, Slot, metadata_of, observers, tell
from reactivate._engine.sites import user_frame
from reactivate._engine.state.gradients import Gradients
from reactivate._engine.state.tensor_states import TensorStates
from reactivate._engine.transforms import is_plain_under_transform, refuse_forward_mode
from reactivate._torch.autograd import (
    FUNCTION_APPLY_CODE,
    asks_for_users_hooks,
    beside_users_hooks,
    forget_users_hooks,
    is_forward_mode_active,
    next_node_number,
    not_a_users_hook,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    users_hooks,
)
from reactivate._torch.checkpoints import close_checkpoints_within
from reactivate._torch.dynamo import leave_to_eager, prefer_version_used_last
from reactivate._torch.modes import is_function_mode_active, without_function_modes
from reactivate._torch.scripts import last_script_graph
from reactivate._torch.transforms import current_transform
from reactivate._types import Unrestored

_IS_LEAF = attrgetter("is_leaf")


class Region(BackwardSide):
    """One call of a checkpointed function."""

    __slots__ = ("around", "bits", "capture", "places", "script_graph")
    around: Place | None  # where the region began
    capture: Capture | None
    bits: BitsBefore | None  # of what the forward may write to unseen, if that is looked for in this call
    places: Places | None  # where the user's code saves, if that is noted in this call
    script_graph: Any  # what TorchScript ran last before the region

    def begin(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options) -> Any:
        """Note what a recomputation will read, and start to intercept what autograd saves.

        Returns a function that makes the call where there can be no region yet: mostly None.
        """
        if current_transform() is not None and is_plain_under_transform():
            return _call
        prefer_version_used_last(False)
        self.options = options
        self.early_stop = options.early_stop
        self.saved = []
        self.lock = RLock()
        self.log = None if options.determinism != "values" else OpLog()
        self.sites = ()
        self.proof = self.check = self.bits = self.fence = self.places = None
        self.replaced = {}
        capture = self.capture = Capture(fn, args, kwargs, for_region=True, storage=options.inputs, name=options.name)
        self.context = capture.context
        self.users_hooks = users_hooks() if capture.is_hooked else None
        if capture.scripts and is_being_watched(capture.scripts):
            return functools.partial(call_watched, scripts=capture.scripts)
        if capture.is_lazy:  # the first call of a lazy module makes its parameters, once
            return _call
        self.notes, self.inputs, self.saved_inputs = capture.notes, capture.inputs, capture.saved
        self.states = TensorStates(capture.tensors, None, capture.may_write_unseen) if capture.tensors else None
        self.gradients = Gradients(capture.given) if any(map(_IS_LEAF, capture.given)) else None
        self.script_graph = last_script_graph()
        self.fn, self.args, self.kwargs = capture.fn, capture.args, capture.kwargs
        if fences():
            self.named = named_tensors(capture)
        self.region_call, self.around = enter_region()
        tokens: list[Any] = []
        self.tokens = tokens
        try:
            for before in options.befores:
                tokens.append(before(capture))
        except BaseException as error:
            leave_region(self.around)
            self._finish()
            self._leave(error)
            raise
        self.asked = []
        for index, unrestored in options.asked:
            if tokens[index] is not None:
                self.asked.append((unrestored, tokens[index]))
        pack: Any = self.pack
        if is_due(capture, options.determinism, options.choice):
            self.check, self.places = Check(), {}
            pack = self.pack_noted
            if capture.may_write_unseen():
                self.bits = BitsBefore(naming.tensors_without_a_copy(capture))
        elif observers or (options.determinism != "first" and not are_known(owner_of(fn))):
            self.places = {}
            pack = self.pack_noted
        if options.choice is not None and options.choice.interest.functions:
            pack = self.pack_beside_sites
        if asks_for_users_hooks:
            pack = beside_users_hooks(pack)
        push_saved_tensor_hooks(pack, self.unpack)
        if self.log is not None:
            self.log.__enter__()
        self.forward_log = None
        if options.choice is not None:
            self.forward_log = ForwardLog(self, options.choice)
            self.sites = self.forward_log.sites  # which it fills
            self.forward_log.open()
        return None

    def end(self, result: Any) -> Any:
        """The forward pass is over: keep what the guards have to keep, forget the rest.

        Returns what the caller gets: `result`, on a device with a fence through the region's exit.
        """
        if self.forward_log is not None:
            self.forward_log.close()
        if self.log is not None:
            self.log.__exit__(None, None, None)
        self._pop_hooks()
        try:
            self.snapshots = self.take_snapshots()
        finally:
            self._finish()
            if self.options.has_leaving:
                self._leave(None)
            self.tokens = None
        capture, self.capture = self.capture, None
        assert capture is not None
        if self.gradients is not None and not self.gradients.finish():
            self.gradients = None
        if self.places is not None:
            remember(owner_of(self.fn), self.places)
        if self.check is not None:
            self.check.note_outputs(result)
        self._look_for_writes(capture, result)
        if self.proof is None and self.options.determinism == "metadata":
            self.check = None
        if last_script_graph() is not self.script_graph:
            refuse_watched(last_script_graph(), naming.name_of(self))
        if self.forward_log is not None:
            self.forward_log.settle()
            self.forward_log = None
        if self.saved and fences():
            result = self._stand_behind_fence(result, capture)
        if observers:
            tell(self.context, "forward_done", self)
        return result

    def _look_for_writes(self, capture: Capture, result: Any) -> None:
        """Find what the forward wrote to and no copy was made of; then only a proof shows whether it matters."""
        written = self.unrestored()
        if self.bits is not None:
            written += self.bits.written()
            self.bits = None
        for tensor, spec, version in capture.saved:
            if tensor._version != version:
                place = naming.place_of(self, spec)
                self.replaced[id(spec)] = spec = tensor if tensor.is_leaf else WrittenInput(tensor)
                written.append(Unrestored(spec, place, version))
        self.saved_inputs = [spec for _, spec, _ in capture.saved]
        if written:
            self.proof = WriteProof(written, result)
            self.states = self.states or TensorStates(())
            self.states.note_writes(self.proof.tensors())
            note_writer(capture)
            if self.forward_log is not None and self.check is None:
                self.forward_log.distrust("the region writes to a tensor of which there is no copy")

    def _stand_behind_fence(self, result: Any, capture: Capture) -> Any:
        """On a device with a fence, note what a recomputation needs of it, and make the exit."""
        given = given_tensors(capture)
        self.fence = fence_of(chain(given, tensors_of(capture.modules), tensors_in((result,), {})))
        if self.fence is None:
            return result
        if is_forward_mode_active():
            refuse_forward_mode(self.fence[0])
        self.entries = list(map(capture.spec_of, given))
        self.named = unwritten(self.named, self.fence[0])
        return through_exit(self, result, capture)

    def fail(self, error: BaseException) -> None:
        """The forward pass ended by an exception: leave everything as it was (Rule 13)."""
        if self.forward_log is not None:
            self.forward_log.close()
            self.forward_log.give_up()
            self.forward_log = None
        if self.log is not None:
            self.log.__exit__(None, None, None)
        close_checkpoints_within(error)
        self._pop_hooks()
        self._finish()
        self._leave(error)
        note_shortage(error)

    def _pop_hooks(self) -> None:
        leave_region(self.around)  # whatever guards do next, and if one fails
        self.around = None
        if asks_for_users_hooks:
            forget_users_hooks()
        pop_saved_tensor_hooks()

    def _finish(self) -> None:
        tokens = self.tokens
        if tokens:
            for index, finish in self.options.finishes:
                if index < len(tokens):
                    finish(tokens[index])

    def _leave(self, error: BaseException | None) -> None:
        tokens = self.tokens
        if self.options.has_leaving and tokens:
            with ExitStack() as stack:  # the last one first, and all of them, also if one fails
                for guard, token in zip(self.options.guards, tokens):
                    stack.callback(guard.leave, token, error)

    @not_a_users_hook
    def pack(self, tensor: Tensor, frame: FrameType | None = None) -> Slot:
        """Autograd saves `tensor`: it gets an empty slot."""
        if frame is None:
            frame = _getframe(1)
        if is_function_mode_active():
            with without_function_modes():
                return self.pack(tensor, frame)
        if watches:  # in the recomputation of a region around this one
            refuse_stale(tensor)
        code = frame.f_code  # a custom function may read what it saves as often as it wants
        slot = SharedSlot() if code is FUNCTION_APPLY_CODE or code is SETTLING_CODE else Slot()
        slot.value = None
        self.saved.append((ref(slot), metadata_of(tensor), code, frame.f_lasti))
        return slot

    @not_a_users_hook
    def pack_noted(self, tensor: Tensor) -> Slot:
        """Do as `pack`, and take down what messages and comparisons need."""
        return self._note(self.pack(tensor, _getframe(1)), tensor, _getframe(1))

    def _note(self, slot: Slot, tensor: Tensor, frame: FrameType) -> Slot:
        number = len(self.saved) - 1
        if self.places is not None:
            users = user_frame(frame)
            self.places[number] = SavePlace((frame.f_code, frame.f_lasti), (users.f_code, users.f_lasti))
        if self.check is not None:
            self.check.note(number, tensor)
        return slot

    @not_a_users_hook
    def pack_beside_sites(self, tensor: Tensor) -> Slot:
        """As `pack`, but a custom function whose call is saved has not saved yet when its forward returns."""
        log = self.forward_log
        if log is not None and log.pending is not None:
            if log.pending.number == next_node_number():
                return log.pending.pack(tensor)
            log.finish_pending()
        return self._note(self.pack(tensor, _getframe(1)), tensor, _getframe(1))


def _call(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return fn(*args, **kwargs)


leave_to_eager(Region.pack.__code__)
leave_to_eager(Region.pack_noted.__code__)
