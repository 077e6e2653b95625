"""The life of a region: a forward that keeps no activations, and a backward that finds them all.

A region puts saved-tensor hooks around its function. For each tensor that autograd wants to save it returns a number; when
the backward asks for the first one, the function runs again (see `recompute`), and every number gets its tensor, which is
handed out once and forgotten. Inputs are kept as saved tensors of autograd's own, outside of the region's hooks: so a region
around this one, or an offloader, sees them as it sees any saved tensor (Rules 7, 9). The graph owns the hooks, and these own
the region: when autograd lets go of its saved tensors the region goes too, and no cycle is left (Rule 2).

The rules cited here and in the tests are those of `docs/semantics.md`.
"""

from __future__ import annotations

import functools
from _thread import RLock, get_ident
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from contextvars import Context
from sys import _getframe
from types import CodeType, FrameType, MappingProxyType
from typing import Any
from weakref import ref

from torch import Tensor

from reactivate._passes.check import BitsBefore, Check
from reactivate._passes.current import NOT_ENTERED, Running, enter_region, leave_region
from reactivate._passes.logs import unseen
from reactivate._passes.observing import keeping_for, observers, tell
from reactivate._passes.oplog import OpLog
from reactivate._passes.places import SavePlace, are_known, remember, user_frame
from reactivate._passes.stale import is_of_a_write, refuse_stale, watches
from reactivate._region import errors_text, naming
from reactivate._region.accounts import NotKept, counting_threads, note_shortage
from reactivate._region.due import is_due, note_writer, owner_of
from reactivate._region.matching import Metadata, Values, metadata_of
from reactivate._region.options import Options
from reactivate._region.proof import WriteProof, find_written
from reactivate._region.recompute import recompute
from reactivate._region.scripts import call_watched, is_being_watched, refuse_watched
from reactivate._region.sharing import current_group, groups, is_read_by_another
from reactivate._region.transforms import is_plain_under_transform
from reactivate._saved_calls.life import ForwardLog
from reactivate._saved_calls.saved_call import SETTLING_CODE, Kept, SavedCall, Slot
from reactivate._snapshot.call import Call
from reactivate._snapshot.inputs import Input
from reactivate._snapshot.moment import Moment
from reactivate._snapshot.reached_modules import ReachedModules
from reactivate._snapshot.region_calls import RegionCall
from reactivate._storing.inputs import store_for
from reactivate._torch.autograd import (
    FUNCTION_APPLY_CODE,
    asks_for_users_hooks,
    beside_users_hooks,
    current_backward,
    forget_users_hooks,
    is_function_running,
    next_node_number,
    not_a_users_hook,
    on_backward_end,
    pop_hooks_of,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    saver_of,
    users_hooks,
)
from reactivate._torch.dynamo import (
    close_checkpoints_within,
    last_script_graph,
    leave_out_of_graphs,
    leave_to_eager,
    prefer_version_used_last,
)
from reactivate._torch.modes import (
    current_transform,
    is_function_mode_active,
    run_beside_function_modes,
    run_unseen,
    without_function_modes,
)
from reactivate._types import DEVICE, Unrestored
from reactivate._xla.exits import through_exit
from reactivate._xla.fence import fences
from reactivate._xla.recomputation import named_tensors

Saved = tuple[Metadata, CodeType, int]
"""What is known of one saved tensor: its metadata, and the code and the instruction that saved it."""

_NO_FRAME_TELLS = FUNCTION_APPLY_CODE is None  # that a custom function saves


class Region:
    """One call of a checkpointed function: how to make it again, and what it saved.

    Attributes:
        options: of the checkpointed function.
        early_stop: as in the options, unless one of the ops must not be cut short.
        is_ordinary: whether a recomputation is all that is asked of this call, as of most: there is no policy, comparison,
            proof, observer or fence, no large tree of modules, and no guard that has to close something.
        fn, args, kwargs: the function, and the specs of its arguments (see `_snapshot.inputs`).
        call, closed_code: the call and what it reaches, as long as the forward runs; see `Call`.
        context: the context variables of the forward.
        identity: the identity of the call, for code inside of it.
        moment: what the call reached, as it was when the forward began.
        reached: the same of modules in a large tree, which are noted as the forward reaches them; otherwise None.
        is_in_forward: whether the forward still runs: a backward inside of it recomputes what is there by then.
        tokens, snapshots: what the guards said before the forward; what each keeps, in the order of `options.recomputations`.
        inputs: tensors that the recomputation reads where they are, and of which there is no copy.
        cells: what holds the closed-over tensors that are saved tensors of autograd's own.
        specs: of all tensors that are saved tensors of autograd's own, or in a storage.
        replaced: {id of a spec: the spec to take in its place}, of arguments that the forward wrote to.
        saved: what is known of each tensor that autograd saved, in order.
        slots: references to their slots, in calls that are compared or observed, and with a policy; None in others.
        values: the recomputed tensors that were not handed out yet, by number; empty between backwards.
        read_again: the numbers of the tensors that are read several times in one backward: those of custom functions.
        check: checksums of the forward, if the next recomputation is to be compared with it.
        filled: fills memory that nothing has written to, to find out whether a difference comes from its contents.
        proof: of a forward that wrote to what there is no copy of; otherwise None.
        log: the ops of the forward, with `check="every"`.
        users_hooks: (pack, unpack), saved-tensor hooks of the user's around the region; None without any.
        forward_log: of the calls that the policy saves, as long as the forward runs.
        saved_calls, seen_modules: these calls, in order, and the modules whose calls the policy sees.
        fence: (device type, its fence) where the device's compiler would undo a recomputation, otherwise None; with a fence
            `entries`, the specs of all tensors among the arguments, and `named`, what else is read behind it, with versions.
    """

    options: Options
    early_stop: bool
    fn: Any
    args: list[Any]
    kwargs: dict[str, Any]
    closed_code: CodeType | None
    call: Call | None
    context: Context
    identity: RegionCall
    moment: Moment
    inputs: Sequence[Input]
    cells: Sequence[Any]
    specs: Sequence[Any]
    saved: list[Saved]
    script_graph: Any
    entries: Any
    snapshots: list[Any]
    outer: Running | None = NOT_ENTERED
    # What most regions do not have:
    reached: ReachedModules | None = None
    is_ordinary = True
    is_in_forward = True
    tokens: list[Any] = []  # noqa: RUF012
    slots: list[ref[Slot]] | None = None
    values: Values = {}  # noqa: RUF012
    replaced: Mapping[int, Any] = MappingProxyType({})
    read_again: set[int] = set()  # noqa: RUF012
    saved_calls: Sequence[SavedCall] = ()
    seen_modules: Sequence[Any] = ()
    places: dict[int, SavePlace] | None = None
    check: Check | None = None
    proof: WriteProof | None = None
    bits: BitsBefore | None = None
    filled: Any = None
    forward_log: ForwardLog | None = None
    log: OpLog | None = None
    users_hooks: tuple[Any, Any] | None = None
    fence: tuple[str, Any] | None = None
    named: Any = None

    # -- forward ------------------------------------------------------------------------------------------------------

    def begin(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options) -> Any:
        """Begin a forward, and intercept what autograd saves. Return None, or what makes the call where no region can be."""
        if current_transform() is not None and is_plain_under_transform():
            return _call
        prefer_version_used_last(False)
        inputs = options.inputs
        store = None if inputs is DEVICE else store_for(inputs, options.name or naming.name_of_region(fn))
        make: Any = functools.partial(keeping_for, self, Call) if observers else Call
        note: Any = Moment
        if is_function_mode_active():  # its looks at tensors are none of the user's ops
            make, note = (functools.partial(run_beside_function_modes, look) for look in (make, note))
        call = self.call = make(fn, args, kwargs, store=store, for_region=True)
        if call.scripts and is_being_watched(call.scripts):
            return functools.partial(call_watched, scripts=call.scripts)
        if call.is_lazy:  # the first call of a lazy module makes its parameters, once
            return _call
        self.options, self.early_stop = options, options.early_stop
        self.fn, self.args, self.kwargs, self.context = fn, call.args, call.kwargs, call.context
        self.closed_code, self.specs, self.inputs, self.cells = call.closed_code, call.specs, call.inputs, call.cells
        if call.is_hooked:
            self.users_hooks = users_hooks()
        self.saved, self.lock = [], RLock()
        self.script_graph = last_script_graph()
        tree = call.tree if options.restores_modules else None
        self.moment = note(call.holders, call.tensors, call.arguments(), tree, call.may_write_unseen)
        self.tokens = tokens = []
        enter_region(self)
        if call.is_large and options.restores_modules:
            self.is_ordinary = False
            self.reached = ReachedModules(call.roots, call.may_write_unseen, unseen)
        for before in options.befores:
            tokens.append(before(call))
        is_compared = is_due(call, options.check, options.choice)
        pack: Any = self.pack
        if is_compared or observers or fences() or not (options.are_ordinary and self.is_ordinary):
            self.is_ordinary = False
            pack = self._choose_pack(call, is_compared)
        if asks_for_users_hooks:
            pack = beside_users_hooks(pack)
        push_saved_tensor_hooks(pack, self.unpack if self.slots is None and not _NO_FRAME_TELLS else self.unpack_slot)
        if not self.is_ordinary:
            self._open_logs()
        return None

    def _choose_pack(self, call: Call, is_compared: bool) -> Any:
        """Return the hook for what autograd saves: the plain one, unless more is asked of this call."""
        options = self.options
        pack: Any = self.pack
        if fences():
            self.named = named_tensors(call)
        if is_compared:
            self.check, self.places, self.slots = Check(), {}, []
            pack = self.pack_noted
            if call.may_write_unseen():
                self.bits = BitsBefore(naming.tensors_without_a_copy(call))
        elif observers or (options.check != "first" and not are_known(owner_of(self.fn))):
            self.places, self.slots = {}, []
            pack = self.pack_noted
        if options.choice is not None:
            self.slots = []
            pack = self.pack_beside_calls if options.choice.interest.functions else self.pack_noted
        return pack

    def _open_logs(self) -> None:
        if self.options.check == "every":
            self.log = OpLog()
            self.log.__enter__()
        if self.options.choice is not None:
            log = self.forward_log = ForwardLog(self, self.options.choice)
            self.saved_calls = log.calls  # which it fills
            log.open()

    def _close_logs(self) -> None:
        if self.forward_log is not None:
            self.forward_log.close()
        if self.log is not None:
            self.log.leave()

    @not_a_users_hook
    def pack(self, tensor: Tensor, frame: FrameType | None = None) -> int:
        """Autograd saves `tensor`: it gets a number."""
        if frame is None:
            frame = _getframe(1)
        if is_function_mode_active():
            with without_function_modes():
                return self.pack(tensor, frame)
        if watches:  # in the recomputation of a region around this one
            refuse_stale(tensor)
        code, saved = frame.f_code, self.saved
        if code is FUNCTION_APPLY_CODE or code is SETTLING_CODE:  # a custom function may read it as often as it wants
            self.note_read_again(len(saved))
            frame = saver_of(frame)
        saved.append((metadata_of(tensor), frame.f_code, frame.f_lasti))
        return len(saved) - 1

    @not_a_users_hook
    def pack_noted(self, tensor: Tensor) -> Slot:
        """Do as `pack`, and note what messages and comparisons need."""
        return self._note(self.pack(tensor, _getframe(1)), tensor, _getframe(1))

    @not_a_users_hook
    def pack_beside_calls(self, tensor: Tensor) -> Slot:
        """Do as `pack`, but a custom function whose call is saved has not saved yet when its forward returns."""
        log = self.forward_log
        if log is not None and log.pending is not None:
            if log.pending.number == next_node_number():
                return log.pending.pack(tensor)
            log.finish_pending()
        return self._note(self.pack(tensor, _getframe(1)), tensor, _getframe(1))

    def note_read_again(self, number: int) -> None:
        """Keep the value of a saved tensor for as long as a backward runs."""
        self.read_again = self.read_again or set()  # an empty one may be that of all regions
        self.read_again.add(number)

    def _note(self, number: int, tensor: Tensor, frame: FrameType) -> Slot:
        if self.places is not None:
            users = user_frame(frame)
            self.places[number] = SavePlace((frame.f_code, frame.f_lasti), (users.f_code, users.f_lasti))
        if self.check is not None:
            self.check.note(number, tensor)
        slot = Slot(number)
        self.slots.append(ref(slot))  # type: ignore[union-attr]
        return slot

    def slot_of(self, number: int) -> Slot | None:
        """Return the slot of a saved tensor, None if no graph has it any more; only where slots are noted."""
        return None if self.slots is None else self.slots[number]()

    def is_recomputed(self, number: int) -> bool:
        """Return whether only a recomputation can tell a saved tensor that a graph still has."""
        slot = self.slot_of(number)
        return self.slots is None or (slot is not None and slot.kept is None)

    def end(self, result: Any) -> Any:
        """Finish the forward: keep what the guards have to keep, forget the rest. Returns what the caller gets."""
        if not self.is_ordinary:
            self._close_logs()
        self._pop_hooks()
        try:
            self.snapshots = self.take_snapshots()
        finally:
            if not self.is_ordinary:
                self._close_guards(None)
            self.is_in_forward, self.tokens = False, []
        call: Any = self.call
        self.call = None
        if is_function_mode_active():
            written = run_beside_function_modes(find_written, self, call)
        else:
            written = find_written(self, call)
        if self.places is not None:
            remember(owner_of(self.fn), self.places)
        if self.check is not None:
            run_unseen(self.check.note_outputs, result)
            if self.bits is not None:
                written += self.bits.written()
                self.bits = None
        if written:
            self._need_proof(written, call, result)
        if (graph := last_script_graph()) is not self.script_graph:
            refuse_watched(graph, naming.name_of(self))
        return result if self.is_ordinary else self._end_more(result, call)

    def _end_more(self, result: Any, call: Call) -> Any:
        """Do what few regions ask for at their end. Returns what the caller gets."""
        if self.proof is None and self.options.check == "metadata":
            self.check = None
        if self.forward_log is not None:
            self.forward_log.settle()
            self.forward_log = None
        if self.named is not None and self.saved:
            result = through_exit(self, result, call)
        if observers:
            tell(self.context, "forward_done", self)
        return result

    def _need_proof(self, written: list[Unrestored], call: Call, result: Any) -> None:
        """The forward wrote to what there is no copy of: only a proof shows whether that matters."""
        self.proof, self.is_ordinary = WriteProof(written, result), False
        self.moment.note_writes(self.proof.tensors())
        note_writer(call)
        if self.forward_log is not None and self.check is None:
            self.forward_log.rerun_all("the region writes to a tensor of which there is no copy", keeps=True)

    def fail(self, error: BaseException) -> None:
        """End a forward that has raised: what it has done up to there stays, as without a region.

        An interrupt may come at any moment, also in `begin` and `end`: so all that is open is closed, and nothing else.
        """
        close_checkpoints_within(error)
        self._close_logs()
        if self.forward_log is not None:
            self.forward_log.give_up()
            self.forward_log = None
        leave_region(self)
        pop_hooks_of(self)
        self._close_guards(error)
        note_shortage(error, Region)

    def _pop_hooks(self) -> None:
        leave_region(self)  # whatever guards do next, and if one fails
        if asks_for_users_hooks:
            forget_users_hooks()
        pop_saved_tensor_hooks()

    def _close_guards(self, error: BaseException | None) -> None:
        if self.reached is not None:
            self.reached.finish()
        if self.tokens and self.options.has_leaving:
            tokens, self.tokens = self.tokens, []
            with ExitStack() as stack:  # the last one first, and all of them, also if one fails
                for guard, token in zip(self.options.asked, tokens):
                    stack.callback(guard.leave, token, error)

    def take_snapshots(self) -> list[Any]:
        """Return what each guard would keep if the forward ended now."""
        snapshots = [*self.tokens]
        for index, after in self.options.afters:
            if snapshots[index] is not None:
                snapshots[index] = after(snapshots[index])
        return snapshots

    def unrestored(self) -> list[Unrestored]:
        """Return what was modified since the forward began, and of what there is no copy."""
        found = self.moment.unrestored()
        return found + self.unrestored_inputs() if self.inputs or self.reached is not None else found

    def unrestored_inputs(self) -> list[Unrestored]:
        """Return the inputs, and what modules of a large tree have, that were modified since the forward began."""
        moved = (item for item in self.inputs if item.tensor._version != item.version)
        found = [Unrestored(item.tensor, item.place, item.version) for item in moved]
        return found if self.reached is None else found + self.reached.unrestored()

    # -- backward -----------------------------------------------------------------------------------------------------

    def unpack(self, number: int) -> Tensor:
        """Autograd asks for a tensor that it saved, by its number: mostly it is there, and is handed out once."""
        if groups or self.read_again:
            return self.unpack_slot(number)
        found: Any = self.values.pop(number, None)
        if found is None:
            found = self._recomputed(number)
            self.values.pop(number, None)
        value: Tensor
        value, version = found
        if value._version != version:
            raise self.options.exception(errors_text.written_after_saved(self, number))
        return value

    def unpack_slot(self, handle: Any) -> Tensor:
        """Autograd asks for a tensor that it saved: by its slot, or by its number."""
        number, kept = (handle, None) if type(handle) is int else (handle.number, handle.kept)
        if (found := self.values.get(number) or self._recomputed(number, kept)) is None:
            return self._load(handle)
        value, version = found
        if value._version != version:
            raise self.options.exception(errors_text.written_after_saved(self, number))
        # Where no frame tells that a custom function saves, its node tells that it reads.
        is_read_again = number in self.read_again or (_NO_FRAME_TELLS and is_function_running())
        if not (is_read_again or (groups and is_read_by_another())):
            self.values.pop(number, None)
        return value

    def _recomputed(self, number: int, kept: Kept | None = None) -> tuple[Tensor, int] | None:
        """Return a tensor after a recomputation, None if a saved call keeps it."""
        with self.lock:  # autograd has a thread for each device; the one that comes second finds its value
            # A recomputation during the forward has found only what was saved by then, and another backward may take it.
            is_tried = False
            while (found := self.values.get(number)) is None:
                if self.is_in_forward:
                    if self.forward_log is not None:
                        self.forward_log.rerun_all("a backward inside of the region reads what is there by then")
                elif kept is not None and (is_tried or not kept.is_shared):
                    return None
                if counting_threads and get_ident() in counting_threads:
                    raise NotKept
                recompute(self)
                is_tried = True
            self._limit_lifetime()
            return found

    def _load(self, slot: Slot) -> Tensor:
        try:
            return slot.kept.load()  # type: ignore[union-attr]
        except RuntimeError as error:
            if not is_of_a_write(error):
                raise
            raise self.options.exception(errors_text.written_after_saved(self, slot.number)) from None

    def recompute_behind(self, gradient: Tensor) -> Tensor | None:
        """A backward has come to an exit: what it will read of the region is computed from here on, not before."""
        with self.lock:
            if self.values or not any(map(self.is_recomputed, range(len(self.saved)))):
                return gradient
            fenced = recompute(self, gradient)
            self._limit_lifetime()
            return fenced

    def _limit_lifetime(self) -> None:
        """Make sure that what was recomputed goes, also if the graph is retained."""
        group = current_group() if groups else None
        if group is not None:
            group.keep(self)
        elif len(self.saved) == 1 and not (self.read_again or self.fence or _NO_FRAME_TELLS):
            return  # it is handed out now, and once
        elif current_backward() == -1:
            self.forget()  # code looks at `grad_fn._saved_...`
        else:
            on_backward_end(functools.partial(_forget, ref(self)))

    def forget(self) -> None:
        """Let go of recomputed tensors that were not asked for."""
        self.values = {}


def _call(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return fn(*args, **kwargs)


def _forget(reference: ref[Region]) -> None:
    region = reference()
    if region is not None:
        region.forget()


leave_to_eager(Region.pack.__code__)
leave_to_eager(Region.pack_noted.__code__)
leave_out_of_graphs(Region.unpack)
leave_out_of_graphs(Region.unpack_slot)
