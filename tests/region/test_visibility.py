"""Rules 19, 21 and 23: what code, traces and hooks can see of a region and of its recomputations."""

from __future__ import annotations

import functools
import inspect
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from journal import Journal
from oracle import Case, check, compare, leaf, plainly
from several import each
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

import reactivate
from reactivate.errors import UsageError

# -- is_recomputing (Rule 19) -----------------------------------------------------------------------------------------


def test_it_is_recomputing_in_a_recomputation_and_nowhere_else() -> None:
    seen = Journal()

    def note(grad: Tensor) -> None:
        seen.append(reactivate.is_recomputing())

    def fn(x: Tensor) -> Tensor:
        seen.append(reactivate.is_recomputing())
        return x.sin().exp()

    x = leaf(4)
    seen.append(reactivate.is_recomputing())
    out = reactivate.checkpoint(fn)(x)
    out.register_hook(note)
    x.register_hook(note)
    out.sum().backward()
    seen.append(reactivate.is_recomputing())
    # Before, in the forward pass, in the hook of the output, in the recomputation, in the hook of the input, after.
    assert seen == [False, False, False, True, False, False]


def test_nested_regions_are_recomputing_in_each_of_their_recomputations() -> None:
    seen = Journal()

    def inner(x: Tensor) -> Tensor:
        seen.append(("inner", reactivate.is_recomputing()))
        return x.sin().exp()

    def outer(x: Tensor) -> Tensor:
        seen.append(("outer", reactivate.is_recomputing()))
        out: Tensor = reactivate.checkpoint(inner)(x.cos()).tanh()
        seen.append(("outer, later", reactivate.is_recomputing()))
        return out

    reactivate.checkpoint(outer, check="metadata")(leaf(4)).sum().backward()
    assert seen[:3] == [("outer", False), ("inner", False), ("outer, later", False)]
    # The outer recomputation ends at `tanh`; what it recomputes is what the inner recomputation starts from.
    assert [name for name, _ in seen[3:]] == ["outer", "inner", "inner"]
    assert all(is_recomputation for _, is_recomputation in seen[3:])


def test_it_is_over_after_an_exception_in_a_recomputation() -> None:
    def fn(x: Tensor) -> Tensor:
        if reactivate.is_recomputing():
            raise ValueError("in the recomputation")
        return x.sin().exp()

    out = reactivate.checkpoint(fn)(leaf(4)).sum()
    for _ in range(2):
        with pytest.raises(ValueError, match="in the recomputation"):
            out.backward(retain_graph=True)
        assert not reactivate.is_recomputing()


def test_another_thread_is_not_recomputing_while_this_one_is() -> None:
    in_recomputation, asked = threading.Event(), threading.Event()
    seen = Journal()

    def fn(x: Tensor) -> Tensor:
        if reactivate.is_recomputing():
            in_recomputation.set()
            assert asked.wait(10)
            seen.append(reactivate.is_recomputing())
        return x.sin().exp()

    def ask() -> None:
        assert in_recomputation.wait(10)
        seen.append(reactivate.is_recomputing())
        asked.set()

    thread = threading.Thread(target=ask)
    thread.start()
    reactivate.checkpoint(fn)(leaf(4)).sum().backward()
    thread.join()
    assert seen == [False, True]


def test_side_effects_happen_twice_and_is_recomputing_avoids_that() -> None:
    every, once = Journal(), Journal()

    def fn(x: Tensor) -> Tensor:
        every.append("step")
        if not reactivate.is_recomputing():
            once.append("step")
        return x.sin().exp()

    reactivate.checkpoint(fn)(leaf(4)).sum().backward()
    assert (len(every), len(once)) == (2, 1)


# -- profiler traces --------------------------------------------------------------------------------------------------


def recomputations_in_trace(step: Callable[[], Any]) -> list[str]:
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        step()
    return [event.name for event in trace.events() if event.name.startswith("reactivate::")]


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


class Layer:
    def run(self, x: Tensor) -> Tensor:
        return x.sin().exp()


def doubled(x: Tensor, factor: float = 2) -> Tensor:
    return (x * factor).sin().exp()


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (doubled, "doubled"),
        (block(), "Sequential"),
        (Layer().run, "Layer.run"),
        (torch.exp, "exp"),
        (functools.partial(doubled, factor=3), "doubled"),
    ],
    ids=["function", "module", "method", "builtin", "partial"],
)
def test_a_recomputation_is_in_the_trace_by_name(fn: Any, name: str) -> None:
    def step(**options: Any) -> None:
        out = reactivate.checkpoint(fn, **options)(leaf(4, 4)).sum()
        out.backward(retain_graph=True)
        out.backward()

    names = recomputations_in_trace(step)
    assert len(names) == 2 and all(re.fullmatch(rf"reactivate::recompute (\w+\.)?{name}", found) for found in names)
    assert recomputations_in_trace(lambda: step(name="block 7")) == ["reactivate::recompute block 7"] * 2


def test_the_ops_of_a_recomputation_are_under_its_name() -> None:
    out = reactivate.checkpoint(doubled)(leaf(4, 4)).sum()
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        out.backward()
    (event,) = [event for event in trace.events() if event.name == "reactivate::recompute doubled"]
    ops = {child.name for child in event.cpu_children}
    assert {"aten::mul", "aten::sin", "aten::exp"} <= ops


def test_a_plain_call_and_a_forward_pass_leave_no_name_in_the_trace() -> None:
    with torch.no_grad():
        assert recomputations_in_trace(lambda: reactivate.checkpoint(doubled)(leaf(4, 4))) == []
    assert recomputations_in_trace(lambda: reactivate.checkpoint(doubled)(leaf(4, 4))) == []


# -- what checkpoint takes and gives ----------------------------------------------------------------------------------


def test_the_result_looks_like_the_function() -> None:
    for wrap in (reactivate.checkpoint, reactivate.checkpoint(name="other", early_stop=False)):

        def fn(x: Tensor, *, scale: float = 2.0) -> Tensor:
            """The sine."""
            return (x * scale).sin().exp()

        wrapped = wrap(fn)
        assert wrapped.__wrapped__ is fn
        assert (wrapped.__name__, wrapped.__doc__) == ("fn", "The sine.")
        assert (wrapped.__qualname__, wrapped.__module__) == (fn.__qualname__, fn.__module__)
        assert inspect.signature(wrapped) == inspect.signature(fn)
        x = leaf(4)
        (grad,) = torch.autograd.grad(wrapped(x, scale=3.0).sum(), x)
        assert torch.equal(grad, torch.autograd.grad(fn(x, scale=3.0).sum(), x)[0])


def test_the_result_wraps_the_module() -> None:
    module = block()
    wrapped = reactivate.checkpoint(module)
    assert wrapped.__wrapped__ is module  # type: ignore[attr-defined]


class Scale(nn.Module):
    @staticmethod
    @reactivate.checkpoint
    def static(x: Tensor) -> Tensor:
        return x.sin().exp()

    @classmethod
    @reactivate.checkpoint(early_stop=False)
    def of_class(cls, x: Tensor) -> Tensor:
        assert cls is Scale
        return x.sin().exp()

    @reactivate.checkpoint
    def method(self, x: Tensor) -> Tensor:
        assert isinstance(self, Scale)
        return x.sin().exp()


def callables() -> dict[str, Callable[[], Case]]:
    class Object:
        def __call__(self, x: Tensor) -> Tensor:
            return x.sin().exp()

    return {
        "function": lambda: Case(doubled, (leaf(8, 8),)),
        "lambda": lambda: Case(lambda x: x.sin().exp(), (leaf(8, 8),)),
        "bound method": lambda: Case(Layer().run, (leaf(8, 8),)),
        "partial": lambda: Case(functools.partial(doubled, factor=3), (leaf(8, 8),)),
        "partial of partial": lambda: Case(functools.partial(functools.partial(doubled), factor=3), (leaf(8, 8),)),
        "module": lambda: Case(block(), (leaf(4, 4),)),
        "module's forward": lambda: (lambda module: Case(module.forward, (leaf(4, 4),), modules=[module]))(block()),
        "callable object": lambda: Case(Object(), (leaf(8, 8),)),
        "builtin": lambda: Case(torch.softmax, (leaf(8, 8), -1)),
        "operator": lambda: Case(torch.ops.aten.sin.default, (leaf(8, 8),)),
        "custom function": lambda: Case(Sine.apply, (leaf(8, 8),)),
    }


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.cos())
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (slope,) = ctx.saved_tensors
        out: Tensor = grad * slope
        return out


@each("name", callables())
def test_everything_that_can_be_called(name: str) -> None:
    # Of one op autograd keeps one tensor; for `sin` that is the input.
    check(callables()[name], saves_memory=name != "operator")


@pytest.mark.parametrize("name", ["static", "of_class", "method"])
def test_decorated_methods(name: str) -> None:
    x = leaf(4)
    (grad,) = torch.autograd.grad(getattr(Scale(), name)(x).sum(), x)
    assert torch.equal(grad, torch.autograd.grad(x.sin().exp().sum(), x)[0])


@pytest.mark.parametrize("value", [3, "sin", [torch.sin], torch.ones(2)], ids=lambda value: type(value).__name__)
def test_what_cannot_be_called_is_refused(value: Any) -> None:
    with pytest.raises(UsageError, match="cannot be called"):
        reactivate.checkpoint(value)


# -- hooks (Rule 21) --------------------------------------------------------------------------------------------------


def hooked_module(fired: Journal) -> nn.Module:
    """A module that notes its own hooks and those of a child, and whether they fired in a recomputation."""

    def note(name: str) -> Callable[..., None]:
        return lambda *_: fired.append((name, reactivate.is_recomputing()))

    module = block()
    for name, owner in (("own", module), ("inner", module[0])):
        owner.register_forward_pre_hook(note(f"{name} pre"))
        owner.register_forward_hook(note(f"{name} post"))
        owner.register_full_backward_pre_hook(note(f"{name} backward pre"))
        owner.register_full_backward_hook(note(f"{name} backward"))
    module[0].weight.register_hook(note("tensor"))
    module[0].weight.register_post_accumulate_grad_hook(note("accumulated"))
    return module


BACKWARD = {"own backward pre", "own backward", "inner backward pre", "inner backward", "tensor", "accumulated"}


@pytest.mark.parametrize("early_stop", [True, False], ids=["early stop", "whole"])
def test_hooks_fire_once_but_for_the_forward_hooks_inside(early_stop: bool) -> None:
    fired = Journal()
    module, x = hooked_module(fired), leaf(3, 4)
    module(x).sum().backward()
    plain, grads = list(fired), [x.grad, *(parameter.grad for parameter in module.parameters())]
    assert len(plain) == 10 and {name for name, _ in plain} > BACKWARD

    fired.clear()
    x.grad = None
    module.zero_grad()
    reactivate.checkpoint(module, early_stop=early_stop)(x).sum().backward()
    again = [name for name, is_recomputation in fired if is_recomputation]
    assert [name for name, is_recomputation in fired if not is_recomputation] == [name for name, _ in plain], (
        "each once, in order"
    )
    assert again == ["inner pre", "inner post"], "those inside of the region, a second time"
    for one, other in zip(grads, [x.grad, *(parameter.grad for parameter in module.parameters())], strict=True):
        assert torch.equal(one, other)


def test_hooks_that_are_called_in_every_backward_are_called_in_every_backward() -> None:
    fired = Journal()
    module = hooked_module(fired)
    out = reactivate.checkpoint(module)(leaf(3, 4)).sum()
    out.backward(retain_graph=True)
    fired.clear()
    out.backward()
    names = [name for name, is_recomputation in fired if not is_recomputation]
    assert sorted(names) == sorted(BACKWARD), "each once"
    assert [name for name, is_recomputation in fired if is_recomputation] == ["inner pre", "inner post"]


def test_a_hook_that_the_function_puts_on_its_input_fires_once() -> None:
    fired = Journal()

    def fn(x: Tensor) -> Tensor:
        x.register_hook(lambda grad: fired.append(reactivate.is_recomputing()))
        return x.sin().exp()

    for x in (leaf(4), leaf(4) * 1):
        fired.clear()
        reactivate.checkpoint(fn)(x).sum().backward()
        assert fired == [False]


# -- hooks around, hooks inside ---------------------------------------------------------------------------------------


def test_outer_hooks_see_what_the_region_keeps() -> None:
    x, w = leaf(8, 16), leaf(16, 16)
    packed: list[tuple[int, ...]] = []
    with saved_tensors_hooks(lambda t: (packed.append(tuple(t.shape)), t)[1], lambda t: t):
        out = reactivate.checkpoint(lambda x, w: (x @ w).tanh().exp())(x, w)
    assert packed == [(8, 16), (16, 16)], "the two inputs and nothing else"
    out.sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad((x @ w).tanh().exp().sum(), x)[0])


def test_an_offloader_around_a_region_and_inside_of_it() -> None:
    def once(wrap: Any, outer: bool, inner: bool) -> list[Any]:
        x, w = leaf(8, 16), leaf(16, 16)

        def fn(x: Tensor, w: Tensor) -> Tensor:
            h = (x @ w).tanh()
            if inner:
                with save_on_cpu():
                    h = h.exp().sin()
            return h.cos() * x

        with save_on_cpu() if outer else torch.enable_grad():
            out = wrap(fn)(x.sin(), w)
        out.sum().backward()
        return [x.grad, w.grad]

    for inner in (True, False):
        for outer in (True, False):
            compare(lambda wrap: once(wrap, outer and wrap is not plainly, inner))


def test_mutated_input_is_right_if_an_offloader_has_a_copy() -> None:
    x = leaf(8)
    h = x * 1
    with saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        out = reactivate.checkpoint(lambda h: h.sin().exp())(h)
    h.add_(1)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(grad, torch.autograd.grad((x * 1).sin().exp().sum(), x)[0])


def test_hooks_on_tensors_fire_once() -> None:
    calls = {"input": 0, "inside": 0, "before": 0, "leaf": 0}

    def count(name: str) -> Callable[[Tensor], None]:
        def hook(grad: Tensor) -> None:
            calls[name] += 1

        return hook

    x, w = leaf(8, 16), leaf(16, 16)
    w.register_hook(count("before"))

    def fn(h: Tensor, w: Tensor) -> Tensor:
        h.register_hook(count("input"))
        w.register_hook(count("leaf"))
        y = (h @ w).tanh()
        y.register_hook(count("inside"))
        return y.exp()

    reactivate.checkpoint(fn)(x.sin(), w).sum().backward()
    assert calls == {"input": 1, "inside": 1, "before": 1, "leaf": 1}


def test_hooks_of_the_module_that_is_the_region_fire_once_and_those_inside_again() -> None:
    block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    fired = Journal()

    def note(name: str) -> Callable[..., None]:
        return lambda *_: fired.append((name, reactivate.is_recomputing()))

    block.register_forward_pre_hook(note("pre"))
    block.register_forward_hook(note("post"))
    block.register_full_backward_hook(note("backward"))
    block[0].register_forward_hook(note("inner"))
    x = leaf(4, 8)
    for fn in (block, block.__call__):
        fired.clear()
        reactivate.checkpoint(fn)(x).sum().backward()
        assert [item for item in fired if item[0] in ("pre", "post", "backward")] == [
            ("pre", False),
            ("post", False),
            ("backward", False),
        ]
        assert [item for item in fired if item[0] == "inner"] == [("inner", False), ("inner", True)]
    assert "forward" not in vars(block)


def test_hook_that_changes_arguments_and_result() -> None:
    def make() -> Case:
        block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Tanh())
        block.register_forward_pre_hook(lambda module, args: (args[0].sin(),))
        block.register_forward_hook(lambda module, args, out: out.exp())
        return Case(block, (leaf(4, 8),))

    check(make)
