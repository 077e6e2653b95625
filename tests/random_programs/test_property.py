"""Rules 1 to 9, 12 and 15 on random programs: what a checkpointed program computes is what the plain one computes.

A program runs three times: plain; checkpointed; and once plain with hooks that copy every tensor as autograd saves it,
which is what "right" means where the plain program raises because an op in place overwrote a saved tensor. Forward pass
and each backward are events, compared in order:

- where plain has a result, ours is bitwise that; or it is a `MutationError`, if an input of a region that requires a
  gradient was written to while the region still had to read it, by the program inside of a region or after it;
- where plain raises, ours raises, or is bitwise what the run with copies computes. Never anything else.

Of a program that raises nowhere, the number of regions and of recomputations is compared with what the run with copies saw
being read, and no byte is kept but the inputs'. With `check="first"` every region is compared with its forward.

`REACTIVATE_EXAMPLES=20000 pytest tests/random_programs/test_property.py` runs as many, other ones each time (or those
of `--hypothesis-seed`).
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from hypothesis import HealthCheck, example, given, note, settings, strategies as st
from interpreter import CONTEXTS, MODULES, OPS, WRITES, World, Wrap
from oracle import assert_bitwise, bits_of, cotangents, flatten, random_states, seed_everything
from programs import WAYS, Backward, Op, Program, Region, Step, Use, Within, Write
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import reactivate
from reactivate._passes.observing import observed_by
from reactivate._torch.autograd import current_backward, is_function_running
from reactivate._xla.fence import fences
from reactivate.errors import MutationError

Draw = Callable[[Any], Any]
EXAMPLES = os.environ.get("REACTIVATE_EXAMPLES")


# -- programs ---------------------------------------------------------------------------------------------------------

references = st.integers(0, 7).map(lambda back: -1 - back)  # mostly to what is new
ways = st.sampled_from(WAYS)
few_values = st.lists(references, min_size=1, max_size=3).map(tuple)
rarely = st.integers(0, 29).map(lambda number: number == 29)
ops = st.builds(Op, st.sampled_from([*OPS, "matmul", "matmul", "mul", "dropout"]), references, references)
simple = {
    "op": ops,
    "use": st.builds(Use, st.integers(0, 2), references),
    "write": st.builds(Write, st.sampled_from(list(WRITES)), references, references, rarely),
}


@st.composite
def steps(draw: Draw, depth: int, least: int) -> tuple[Step, ...]:
    kinds = ["op"] * 7 + ["use"] * 2 + ["write"] + (["region"] * 2 + ["within"] if depth else [])
    found: list[Step] = []
    for kind in draw(st.lists(st.sampled_from(kinds), min_size=least, max_size=least + 4)):
        if kind in simple:
            found.append(draw(simple[kind]))
        elif kind == "within":
            found.append(Within(draw(st.sampled_from(list(CONTEXTS))), draw(few_values), draw(steps(depth - 1, 1))))
        else:
            values = draw(few_values)
            found.append(Region(values, tuple(draw(ways) for _ in values), draw(steps(depth - 1, 1))))
    return tuple(found)


backwards = st.builds(Backward, st.sampled_from(["backward", "one", "grad", "double"]), references, st.just(True))


@st.composite
def programs(draw: Draw) -> Program:
    count = draw(st.integers(1, 4))
    kinds = [draw(st.sampled_from(["computed", "computed", "leaf", "constant"])) for _ in range(count)]
    calls = draw(st.lists(backwards, min_size=1, max_size=3))
    calls[-1] = Backward(calls[-1].how, calls[-1].output, draw(st.booleans()))
    return Program(
        kinds=tuple(kinds),
        ways=tuple(draw(ways) for _ in range(count)),
        modules=tuple(draw(st.lists(st.sampled_from(list(MODULES)), min_size=1, max_size=3))),
        steps=draw(steps(depth=3, least=3)),
        outputs=tuple(draw(st.lists(references, min_size=1, max_size=3))),
        container=draw(st.sampled_from(["one", "tuple", "list", "dict", "nested"])),
        context=draw(st.sampled_from(["enable_grad", "enable_grad", "autocast"])),
        late_writes=draw(st.sampled_from([(), (), (), (), (), (-1,), (0,)])),
        backwards=tuple(calls),
    )


# -- running one ------------------------------------------------------------------------------------------------------


@dataclass
class Events:
    """Results of the forward pass and of each backward, up to the first error."""

    results: list[dict[str, Any]] = field(default_factory=list)
    error: Exception | None = None
    after: dict[str, Any] = field(default_factory=dict)


def run(program: Program, wrap: Wrap) -> Events:
    """Run a program, and note what comes out of each event."""
    seed_everything()
    world, events, roots = World(program), Events(), list[Tensor]()
    seed_everything()

    def forward() -> dict[str, Any]:
        outputs = flatten(world.forward(wrap))
        roots.extend(leaf for leaf in outputs if isinstance(leaf, Tensor) and leaf.requires_grad)
        found = {f"output {index}": _copied(leaf) for index, leaf in enumerate(outputs)}
        found |= {f"input {index} afterwards": _copied(value) for index, value in enumerate(world.inputs)}
        with torch.no_grad():
            for index in program.late_writes:
                world.inputs[index % len(world.inputs)].mul_(2)
        return found

    calls = [lambda call=call: backward(call, roots, world.leaves) for call in program.backwards]
    for event in (forward, *calls):
        try:
            events.results.append(event())
        except Exception as error:
            events.error = error
            break
    for index, module in enumerate(world.modules):
        events.after |= {f"buffer m{index}.{name}": buffer.clone() for name, buffer in module.named_buffers()}
    events.after |= random_states()
    return events


def backward(call: Backward, roots: list[Tensor], leaves: dict[str, Tensor]) -> dict[str, Any]:
    """One backward call; what it returns and the gradients that have come together so far."""
    returned: Sequence[Tensor | None] = ()
    if roots and leaves:
        chosen = roots if call.how == "backward" else [roots[call.output % len(roots)]]
        if call.how in ("backward", "one"):
            torch.autograd.backward(chosen, cotangents(chosen), retain_graph=call.retain)
        else:
            returned = torch.autograd.grad(
                chosen,
                list(leaves.values()),
                cotangents(chosen),
                retain_graph=call.retain or call.how == "double",
                create_graph=call.how == "double",
                allow_unused=True,
            )
        second = [grad for grad in returned if call.how == "double" and grad is not None and grad.requires_grad]
        if second:
            torch.autograd.backward([grad.square().sum() for grad in second], retain_graph=call.retain)
    found = {f"returned {name}": _copied(grad) for name, grad in zip(leaves, returned)}
    return found | {f"gradient of {name}": _copied(leaf.grad) for name, leaf in leaves.items()}


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


# -- what is right ----------------------------------------------------------------------------------------------------


class _Packed(NamedTuple):
    copy: Tensor
    regions: tuple[int, ...]  # that were open when it was saved
    reads: set[int]  # the backward calls that have read it, but for a custom function's own


class Copies:
    """The plain program with a copy of every tensor that autograd saves; it watches what regions would have to do.

    Attributes:
        read: for each region, the backward calls that read something which it or a region inside of it saved.
        own: the same, of what it saved itself.
        reads_again: whether a backward read one of these twice. (A custom function may without another recomputation.)
        inputs: what each region reads and has no copy of, with versions as the region began.
    """

    def __init__(self) -> None:
        self.read: list[set[int]] = []
        self.own: list[set[int]] = []
        self.reads_again = False
        self.inputs: list[tuple[Tensor, int]] = []
        self._open: list[int] = []

    def wrap(self, fn: Callable[..., Any], values: Sequence[Tensor]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return fn(*args, **kwargs)
            self.inputs += [(value, value._version) for value in values if value.requires_grad]
            self._open.append(len(self.read))
            self.read.append(set())
            self.own.append(set())
            try:
                with saved_tensors_hooks(self._pack, self._unpack):
                    return fn(*args, **kwargs)
            finally:
                self._open.pop()

        return watched

    def _pack(self, tensor: Tensor) -> _Packed:
        copy = tensor.detach()
        memory = torch.empty(0, dtype=tensor.dtype).set_(
            tensor.untyped_storage().clone(), tensor.storage_offset(), tensor.shape, tensor.stride()
        )
        return _Packed(memory if copy.layout is torch.strided else copy.clone(), tuple(self._open), set())

    def _unpack(self, packed: _Packed) -> Tensor:
        now = current_backward()
        for region in packed.regions:
            self.read[region].add(now)
        self.own[packed.regions[-1]].add(now)
        if not is_function_running():
            self.reads_again |= now in packed.reads
            packed.reads.add(now)
        return packed.copy

    def wrote_to_inputs(self) -> bool:
        return any(value._version != version for value, version in self.inputs)


class Counts:
    """Regions of the forward pass, and their recomputations; not those that recomputations of others run."""

    def __init__(self) -> None:
        self.regions: set[weakref.ref[Any]] = set()  # a region that is held would hold the graph around it
        self.recomputed: list[weakref.ref[Any]] = []

    def forward_done(self, record: Any) -> None:
        if not reactivate.is_recomputing():
            self.regions.add(weakref.ref(record))

    def recomputation_done(self, record: Any) -> None:
        self.recomputed.append(weakref.ref(record))
        hash(self.recomputed[-1])  # while it has one

    def recomputations(self) -> int:
        return sum(reference in self.regions for reference in self.recomputed)


def plain(fn: Callable[..., Any], values: Sequence[Tensor]) -> Callable[..., Any]:
    return fn


def checkpointed(**options: Any) -> Wrap:
    return lambda fn, values: reactivate.checkpoint(fn, **options)


def kept_bytes(program: Program, wrap: Wrap) -> tuple[int, int]:
    """Return what autograd keeps of a forward pass, without leaves; and how many bytes the inputs have."""
    seed_everything()
    world = World(program)
    leaves = {leaf.untyped_storage().data_ptr() for leaf in world.leaves.values()}
    kept: dict[int, Tensor] = {}

    def count(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in leaves:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(count, lambda tensor: tensor):
        output = world.forward(wrap)
    found = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    given = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in world.inputs}
    del output
    return found, sum(size for address, size in given.items() if address not in leaves)


# -- the test ---------------------------------------------------------------------------------------------------------


def compare(program: Program, wrap: Wrap) -> tuple[Copies, Counts] | None:
    """Plain and checkpointed are the same, as the docstring of this file says. None if one of them raises."""
    copies, counts = Copies(), Counts()
    expected, right = run(program, plain), run(program, copies.wrap)
    with observed_by(counts):
        ours = run(program, wrap)
    may_refuse = copies.wrote_to_inputs()
    for index, results in enumerate(ours.results):
        assert index < len(right.results), f"event {index} raises with copies too: {right.error!r}"
        if index < len(expected.results):
            assert_same_results(expected.results[index], right.results[index], f"event {index}, with copies")
        assert_same_results(right.results[index], results, f"event {index}")
    if ours.error is not None and len(ours.results) < len(expected.results):
        assert may_refuse and isinstance(ours.error, MutationError), f"only ours raises: {ours.error!r}"
    if ours.error is not None or expected.error is not None:
        return None
    assert_same_results(expected.after, ours.after, "afterwards")
    assert len(counts.regions) == len(copies.read), "as many regions as expected"
    return copies, counts


def check(program: Program, **options: Any) -> None:
    """Results are the same, with as many recomputations as the backwards need, and nothing kept.

    A region inside of another one is recomputed without that where its inputs are still there.
    """
    wrap = checkpointed(**options)
    found = compare(program, wrap)
    if found is None:
        return
    copies, counts = found
    least, most = sum(map(len, copies.own)), sum(map(len, copies.read))
    if fences():  # a backward that comes to an exit recomputes, whether it will read what is saved or not
        most += len(counts.regions) * len(program.backwards)
    assert counts.recomputations() >= least and (counts.recomputations() <= most or copies.reads_again), (
        "as many as expected"
    )
    kept, given_bytes = kept_bytes(program, wrap)
    assert kept <= given_bytes, "nothing was kept but inputs"


def assert_same_results(one: dict[str, Any], other: dict[str, Any], where: str) -> None:
    assert one.keys() == other.keys(), where
    for name, value in one.items():
        if not isinstance(value, Tensor) or not torch.equal(bits_of(value), bits_of(other[name])):
            assert_bitwise(value, other[name], f"{where}: {name}")


_INNER_BACKWARD = (Op("sin", -1, -1), Op("bulk", -1, -1), Op("gradient", -1, -2))


def _found(*rest: Step, modules: tuple[str, ...] = ()) -> Program:
    """A program that was found to go wrong: a backward inside of the forward pass, and then `rest`."""
    return Program(("leaf",), ("positional",), modules, (*_INNER_BACKWARD, *rest), (-1,), "one")


@example(_found(Op("dropout", -1, -1)), False, "metadata")
@example(_found(Op("sin", -2, -2), Op("exp", -1, -1), Op("gradient", -1, -2)), True, "every")
@example(_found(Region((-2,), ("positional",), (Use(0, -1),)), modules=("BatchNorm",)), False, "metadata")
@settings(
    max_examples=int(EXAMPLES or 300),
    derandomize=EXAMPLES is None,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)
@given(programs(), st.booleans(), st.sampled_from(["metadata", "first", "first", "every", "none"]))
def test_random_programs(program: Program, early_stop: bool, determinism: str) -> None:
    note(
        f"{program}\nagain: python -m pytest tests/random_programs/test_property.py, or with the line that is printed below"
    )
    with patch("reactivate._region.region.is_due", lambda fn, determinism, choice: True):
        check(program, early_stop=early_stop, check=determinism)
