"""Rule 15: a recomputation reads what the forward read, also if that was written to since.

Where there is no copy of it, it is refused, with the name of what was written to.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from oracle import Case, Watched, assert_same, check, compare, leaf, run, tensors_in
from several import each
from torch import Tensor, nn

import reactivate
from reactivate import policies
from reactivate._passes.observing import observed_by, without_regions
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


# -- writes of the region itself --------------------------------------------------------------------------------------


def test_an_input_with_a_gradient_that_the_region_writes_to_and_reads_is_refused_in_the_backward() -> None:
    h = leaf(4) * 1
    out = reactivate.checkpoint(lambda h: h.mul_(2).sin())(h)
    written = h.detach().clone()
    for _ in range(2):
        with pytest.raises(MutationError, match=r"wrote in place to `args\[0\]`.*[Cc]lone"):
            out.sum().backward(retain_graph=True)
        assert torch.equal(h, written), "and it is left as it was"


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])
def test_an_input_with_a_gradient_that_the_region_writes_to_idempotently_is_right(shape: Shape) -> None:
    def make() -> Case:
        start = leaf(*shape)
        h = start * 1
        return Case(lambda h: h.relu_().sin().exp(), (h,), leaves={"start": start})

    check(make)


class ChangesItsGradient(torch.nn.Linear):
    """A layer whose forward scales the gradient that it has so far, and reads it."""

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.grad is not None:
            with torch.no_grad():
                self.weight.grad.mul_(0.5)
            x = x + self.weight.grad.mean()
        return super().forward(x).sin()


def test_a_gradient_that_the_region_writes_to_is_refused_once_with_what_to_do() -> None:
    layer = ChangesItsGradient(4, 4)
    plain, x = copy.deepcopy(layer), torch.randn(2, 4)
    region = reactivate.checkpoint(layer)
    for number in range(3):
        plain(x).sum().backward()
        before = None if layer.weight.grad is None else layer.weight.grad.clone()
        bias = None if layer.bias.grad is None else layer.bias.grad.clone()
        out = region(x)
        if number == 1:
            with pytest.raises(
                MutationError, match=r"wrote in place to `a gradient`.*set the gradients to what they were"
            ):
                out.sum().backward()
            layer.weight.grad, layer.bias.grad = before, bias
            out = region(x)
        out.sum().backward()
        assert torch.equal(layer.weight.grad, plain.weight.grad)
        assert torch.equal(layer.bias.grad, plain.bias.grad)


def test_a_write_that_only_the_gradients_see_is_refused() -> None:
    """As before a factor that starts at zero: the outputs are those of the forward."""
    out = reactivate.checkpoint(lambda h, b: h.mul_(2).exp() * b)(leaf(4) * 1, torch.zeros(4, requires_grad=True))
    with pytest.raises(MutationError, match=r"wrote in place to `args\[0\]`"):
        out.sum().backward()


def test_a_write_that_no_backward_sees_is_right() -> None:
    """Autograd's copy of the input that is written to went with the forward."""

    def fn(x: Tensor, h: Tensor) -> Tensor:
        h.sin().exp()
        h.detach().mul_(2)
        return x.sin().exp()

    for determinism in ("first", "metadata"):
        check(lambda: Case(fn, (leaf(8, 16), leaf(8, 16) * 1)), check=determinism)


def test_an_input_that_is_given_back_and_written_to_afterwards_is_right() -> None:
    x, h = leaf(4), leaf(4) * 1
    out, given = reactivate.checkpoint(lambda x, items: (x.sin().exp(), items[0]))(x, [h])
    given.mul_(2)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(grad, torch.autograd.grad(x.sin().exp().sum(), x)[0])


def test_a_region_that_writes_to_its_input_does_not_recompute_the_region_around_it() -> None:
    """To find the name of what was written to, nothing is unpacked."""

    def outer(x: Tensor) -> Tensor:
        h = reactivate.checkpoint(lambda h: h.sin().exp())(x.sin())
        reactivate.checkpoint(lambda h: h.detach().mul_(2))(h)
        return h

    watched = Watched()
    with observed_by(watched):
        out = reactivate.checkpoint(outer)(leaf(4))
        assert (watched.regions, watched.recomputations) == (3, 0)
        out.sum().backward()


def test_an_input_that_is_cloned_and_written_to_is_right() -> None:
    check(lambda: Case(lambda h: h.clone().mul_(2).sin().exp(), (leaf(8, 16),)))


SHAPES = pytest.mark.parametrize("shape", [(4, 4), (4,), LARGE], ids=["matrix", "as a running mean", "large"])


def counted(shape: Shape, op: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Train with a table that each call reads with `op` and then adds 1 to."""

    def fn(x: Tensor, table: Tensor) -> Tensor:
        y = op(x.sin(), table)
        table.add_(1)
        return y.exp()

    x, table = leaf(shape[-1], shape[-1]), torch.ones(shape)
    read = [torch.full(shape, float(number)) for number in (1, 2, 3, 4)]
    expected = [torch.autograd.grad(op(x.sin(), table).exp().sum(), x)[0] for table in read]
    outputs = [reactivate.checkpoint(fn)(x, table).sum() for _ in range(2)]
    if shape == LARGE:
        for out in outputs:
            with pytest.raises(MutationError, match=r"`args\[1\]`"):
                out.backward()
        outputs += [reactivate.checkpoint(fn)(x, table).sum() for _ in range(2)]  # now there is a copy
    for out, gradient in list(zip(outputs, expected))[2 * (shape == LARGE) :]:
        assert torch.equal(torch.autograd.grad(out, x)[0], gradient)
    assert torch.equal(table, torch.full(shape, 1.0 + len(outputs)))


@SHAPES
def test_an_input_without_a_graph_that_is_read_and_written_to(shape: Shape) -> None:
    counted(shape, torch.add)


@pytest.mark.unfenced(reason="what was saved is an alias that is written to: refused, as without regions")
@SHAPES
def test_an_input_without_a_graph_that_is_saved_and_written_to(shape: Shape) -> None:
    counted(shape, torch.mul)


class Teacher(nn.Module):
    """A parameter that each call writes to from another, and reads before or after that."""

    def __init__(self, write: Callable[[Tensor, Tensor], Any], *, needs_grad: bool, reads: str) -> None:
        super().__init__()
        self.teacher = nn.Parameter(torch.randn(100, 100), requires_grad=needs_grad)
        self.student = nn.Parameter(torch.randn(100, 100))
        self.write, self.reads = write, reads

    def forward(self, x: Tensor) -> Tensor:
        before = (x @ self.teacher).sin() if self.reads == "before" else 1
        with torch.no_grad():
            self.write(self.teacher, self.student)
        after = (x @ self.teacher).sin() if self.reads == "after" else 1
        return ((x @ self.student).sin() * before * after).exp()


def average(teacher: Tensor, student: Tensor) -> None:
    teacher.mul_(0.9).add_(student, alpha=0.1)


WRITES = {
    "copy": lambda teacher, student: teacher.copy_(student),
    "clamp": lambda teacher, student: teacher.clamp_(-1, 1),
    "average": average,
}


def steps_of(wrap: Any, write: str, microbatches: int, **options: Any) -> list[Any]:
    """Return the gradients of the student in each of three steps, None where the backward was refused."""
    torch.manual_seed(0)
    model = Teacher(WRITES[write], **options)
    call = wrap(model)
    found: list[Any] = []
    for _ in range(3):
        outputs = [call(torch.randn(4, 100)).sum() for _ in range(microbatches)]
        try:
            found.append(torch.autograd.grad(sum(outputs), model.student)[0])  # type: ignore[arg-type]
        except MutationError:
            found.append(None)
        with torch.no_grad():
            model.student.mul_(0.9)
    return found


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("needs_grad", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("reads", ["nowhere", "after", "before"])
def test_a_parameter_that_each_call_writes_to(reads: str, write: str, needs_grad: bool, microbatches: int) -> None:
    """The program is right wherever torch's checkpoint is; elsewhere the first step is refused, and then there is a copy."""
    found = {
        name: steps_of(wrap, write, microbatches, needs_grad=needs_grad, reads=reads)
        for name, wrap in {
            "plain": lambda model: model,
            "ours": reactivate.checkpoint,
            "torch": lambda model: partial(torch.utils.checkpoint.checkpoint, model, use_reentrant=False),
        }.items()
    }
    for step, (plain, ours) in enumerate(zip(found["plain"], found["ours"])):
        if ours is None:
            assert step == 0 and not torch.equal(plain, found["torch"][0])
        else:
            assert torch.equal(plain, ours)


@pytest.mark.parametrize("backwards", [1, 2])
def test_an_idempotent_write_of_two_microbatches_is_proved_for_each_backward(backwards: int) -> None:
    model, x = Teacher(WRITES["clamp"], needs_grad=False, reads="after"), torch.randn(4, 100)
    outputs = [reactivate.checkpoint(model)(x).sum() for _ in range(2)]
    expected = torch.autograd.grad(model(x).sum(), model.student)[0]
    for _ in range(backwards):
        for out in outputs:
            assert torch.equal(torch.autograd.grad(out, model.student, retain_graph=True)[0], expected)


def test_a_large_input_that_is_only_written_to_is_right() -> None:
    """A log, of which each region writes one entry that none reads."""

    def make() -> Case:
        log = torch.zeros(6, 200, 200)

        def block(x: Tensor, index: int) -> Tensor:
            y = x.sin().exp()
            log[index].copy_(y.detach())
            return y.cos().exp()

        def fn(x: Tensor) -> Tensor:
            for index in range(6):
                x = reactivate.checkpoint(block)(x, index)
            holder.register_buffer("log", log)
            return x

        holder = nn.Module()
        return Case(fn, (leaf(200, 200),), modules=[holder])

    with without_regions():
        plain = run(make)
    ours = run(make)
    assert_same(plain, ours)
    assert ours.regions == ours.recomputations == 6


def test_a_saved_tensor_that_the_region_overwrites_is_refused_as_without_a_region() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x.exp()
        y.mul_(2)
        return y.sin()

    for wrap, error in ((lambda fn: fn, RuntimeError), (reactivate.checkpoint, MutationError)):
        out = wrap(fn)(leaf(4)).sum()
        with pytest.raises(error, match="modified by an inplace operation"):
            out.backward()


@pytest.mark.parametrize("determinism", ["metadata", "none"])
def test_a_write_that_only_outputs_see_is_refused_without_checksums_of_saved_tensors(determinism: str) -> None:
    """A limit: without these, only the outputs show whether a write matters."""
    out = reactivate.checkpoint(lambda x, h: x.sin() + h.mul_(2), check=determinism)(leaf(4), leaf(4) * 1)
    with pytest.raises(MutationError, match=r"`args\[1\]`"):
        out.sum().backward()


def test_a_write_that_only_gradients_see_is_refused_in_every_compared_call() -> None:
    """The outputs are all zero: the second call is compared by what it saves, whatever `determinism` says."""

    def fn(h: Tensor, scale: Tensor) -> Tensor:
        return h.mul_(2).exp() * scale

    first = reactivate.checkpoint(fn)
    again = reactivate.checkpoint(fn, check="metadata")
    for call in (first, again, again):
        with pytest.raises(reactivate.errors.ReactivateError):
            call(leaf(4).abs(), torch.zeros(4, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("determinism", ["first", "metadata", "every", "none"])
@pytest.mark.parametrize("early_stop", [True, False])
def test_a_kept_output_proves_nothing_of_a_write(determinism: str, early_stop: bool) -> None:
    """The result of the last call is kept, and so the same in any case; its weight's gradient depends on the write."""
    linear = nn.Linear(4, 4)

    def fn(x: Tensor) -> Tensor:
        alias = x.detach()
        alias.mul_(alias.sin())
        return linear(alias.sin())

    wrap = reactivate.checkpoint(policy=policies.save_ops("linear"), early_stop=early_stop, check=determinism)
    for _ in range(3):
        out = wrap(fn)(leaf(4, 4) * 1)
        with pytest.raises(MutationError):
            out.sum().backward()
