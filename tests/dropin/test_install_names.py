"""Names of torch's that `dropin.install` replaces: what each does here, in torch.distributed, and under compilers."""

from __future__ import annotations

import contextlib
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as upstream
from install_cases import block, check_runs_here, check_runs_on_torch, one_block
from journal import Journal
from oracle import Case, Ran, assert_bitwise, assert_same, run
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

pytestmark = pytest.mark.usefixtures("whole_heap")
NAMES = ("checkpoint", "checkpoint_sequential", "set_checkpoint_early_stop", "set_checkpoint_debug_enabled")
NAMES += ("CheckpointFunction",)
if hasattr(upstream, "GraphExecGroup"):
    from torch.utils.checkpoint import GraphExecGroup

    NAMES += ("GraphExecGroup",)
else:
    from reactivate.dropin.torch import GraphExecGroup  # torch 2.9 has none


def three_blocks() -> Case:
    """The modules are listed one by one, since a wrapper around them would be in their names."""
    blocks = [block(), block(), block()]
    return Case(nn.Sequential(*blocks), (torch.randn(8, 16, requires_grad=True),), modules=[*blocks])


# -- what they do -----------------------------------------------------------------------------------------------------


def test_every_name_of_torch() -> None:
    """Each of them, imported early, is another object while it is installed, and the very same one afterwards."""
    originals = tuple(getattr(upstream, name) for name in NAMES)  # a local tuple keeps what it has
    assert tuple(globals()[name] for name in NAMES) == originals
    with dropin.install():
        for name, original in zip(NAMES, originals):
            assert getattr(upstream, name) is globals()[name] is not original, name
    for name, original in zip(NAMES, originals):
        assert getattr(upstream, name) is globals()[name] is original, name


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
