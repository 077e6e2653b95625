"""`dropin.install`: what called torch's checkpoint functions calls ours, until it is taken back."""

from __future__ import annotations

import contextlib
import functools
import gc
import pickle
import types
from collections import deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as upstream
from journal import Journal
from oracle import Case, Ran, assert_bitwise, assert_same, backward_once, run
from several import each
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import (
    CheckpointError,
    CheckpointFunction,
    checkpoint,
    checkpoint_sequential,
    set_checkpoint_debug_enabled,
    set_checkpoint_early_stop,
)

from reactivate import dropin
from reactivate._passes.observing import observed_by
from reactivate.errors import UsageError
from reactivate.guards import DEFAULT, Guard
from reactivate.storage import Host

pytestmark = pytest.mark.usefixtures("whole_heap")

Get = Callable[[], Any]  # asks a place what it refers to
NAMES = ("checkpoint", "checkpoint_sequential", "set_checkpoint_early_stop", "set_checkpoint_debug_enabled")
NAMES += ("CheckpointFunction",)
if hasattr(upstream, "GraphExecGroup"):
    from torch.utils.checkpoint import GraphExecGroup

    NAMES += ("GraphExecGroup",)
else:
    from reactivate.dropin.torch import GraphExecGroup  # torch 2.9 has none


def block(width: int = 16) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(width, 4 * width), nn.BatchNorm1d(4 * width), nn.GELU(), nn.Dropout(0.2), nn.Linear(4 * width, width)
    )


def one_block() -> Case:
    return Case(block(), (torch.randn(8, 16, requires_grad=True),))


def three_blocks() -> Case:
    """The modules are listed one by one, since a wrapper around them would be in their names."""
    blocks = [block(), block(), block()]
    return Case(nn.Sequential(*blocks), (torch.randn(8, 16, requires_grad=True),), modules=[*blocks])


def check_runs_here(wrap: Callable[[Any], Any], make: Callable[[], Case] = one_block, regions: int = 1) -> None:
    """A function that `wrap` makes runs on this engine, and does what the original does."""
    plain, ours = run(make), run(make, wrap)
    assert_same(plain, ours)
    assert (ours.regions, ours.recomputations) == (regions, regions)
    assert ours.kept_bytes < plain.kept_bytes


def check_runs_on_torch(wrap: Callable[[Any], Any], make: Callable[[], Case] = one_block) -> None:
    plain, theirs = run(make), run(make, wrap)
    assert_bitwise(plain.outputs[0], theirs.outputs[0], "output")
    assert (theirs.regions, theirs.recomputations) == (0, 0)
    assert theirs.kept_bytes < plain.kept_bytes


def with_checkpoint(get: Get) -> Callable[[Any], Any]:
    return lambda fn: functools.partial(get(), fn, use_reentrant=False)


# -- places that a reference can be in --------------------------------------------------------------------------------


class Plain:
    """An object whose attributes Python keeps without a dict, as long as nobody asks for that."""

    def __init__(self, function: Any) -> None:
        self.function = function


@dataclass(frozen=True, slots=True)
class Frozen:
    function: Any


Named = namedtuple("Named", ["function", "label"])


def module_of_its_own() -> Get:
    module = types.ModuleType("a_library")
    exec("from torch.utils.checkpoint import checkpoint as renamed", vars(module))
    return lambda: module.renamed


def function_of_partial() -> Get:
    partial = functools.partial(upstream.checkpoint, use_reentrant=False)
    return lambda: partial.func


def argument_of_partial() -> Get:
    partial = functools.partial(print, 1, upstream.checkpoint)
    return lambda: partial.args[1]


def keyword_of_partial() -> Get:
    partial = functools.partial(print, function=upstream.checkpoint)
    return lambda: partial.keywords["function"]


def closure() -> Get:
    function = upstream.checkpoint
    return lambda: function


def class_attribute() -> Get:
    class Base:
        function = upstream.checkpoint

    class Derived(Base):
        pass

    Derived.function  # now Python has it in a cache
    return lambda: Derived.function


def static_method() -> Get:
    class Owner:
        function = staticmethod(upstream.checkpoint)

    return lambda: Owner.function


def default_argument() -> Get:
    def function(first: int = 1, function: Any = upstream.checkpoint) -> Any:
        return function

    return function


def keyword_default() -> Get:
    def function(*, function: Any = upstream.checkpoint) -> Any:
        return function

    return function


def attribute_of_object() -> Get:
    plain = Plain(upstream.checkpoint)
    return lambda: plain.function


def attribute_of_module() -> Get:
    module = nn.Linear(1, 1)
    module.function = upstream.checkpoint
    return lambda: module.function


def attribute_of_function() -> Get:
    def function() -> Any:
        return function.engine  # type: ignore[attr-defined]

    function.engine = upstream.checkpoint  # type: ignore[attr-defined]
    return function


def slot() -> Get:
    frozen = Frozen(upstream.checkpoint)
    return lambda: frozen.function


def value_of_dict() -> Get:
    table = {"full": upstream.checkpoint}
    return lambda: table["full"]


def item_of_list() -> Get:
    items = [None, upstream.checkpoint]
    return lambda: items[1]


def item_of_deque() -> Get:
    items = deque([None, upstream.checkpoint])
    return lambda: items[1]


def tuple_in_dict() -> Get:
    table = {"full": (upstream.checkpoint, {"use_reentrant": False})}
    return lambda: table["full"][0]


def tuple_in_tuple_in_list() -> Get:
    items = [(1, (2, upstream.checkpoint))]
    return lambda: items[0][1][1]


def named_tuple() -> Get:
    items = [Named(upstream.checkpoint, "full")]
    return lambda: items[0].function


PLACES: list[Callable[[], Get]] = [
    *(module_of_its_own, function_of_partial, argument_of_partial, keyword_of_partial, closure, class_attribute),
    *(static_method, default_argument, keyword_default, attribute_of_object, attribute_of_module),
    *(attribute_of_function, slot, value_of_dict, item_of_list, item_of_deque, tuple_in_dict, tuple_in_tuple_in_list),
    named_tuple,
]


def test_references_of_every_kind() -> None:
    """Made before, they are ours while it is installed, and torch's very own before and after."""
    original = upstream.checkpoint  # a local variable of a running function keeps what it has
    places = {make.__name__: make() for make in PLACES}
    places["the global of a module"] = lambda: checkpoint
    for name, get in places.items():
        assert get() is original, name
    with dropin.install():
        assert upstream.checkpoint is not original
        for name, get in places.items():
            assert get() is upstream.checkpoint, name
            check_runs_here(with_checkpoint(get))
    for name, get in places.items():
        assert get() is original, name
        check_runs_on_torch(with_checkpoint(get))


class Counting(nn.Module):
    """Writes to a buffer, of which a region has a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(128, 128))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return (x.sin() * self.count.mean()).exp()


def test_copies_of_buffers_go_with_the_installation() -> None:
    def tensor_bytes() -> int:
        return sum(item.nbytes for item in gc.get_objects() if type(item) is Tensor)

    model = Counting()
    with dropin.install() as installed:
        for _ in range(2):
            upstream.checkpoint(model, torch.ones(4, requires_grad=True), use_reentrant=False).sum().backward()
        during = tensor_bytes()
    assert installed.regions == 2
    assert tensor_bytes() <= during - model.count.nbytes


def test_references_made_while_installed() -> None:
    """They are torch's afterwards, as if they had been made then."""
    original = upstream.checkpoint
    with dropin.install():
        places = {make.__name__: make() for make in PLACES}
        for name, get in places.items():
            assert get() is not original, name
    for name, get in places.items():
        assert get() is original, name


def test_containers_are_the_same_objects_afterwards() -> None:
    """Also those that cannot be written to, and others stood in for."""
    table = {"pair": (upstream.checkpoint, 1), "nested": (0, (upstream.checkpoint, 2))}
    method = staticmethod(upstream.checkpoint)
    owner = type("Owner", (), {"function": method})
    pair, nested = table["pair"], table["nested"]
    with dropin.install():
        assert table["pair"] == (upstream.checkpoint, 1)
        assert table["nested"][1][0] is owner.function is upstream.checkpoint  # type: ignore[index, attr-defined]
    assert table["pair"] is pair
    assert table["nested"] is nested
    assert vars(owner)["function"] is method


def test_every_name_of_torch() -> None:
    """Each of them, imported early, is another object while it is installed, and the very same one afterwards."""
    originals = tuple(getattr(upstream, name) for name in NAMES)  # a local tuple keeps what it has
    assert tuple(globals()[name] for name in NAMES) == originals
    with dropin.install():
        for name, original in zip(NAMES, originals):
            assert getattr(upstream, name) is globals()[name] is not original, name
    for name, original in zip(NAMES, originals):
        assert getattr(upstream, name) is globals()[name] is original, name


# -- what they do ----------------------------------------------------------------------------------------------------


def apply_to_blocks(model: Any, variant: CheckpointImpl) -> Any:
    wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=variant)
    apply_activation_checkpointing(model, wrapper, lambda module: type(module) is nn.Sequential)
    return model


VARIANTS = list(CheckpointImpl)


@each(
    ("wrap", "make", "regions"),
    [
        (lambda model: lambda x: checkpoint_sequential(model, 3, x, use_reentrant=False), three_blocks, 2),
        (lambda fn: lambda *args: CheckpointFunction.apply(fn, True, *args), one_block, 1),
        (composable, one_block, 1),
        *((functools.partial(checkpoint_wrapper, checkpoint_impl=variant), one_block, 1) for variant in VARIANTS),
        *((functools.partial(apply_to_blocks, variant=variant), three_blocks, 3) for variant in VARIANTS),
    ],
)
def test_every_way_into_a_region(wrap: Callable[[Any], Any], make: Callable[[], Case], regions: int) -> None:
    """Run it here while the drop-in is installed, and on torch afterwards."""
    with dropin.install():
        check_runs_here(wrap, make, regions)
    check_runs_on_torch(wrap, make)


def twice(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
    """Twice what the backward of torch's function returns, by the name that it has at that time."""
    return tuple(None if one is None else 2 * one for one in upstream.CheckpointFunction.backward(ctx, *gradients))


def eightfold(ctx: Any, function: Callable[..., Any], preserves: bool, *args: Any) -> Any:
    return 8 * upstream.CheckpointFunction.forward(ctx, function, preserves, *args)


@each(
    ("own", "regions"),
    [({"backward": staticmethod(twice)}, 0), ({"forward": staticmethod(eightfold)}, 0), ({}, 0), (None, 1)],
)
def test_subclasses_of_its_autograd_function(own: dict[str, Any] | None, regions: int) -> None:
    """They do what they do with torch, made before or after the installation; the class itself, None here, is a region."""

    def make() -> Any:
        base = upstream.CheckpointFunction
        return base if own is None else type("Derived", (base,), dict(own))

    def results(function: Any) -> tuple[Tensor, Tensor]:
        x = torch.linspace(-1, 1, 8, requires_grad=True)
        y = function.apply(lambda x: x.sin().exp(), True, x)
        y.sum().backward()
        assert x.grad is not None
        return y.detach(), x.grad

    before = make()
    expected = results(before)
    with dropin.install() as installed:
        within = make()
        assert issubclass(within, torch.autograd.Function) and issubclass(within, upstream.CheckpointFunction)
        for function in (within, before) if own is not None else (within,):
            for found, right in zip(results(function), expected):
                assert_bitwise(found, right, "result")
        assert installed.regions == regions
    for around in (contextlib.nullcontext, dropin.install):  # a second installation has a class of its own
        with around():
            for found, right in zip(results(within), expected):
                assert_bitwise(found, right, "result")


def test_early_stop() -> None:
    """The end of the function, after the last thing that is needed, runs again only without early stop.

    The first call, the second, the fourth and so on run to their ends again, to be compared; each third is none of these.
    """
    ends = Journal()

    def fn(x: Tensor) -> Tensor:
        y = x.sin().exp()
        ends.append(None)
        return y

    def count(enable: bool) -> int:
        for _ in range(3):
            ends.clear()
            ran = Ran()
            with observed_by(ran):
                with set_checkpoint_early_stop(enable):
                    y = checkpoint(fn, torch.ones(3, requires_grad=True), use_reentrant=False)
                y.sum().backward()
            assert (ran.regions, ran.recomputations) == (1, 1)
        return len(ends)

    with dropin.install():
        assert count(True) == 1
        assert count(False) == 2


def test_debug() -> None:
    """With it the op whose result differs is named; without it only some calls are compared, by what they save."""
    calls = Journal()

    def differentiate(enabled: bool) -> None:
        calls.clear()

        def fn(x: Tensor) -> Tensor:
            calls.append(None)
            return (x.sin() * len(calls)).exp()

        with set_checkpoint_debug_enabled(enabled):
            y = checkpoint(fn, torch.ones(3, requires_grad=True), use_reentrant=False)
        y.sum().backward()

    with dropin.install():
        with pytest.raises(CheckpointError, match="computes other values"):
            differentiate(False)
        with pytest.raises(CheckpointError, match=r"Op 2 is the first that differs(.|\n)*-> +2 aten\.mul"):
            differentiate(True)


def test_graph_exec_group() -> None:
    """Two backward calls share a recomputation in one group, and have two without."""

    def recomputations(context: Any) -> int:
        ran, x = Ran(), torch.ones(3, requires_grad=True)
        with observed_by(ran):
            one, other = checkpoint(lambda x: (x.sin().exp(), x.cos().exp()), x, use_reentrant=False)
            with context:
                one.sum().backward(retain_graph=True)
                other.sum().backward()
        return ran.recomputations

    with dropin.install():
        assert recomputations(GraphExecGroup()) == 1
        assert recomputations(contextlib.nullcontext()) == 2


# -- torch.distributed -----------------------------------------------------------------------------------------------


def test_wrappers_change_their_engine() -> None:
    """One made before runs here while it is installed; one made then runs on torch afterwards."""
    before = checkpoint_wrapper(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    x = torch.ones(2, 4)
    with dropin.install():
        meanwhile = checkpoint_wrapper(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
        assert [regions_of(before, x), regions_of(meanwhile, x)] == [1, 1]
    assert [regions_of(before, x), regions_of(meanwhile, x)] == [0, 0]


@pytest.mark.skipif(not hasattr(upstream, "_checkpoint_impl"), reason="torch < 2.14 has no such decorator")
def test_decorated_functions_change_their_engine() -> None:
    """One that was decorated before runs here while it is installed, and one decorated then on torch afterwards."""
    before = checkpoint(use_reentrant=False)(torch.sin)
    x = torch.ones(2, requires_grad=True)
    with dropin.install():
        meanwhile = checkpoint(use_reentrant=False)(torch.sin)
        assert [regions_of(before, x), regions_of(meanwhile, x)] == [1, 1]
    assert [regions_of(before, x), regions_of(meanwhile, x)] == [0, 0]


def test_composable_after_an_exception() -> None:
    """Rule 13: the module is as it was, and its next call is a region again."""

    class Fails(nn.Module):
        fails = True

        def forward(self, x: Tensor) -> Tensor:
            if self.fails:
                raise ValueError("now")
            return x.sin().exp()

    with dropin.install():
        module = composable(Fails())
        with pytest.raises(ValueError, match="now"):
            module(torch.ones(3, requires_grad=True))
        module.fails = False
        assert regions_of(module, torch.ones(3, requires_grad=True)) == 1


@pytest.mark.parametrize("end", ["throw", "close"])
def test_generator_that_is_not_finished(end: str) -> None:
    """Rule 13, for what composable `checkpoint` is made of: `fresh_state` looks for hooks that were left behind."""
    with dropin.install():
        generator = upstream._checkpoint_without_reentrant_generator(torch.sin)
        next(generator)
        if end == "close":
            generator.close()
        else:
            with pytest.raises(KeyError):
                generator.throw(KeyError())


# -- when it is there ------------------------------------------------------------------------------------------------


def test_a_second_installation_is_the_first() -> None:
    original = upstream.checkpoint
    handle = dropin.install(guards=DEFAULT.without("rng"), storage=Host(least_bytes=0))
    installed = upstream.checkpoint
    assert dropin.install() is handle  # as a cell of a notebook that runs again
    assert dropin.install(guards=DEFAULT.without("rng"), storage=Host(least_bytes=0)) is handle
    assert upstream.checkpoint is installed and dropin.is_installed()
    with dropin.install() as again:
        with dropin.install():
            assert again is handle
        assert upstream.checkpoint is installed
    assert upstream.checkpoint is installed  # as before the `with`
    handle.remove()
    assert upstream.checkpoint is original and not dropin.is_installed()
    with dropin.install() as other:
        assert other is not handle
    assert upstream.checkpoint is original


@pytest.mark.parametrize(("name", "value"), [("guards", DEFAULT.without("rng")), ("storage", Host(least_bytes=0))])
def test_a_second_installation_with_other_settings_is_refused(name: str, value: Any) -> None:
    with dropin.install():
        installed = upstream.checkpoint
        with pytest.raises(UsageError, match=f"installed already, with {name}=.*call remove"):
            dropin.install(**{name: value})
        assert upstream.checkpoint is installed
    assert not dropin.is_installed()


def test_uninstall() -> None:
    original = upstream.checkpoint
    dropin.uninstall()  # nothing to do
    dropin.install()
    dropin.uninstall()
    assert upstream.checkpoint is original is checkpoint
    with dropin.install() as installation:
        dropin.uninstall()
        assert upstream.checkpoint is original and "taken back" in repr(installation)
    assert not dropin.is_installed()


def test_it_counts_the_regions_that_run_through_it() -> None:
    x = torch.ones(4, requires_grad=True)
    with dropin.install() as installation:
        assert installation.regions == 0
        for use_reentrant in (False, True):
            checkpoint(torch.sin, x, use_reentrant=use_reentrant).sum().backward()
        with torch.no_grad():
            checkpoint(torch.sin, x, use_reentrant=False)  # keeps nothing anyway
        checkpoint_sequential([torch.sin, torch.exp, torch.cos], 3, x, use_reentrant=False)
        composable(block())(torch.randn(8, 16, requires_grad=True))
        dropin.torch.checkpoint(torch.sin, x, use_reentrant=False)  # through no installation
        assert installation.regions == 5
    checkpoint(torch.sin, x, use_reentrant=False)
    assert installation.regions == 5 and "5 regions ran" in repr(installation)
    with dropin.install() as other:
        assert other.regions == 0


def test_taking_it_back_twice_is_refused() -> None:
    installation = dropin.install()
    installation.remove()
    original = upstream.checkpoint
    with pytest.raises(UsageError, match="taken back already"):
        installation.remove()
    with dropin.install(), pytest.raises(UsageError, match="taken back already"):
        installation.remove()
    assert upstream.checkpoint is original


def test_references_that_are_hidden_are_refused() -> None:
    """The collector does not look at frozen objects, so that nothing would be found."""
    original = upstream.checkpoint
    gc.freeze()
    try:
        with pytest.raises(UsageError, match="gc.unfreeze"):
            dropin.install()
    finally:
        gc.unfreeze()
    assert upstream.checkpoint is original is checkpoint
    with dropin.install():
        check_runs_here(checkpoint_wrapper)


def test_an_exception_takes_it_back() -> None:
    original = upstream.checkpoint
    with pytest.raises(KeyError), dropin.install():
        raise KeyError
    assert upstream.checkpoint is original is checkpoint


def test_pickle() -> None:
    """A pickle holds a name of torch's, so it is read with and without the drop-in."""
    original = upstream.checkpoint
    with dropin.install():
        values = [getattr(upstream, name) for name in NAMES]
        data = pickle.dumps([*values, functools.partial(checkpoint, use_reentrant=False)])
        for value, copy in zip(values, pickle.loads(data)):
            assert copy is value
        check_runs_here(lambda fn: functools.partial(pickle.loads(data)[-1], fn))
    assert pickle.loads(data)[:-1] == [getattr(upstream, name) for name in NAMES]
    assert pickle.loads(data)[-1].func is original


def test_guards_reach_the_regions() -> None:
    """List the messages of every way into the engine, and of no other installation."""

    class Count(Guard):
        name = "count"
        events: tuple[str, ...] = ()

        def before(self, call: Any) -> Any:
            self.events += ("before",)
            return self

        def recompute(self, snapshot: Any) -> Any:
            self.events += ("recomputation",)

    guard = Count()
    with dropin.install(guards=DEFAULT.adding(guard)):
        for wrap in (checkpoint_wrapper, composable, with_checkpoint(lambda: checkpoint)):
            check_runs_here(wrap)
            assert guard.events == ("before", "recomputation")
            guard.events = ()
    with dropin.install():
        check_runs_here(checkpoint_wrapper)
    assert guard.events == ()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_regions_keep_their_engine(use_reentrant: bool) -> None:
    """A graph that is there when it is installed, and when it is taken back, goes on as it began."""

    def across(installation: Callable[[], Any], other: Callable[[], Any]) -> Ran:
        def wrap(fn: Any) -> Any:
            def wrapped(x: Tensor) -> Tensor:
                with installation():
                    return checkpoint(fn, x, use_reentrant=use_reentrant)

            return wrapped

        def backward(outputs: list[Tensor], inputs: dict[str, Tensor]) -> None:
            with other():
                backward_once(outputs, inputs)

        def make() -> Case:
            return Case(lambda x: (x.sin() * torch.rand(8)).exp().tanh(), (torch.randn(4, 8, requires_grad=True),))

        plain, checkpointed = run(make), run(make, wrap, backward)
        assert_same(plain, checkpointed)
        assert checkpointed.kept_bytes < plain.kept_bytes
        return checkpointed

    theirs = across(contextlib.nullcontext, dropin.install)
    assert (theirs.regions, theirs.recomputations) == (0, 0)
    ours = across(dropin.install, contextlib.nullcontext)
    assert (ours.regions, ours.recomputations) == (1, 1)


# -- compilers -------------------------------------------------------------------------------------------------------


class Compiled(nn.Module):
    """A region with an op on each side of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda x: self.linear(x).sin().exp(), x.cos(), use_reentrant=False).tanh()


def test_compile() -> None:
    """The compiler gets torch's operator, in one graph; its backward holds the ops of the region again."""
    graphs: list[list[str]] = []

    def note(graph: Any, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    compiler = aot_autograd(fw_compiler=note, bw_compiler=note, partition_fn=min_cut_rematerialization_partition)
    make = functools.partial(compiled_case, Compiled)
    plain = run(make)
    with dropin.install():
        ours = run(make, lambda module: torch.compile(module, backend=compiler, fullgraph=True))
    torch.compiler.reset()
    assert_same(plain, ours)
    forward, backward = graphs
    assert "aten.sin.default" in forward
    assert "aten.sin.default" in backward


def test_compile_with_a_graph_break_in_the_region() -> None:
    """The call is left to eager, and there it runs here."""

    class Breaks(Compiled):
        def forward(self, x: Tensor) -> Tensor:
            def region(x: Tensor) -> Tensor:
                torch._dynamo.graph_break()
                return self.linear(x).sin().exp()

            return checkpoint(region, x.cos(), use_reentrant=False).tanh()

    make = functools.partial(compiled_case, Breaks)
    plain = run(make)
    with dropin.install():
        ours = run(make, lambda module: torch.compile(module, backend="aot_eager"))
    torch.compiler.reset()
    assert_same(plain, ours)
    assert (ours.regions, ours.recomputations) == (1, 1)


def test_export() -> None:
    module, x = Compiled(), torch.randn(4, 8)
    with dropin.install():
        exported = torch.export.export(module, (x,), strict=False)
    assert_bitwise(exported.module()(x), module(x), "output")


def compiled_case(kind: type[nn.Module]) -> Case:
    return Case(kind(), (torch.randn(4, 8, requires_grad=True),))


def regions_of(module: nn.Module, x: Tensor) -> int:
    ran = Ran()
    with observed_by(ran):
        module(x).sum().backward()
    assert ran.recomputations == ran.regions
    return ran.regions
