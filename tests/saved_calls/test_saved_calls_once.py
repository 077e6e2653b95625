"""Saved calls that a recomputation does not make, or makes elsewhere: filled caches, and what calls leave."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from count_ops import CountOps
from oracle import compare
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import reactivate
from reactivate import policies

STEPS = 5
Block = Callable[[Tensor], Tensor]


def trained(make: Callable[[], Block], wrap: Callable[[Block], Any], sizes: tuple[int, ...]) -> list[Any]:
    block = make()
    region = wrap(block)
    found: list[Any] = []
    for size in sizes:
        x = torch.rand(size, 4, requires_grad=True)
        out = region(x)
        out.sum().backward()
        found += [out.detach(), x.grad]
    if isinstance(block, nn.Module):
        found += [parameter.grad for parameter in block.parameters()]
    return found


def assert_exact(make: Callable[[], Block], policy: Any, sizes: tuple[int, ...] = (4,) * STEPS) -> None:
    ran = compare(lambda wrap: trained(make, wrap, sizes), policy=policy)
    assert ran.regions == len(sizes) and ran.recomputations == len(sizes)


# -- caches ----------------------------------------------------------------------------------------------------------


def rotary() -> Block:
    @functools.cache
    def table(length: int) -> Tensor:
        angles = torch.einsum("i,j->ij", torch.arange(length).float(), torch.arange(4).float())
        return angles.cos().mul(0.5)

    return lambda x: torch.matmul(x.mul(table(len(x))), x.t()).sin().mul(x.sum())


def two_tables() -> Block:
    @functools.cache
    def table(length: int) -> Tensor:
        return torch.arange(length).float().mul(0.1).exp()

    def block(x: Tensor) -> Tensor:
        return x.mul(table(4)).exp().mul(table(len(x))[:1]).sin().mul(table(2)[:1])

    return block


def masked() -> Block:
    @functools.cache
    def mask(length: int) -> Tensor:
        return torch.ones(length, length).tril()

    return lambda x: (torch.softmax(x @ x.t(), -1).mul(mask(len(x)))).sin().mul(x.sum())


SAVED: dict[str, Any] = {
    "mul": policies.save_ops("mul"),
    "einsum and matmul": policies.save_ops("einsum", "matmul", "exp"),
    "many": policies.save_ops("einsum", "matmul", "mul", "cos", "exp", "tril", "softmax", "sin"),
    "compute_intensive": policies.compute_intensive(),
    "every second": policies.every_nth(2, policies.save_ops("mul", "exp", "sin")),
}


@pytest.mark.parametrize("sizes", [(4,) * STEPS, (4, 4, 8, 6, 8, 10, 4, 12)], ids=["one size", "sizes"])
@pytest.mark.parametrize("policy", SAVED)
@pytest.mark.parametrize("make", [rotary, two_tables, masked])
def test_a_cache_that_the_forward_fills(make: Any, policy: str, sizes: tuple[int, ...]) -> None:
    assert_exact(make, SAVED[policy], sizes)


# -- what a saved call leaves ----------------------------------------------------------------------------------------

FACTOR: ContextVar[float] = ContextVar("FACTOR", default=1.0)


class Leaving(nn.Module):
    """A block whose first child leaves something that the rest reads."""

    def __init__(self, leave: Callable[[nn.Module, Tensor], None], read: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.child = Child(leave)
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.child(x.sin())
        return (hidden * self.read(self.child)).exp() * hidden


class Child(nn.Module):
    def __init__(self, leave: Callable[[nn.Module, Tensor], None]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4))
        self.leave = leave

    def forward(self, x: Tensor) -> Tensor:
        self.leave(self, x)
        return (x * self.weight).cos()


def append(child: Any, x: Tensor) -> None:
    if not hasattr(child, "history"):
        child.history = []
    child.history.append(x.detach().mean())


def nest(child: Any, x: Tensor) -> None:
    if not hasattr(child, "table"):
        child.table = {"rows": [[]]}
    child.table["rows"][0].append(x.detach().mean())


def count(child: Any, x: Tensor) -> None:
    if not hasattr(child, "total"):
        child.total = torch.zeros(())
    child.total += x.detach().mean()


def set_variable(child: Any, x: Tensor) -> None:
    FACTOR.set(FACTOR.get() + float(x.detach().mean()))


LEFT: dict[str, tuple[Any, Any]] = {
    "a list": (append, lambda child: torch.stack(child.history).mean()),
    "a list in a dict": (nest, lambda child: torch.stack(child.table["rows"][0]).mean()),
    "a tensor": (count, lambda child: child.total.clone()),
    "a context variable": (set_variable, lambda child: FACTOR.get()),
}


class Twice(nn.Module):
    def __init__(self, block: nn.Module, wrap: Callable[[Any], Any]) -> None:
        super().__init__()
        self.block, self.wrapped = block, [wrap(block)]

    def forward(self, x: Tensor) -> Tensor:
        return self.wrapped[0](self.wrapped[0](x))


@pytest.mark.parametrize("more", [(), ("mul",), ("mul", "sin", "cos")])
@pytest.mark.parametrize("left", LEFT)
def test_what_a_saved_module_leaves(left: str, more: tuple[str, ...]) -> None:
    def run(wrap: Callable[[Any], Any]) -> list[Any]:
        FACTOR.set(1.0)
        model = Twice(Leaving(*LEFT[left]), wrap)
        found: list[Any] = []
        for _ in range(STEPS):
            x = torch.rand(4, 4, requires_grad=True)
            out = model(x)
            out.sum().backward()
            found += [out.detach(), x.grad, FACTOR.get()]
        return [*found, *(parameter.grad for parameter in model.parameters())]

    saved = policies.save_modules("child")
    policy = policies.union(saved, policies.save_ops(*more)) if more else saved
    ran = compare(run, policy=policy)
    assert ran.regions == 2 * STEPS and ran.recomputations == 2 * STEPS


def test_a_saved_module_that_turns_gradients_off() -> None:
    def make() -> Block:
        class Off(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                out = x.sin()
                torch.set_grad_enabled(False)
                return out

        class Whole(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.child = Off()

            def forward(self, x: Tensor) -> Tensor:
                hidden = self.child(x)
                scale = hidden.exp().sum()
                torch.set_grad_enabled(True)
                return hidden.cos() * scale

        return Whole()

    assert_exact(make, policies.save_modules("child"))


# -- what a saved call returns ---------------------------------------------------------------------------------------


class Tagged(Tensor):
    """A subclass that has nothing but a name, and an attribute that every function sets."""

    tag: int

    @staticmethod
    def __new__(cls, data: Tensor, tag: int) -> Tagged:
        made = Tensor._make_subclass(cls, data, data.requires_grad)
        made.tag = tag
        return made

    def __init__(self, data: Tensor, tag: int) -> None:
        pass

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, Tagged):
            result.tag = 1 + max((getattr(item, "tag", 0) for item in args if isinstance(item, Tagged)), default=0)
        return result


@pytest.mark.parametrize("op", ["sin", "mul", "exp"])
def test_a_result_of_a_subclass_without_a_dispatch_of_its_own(op: str) -> None:
    def block(x: Tensor) -> Tensor:
        tagged: Any = Tagged(x * 1, 3)
        sine = tagged.sin()
        product = sine.mul(sine).mul(sine.tag)
        return (product.exp() * product.tag).as_subclass(Tensor)

    assert_exact(lambda: block, policies.save_ops(op))


class Fails(nn.Module):
    """Raises in its first calls, after a call that the policy saves, too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if float(torch.rand(())) < 0.5:
            raise ValueError
        return y


class Tries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = Fails(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(20):
            try:
                x = self.inner(x)
                break
            except ValueError:
                x = x * 1.1
        return self.last(x.sin()).tanh()


@pytest.mark.parametrize(
    "policy",
    [
        policies.save_modules("inner"),
        policies.save_ops("linear", "rand"),
        policies.union(policies.save_modules("inner"), policies.save_ops("linear", "rand")),
    ],
)
def test_a_saved_call_that_raises_is_run_again(policy: Any) -> None:
    """The calls inside of it have no numbers of their own, in neither pass."""

    def trained(wrap: Any) -> list[Tensor]:
        model = Tries()
        run, found = wrap(model), []
        for _ in range(6):
            x = torch.randn(3, 4, requires_grad=True)
            run(x).square().sum().backward()
            found += [x.grad, *(parameter.grad.clone() for parameter in model.parameters())]
        return [*found, torch.rand(())]

    compare(trained, policy=policy)


# -- hooks around the region that unpack a tensor once ------------------------------------------------------------------


def under_torchs_checkpoint(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    out: Tensor = checkpoint(fn, x, use_reentrant=False)
    return out


def under_hooks_that_give_once(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    packed: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> int:
        packed[len(packed)] = tensor.detach().clone()
        return len(packed) - 1

    with saved_tensors_hooks(pack, packed.pop):
        return fn(x)


def attention(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x.sin(), x, x).cos()


def last(x: Tensor) -> Tensor:
    return (x.sin() * x).exp()


def first(x: Tensor) -> Tensor:
    return x.exp().sin().cos().tanh()


def twice(x: Tensor) -> Tensor:
    found = (x.sin() * x).tanh()
    return found.exp() * found.exp() + found


ONCE = policies.save_ops("scaled_dot_product_attention", "exp", "tanh")
KERNELS = "_scaled_dot_product_flash_attention_for_cpu", "exp", "tanh"


@pytest.mark.parametrize("fn", [attention, last, first, twice])
@pytest.mark.parametrize("around", [under_torchs_checkpoint, under_hooks_that_give_once])
def test_hooks_around_a_region_unpack_what_a_saved_call_keeps_once(fn: Any, around: Any) -> None:
    found, calls = [], []
    for region in (fn, reactivate.checkpoint(fn, policy=ONCE)):
        x = torch.linspace(-1, 1, 64).reshape(1, 2, 8, 4).requires_grad_()
        with CountOps() as ops:
            out = around(region, x)
            out.sum().backward()
        found.append((out.detach(), x.grad))
        calls.append(ops.ops)
    assert all(map(torch.equal, *found))
    plain, ours = calls
    assert all(ours[op] == plain[op] for op in KERNELS)
    assert ours["sin"] > plain["sin"]


def test_torchs_checkpoint_around_a_region_may_be_differentiated_twice() -> None:
    found = []
    for region in (attention, reactivate.checkpoint(attention, policy=ONCE)):
        x = torch.linspace(-1, 1, 64).reshape(1, 2, 8, 4).requires_grad_()
        out = under_torchs_checkpoint(region, x)
        (one,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
        (two,) = torch.autograd.grad(out.square().sum(), x)
        found.append((one, two))
    assert all(map(torch.equal, *found))
