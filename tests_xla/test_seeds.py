"""Random numbers over compiled steps: every mask is the plain run's, and so is the seed of the next step."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_xla
from lazy import DEVICE, MLP, XLA, Wrap, ours, plain
from oracle import Watched
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as upstream
from torch_xla.experimental import eager_mode

import reactivate
from reactivate import policies
from reactivate._passes.observing import observed_by
from reactivate.errors import UnsupportedError

Step = Callable[[nn.Module, Tensor, Wrap], Tensor]


def around(model: nn.Module, x: Tensor, wrap: Wrap) -> Tensor:
    """Dropout outside of regions before and behind, and between them."""
    x = F.dropout(x, 0.2)
    for block in model.blocks:
        x = F.dropout(wrap(block)(x), 0.2)
    return x.square().mean()


def before(model: nn.Module, x: Tensor, wrap: Wrap) -> Tensor:
    return model(F.dropout(x, 0.2), wrap).square().mean()


def behind(model: nn.Module, x: Tensor, wrap: Wrap) -> Tensor:
    return F.dropout(model(x, wrap), 0.2).square().mean()


def inside(model: nn.Module, x: Tensor, wrap: Wrap) -> Tensor:
    return model(x, wrap).square().mean()


def of_two(model: nn.Module, x: Tensor, wrap: Wrap) -> Tensor:
    """A region of two regions: a recomputation inside of another one."""
    first, second, *others = model.blocks
    x = wrap(lambda x: F.dropout(wrap(second)(wrap(first)(x)), 0.2))(x)
    for block in others:
        x = wrap(block)(x)
    return x.square().mean()


def seeded_in_the_middle(model: nn.Module, x: Tensor, wrap: Wrap) -> Tensor:
    x = F.dropout(x, 0.2)
    torch_xla.manual_seed(11)
    x = model(F.dropout(x, 0.3), wrap)
    torch.xla.set_rng_state(torch.xla.get_rng_state())
    return F.dropout(x, 0.2).square().mean()


STEPS: dict[str, Step] = {
    step.__name__: step for step in (around, before, behind, inside, of_two, seeded_in_the_middle)
}
MARKERS: dict[str, Callable[[], None]] = {
    "sync": torch_xla.sync,
    "twice": lambda: [torch_xla.sync() for _ in range(2)].clear(),
    "wait": lambda: torch_xla.sync(wait=True),
    "none": lambda: None,
    "direct": lambda: XLA._xla_step_marker("xla:0", [], wait=True, reset_scope=True),
}


def trained(step: Step, wrap: Wrap, marker: Callable[[], None] = torch_xla.sync, steps: int = 4) -> list[Any]:
    """Losses, gradients, parameters and seeds of some steps, the last seed behind another marker."""
    model, x = _fresh()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    found: list[Any] = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = step(model, x, wrap)
        loss.backward()
        found += [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
        optimizer.step()
        found += [F.dropout(torch.ones(64, device=DEVICE), 0.5), XLA._xla_get_rng_seed("")]
        marker()
    torch_xla.sync()
    return [*_values(found), *_values(model.parameters()), XLA._xla_get_rng_seed("")]


def _values(items: Any) -> list[Any]:
    return [item.detach().cpu() if isinstance(item, Tensor) else item for item in items]


def assert_equal(expected: list[Any], found: list[Any]) -> None:
    assert len(expected) == len(found)
    for index, (one, other) in enumerate(zip(expected, found)):
        same = torch.equal(one, other) if isinstance(one, Tensor) else one == other
        assert same, f"item {index}: {one} against {other}"


@pytest.mark.parametrize("name", STEPS)
def test_steps_with_dropout(name: str) -> None:
    watched = Watched()
    expected = trained(STEPS[name], plain)
    with observed_by(watched):
        found = trained(STEPS[name], ours)
    assert watched.recomputations >= 16
    assert_equal(expected, found)


@pytest.mark.parametrize("name", MARKERS)
def test_markers_of_every_kind(name: str) -> None:
    assert_equal(trained(around, plain, MARKERS[name]), trained(around, ours, MARKERS[name]))


def test_op_by_op(op_by_op: None) -> None:
    assert_equal(trained(around, plain), trained(around, ours))


def test_op_by_op_in_the_backward_alone() -> None:
    def switched(wrap: Wrap) -> list[Any]:
        torch_xla.manual_seed(5)
        x = torch.ones(64, device=DEVICE).requires_grad_()
        y = F.dropout(wrap(lambda x: F.dropout(x, 0.5).exp())(F.dropout(x, 0.5)), 0.5)
        eager_mode(True)
        try:
            y.sum().backward()
        finally:
            eager_mode(False)
        torch_xla.sync()
        return [x.grad.cpu(), XLA._xla_get_rng_seed("")]

    assert_equal(switched(plain), switched(ours))


def test_saved_dropout() -> None:
    """A recomputation goes on from where the saved call left the stream."""
    policy = policies.save_ops("dropout")
    assert_equal(trained(around, plain), trained(around, lambda block: ours(block, policy=policy)))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_installed_in_the_place_of_torchs(use_reentrant: bool) -> None:
    def wrap(block: Any) -> Any:
        return lambda x: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=use_reentrant)

    expected = trained(around, plain)
    with reactivate.dropin.install():
        assert_equal(expected, trained(around, wrap))


def test_torchs_own_with_a_context() -> None:
    def wrap(block: Any) -> Any:
        return lambda x: upstream(block, x, use_reentrant=False, context_fn=reactivate.dropin.xla.context_fn)

    assert_equal(trained(around, plain), trained(around, wrap))


def test_a_backward_in_a_later_step() -> None:
    def later(wrap: Wrap) -> list[Any]:
        torch_xla.manual_seed(5)
        x = torch.ones(64, device=DEVICE).requires_grad_()
        y = wrap(lambda x: F.dropout(x, 0.5).exp())(F.dropout(x, 0.5))
        torch_xla.sync()
        noise = torch.rand(3, device=DEVICE)
        (y.sum() + noise.sum()).backward()
        behind = torch.rand(3, device=DEVICE)
        torch_xla.sync()
        return [x.grad.cpu(), behind.cpu(), torch.rand(3, device=DEVICE).cpu(), XLA._xla_get_rng_seed("")]

    assert_equal(later(plain), later(ours))


def marked_in_the_backward(wrap: Wrap, inside: Callable[[], Any]) -> list[Any]:
    """A step marker between the backward of two regions, where each recomputation has found a root."""
    torch_xla.manual_seed(5)
    x = torch.ones(64, device=DEVICE).requires_grad_()
    region = wrap(lambda x: F.dropout(x, 0.5).exp())
    y = region(F.dropout(x, 0.5))
    y.register_hook(lambda gradient: [torch_xla.sync(), inside()].clear())
    region(y).sum().backward()
    behind = torch.rand(3, device=DEVICE)
    torch_xla.sync()
    return [x.grad.cpu(), behind.cpu(), torch.rand(3, device=DEVICE).cpu(), XLA._xla_get_rng_seed("")]


def test_a_marker_between_the_recomputations_of_a_backward() -> None:
    watched = Watched()
    expected = marked_in_the_backward(plain, lambda: None)
    with observed_by(watched):
        found = marked_in_the_backward(ours, lambda: None)
    assert watched.recomputations == 2
    assert_equal(expected, found)


def test_numbers_drawn_behind_a_marker_inside_of_a_backward_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="Mark the step behind the backward"):
        marked_in_the_backward(ours, lambda: torch.rand(3, device=DEVICE))


def test_an_error_in_a_recomputation_brings_the_seed_back() -> None:
    class Fails(Exception):
        pass

    def fn(x: Tensor) -> Tensor:
        y = F.dropout(x, 0.5)
        if reactivate.is_recomputing():
            raise Fails
        return y.exp()

    def run(fn: Any) -> list[Any]:
        torch_xla.manual_seed(5)
        x = torch.ones(64, device=DEVICE).requires_grad_()
        y = F.dropout(fn(F.dropout(x, 0.5)), 0.5).sum()
        if fn is not bare:
            with pytest.raises(Fails):
                y.backward()
        torch_xla.sync()
        return [torch.rand(3, device=DEVICE).cpu(), XLA._xla_get_rng_seed("")]

    def bare(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5).exp()

    assert_equal(run(bare), run(reactivate.checkpoint(fn)))


def test_a_state_is_a_number_and_brings_back_the_root() -> None:
    torch_xla.manual_seed(5)
    torch.rand(3, device=DEVICE)
    state = torch.xla.get_rng_state()
    assert state == XLA._xla_get_rng_seed("") and isinstance(state, int)
    expected = torch.rand(3, device=DEVICE).cpu()
    torch_xla.sync()
    seed = XLA._xla_get_rng_seed("")
    for same in (state, copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        torch.xla.set_rng_state(same)
        assert torch.equal(torch.rand(3, device=DEVICE).cpu(), expected)
        torch_xla.sync()
        assert XLA._xla_get_rng_seed("") == seed


def test_no_dead_draw_is_compiled() -> None:
    """The draws that bring the seed back are dropped before the compiler sees them."""
    torch_xla.manual_seed(5)
    x = torch.ones(64, device=DEVICE).requires_grad_()
    y = F.dropout(ours(lambda x: F.dropout(x, 0.5).exp())(F.dropout(x, 0.5)), 0.5).sum()
    y.backward()
    program = XLA._get_xla_tensors_hlo([y, x.grad])
    assert program.count("rng-bit-generator(") == 4  # three of the forward, one of the recomputation


def accumulated(wrap: Wrap) -> list[Any]:
    """Gradients of three microbatches, with a step marker a microbatch and without."""
    model, x = _fresh()
    found: list[Any] = []
    for is_marked in (False, True):
        model.zero_grad()
        for scale in (1, 2, 4):
            behind(model, x * scale, wrap).backward()
            if is_marked:
                torch_xla.sync()
        found += [parameter.grad.clone() for parameter in model.parameters()]
        torch_xla.sync()
    return [*_values(found), XLA._xla_get_rng_seed("")]


def compiled_step(wrap: Wrap) -> list[Any]:
    model, x = _fresh()

    def step(x: Tensor) -> list[Tensor]:
        model.zero_grad()
        loss = behind(model, x, wrap)
        loss.backward()
        return [loss.detach(), *(parameter.grad for parameter in model.parameters())]

    compiled = torch_xla.compile(step, full_graph=True)
    return [*_values(item for _ in range(3) for item in compiled(x)), XLA._xla_get_rng_seed("")]


def compiled_forward(wrap: Wrap) -> list[Any]:
    model, x = _fresh()
    compiled = torch_xla.compile(lambda x: behind(model, x, wrap))
    found: list[Any] = []
    for _ in range(3):
        model.zero_grad()
        compiled(x).backward()
        found += [parameter.grad.clone() for parameter in model.parameters()]
    return [*_values(found), XLA._xla_get_rng_seed("")]


def _fresh() -> tuple[MLP, Tensor]:
    torch.manual_seed(0)
    model, x = MLP(dropout=0.3).to(DEVICE), torch.randn(8, 16).to(DEVICE)
    torch_xla.manual_seed(5)
    torch_xla.sync()
    return model, x


@pytest.mark.parametrize("run", [accumulated, compiled_step], ids=lambda run: run.__name__)
def test_ways_to_run_a_step(run: Callable[[Wrap], list[Any]]) -> None:
    watched = Watched()
    expected = run(plain)
    with observed_by(watched):
        found = run(ours)
    assert watched.recomputations >= 12
    assert_equal(expected, found)


def test_a_compiled_forward() -> None:
    """Its backward is a program of its own, in which sums of gradients may round otherwise: one last bit of a bias did."""
    (*expected, seed), (*found, seed_after) = compiled_forward(plain), compiled_forward(ours)
    assert seed == seed_after
    for one, other in zip(expected, found, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-8)
