"""Plain against checkpointed, each on objects of its own, everything compared bit for bit."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parameter import is_lazy
from torch.utils import _pytree

import reactivate
from reactivate._passes.observing import observed_by

SEED = 1234


@dataclass
class Case:
    """A function with arguments, made anew for each run.

    `leaves` are closed-over tensors whose gradients are compared too; `modules` are those whose buffers are.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    leaves: dict[str, Tensor] = field(default_factory=dict)
    modules: list[nn.Module] = field(default_factory=list)

    def __post_init__(self) -> None:
        if isinstance(self.fn, nn.Module) and not self.modules:
            self.modules = [self.fn]

    def inputs(self) -> dict[str, Tensor]:
        found = {f"input {index}": leaf for index, leaf in enumerate(tensors_in((self.args, self.kwargs)))}
        found |= self.leaves
        for index, module in enumerate(self.modules):
            found |= {f"{index}.{name}": parameter for name, parameter in module.named_parameters()}
        return {name: leaf for name, leaf in found.items() if leaf.requires_grad}


@dataclass(kw_only=True)
class Watched:
    """Counts of what the engine did, for whom it is the observer.

    Attributes:
        regions, recomputations: how many there were.
    """

    regions: int = 0
    recomputations: int = 0

    def forward_done(self, record: Any) -> None:
        self.regions += 1

    def recomputation_done(self, record: Any) -> None:
        self.recomputations += 1


@dataclass
class Ran(Watched):
    """The results of one run, and what the engine did for it."""

    outputs: list[Any] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    kept_bytes: int = 0


def flatten(value: Any) -> list[Any]:
    """Everything in nested containers, dataclasses and plain objects."""
    leaves = []
    for leaf in _pytree.tree_leaves(value):
        if dataclasses.is_dataclass(leaf):
            leaves += flatten([getattr(leaf, item.name) for item in dataclasses.fields(leaf)])
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, (Tensor, nn.Module, type)) and not callable(leaf):
            leaves += flatten(list(vars(leaf).values()))
        else:
            leaves.append(leaf)
    return leaves


def tensors_in(value: Any) -> list[Tensor]:
    return [leaf for leaf in flatten(value) if isinstance(leaf, Tensor)]


def seed_everything(seed: int = SEED) -> None:
    torch.default_generator.manual_seed(seed)  # `torch.manual_seed` formats the stack for each device that is not here
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def backward_once(outputs: list[Tensor], inputs: dict[str, Tensor]) -> None:
    torch.autograd.backward(outputs, cotangents(outputs))


def backward_twice(outputs: list[Tensor], inputs: dict[str, Tensor]) -> None:
    torch.autograd.backward(outputs, cotangents(outputs), retain_graph=True)
    torch.autograd.backward(outputs, cotangents(outputs))


def double_backward(outputs: list[Tensor], inputs: dict[str, Tensor]) -> list[Tensor | None]:
    """The gradients of the squares of gradients."""
    loss = sum(output.float().square().sum() for output in outputs)
    gradients = torch.autograd.grad(loss, list(inputs.values()), create_graph=True, allow_unused=True)  # type: ignore[arg-type]
    sum(gradient.square().sum() for gradient in gradients if gradient is not None).backward()  # type: ignore[union-attr]
    return list(gradients)


def cotangents(outputs: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(out.shape, generator=generator).to(out.device, out.dtype) for out in outputs]


def run(
    make: Callable[[], Case],
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    backward: Callable[[list[Tensor], dict[str, Tensor]], Any] = backward_once,
) -> Ran:
    """One run of a case that is made for it."""
    seed_everything()
    case = make()
    ran = Ran()
    seed_everything()
    fn = case.fn if wrap is None else wrap(case.fn)
    inputs = case.inputs()
    kept: dict[int, tuple[Tensor, int]] = {}
    leaves = {leaf.untyped_storage().data_ptr() for leaf in inputs.values() if not is_lazy(leaf)}

    def count(tensor: Tensor) -> Tensor:
        if tensor.layout is torch.strided and type(tensor) is Tensor:
            storage = tensor.untyped_storage()
            with contextlib.suppress(RuntimeError):  # inside of a transform of torch.func it has no memory
                if storage.data_ptr() not in leaves:
                    kept[storage.data_ptr()] = (tensor, storage.nbytes())
        return tensor

    with observed_by(ran):
        with saved_tensors_hooks(count, lambda tensor: tensor):
            output = fn(*case.args, **case.kwargs)
        ran.kept_bytes = sum(size for _, size in kept.values())
        kept.clear()
        ran.outputs = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in flatten(output)]
        roots = [leaf for leaf in tensors_in(output) if leaf.requires_grad]
        result = backward(roots, inputs)
    ran.gradients = {name: leaf.grad for name, leaf in inputs.items()}
    if result is not None:
        ran.gradients |= {f"returned {index}": leaf.detach() for index, leaf in enumerate(tensors_in(result))}
    for index, module in enumerate(case.modules):
        ran.state |= {f"buffer {index}.{name}": buffer.clone() for name, buffer in module.named_buffers()}
        ran.state |= {f"training {index}.{name}": child.training for name, child in module.named_modules()}
    ran.state |= random_states()
    return ran


def random_states() -> dict[str, Any]:
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": repr(numpy.random.get_state(legacy=False)),
    }


def skip_unless_repeatable(plain: Callable[[], Ran]) -> None:
    """Skip a test where the plain run cannot be, or is not equal to itself: of kernels of devices that is often so."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            one, other = plain(), plain()
        except (RuntimeError, IndexError) as error:
            pytest.skip(f"the plain run raises: {error}".splitlines()[0])
    if any("does not have a deterministic implementation" in str(item.message) for item in caught):
        pytest.skip("torch has no kernel for it that gives the same bits each time")
    try:
        assert_same(one, other)
    except AssertionError:
        pytest.skip("the plain run gives other bits each time")


def assert_bitwise(one: Any, other: Any, name: str) -> None:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        assert one.shape == other.shape and one.dtype == other.dtype and one.device == other.device, name
        assert one.layout == other.layout and type(one) is type(other), name
        assert getattr(one, "placements", None) == getattr(other, "placements", None), name
        for first, second in zip(parts_of(one), parts_of(other), strict=True):
            assert torch.equal(bits_of(first), bits_of(second)), f"{name} differs: {difference(first, second)}"
    else:
        assert type(one) is type(other), f"{name}: {one} against {other}"
        if not isinstance(one, Tensor):
            assert one == other or (one != one and other != other), f"{name}: {one} against {other}"


def difference(one: Tensor, other: Tensor) -> str:
    """Say where two tensors of one shape and dtype differ first, how often, and by how much."""
    size = one.element_size()
    unlike = (bits_of(one).view(-1, size) != bits_of(other).view(-1, size)).any(dim=1)
    numbers = unlike.nonzero().flatten().tolist()
    first = tuple(int(index) for index in numpy.unravel_index(numbers[0], one.shape))
    text = f"{len(numbers)} of {one.numel()} elements of {one.dtype}{list(one.shape)}, first at {first}: "
    text += f"{one[first].item()!r} against {other[first].item()!r}"
    if one.dtype == torch.bool:
        return text
    distance = (one.detach().to(torch.complex128) - other.detach().to(torch.complex128)).abs().max().item()
    return f"{text}; the largest difference is {distance:.3g}"


def parts_of(tensor: Tensor) -> list[Tensor]:
    if tensor.is_nested:
        return list(tensor.unbind())
    if hasattr(tensor, "to_local"):  # a view of what is split over the ranks is refused by older torches
        return [tensor.to_local()]
    return [tensor if tensor.layout is torch.strided else tensor.to_dense()]


def bits_of(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def assert_same(plain: Ran, ours: Ran) -> None:
    assert len(plain.outputs) == len(ours.outputs)
    for index, (one, other) in enumerate(zip(plain.outputs, ours.outputs)):
        assert_bitwise(one, other, f"output {index}")
    assert plain.gradients.keys() == ours.gradients.keys()
    for name, gradient in plain.gradients.items():
        assert_bitwise(gradient, ours.gradients[name], f"gradient of {name}")
    for name, state in plain.state.items():
        assert_bitwise(state, ours.state[name], name)


def assert_alike(one: Iterable[Any], other: Iterable[Any], name: str = "result") -> None:
    """Two runs have returned as many results, each the same bit for bit."""
    for index, (first, second) in enumerate(zip(one, other, strict=True)):
        assert_bitwise(first, second, f"{name} {index}")


def plainly(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """The function itself, in the place of a checkpointed one."""
    return fn


def compare(once: Callable[[Callable[..., Any]], Iterable[Any]], **options: Any) -> Watched:
    """`once(wrap)` returns the same bits with `wrap` a checkpoint, and there was one; return what the engine did."""
    seed_everything()
    plain, watched = list(once(plainly)), Watched()
    seed_everything()
    with observed_by(watched):
        ours = list(once(partial(reactivate.checkpoint, **options)))
    assert_alike(plain, ours)
    assert watched.regions >= 1 and watched.recomputations >= 1, "a region ran, and was recomputed"
    return watched


def trained(
    model: nn.Module, call: Callable[[Tensor], Tensor], steps: int, told: Callable[[], list[Any]] = list
) -> list[Any]:
    """Train a model on batches of 5 rows of 4 numbers; return what each step gave, what is `told` then, and the state."""
    found: list[Any] = []
    for _ in range(steps):
        x = leaf(5, 4)
        out = call(x)
        out.square().sum().backward()
        found += [out.detach(), x.grad, *told()]
    return [*found, *(parameter.grad for parameter in model.parameters()), *model.state_dict().values()]


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def check(
    make: Callable[[], Case],
    *,
    backward: Callable[[list[Tensor], dict[str, Tensor]], Any] = backward_once,
    regions: int = 1,
    recomputations: int = 1,
    saves_memory: bool = True,
    **options: Any,
) -> tuple[Ran, Ran]:
    """Plain and checkpointed are the same, and there was a checkpoint: regions ran, recomputations ran, less was kept."""
    plain = run(make, None, backward)
    ours = run(make, lambda fn: reactivate.checkpoint(fn, **options), backward)
    assert_same(plain, ours)
    assert ours.regions == regions, "as many regions as expected"
    assert ours.recomputations == recomputations, "as many recomputations as expected"
    if saves_memory:
        assert ours.kept_bytes < plain.kept_bytes, "less was kept than plain"
    return plain, ours
