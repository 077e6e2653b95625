"""A harness for state: one small program, run plainly and checkpointed, and every result compared bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from oracle import Watched, assert_bitwise, leaf, plainly, random_states, seed_everything
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import reactivate
from reactivate._passes.observing import observed_by

Wrap = Callable[..., Any]
"""`wrap(fn)` checkpoints `fn`, or returns `fn` itself. Options (`policy=`) reach `reactivate.checkpoint` only."""


@dataclass(frozen=True)
class Program:
    """A function that builds everything anew, trains with `wrap(fn)` in it, and returns what is compared.

    Attributes:
        may_refuse: whether `reactivate` may raise a `ReactivateError` instead of being right.
        recomputations: how many recomputations there are at least.
        name: that of the function, unless it is given.
    """

    run: Callable[[Wrap], Any]
    may_refuse: bool = False
    recomputations: int = 1
    name: str = ""

    def __str__(self) -> str:
        return self.name or self.run.__name__


@dataclass
class Programs:
    """The programs of one test file, in the order in which they are written."""

    listed: list[Program] = field(default_factory=list)

    def test(self) -> Callable[[Program], None]:
        """Make the test of these programs, one case for each."""

        @pytest.mark.parametrize("program", self.listed, ids=str)
        def test_program(program: Program) -> None:
            check_program(program)

        return test_program

    def right(self, run: Callable[[Wrap], Any]) -> Callable[[Wrap], Any]:
        """Add a program that must be bitwise right."""
        self.listed.append(Program(run))
        return run

    def right_with(self, *, recomputations: int) -> Callable[[Callable[[Wrap], Any]], Callable[[Wrap], Any]]:
        """Add a program that must be bitwise right, with at least so many recomputations."""

        def add(run: Callable[[Wrap], Any]) -> Callable[[Wrap], Any]:
            self.listed.append(Program(run, recomputations=recomputations))
            return run

        return add

    def loud(self, run: Callable[[Wrap], Any]) -> Callable[[Wrap], Any]:
        """Add a program that must be bitwise right or refused."""
        self.listed.append(Program(run, may_refuse=True))
        return run

    def right_by(
        self, harness: Callable[..., Any], *others: Any, recomputations: int = 1, **options: Any
    ) -> Callable[[Any], Any]:
        """Add `harness(wrap, given, *others, **options)` for a function or a class that is given, under its name."""

        def add(given: Any) -> Any:
            rows = {given.__name__: (given, *others)}
            self.rows(partial(harness, **options), rows, recomputations=recomputations)
            return given

        return add

    def rows(
        self,
        harness: Callable[..., Any],
        rows: Mapping[str, tuple[Any, ...]],
        *,
        recomputations: int | Callable[..., int] = 1,
    ) -> None:
        """Add `harness(wrap, *row)` for each row of a table, under the name of the row.

        Args:
            recomputations: how many there are at least: of each row, or a function of the row.
        """
        for name, row in rows.items():
            run = lambda wrap, row=row: harness(wrap, *row)  # noqa: E731
            least = recomputations(*row) if callable(recomputations) else recomputations
            self.listed.append(Program(run, recomputations=least, name=name))


def with_torch(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return torch_checkpoint(fn, *args, use_reentrant=False, **kwargs)

    return checkpointed


def results_of(program: Program, wrap: Wrap) -> dict[str, Any]:
    """Run a program from a fresh seed and return its results and the RNG states after it, by name."""
    seed_everything()
    found: dict[str, Any] = {}
    note("result", program.run(wrap), found)
    return found | random_states()


def note(name: str, value: Any, found: dict[str, Any]) -> None:
    """Add `value` to `found`: containers item by item, tensors as copies."""
    if isinstance(value, dict):
        for key, item in value.items():
            note(f"{name}[{key!r}]", item, found)
    elif isinstance(value, (list, tuple)):
        found[f"length of {name}"] = len(value)
        for index, item in enumerate(value):
            note(f"{name}[{index}]", item, found)
    else:
        found[name] = value.detach().clone() if isinstance(value, Tensor) else value


def assert_same_results(plain: dict[str, Any], other: dict[str, Any]) -> None:
    assert plain.keys() == other.keys(), f"only one run has {sorted(plain.keys() ^ other.keys())}"
    for name, value in plain.items():
        assert_bitwise(value, other[name], name)


def check_program(program: Program) -> None:
    """Assert that `reactivate` gives the plain results, or refuses where the program allows that."""
    plain = results_of(program, plainly)
    if program.may_refuse:
        assert not torch_is_right(program, plain), "what torch's checkpoint runs rightly must not be refused"
    watched = Watched()
    try:
        with observed_by(watched):
            ours = results_of(program, reactivate.checkpoint)
    except reactivate.errors.ReactivateError:
        if not program.may_refuse:
            raise
        return
    assert_same_results(plain, ours)
    assert watched.regions >= 1, "a region ran"
    assert watched.recomputations >= program.recomputations, "regions were recomputed"


def torch_is_right(program: Program, plain: dict[str, Any]) -> bool:
    """Return whether torch's own checkpoint gives the plain results."""
    try:
        assert_same_results(plain, results_of(program, with_torch))
    except Exception:
        return False
    return True


def inputs(count: int = 3) -> list[Tensor]:
    return [leaf(6, 4) for _ in range(count)]


def curve(x: Tensor, factor: Any) -> Tensor:
    """A function whose saved tensors, and so its gradient, depend on `factor`, with equal shapes for every factor."""
    return x + (x * factor).tanh()


def backward(*outputs: Tensor) -> None:
    sum(output.square().sum() for output in outputs).backward()


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def state_of(module: nn.Module) -> dict[str, Any]:
    """The parameters, their gradients and the buffers of a module."""
    return {
        "parameters": dict(module.named_parameters()),
        "gradients": gradients(module),
        "buffers": dict(module.named_buffers()),
    }


def train(
    fn: Callable[..., Tensor], inputs: list[Tensor], *others: Any, between: Callable[[], Any] = lambda: None
) -> list[Tensor | None]:
    """One forward and one backward for each input, beside `others`, with `between` run between the two.

    Returns the gradients of the inputs.
    """
    for x in inputs:
        out = fn(x, *others)
        between()
        backward(out)
    return [x.grad for x in inputs]


@contextmanager
def restored(*namespaces: Any) -> Iterator[None]:
    """Give modules, classes and functions their attributes back."""
    before = [dict(vars(item)) for item in namespaces]
    try:
        yield
    finally:
        for item, noted in zip(namespaces, before):
            for name in vars(item).keys() - noted.keys():
                delattr(item, name)
            for name, value in noted.items():
                if vars(item)[name] is not value:
                    setattr(item, name, value)


def with_changes(wrap: Wrap, fn: Callable[..., Any], change: Callable[[int], Any], read: Callable[[], Any]) -> Any:
    """Three steps, with a change between forward and backward of each; what is read afterwards is compared, too."""
    checkpointed = wrap(fn)
    found = []
    for step in range(3):
        x = leaf(6, 4)
        out = checkpointed(x)
        change(step)
        found.append(read())
        backward(out)
        found += [x.grad, read()]
    return found


def vectors(count: int = 2) -> list[Tensor]:
    return [leaf(4) for _ in range(count)]


def mutated(wrap: Wrap, mutate: Callable[[Any], float], make: Callable[[], Any], show: Callable[[Any], Any]) -> Any:
    """A container that the function changes, as an argument and as a captured value; `mutate` returns a factor."""
    as_argument, captured = make(), make()
    checkpointed = wrap(lambda x, given: curve(curve(x, mutate(given)), mutate(captured)))
    grads = train(lambda x: checkpointed(x, as_argument), vectors(3))
    return [grads, show(as_argument), show(captured)]


def with_module(
    wrap: Wrap,
    forward: Callable[[Any, Tensor], Tensor],
    make: Callable[[], nn.Module],
    *,
    show: Callable[[Any], Any] = lambda module: None,
    count: int = 3,
    **options: Any,
) -> Any:
    """Train a function of a module, and compare the module, and what `show` shows of it, too."""
    module = make()
    grads = train(wrap(lambda x: forward(module, x), **options), inputs(count))
    return [grads, state_of(module), show(module)]


def as_region(
    wrap: Wrap,
    kind: Callable[..., nn.Module],
    *,
    show: Callable[[Any], Any] = lambda module: None,
    count: int = 3,
    **attributes: Callable[[], Any],
) -> Any:
    """Train a module of a class with these attributes, and compare it, and what `show` shows of it, too."""
    module = kind(**{name: make() for name, make in attributes.items()})
    return [train(wrap(module), inputs(count)), state_of(module), show(module)]


class Holding(nn.Module):
    """A module with the attributes that it is given."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


class Scale(nn.Module):
    """A buffer that the forward reads, then moves towards the input; what it read decides what autograd saves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("amax", torch.ones(1, 4))

    def update(self, x: Tensor) -> None:
        with torch.no_grad():
            self.amax.mul_(0.5).add_(x.detach().abs().amax(0))

    def forward(self, x: Tensor) -> Tensor:
        out = curve(x, self.amax.clone())
        self.update(x)
        return curve(out, self.amax.clone())
