"""Tensors of unusual kinds that a region reads or reaches: made in inference mode, nested, without a shape yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import compare
from several import each
from state_programs import Holding
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import reactivate
from reactivate import policies

Make = Callable[[], Any]
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "metadata": {"check": "metadata"},
    "policy": {"policy": policies.save_ops("linear")},
    "site": {"policy": lambda at: reactivate.Save() if at.name == "part" else None},
}


def results(wrap: Callable[..., Any], make: Make, steps: int = 3) -> list[Any]:
    """Train in steps of two microbatches. `make` returns a function of one tensor, and what to compare after each step."""
    fn, state = make()
    call = wrap(fn)
    found: list[Any] = []
    for _ in range(steps):
        inputs = [torch.randn(2, 4, requires_grad=True) for _ in range(2)]
        outputs = [call(x) for x in inputs]
        for x, out in zip(inputs, outputs, strict=True):
            out.sum().backward()
            found += [out.detach(), x.grad]
        found += [item.clone() if isinstance(item, Tensor) else item for item in state()]
    return found


def assert_right(make: Make, **options: Any) -> None:
    watched = compare(lambda wrap: results(wrap, make), **options)
    assert watched.regions == watched.recomputations == 6, "regions ran and were recomputed"


# -- made in inference mode ---------------------------------------------------------------------------------------------


def teacher(build: Callable[[], nn.Module], act: Callable[[Any], None] = lambda module: None) -> Make:
    """A model with a frozen part that was made in inference mode, of which `act` may change the state."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            with torch.inference_mode():
                self.teacher = build()

        def forward(self, x: Tensor) -> Tensor:
            part = reactivate.site(self.part, name="part")
            return (part(x) * self.taught(x)).sin().cos()

        def part(self, x: Tensor) -> Tensor:
            return self.linear(x).tanh()

        def taught(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                out: Tensor = self.teacher(x).clone()
            with torch.inference_mode():
                act(self.teacher)
            return out

    def make() -> Any:
        model = Model()
        return model, lambda: [item.clone() for item in (*model.teacher.parameters(), *model.teacher.buffers())]

    return make


def halve(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.mul_(0.5)


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5_000), nn.Linear(5_000, 4)).requires_grad_(False)


TEACHERS: dict[str, Make] = {
    "linear": teacher(lambda: nn.Linear(4, 4).requires_grad_(False)),
    "differentiable": teacher(lambda: nn.Linear(4, 4)),
    "batch norm": teacher(lambda: nn.BatchNorm1d(4).eval()),
    "spectral norm": teacher(lambda: spectral_norm(nn.Linear(4, 4)).eval()),
    "written": teacher(lambda: nn.Linear(4, 4).requires_grad_(False), halve),
    "wide": teacher(wide),
    "wide, written": teacher(wide, halve),
}


@each("options", OPTIONS)
@each("name", TEACHERS)
def test_parameters_that_were_made_in_inference_mode(name: str, options: str) -> None:
    assert_right(TEACHERS[name], **OPTIONS[options])


def test_an_argument_with_a_gradient_that_was_made_in_inference_mode() -> None:
    linear = nn.Linear(4, 4)
    with torch.inference_mode():
        scale = nn.Parameter(torch.rand(4))

    def fn(x: Tensor, scale: Tensor) -> Tensor:
        with torch.no_grad():
            taken = scale * 2
        return (linear(x) * taken).sin().cos()

    def gradient(wrap: Any) -> Any:
        x = torch.ones(2, 4, requires_grad=True)
        return torch.autograd.grad(wrap(fn)(x, scale).sum(), x)

    assert compare(gradient).recomputations == 1


def test_a_parameter_made_in_inference_mode_in_a_closure() -> None:
    def make() -> Any:
        linear = nn.Linear(4, 4)
        with torch.inference_mode():
            scale = nn.Parameter(torch.rand(4))

        def fn(x: Tensor) -> Tensor:
            with torch.no_grad():
                taken = scale * 2
            return (linear(x) * taken).sin().cos()

        return fn, lambda: [linear.weight.grad]

    assert_right(make)


# -- merely held --------------------------------------------------------------------------------------------------------


def ragged() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.strided)


def ragged_row() -> Tensor:
    return torch.nested.nested_tensor([torch.tensor(1.0), torch.tensor(2.0)], layout=torch.strided)


HELD: dict[str, Callable[[], Tensor]] = {
    "nested": ragged,
    "nested row": ragged_row,
    "nested with a gradient": lambda: ragged().requires_grad_(),
    "buffer": nn.UninitializedBuffer,
    "parameter": nn.UninitializedParameter,
    "frozen parameter": lambda: nn.UninitializedParameter(requires_grad=False),
}


def in_attribute(held: Tensor, linear: nn.Module) -> Callable[[Tensor], Tensor]:
    class Model(Holding):
        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).sin().cos()  # type: ignore[no-any-return]

    return Model(linear=linear, held=held)


def in_buffer(held: Tensor, linear: nn.Module) -> Callable[[Tensor], Tensor]:
    model: Any = in_attribute(torch.ones(1), linear)
    model.register_buffer("buffer", held)
    return model  # type: ignore[no-any-return]


def in_closure(held: Tensor, linear: nn.Module) -> Callable[[Tensor], Tensor]:
    def fn(x: Tensor) -> Tensor:
        assert held is not None
        return linear(x).sin().cos()  # type: ignore[no-any-return]

    return fn


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("where", [in_attribute, in_buffer, in_closure])
@each("name", HELD)
def test_a_tensor_that_is_merely_held(name: str, where: Any, options: str) -> None:
    def make() -> Any:
        linear = nn.Linear(4, 4)
        return where(HELD[name](), linear), lambda: [linear.weight.grad]

    if not (where is in_buffer and name.endswith("parameter")):
        assert_right(make, **OPTIONS[options])


@each("name", HELD)
def test_an_argument_that_is_merely_held(name: str) -> None:
    linear = nn.Linear(4, 4)

    def gradient(wrap: Any) -> Any:
        x = torch.ones(2, 4, requires_grad=True)
        out = wrap(lambda x, held: linear(x).sin().cos())(x, HELD[name]())
        return torch.autograd.grad(out.sum(), x)

    assert compare(gradient).recomputations == 1


@pytest.mark.parametrize("make_held", [ragged, ragged_row])
def test_a_nested_buffer_that_the_forward_writes_to(make_held: Callable[[], Tensor]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("held", make_held())

        def forward(self, x: Tensor) -> Tensor:
            held: Any = self.held
            out = self.linear(x).sin() * held.unbind()[1].sum()
            held.mul_(0.5)
            return (out * held.unbind()[0].sum()).tanh()  # type: ignore[no-any-return]

    def make() -> Any:
        model: Any = Model()
        return model, lambda: [model.linear.weight.grad, *model.held.unbind()]

    assert_right(make)
    assert_right(make, check="metadata")
