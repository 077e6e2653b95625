"""Policies of torch's selective checkpointing that offload: what they say is kept elsewhere, and is not computed again."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as upstream
from offload_cases import Shelf
from oracle import Case, assert_bitwise, assert_same, run
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import reactivate
from reactivate.dropin import torch as ours
from reactivate.storage import Disk, Host

Policy = upstream.CheckpointPolicy
SHOWS_RESULTS = "op_output" in inspect.signature(upstream.SelectiveCheckpointContext).parameters
pytestmark = pytest.mark.skipif(not SHOWS_RESULTS, reason="this torch shows policies no results")
NAMES = ["MUST_CPU_OFFLOAD", "PREFER_CPU_OFFLOAD"]
mm, rand_like = torch.ops.aten.mm.default, torch.ops.aten.rand_like.default


class Runs(TorchDispatchMode):
    """Count ops that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.count: dict[Any, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func] = self.count.get(func, 0) + 1
        return func(*args, **(kwargs or {}))


def of(answer: Any, *ops: Any) -> Any:
    """Return a policy that gives `answer` for some ops, or for all."""
    return lambda context, op, *args, **kwargs: answer if not ops or op in ops else Policy.PREFER_RECOMPUTE


def offloading(policy: Any, engine: Any = ours, **options: Any) -> Callable[[Any], Any]:
    contexts = functools.partial(upstream.create_selective_checkpoint_contexts, policy)
    return lambda fn: functools.partial(engine.checkpoint, fn, use_reentrant=False, context_fn=contexts, **options)


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> Shelf:
    found = Shelf()
    monkeypatch.setattr(ours, "storage", found)
    return found


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def chain() -> Case:
    weight = leaf(16, 16)
    return Case(lambda x: ((x @ weight).tanh() @ weight).exp().sin(), (leaf(8, 16),), leaves={"weight": weight})


@pytest.mark.parametrize("name", NAMES)
def test_results_are_moved_and_not_computed_again(name: str, shelf: Shelf) -> None:
    """torch's own engine computes them again; the bits are the same."""
    policy = of(getattr(Policy, name), mm)
    counts = {}
    for engine in (upstream, ours):
        torch.manual_seed(0)
        case = chain()
        with Runs() as runs:
            out = offloading(policy, engine)(case.fn)(*case.args)
            in_forward = runs.count[mm]
            out.sum().backward()
        counts[engine] = runs.count[mm] - in_forward
    assert counts[upstream] - counts[ours] == 2
    assert (shelf.taken, shelf.given) == (2, 2)
    assert_same(run(chain), run(chain, offloading(policy)))
    assert_same(run(chain, offloading(policy, upstream)), run(chain, offloading(policy)))


def everything() -> Case:
    """Views, writes in place, several results, numbers, random ops, results that are no tensors."""
    norm, weight = nn.LayerNorm(16), leaf(16, 16)

    def fn(x: Tensor) -> Any:
        y = norm(x) @ weight
        y.add_(x[0])
        first, second = y.t().chunk(2)
        first = nn.functional.dropout(first, 0.5) * second.max(dim=1).values.unsqueeze(1)
        z = torch.cat([first.sin(), second * float(first.shape[0])]).sort(dim=0).values
        z[1:3] *= torch.rand_like(z[1:3])
        return z.exp().t(), z[0]

    return Case(fn, (leaf(8, 16),), leaves={"weight": weight}, modules=[norm])


@pytest.mark.parametrize("ops", [(), (rand_like,), (torch.ops.aten.max.dim,), (torch.ops.aten.sin.default, mm)])
def test_whatever_is_offloaded_the_bits_are_those_of_plain(ops: Any, shelf: Shelf) -> None:
    found = run(everything, offloading(of(Policy.MUST_CPU_OFFLOAD, *ops)))
    assert_same(run(everything), found)
    assert (found.regions, found.recomputations) == (1, 1)
    assert shelf.given > 0


def test_what_the_region_modifies_is_computed_again(shelf: Shelf) -> None:
    run(everything, offloading(of(Policy.MUST_CPU_OFFLOAD, mm)))
    assert shelf.taken == 0, "`add_` has modified the only product"


def test_saved_and_offloaded_calls_of_one_op(shelf: Shelf) -> None:
    """They are counted apart: torch answers the first, and the storage the second."""

    def make() -> Case:
        weight = leaf(8, 8)

        def fn(x: Tensor) -> Tensor:
            for _ in range(6):
                x = (x @ weight).tanh()
            return x.sin()

        return Case(fn, (leaf(4, 8),), leaves={"weight": weight})

    def wrap(fn: Any) -> Any:
        answers = iter([Policy.MUST_SAVE, Policy.MUST_CPU_OFFLOAD, Policy.MUST_RECOMPUTE, True, False] * 2)
        return offloading(lambda context, op, *args: next(answers) if op is mm else Policy.PREFER_RECOMPUTE)(fn)

    assert_same(run(make), run(make, wrap))
    assert shelf.taken == 1


def test_two_backwards(shelf: Shelf) -> None:
    def twice(outputs: list[Tensor], inputs: dict[str, Tensor]) -> None:
        outputs[0].sum().backward(retain_graph=True)
        outputs[0].square().sum().backward()

    found = run(chain, offloading(of(Policy.MUST_CPU_OFFLOAD, mm)), twice)
    assert_same(run(chain, None, twice), found)
    assert (found.recomputations, shelf.taken, shelf.given) == (2, 2, 4)


def test_nothing_is_left(shelf: Shelf) -> None:
    case = chain()
    fn = offloading(of(Policy.MUST_CPU_OFFLOAD, mm))(case.fn)
    out = fn(*case.args)
    assert shelf.alive() == 2
    out.sum().backward()
    del out
    assert shelf.alive() == 0
    fn(*case.args)
    assert shelf.alive() == 0, "of a forward without a backward neither"


def test_a_region_that_raises_offloads_nothing(shelf: Shelf) -> None:
    def fn(x: Tensor) -> Tensor:
        x @ x
        raise KeyError("in the forward")

    with pytest.raises(KeyError, match="in the forward"):
        offloading(of(Policy.MUST_CPU_OFFLOAD, mm))(fn)(leaf(4, 4))
    assert shelf.taken == 0 and shelf.alive() == 0


def test_regions_in_a_region(shelf: Shelf) -> None:
    def wrap(fn: Any) -> Any:
        inner = offloading(of(Policy.MUST_CPU_OFFLOAD, mm))(fn)
        return offloading(of(Policy.MUST_CPU_OFFLOAD, torch.ops.aten.exp.default))(lambda x: inner(x.sin().exp()).sin())

    def plain(fn: Any) -> Any:
        return lambda x: fn(x.sin().exp()).sin()

    def make() -> Case:
        weight = leaf(8, 8)
        return Case(lambda x: ((x @ weight).tanh() @ weight).sin(), (leaf(8, 8),), leaves={"weight": weight})

    assert_same(run(make, plain), run(make, wrap))
    assert shelf.taken >= 3


def test_a_result_that_is_modified_after_the_region() -> None:
    """The storage leaves it where it is: as torch's engine does, ours computes it again."""
    weight, x = leaf(8, 8), leaf(8, 8)
    gradients = {}
    for engine in (upstream, ours):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that nothing was moved
            out = offloading(of(Policy.MUST_CPU_OFFLOAD, mm), engine)(lambda y: y.sin() @ weight)(x)
            kept = offloading(of(Policy.MUST_CPU_OFFLOAD, mm), engine)(lambda y: (z := y.sin() @ weight, z.exp()))(x)
            out.mul_(2)
            with torch.no_grad():
                kept[0].mul_(2)
            gradients[engine] = torch.autograd.grad(out.sum() + kept[1].sum(), (x, weight))
    for one, other in zip(*gradients.values()):
        assert_bitwise(one, other, "a gradient")


def test_on_the_host_already() -> None:
    """The default storage leaves tensors of the CPU where they are, says so, and nothing is computed again."""
    case = chain()
    with warnings.catch_warnings(record=True) as caught, Runs() as runs:
        warnings.simplefilter("always")
        out = offloading(of(Policy.MUST_CPU_OFFLOAD, mm))(case.fn)(*case.args)
        before = runs.count[mm]
        out.sum().backward()
    assert runs.count[mm] - before == 4, "the products of the backward"
    assert isinstance(ours.storage, Host)
    assert all("has moved nothing" in str(entry.message) for entry in caught)


def test_the_storage_of_an_installation(tmp_path: Any, whole_heap: None) -> None:
    disk = Disk(str(tmp_path), least_bytes=0, last=0)
    case = chain()
    expected = torch.autograd.grad(case.fn(*case.args).sum(), case.args)
    with reactivate.dropin.install(storage=disk):
        contexts = functools.partial(upstream.create_selective_checkpoint_contexts, of(Policy.PREFER_CPU_OFFLOAD, mm))
        out = upstream.checkpoint(case.fn, *case.args, use_reentrant=False, context_fn=contexts)
        assert_bitwise(torch.autograd.grad(out.sum(), case.args)[0], expected[0], "gradient")
    assert disk.traffic.moved_bytes == 2 * 8 * 16 * 4


def test_what_is_no_storage() -> None:
    with pytest.raises(ValueError, match=r"install\(storage=...\)"):
        reactivate.dropin.install(storage="host")  # type: ignore[arg-type]


def test_contexts_that_are_not_torchs_stay_as_they_are(shelf: Shelf) -> None:
    pair = Runs(), Runs()
    x = leaf(4, 4)
    ours.checkpoint(lambda y: (y @ y).sin(), x, use_reentrant=False, context_fn=lambda: pair).sum().backward()
    assert pair[0].count[mm] == pair[1].count[mm] == 1
    assert shelf.taken == 0


# -- save_on_cpu ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [Policy.MUST_SAVE, getattr(Policy, "MUST_CPU_OFFLOAD", None)])
def test_save_on_cpu_around_regions(answer: Any, shelf: Shelf) -> None:
    def make() -> Case:
        return Case(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.Tanh()), (leaf(8, 16),))

    def wrap(fn: Any) -> Any:
        selective = offloading(of(answer, torch.ops.aten.addmm.default))(fn)

        def around(x: Tensor) -> Tensor:
            with warnings.catch_warnings(), save_on_cpu():
                warnings.simplefilter("ignore", FutureWarning)  # torch's, of these hooks
                return selective(x)

        return around

    assert_same(run(make), run(make, wrap))
    assert shelf.taken == (0 if answer is Policy.MUST_SAVE else 2)


@pytest.mark.parametrize("hooks", [save_on_cpu, lambda: saved_tensors_hooks(Tensor.clone, Tensor.clone)])
def test_save_on_cpu_inside_of_regions(hooks: Any, shelf: Shelf) -> None:
    """Hooks get the saved tensors of their part, in the recomputation too; results are offloaded all the same."""

    def make() -> Case:
        weight = leaf(16, 16)

        def fn(x: Tensor) -> Tensor:
            y = (x @ weight).tanh()
            with hooks():
                y = (y @ weight).exp()
            return (y @ weight).sin()

        return Case(fn, (leaf(8, 16),), leaves={"weight": weight})

    found = run(make, offloading(of(Policy.MUST_CPU_OFFLOAD, mm)))
    assert_same(run(make), found)
    assert (found.recomputations, shelf.taken, shelf.given) == (1, 3, 3)
