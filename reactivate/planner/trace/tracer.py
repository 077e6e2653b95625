"""Traces a step while it runs: allocations, units, regions and recomputations, op by op.

A step runs on fake tensors (see `_inspect.fake`) under a dispatch mode that sees every op and every storage that is
born and dies. That gives the peak of the real step to the byte, but for what kernels allocate for themselves, which
`Costs` knows where it was measured.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.nn import Module
from torch.nn.functional import multi_head_attention_forward
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from reactivate._loss.logits import Logits
from reactivate._passes.current import is_recomputed
from reactivate._passes.observing import observed_by
from reactivate._region.accounts import copied_inputs, held_by_guards, put_aside, storages_of
from reactivate._region.region import Region
from reactivate._torch.asking import asking, show_inside
from reactivate._torch.autograd import current_node_number, next_node_number
from reactivate._torch.dynamo import DispatchMode
from reactivate._torch.modes import FakeTensor, device_of, is_dispatch_mode_active
from reactivate._torch.modules import are_made_of_tensors, layouts_unseen
from reactivate._torch.ops import DEVICE_QUERY, tensor_positions, tensors_at_op, written_arguments
from reactivate._torch.rng import RandomStatesTaken
from reactivate.planner.trace.answers import RealAnswers
from reactivate.planner.trace.data_scope import DataScope
from reactivate.planner.trace.positions import ModuleStack, UnitPosition, is_in_backward
from reactivate.planner.trace.records import SUM_IN_PLACE, Allocation, CopyEvent, Costs, Op, Origin, Trace, UnitCall
from reactivate.planner.trace.refused import RefusedRegions
from reactivate.planner.trace.resized import ResizedStorages
from reactivate.planner.trace.stream_clock import StreamClock
from reactivate.policies.canonical import name_of
from reactivate.storage.rehearsal import MoveKind, Rehearsal

NUMBERS, STATE, ASIDE, RANDOM_STATE = "numbers", "state of a region", "state put aside", "random state"
"""Origins that are no ops."""

_NUMBERS = (bool, int, float, complex)
_ADD: Any = torch.ops.aten.add.Tensor
_OF_DATA = frozenset({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output})
"""The tags of ops whose result's size, or its meaning for Python, is in the numbers that they are given."""
_AROUND_MODES = ("torch._dynamo.", "torch._compile")  # modules of functions that torch wraps a mode's in
_INDEXING = frozenset({"index", "_unsafe_index"})  # of which that is so only where they are given a mask
_MASKS = (torch.bool, torch.uint8)  # the dtypes of masks


@contextmanager
def traced(
    units: Mapping[str, Module],
    known: Iterable[Tensor],
    costs: Costs,
    *,
    count_functions: bool = False,
    rehearsal: Rehearsal | None = None,
    watch: Callable[[int], None] | None = None,
    model: Module | None = None,
    answers: RealAnswers | None = None,
) -> Iterator[Trace]:
    """Take down what runs inside of the context.

    Args:
        units: the model's blocks by their paths, none inside of another.
        known: tensors that are there before the step and do not count.
        count_functions: whether to count the calls of torch's functions, and to find where sizes depend on data.
        rehearsal: of the storage that is used.
        watch: called after each op with the bytes that are alive; it may raise.
        model: whose modules are named as the origin of what they allocate.
        answers: those that the step is given; None for one that runs for real, or needs none.
    """
    paths = {id(module): path for path, module in units.items()}
    known = list(known)
    scope = DataScope(known, () if model is None else model.buffers()) if count_functions else None
    tracer = _Tracer(paths, costs, watch, ModuleStack(model), scope)
    tracer.trace.rounding = costs.rounding
    for tensor in known:
        tracer.trace.standing += tracer.know(tensor)
    if answers is not None:
        answers.tell = tracer.needs_data
    with ExitStack() as stack:
        stack.enter_context(register_module_forward_pre_hook(tracer.unit_begins))
        stack.enter_context(register_module_forward_hook(tracer.unit_ends, always_call=True))
        if tracer.clock is not None:
            stack.enter_context(tracer.clock.orders)
        stack.enter_context(tracer.resized.resizes)
        stack.enter_context(RandomStatesTaken(tracer.takes_random_state))
        stack.enter_context(observed_by(tracer))
        stack.enter_context(layouts_unseen())
        stack.enter_context(tracer)
        if count_functions:
            stack.enter_context(_Functions(tracer.function_called))
        if rehearsal is not None:
            rehearsal.tell = tracer.moved
        stack.callback(tracer.refused.end)
        yield tracer.trace
    tracer.end()
    tracer.trace.of_data = set() if scope is None else scope.paths
    if rehearsal is not None:
        tracer.trace.stored_bytes, tracer.trace.failures = rehearsal.most_stored_bytes, rehearsal.failures


class _Tracer(DispatchMode):
    def __init__(
        self,
        units: Mapping[int, str],
        costs: Costs,
        watch: Callable[[int], None] | None,
        modules: ModuleStack,
        scope: DataScope | None,
    ) -> None:
        super().__init__()
        self._watch = watch
        self._modules = modules
        self._scope = scope
        self.refused = RefusedRegions()
        self.trace = Trace(refused=self.refused.paths)
        self.clock = StreamClock() if costs.has_streams else None
        self._units = units
        self._costs = costs
        self._live_bytes = 0
        self._storages: dict[int, weakref.ref[UntypedStorage]] = {}
        self._own: dict[int, Allocation] = {}  # those that were not there before
        self.resized = ResizedStorages(self._resize)
        self._place = UnitPosition()
        self.trace.calls = self._place.calls
        self._call: UnitCall | None = None  # that runs
        self._last: UnitCall | None = None  # that runs, or ran last
        self._aside: list[Allocation] = []  # by the guards of the recomputations that run
        self._node: int | None = None  # of autograd, that runs
        self._node_began = 0  # the op with which it did
        # The last op's, of gradients: what it added to, its result.
        self._sum: tuple[Allocation, Allocation] | None = None

    # -- memory -------------------------------------------------------------------------------------------------------

    def know(self, tensor: Tensor) -> list[int]:
        """`tensor` is read: if no op has made it, it was there before. Return the bytes of each memory that is new."""
        new = []
        for storage in storages_of(tensor):
            if not self._is_known(storage):
                self._storages[id(storage)] = weakref.ref(storage)
                new.append(int(storage.nbytes()))
        return new

    def _enter_numbers(self, op: Any, args: Any) -> None:
        """Numbers in the place of tensors become small tensors, which autograd saves: until when, no mode sees."""
        if self._costs.rounding > 1 or not torch.is_grad_enabled():  # an accelerator's memory holds no numbers
            return
        numbers = [args[at] for at in tensor_positions(op) if at < len(args) and isinstance(args[at], _NUMBERS)]
        if numbers and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in args):
            sizes = [16 if isinstance(number, complex) else 8 for number in numbers]
            self._allocate(sum(sizes), self._origin(NUMBERS))

    def takes_random_state(self, state: Tensor) -> None:
        """Enter the random state that torch's checkpoint keeps for each call: no mode sees it."""
        # An accelerator's memory holds no such state, and other threads may take theirs.
        if self._costs.rounding == 1 and is_dispatch_mode_active():
            self._enter(state, RANDOM_STATE)

    def _is_known(self, storage: UntypedStorage) -> bool:
        known = self._storages.get(id(storage))  # torch gives a storage one Python object for life
        return known is not None and known() is not None

    def _enter(self, tensor: Tensor, origin: str, least_bytes: int = 0) -> None:
        for storage in storages_of(tensor):
            if not self._is_known(storage):
                key = id(storage)
                size_bytes = self._rounded(max(int(storage.nbytes()), least_bytes))
                allocation = self._allocate(size_bytes, self._origin(origin, tensor))
                self._storages[key] = weakref.ref(storage, functools.partial(self._leave, key))
                self._own[key] = allocation

    def _origin(self, op: str, tensor: Tensor | None = None) -> Origin:
        if tensor is None:
            return Origin(op, self._modules.innermost)
        return Origin(op, self._modules.innermost, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))

    def _allocate(self, size_bytes: int, origin: Origin) -> Allocation:
        allocation = Allocation(size_bytes, len(self.trace.ops), origin=origin, place=self._module_now())
        self.trace.allocations.append(allocation)
        self._live_bytes += size_bytes
        return allocation

    def _module_now(self) -> str:
        """Return the path of the module that runs, or whose gradients are computed."""
        path = self._modules.innermost
        node = None if path else current_node_number()
        return path if node is None else self._modules.maker_of(node)

    def _release(self, allocation: Allocation) -> None:
        allocation.died = len(self.trace.ops)
        self._live_bytes -= allocation.size_bytes

    def _rounded(self, size_bytes: int) -> int:
        rounding = self._costs.rounding
        return -(-size_bytes // rounding) * rounding

    def _leave(self, key: int, _: object) -> None:
        self._release(self._own.pop(key))
        self._storages.pop(key, None)

    def _resize(self, key: int, size_bytes: int) -> None:
        """Take down that a storage of the step's own has another size: its memory has gone, or is there again."""
        before = self._own[key]
        self._release(before)
        self._own[key] = self._allocate(self._rounded(size_bytes), before.origin)

    # -- ops ----------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if Logits in types or are_made_of_tensors(types):  # other ops make their numbers
            return NotImplemented
        if func is DEVICE_QUERY and isinstance(args[0], FakeTensor):
            return device_of(args[0])
        name, is_of_data = name_of(func), not _OF_DATA.isdisjoint(func.tags)
        self.resized.look()
        self._look_at_sum()
        before = self._live_bytes
        given = tensors_at_op((args, kwargs))
        for tensor in given:
            self.know(tensor)
        self._enter_numbers(func, args)
        result = func(*args, **kwargs)
        if written_arguments(func):
            self.resized.watch(func, args, kwargs, self._own)
        cost = self._costs.of(func, args, kwargs, result)
        made = tensors_at_op(result)
        has_own_sizes = self.trace.is_real or is_of_data  # no two calls need return as much
        sizes = () if has_own_sizes else cost.result_bytes
        for number, tensor in enumerate(made):
            self._enter(tensor, name, sizes[number] if number < len(sizes) else 0)
        turn, position, is_backward = self._place.now()
        live = self._live_bytes
        top = max(live, before + cost.top_bytes)
        seconds = cost.seconds if self.clock is None else self.clock.ran(cost.seconds, cost.group)
        op = Op(turn, position, is_backward, is_recomputed(), before, top, live, seconds, name)
        if is_backward:
            self._note_sum(func, args, kwargs, result)
        self.trace.ops.append(op)
        self.trace.costs.append(cost)
        if self._scope is not None:
            # Fake tensors have no numbers, and say where these are missed.
            has_numbers = self.trace.is_real and is_of_data
            has_mask = any(tensor.dtype in _MASKS for tensor in given[1:])
            reads_numbers = has_numbers and (has_mask or name not in _INDEXING)
            self._scope.ran(given, made, self._module_now(), reads_numbers=reads_numbers)
        if self._watch is not None:
            self._watch(top)
        return result

    def end(self) -> None:
        """The step is over: compute waits for the collectives that still run."""
        if self.clock is not None and self.trace.ops:
            last, rest = self.trace.ops[-1], self.clock.rest()
            self.trace.ops[-1] = last._replace(seconds=last.seconds + rest)
            self.trace.collective_seconds = self.clock.collective_seconds
            self.trace.waited_seconds = self.clock.waited_seconds + rest

    def _note_sum(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """An op of a backward has run: note whether it adds a gradient to the sum of those that a tensor has so far."""
        node = current_node_number()
        if node != self._node:
            self._node, self._node_began = node, len(self.trace.ops)
        if func is not _ADD or kwargs or torch.is_grad_enabled() or not _is_called_by_autograd():
            return
        before, more, after = (self._own_of(item) for item in (*args, result))
        if before is None or after is None or before is more or before.born >= self._node_began:
            return
        is_alone = not args[0]._is_view()  # which holds the tensor that it is a view of
        if is_alone and before.size_bytes == after.size_bytes and args[0].shape == args[1].shape:
            self._sum = before, after

    def _own_of(self, tensor: Any) -> Allocation | None:
        is_plain = isinstance(tensor, Tensor) and not hasattr(tensor, "__tensor_flatten__")
        storages = list(storages_of(tensor)) if is_plain else []
        return self._own.get(id(storages[0])) if len(storages) == 1 else None

    def _look_at_sum(self) -> None:
        """Take a sum for one in place, whose memory before is gone by now: no one else had it.

        Autograd adds gradients in place then, but not while a dispatch mode looks on.
        """
        if self._sum is None:
            return
        (before, after), self._sum = self._sum, None
        if before.died == len(self.trace.ops):
            after.born = before.died
            op = self.trace.ops[-1]
            live = op.live_bytes - after.size_bytes
            self.trace.ops[-1] = op._replace(top_bytes=max(live, op.start_bytes), live_bytes=live, name=SUM_IN_PLACE)

    def needs_data(self) -> None:
        """The op that runs needs the numbers in tensors."""
        if self._scope is not None:
            self._scope.paths.add(self._module_now())

    # -- units --------------------------------------------------------------------------------------------------------

    def unit_begins(self, module: Module, args: Any) -> None:
        """A module is called."""
        self._modules.begins(module)
        path = self._units.get(id(module))
        if is_in_backward():
            if path is not None and not is_recomputed():
                self.trace.checkpointed.add(path)
            return
        self._modules.mark(next_node_number())
        if path is None:
            return
        self.resized.look()
        call = self._place.unit_begins(path, self._live_bytes, len(self.trace.ops))
        if call is not None:
            self._call = self._last = call

    def unit_ends(self, module: Module, args: Any, result: Any) -> None:
        """A module has returned, or raised."""
        path, outer = self._modules.path_of(module), self._modules.outer
        self._modules.ends(module)
        if is_in_backward():
            return
        self._modules.mark(next_node_number())
        if self._scope is not None and path is not None:
            self._scope.returned(path, outer, result)
        if id(module) in self._units and self._place.unit_ends():
            self._call = None

    def function_called(self, name: str) -> None:
        """One of torch's functions is called."""
        if self._call is not None:
            self._call.functions[name] += 1

    def moved(self, what: MoveKind, key: int, nbytes: int) -> None:
        """A storage has taken a tensor, or has come further with it."""
        self.trace.moves.append(CopyEvent(len(self.trace.ops), what, key, nbytes))
        if what == "taken" and self._call is not None and not is_in_backward():
            self._call.moved.append(nbytes)

    # -- regions ------------------------------------------------------------------------------------------------------

    def forward_done(self, region: Region) -> None:
        """A region's forward pass is over: what its guards keep did not come out of an op."""
        if self._last is not None and not is_in_backward():  # a region around several units ends after the last of them
            self._last.regions += 1
            self._last.saved_tensors += len(region.saved)
            self._last.saved_calls += sum(call.reason is None for call in region.saved_calls)
        for tensor in (*held_by_guards(region), *copied_inputs(region)):
            self._enter(tensor, STATE)
        self.refused.forward_done(region)

    def recomputation_begins(self, region: Region) -> None:
        """A region is recomputed: state as it is now is put aside, where it is other than it was."""
        size_bytes = sum(self._rounded(tensor.nbytes) for tensor in put_aside(region))
        self._aside.append(self._allocate(size_bytes, self._origin(ASIDE)))
        self.refused.recomputation_begins(region)

    def recomputation_done(self, region: Region) -> None:
        """A region was recomputed."""
        self._release(self._aside.pop())
        self.refused.recomputation_done(region)


def _is_called_by_autograd() -> bool:
    """Return whether autograd itself runs the op, and no hook, custom function or subclass of tensors does."""
    frame = sys._getframe(2).f_back
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_AROUND_MODES):
        frame = frame.f_back
    # None: a thread of autograd's own.
    return frame is None or frame.f_code.co_filename == torch.autograd.graph.__file__


class _Functions(TorchFunctionMode):
    """Tells of each of torch's functions that is called."""

    def __init__(self, called: Callable[[str], None]) -> None:
        self._called = called

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = asking(func, kwargs)
        self._called(name_of(func))
        if func is multi_head_attention_forward:  # written in Python: what it calls counts
            return show_inside(self, func, args, kwargs or {})
        return func(*args, **(kwargs or {}))
