"""Rule 15: a recomputation reads what the forward read, also if that was written to since.

Where there is no copy of it, it is refused, with the name of what was written to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from oracle import compare, leaf, tensors_in
from several import each
from torch import Tensor, nn

import reactivate
from reactivate import policies
from reactivate._region import due
from reactivate.errors import MutationError

# -- mutation between forward and backward (Rule 15) ------------------------------------------------------------------


SMALL, LARGE = (3, 5), (200, 200)
"""Of a small tensor without a graph there is a copy; of a large one there is none until a region has written to it."""

Shape = tuple[int, ...]


@dataclass
class Pair:
    x: Tensor
    w: Tensor


@dataclass
class Mutation:
    """A function with arguments, the tensor that is written to, and how messages call that."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Tensor
    place: str

    def leaves(self) -> list[Tensor]:
        return [tensor for tensor in tensors_in((self.args, self.kwargs)) if tensor.requires_grad]

    def plain(self) -> tuple[Tensor, ...]:
        """Return the gradients of the plain function."""
        return torch.autograd.grad(self.fn(*self.args, **self.kwargs).sum(), self.leaves())


def product(x: Tensor, w: Tensor) -> Tensor:
    return (x.sin() * w.cos()).exp()


def positional(shape: Shape) -> Mutation:
    x = leaf(*shape)
    return Mutation(lambda x: x.sin().exp(), (x,), {}, x, "`args[0]`")


def second_positional(shape: Shape) -> Mutation:
    x, w = leaf(*shape), torch.randn(shape)
    return Mutation(product, (x, w), {}, w, "`args[1]`")


def keyword(shape: Shape) -> Mutation:
    x, w = leaf(*shape), torch.randn(shape)
    return Mutation(product, (x,), {"w": w}, w, "`kwargs['w']`")


def in_a_list(shape: Shape) -> Mutation:
    x, w = leaf(*shape), torch.randn(shape)
    return Mutation(lambda items: product(*items), ([x, w],), {}, w, "`args[0][1]`")


def in_a_dict_in_a_tuple(shape: Shape) -> Mutation:
    x, w = leaf(*shape), torch.randn(shape)
    return Mutation(lambda items: product(**items[0]), (({"x": x, "w": w}, None),), {}, w, "`args[0][0]['w']`")


def in_a_dataclass(shape: Shape) -> Mutation:
    x, w = leaf(*shape), torch.randn(shape)
    return Mutation(lambda pair: product(pair.x, pair.w), (), {"pair": Pair(x, w)}, w, "`kwargs['pair'].w`")


def closed_over(shape: Shape) -> Mutation:
    x, w = leaf(*shape), torch.randn(shape)
    return Mutation(lambda x: product(x, w), (x,), {}, w, "`the function (closed over as `w`)`")


def default_argument(shape: Shape) -> Mutation:
    x, w = leaf(*shape), torch.randn(shape)

    def fn(x: Tensor, w: Tensor = w) -> Tensor:
        return product(x, w)

    return Mutation(fn, (x,), {}, w, "`the function (defaults)[0]`")


TABLE, LARGE_TABLE = torch.ones(SMALL), torch.ones(LARGE)


def module_level(shape: Shape) -> Mutation:
    if shape == LARGE:
        return Mutation(lambda x: product(x, LARGE_TABLE), (leaf(*shape),), {}, LARGE_TABLE, "`LARGE_TABLE`")
    return Mutation(lambda x: product(x, TABLE), (leaf(*shape),), {}, TABLE, "`TABLE`")


def attribute_of_self(shape: Shape) -> Mutation:
    class Layer:
        def __init__(self) -> None:
            self.w = torch.randn(shape)

        def run(self, x: Tensor) -> Tensor:
            return product(x, self.w)

    layer = Layer()
    return Mutation(layer.run, (leaf(*shape),), {}, layer.w, "`the function.__self__.w`")


class Scaled(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))
        self.register_buffer("mask", torch.randn(shape))
        self.scale = torch.randn(shape)

    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.weight) * self.mask.exp().sin() * self.scale.exp().sin()


def parameter(shape: Shape) -> Mutation:
    module = nn.Sequential(Scaled(shape))
    return Mutation(module, (leaf(*shape),), {}, module[0].weight, "`Sequential.0.weight`")


def buffer(shape: Shape) -> Mutation:
    module = nn.Sequential(Scaled(shape))
    return Mutation(module, (leaf(*shape),), {}, module[0].mask, "`Sequential.0.mask`")


def attribute_of_a_module(shape: Shape) -> Mutation:
    module = nn.Sequential(Scaled(shape))
    return Mutation(module, (leaf(*shape),), {}, module[0].scale, "`Sequential.0.scale`")


ELSEWHERE = [
    *(second_positional, keyword, in_a_list, in_a_dict_in_a_tuple, in_a_dataclass, closed_over, default_argument),
    *(module_level, attribute_of_self),
]
WITH_GRADIENT = [positional, parameter]
OF_A_MODULE = [buffer, attribute_of_a_module]

Made = tuple[Callable[[Shape], Mutation], Shape]
COPIED: list[Made] = [(make, SMALL) for make in ELSEWHERE]
COPIED += [(make, shape) for make in OF_A_MODULE for shape in (SMALL, LARGE)]
NOT_COPIED: list[Made] = [(make, LARGE) for make in ELSEWHERE]
NOT_COPIED += [(make, shape) for make in WITH_GRADIENT for shape in (SMALL, LARGE)]


def name_of(made: Made) -> str:
    make, shape = made
    return f"{make.__name__}{'-large' if shape == LARGE else ''}"


def forward_of(mutation: Mutation, **options: Any) -> Tensor:
    out: Tensor = reactivate.checkpoint(mutation.fn, **options)(*mutation.args, **mutation.kwargs)
    return out.sum()


@pytest.mark.parametrize("made", COPIED, ids=name_of)
def test_a_write_between_forward_and_backward_to_what_has_a_copy(made: Made) -> None:
    mutation = made[0](made[1])
    expected, target = mutation.plain(), mutation.target
    out = forward_of(mutation)
    target.add_(1)
    written, version = target.clone(), target._version
    for retain in (True, False):
        grads = torch.autograd.grad(out, mutation.leaves(), retain_graph=retain)
        assert all(map(torch.equal, grads, expected)), "of the values that the forward read"
        assert torch.equal(target, written) and target._version == version, "what was written is there"


@pytest.mark.parametrize("made", NOT_COPIED, ids=name_of)
def test_a_write_between_forward_and_backward_to_what_has_no_copy(made: Made) -> None:
    mutation = made[0](made[1])
    out = forward_of(mutation, name="block 7")
    with torch.no_grad():
        mutation.target.add_(1)
    with pytest.raises(MutationError) as raised:
        out.backward()
    message = str(raised.value)
    assert mutation.place in message, "where it entered"
    assert str(list(made[1])) in message, "its shape"
    assert "block 7" in message or made[0] is parameter, "which region"
    assert "Do not" in message or "Write to it outside" in message, "what to do"


@pytest.mark.parametrize("made", [(make, LARGE) for make in ELSEWHERE], ids=name_of)
def test_a_write_that_changes_nothing_to_what_has_no_copy(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison shows it in the first call; and from the next one on there is a copy."""
    monkeypatch.setattr(due, "_calls", {})
    mutation = made[0](made[1])
    expected = mutation.plain()
    for number in (0, 1):
        out = forward_of(mutation)
        with torch.no_grad():
            mutation.target.add_(number)
        assert all(map(torch.equal, torch.autograd.grad(out, mutation.leaves()), expected))


@each("made", COPIED + NOT_COPIED, ids=name_of)
def test_without_a_write_there_is_no_refusal(made: Made) -> None:
    forward_of(made[0](made[1])).backward()


@each("made", COPIED + NOT_COPIED, ids=name_of)
def test_a_write_after_the_backward_is_none_of_ours(made: Made) -> None:
    mutation = made[0](made[1])
    forward_of(mutation).backward()
    with torch.no_grad():
        mutation.target.add_(0)
    forward_of(mutation).backward()


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])
def test_a_module_level_name_that_is_bound_anew(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation = module_level(shape)
    expected, out, other = mutation.plain(), forward_of(mutation), torch.zeros(shape)
    monkeypatch.setitem(globals(), mutation.place.strip("`"), other)
    assert torch.equal(torch.autograd.grad(out, mutation.leaves())[0], expected[0])
    assert globals()[mutation.place.strip("`")] is other


def test_a_write_through_a_view() -> None:
    x = leaf(3, 5) * 1
    out = reactivate.checkpoint(lambda x: x.sin().exp())(x).sum()
    x[1].zero_()
    with pytest.raises(MutationError, match=r"args\[0\]"):
        out.backward()


def test_a_write_through_a_view_of_what_has_a_copy() -> None:
    x, w = leaf(3, 5), torch.randn(3, 5)
    expected = torch.autograd.grad(product(x, w).sum(), x)[0]
    out = reactivate.checkpoint(product)(x, w).sum()
    w[1].zero_()
    assert torch.equal(torch.autograd.grad(out, x)[0], expected) and not w[1].any()


def test_the_second_backward_is_right_or_refused_if_the_write_comes_before_it() -> None:
    for shape in (SMALL, LARGE):
        x, w = leaf(*shape), torch.randn(shape)
        out = reactivate.checkpoint(product)(x, w).sum()
        (first,) = torch.autograd.grad(out, x, retain_graph=True)
        w.zero_()
        if shape == SMALL:
            assert torch.equal(torch.autograd.grad(out, x)[0], first)
        else:
            with pytest.raises(MutationError, match=r"args\[1\]"):
                out.backward()


def test_two_regions_with_a_write_between_them_read_each_its_own() -> None:
    x, w = leaf(3, 5), torch.randn(3, 5)
    expected, outputs = [], []
    for _ in range(3):
        expected.append(torch.autograd.grad(product(x, w).sum(), x)[0])
        outputs.append(reactivate.checkpoint(product)(x, w).sum())
        w.mul_(2)
    for index in (1, 2, 0):
        assert torch.equal(torch.autograd.grad(outputs[index], x)[0], expected[index])


class TwoBlocks(nn.Module):
    """Two regions that can both reach everything, of which each uses a half."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.second = make(), make()

    def forward(self, x: Tensor) -> Tensor:
        h = reactivate.checkpoint(lambda x: self.first(x).sin())(x)
        out: Tensor = reactivate.checkpoint(lambda x: self.second(x).sin())(h)
        return out


def test_state_that_a_region_reaches_and_does_not_read_is_none_of_its_business() -> None:
    model = TwoBlocks(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    verdict = reactivate.verify(model, leaf(8, 4))
    assert verdict and verdict.regions == 2, verdict


def test_parameters_that_a_region_reaches_and_does_not_read_may_be_written_to() -> None:
    """As in a GAN, whose discriminator is stepped before the generator's backward."""
    model, x = TwoBlocks(lambda: nn.Linear(4, 4)), leaf(8, 4)
    h = reactivate.checkpoint(lambda x: model.first(x).sin())(x)
    with torch.no_grad():
        model.second.weight.add_(1)
    h.sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(model.first(x).sin().sum(), x)[0])


class Partly(nn.Module):
    """Reads the first of its layers; writes to its buffer in a way that no version tells, if it is asked to."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.read, self.unread, self.writes = nn.Linear(4, 4), nn.Linear(4, 4), writes
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            self.count.data.add_(1)
        return (self.read(x) * self.count.sum().exp()).tanh()


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("policy", [None, policies.save_ops("linear")], ids=str)
def test_a_region_inside_does_not_read_what_it_only_reaches(writes: bool, policy: Any) -> None:
    """The region around it watches for reads, and its notes of addresses and checksums are none."""

    def gradients(wrap: Callable[..., Any]) -> list[Tensor | None]:
        module, x = Partly(writes), leaf(2, 4)
        inside = wrap(module, policy=policy)
        outside = wrap(lambda x: inside(x.cos()).exp())
        for _ in range(3):
            out = outside(x).sum()
            with torch.no_grad():
                module.unread.weight.mul_(2)
            out.backward()
        return [x.grad, module.read.weight.grad, module.unread.weight.grad, module.count]

    watched = compare(gradients)
    assert watched.regions >= 6 and watched.recomputations >= 6


class Reader(nn.Module):
    """Reads a parameter in a way that is given."""

    def __init__(self, read: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.read = read

    def forward(self, x: Tensor) -> Any:
        found = self.read(x, self.weight)
        return x.sin().exp().cos(), found


def stepped(read: Callable[[Tensor, Tensor], Any], policy: Any = None) -> tuple[Tensor, Tensor]:
    """Return the gradients of the plain module and of a region, whose parameter is stepped before the backward."""
    grads = []
    for wrap in (lambda model: model, partial(reactivate.checkpoint, policy=policy)):
        torch.manual_seed(0)
        model, x = Reader(read), leaf(4, 4)
        out, found = wrap(model)(x)
        with torch.no_grad():
            model.weight.mul_(2)
        grads.append(torch.autograd.grad(out.sum() + found.sum(), x)[0])
    return grads[0], grads[1]


def into_place(x: Tensor, weight: Tensor) -> Tensor:
    y = torch.zeros(4, 4)
    with torch.no_grad():
        y += weight
        y.zero_()
    return y


HARMLESS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a sum that nothing saves": lambda x, weight: x + weight,
    "a view": lambda x, weight: (x + weight)[0].t(),
    "a product without a gradient": lambda x, weight: weight.detach() * 2 + x,
    "filled afterwards": into_place,
}
HARMFUL: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "saved": lambda x, weight: (x + weight).exp(),
    "a view is saved": lambda x, weight: (x + weight)[0].t().exp(),
    "written to a tensor that is saved": lambda x, weight: torch.zeros(4, 4).add_(weight.detach()).mul(x),
    "decides": lambda x, weight: x.sin() if weight.sum() > 0 else x,
    "item": lambda x, weight: x * weight.sum().item(),
    "list": lambda x, weight: x * (weight + 1).tolist()[0][0],
    "numpy": lambda x, weight: x * float((weight + 1).detach().numpy()[0, 0]),
    "a shape": lambda x, weight: x.flatten()[(weight > 1).nonzero().flatten()].exp(),
    "in a region inside": lambda x, weight: reactivate.checkpoint(lambda x: (x + weight).exp())(x),
    "in torch's checkpoint inside": lambda x, weight: torch.utils.checkpoint.checkpoint(
        lambda x: (x + weight).exp(), x, use_reentrant=False
    ),
}


@pytest.mark.parametrize("read", HARMLESS)
def test_what_no_saved_tensor_comes_from_may_be_modified(read: str) -> None:
    assert torch.equal(*stepped(HARMLESS[read]))


@pytest.mark.parametrize("read", HARMFUL)
def test_what_a_saved_tensor_comes_from_may_not_be_modified(read: str) -> None:
    with pytest.raises(MutationError, match="weight"):
        stepped(HARMFUL[read])


def test_what_a_saved_call_is_given_may_not_be_modified() -> None:
    def read(x: Tensor, weight: Tensor) -> Tensor:
        return reactivate.site(torch.mul, name="product")(x + weight, x)

    with pytest.raises(MutationError, match="weight"):
        stepped(read, policies.save_names("product"))


class OfAQueue(nn.Module):
    """Reads a tensor that no walk finds."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: SimpleQueue[Tensor] = SimpleQueue()
        self.queue.put(torch.rand(4, 4))

    def next(self) -> Tensor:
        found = self.queue.get()
        self.queue.put(found)
        return found

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.next()).sin()


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_saved_tensor_that_no_walk_finds_may_not_be_modified(number: int) -> None:
    """In calls that are compared, as the first two, the contents decide; in others the version."""
    model, x = OfAQueue(), leaf(4, 4)
    region = reactivate.checkpoint(model)
    for _ in range(number - 1):
        region(x).sum().backward()
    out = region(x).sum()
    model.next().mul_(2)
    with pytest.raises(MutationError, match="a tensor from outside of it"):
        out.backward()
