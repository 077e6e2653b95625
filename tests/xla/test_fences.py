"""Fences, on a device that has none to need: what stands behind one, and that nothing in front of it is read."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from journal import Journal
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as upstream

import reactivate
from reactivate.integrations import register_fence
from reactivate.policies import save_ops


class Fence:
    """Aliases that are copies; notes what it was given."""

    def __init__(self) -> None:
        self.given: list[list[Tensor]] = []
        self.aliases: list[weakref.ref[Tensor]] = []

    def __call__(self, tensors: list[Tensor]) -> list[Tensor]:
        self.given.append(list(tensors))
        made = [tensor.detach().clone() for tensor in tensors]
        self.aliases += map(weakref.ref, made)
        return made


@pytest.fixture
def fence() -> Iterator[Fence]:
    made = Fence()
    register_fence("cpu", made)
    yield made
    register_fence("cpu", None)


class ReadInRecomputations(TorchDispatchMode):
    """Notes the memory that the ops of recomputations read."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: set[int] = set()
        self.ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if reactivate.is_recomputing():
            self.ops += 1
            self.memory |= {
                memory_of(item) for item in torch.utils._pytree.tree_leaves((args, kwargs)) if is_tensor(item)
            }
        return func(*args, **(kwargs or {}))


def is_tensor(item: Any) -> bool:
    return isinstance(item, Tensor)


def memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Block(nn.Module):
    """Reads an argument, a keyword, parameters, buffers, a closure, a global, an attribute of an object."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.held = held

    def forward(self, x: Tensor, pair: dict[str, Tensor]) -> Tensor:
        return (self.norm(self.linear(x)) * pair["y"] + TABLE + self.held.scale).exp().sin()


class Held:
    scale = torch.full((1, 8), 0.5)


TABLE = torch.ones(1, 8)


def functions(block: Block) -> dict[str, Callable[..., Tensor]]:
    return {
        "module": block,
        "bound method": block.forward,
        "lambda": lambda x, pair: block(x, pair),
        "closure": lambda x, pair: (lambda: block(x, pair))(),
    }


def step(wrap: Callable[[Any], Any], kind: str) -> tuple[list[Tensor], list[Tensor]]:
    """Return what it leaves, and what was there before."""
    torch.manual_seed(0)
    block = Block(Held())
    x, y = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    out = wrap(functions(block)[kind])(x, pair={"y": y})
    out.square().sum().backward()
    parameters = list(block.parameters())
    left = [out, x.grad, y.grad, *(parameter.grad for parameter in parameters), *block.buffers()]
    return left, [x, y, TABLE, Held.scale, *parameters]


@pytest.mark.parametrize("kind", ["module", "bound method", "lambda", "closure"])
def test_no_op_of_a_recomputation_reads_what_is_in_front(kind: str, fence: Fence) -> None:
    with ReadInRecomputations() as read:
        ours, there = step(reactivate.checkpoint, kind)
    assert read.ops > 5
    assert not read.memory & set(map(memory_of, there))
    plain, _ = step(lambda fn: fn, kind)
    for one, other in zip(plain, ours):
        assert torch.equal(one, other)


def test_without_a_fence_it_is_read() -> None:
    with ReadInRecomputations() as read:
        _, there = step(reactivate.checkpoint, "module")
    assert len(read.memory & set(map(memory_of, there))) >= 6


def test_one_fence_for_all_that_is_known_and_the_gradient_first(fence: Fence) -> None:
    block, gradients = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU()), []
    x = torch.randn(4, 8, requires_grad=True)
    out = reactivate.checkpoint(block)(x)
    out.register_hook(gradients.append)
    out.square().sum().backward()
    (given,) = fence.given
    assert given[0] is gradients[0]
    assert {id(parameter) for parameter in block.parameters()} < set(map(id, given))
    assert len(given) == 1 + 1 + len(list(block.parameters())), "not what batch norm may have written to"


def test_tensors_that_the_region_reaches_are_the_same_objects_behind_the_fence(fence: Fence) -> None:
    far, seen = {"held": Held()}, Journal()
    weight = nn.Parameter(torch.randn(8, 8))
    x = torch.randn(8, requires_grad=True)

    def fn(x: Tensor) -> Tensor:
        seen.append((hidden(far).scale is Held.scale, weight.requires_grad, memory_of(weight), memory_of(Held.scale)))
        return (x @ weight * hidden(far).scale).exp().sin()

    before = memory_of(weight), memory_of(Held.scale)
    reactivate.checkpoint(fn)(x).sum().backward()
    forward, recomputation = seen
    assert forward == (True, True, *before)
    assert recomputation[:2] == (True, True)
    assert not set(recomputation[2:]) & set(before)
    assert (memory_of(weight), memory_of(Held.scale)) == before
    assert len(fence.given) == 1


def test_memory_comes_back_after_an_error(fence: Fence) -> None:
    weight, x = nn.Parameter(torch.randn(8, 8)), torch.randn(8, requires_grad=True)

    def fn(x: Tensor) -> Tensor:
        if reactivate.is_recomputing():
            raise KeyError("here")
        return (x @ weight).exp()

    before = memory_of(weight)
    with pytest.raises(KeyError, match="here"):
        reactivate.checkpoint(fn)(x).sum().backward()
    assert memory_of(weight) == before and weight._version == 0


def hidden(far: dict[str, Held]) -> Held:
    return far["held"]


def test_nothing_of_a_fence_outlives_the_backward(fence: Fence) -> None:
    block = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU())
    x = torch.randn(4, 8, requires_grad=True)
    gc.disable()
    try:
        loss = reactivate.checkpoint(block)(x).square().sum()
        loss.backward()
        assert len(fence.aliases) == 6
        assert not [alias for alias in fence.aliases if alias() is not None]
    finally:
        gc.enable()


@pytest.mark.parametrize("retain", [False, True])
def test_a_backward_through_one_output_leaves_the_other_alone(retain: bool, fence: Fence) -> None:
    x = torch.randn(8, requires_grad=True)
    one, other = reactivate.checkpoint(lambda x: (x.sin().exp(), x.cos().exp()))(x)
    one.sum().backward(retain_graph=retain)
    other.sum().backward()
    y = x.detach().clone().requires_grad_()
    (y.sin().exp().sum() + y.cos().exp().sum()).backward()
    assert torch.equal(x.grad, y.grad)
    assert len(fence.given) == 2


def test_outputs_that_are_the_callers_are_the_callers(fence: Fence) -> None:
    x = torch.randn(8, requires_grad=True)
    y = x * 2
    same, part, new = reactivate.checkpoint(lambda y: (y, y[:2], y.sin().exp()))(y)
    assert same is y
    assert part._base is y
    assert "Exit" in new.grad_fn.name()


def test_a_policy_keeps_behind_the_fence_what_is_not_computed_again(fence: Fence) -> None:
    products: list[str] = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if reactivate.is_recomputing():
                products.append(func.name())
            return func(*args, **(kwargs or {}))

    block = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU())
    x = torch.randn(4, 8, requires_grad=True)
    with Products():
        reactivate.checkpoint(block, policy=save_ops("linear"))(x).sum().backward()
    assert "aten::gelu" in products
    assert "aten::addmm" not in products
    assert len(fence.given) == 3, "what was kept is a surprise, each of the two"


def test_a_context_for_torchs_own(fence: Fence) -> None:
    block = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU())
    x = torch.randn(4, 8, requires_grad=True)
    upstream(block, x, use_reentrant=False, context_fn=reactivate.dropin.xla.context_fn).square().sum().backward()
    ours = [x.grad, *(parameter.grad for parameter in block.parameters())]
    assert len(fence.given) > 1
    for leaf in (x, *block.parameters()):
        leaf.grad = None
    block(x).square().sum().backward()
    for one, leaf in zip(ours, (x, *block.parameters())):
        assert torch.equal(one, leaf.grad)


def test_tensors_of_a_recomputation_have_no_attributes_of_ours(fence: Fence) -> None:
    """The user's code may look, as a saved call of a region inside does: results with attributes are not kept."""
    seen = Journal()

    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        seen.append((dict(vars(x)), dict(vars(y))))
        return y.exp()

    reactivate.checkpoint(fn)(torch.ones(2, requires_grad=True)).sum().backward()
    assert seen == [({}, {})] * 2


@pytest.mark.parametrize("is_alive", [True, False])
def test_attributes_of_arguments_are_there_in_the_recomputation(fence: Fence, is_alive: bool) -> None:
    def f(tensor: Tensor) -> Tensor:
        return (tensor * tensor.scale).sin()  # type: ignore[attr-defined]

    x = torch.ones(3, requires_grad=True)
    inner = x * 2
    inner.scale = 3.0  # type: ignore[attr-defined]
    out = reactivate.checkpoint(f)(inner)
    held = inner if is_alive else None
    del inner
    out.sum().backward()
    assert torch.equal(x.grad, 6 * torch.full((3,), 6.0).cos())
    assert fence.given and (held is None or held.scale == 3.0)


def test_no_grad_needs_no_fence(fence: Fence) -> None:
    with torch.no_grad():
        reactivate.checkpoint(torch.sin)(torch.ones(2, requires_grad=True))
    reactivate.checkpoint(torch.sin)(torch.ones(2))
    assert fence.given == []


def test_another_device_is_not_concerned() -> None:
    other = Fence()
    register_fence("meta", other)
    try:
        x = torch.randn(8, requires_grad=True)
        out = reactivate.checkpoint(lambda x: x.sin().exp())(x)
        out.sum().backward()
        assert "Exit" not in out.grad_fn.name()
        assert other.given == []
    finally:
        register_fence("meta", None)
