"""Trees of modules that are not walked again: what changes is seen all the same, and nothing is kept alive."""

from __future__ import annotations

import functools
import gc
import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from memory import without_collector
from oracle import assert_alike, assert_bitwise, compare
from state_programs import Holding
from torch import Tensor, nn

import reactivate
from reactivate import policies
from reactivate._snapshot import holders, parts, reached_modules
from reactivate._snapshot.module_walk import ModuleWalk
from reactivate._snapshot.trees import single_modules, whole_trees

scale = 1.0
counted: int


def shifted(x: Tensor, *, by: float) -> Tensor:
    return x + by


def raised(x: Tensor, *, by: float) -> Tensor:
    return x.abs() ** (1 + by)


class Scaled(nn.Module):
    """Reads what may change: an attribute, a name of this file, an attribute of its class, a child, a list, a partial."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.power = 1
        self.offsets = [0.0]
        self.partial = functools.partial(shifted, by=0.5)

    def forward(self, x: Tensor) -> Tensor:
        shift = getattr(self, "shift", 0.0) + getattr(self.partial, "shift", 0.0)
        x = self.partial(x)
        return (self.inner(x) * scale * self.factor + self.offsets[0] + shift).sin() ** self.power


class Counting(nn.Module):
    """Counts in a name of this file that its first call makes."""

    def forward(self, x: Tensor) -> Tensor:
        global counted
        try:
            counted += 1
        except NameError:
            counted = 1
        return (x * counted).sin()


def another_power(module: Scaled) -> None:
    module.power = 3


def another_child(module: Scaled) -> None:
    module.inner = nn.Linear(4, 4)


def one_child_more(module: Scaled) -> None:
    module.inner = nn.Sequential(module.inner, nn.Linear(4, 4))


def another_parameter(module: Scaled) -> None:
    module.inner.weight = nn.Parameter(torch.randn(4, 4))


def another_registry(module: Scaled) -> None:
    module.inner._parameters = {**module.inner._parameters, "weight": nn.Parameter(torch.randn(4, 4))}


def the_first_buffer(module: Scaled) -> None:
    module.register_buffer("shift", torch.randn(4))


def no_bias(module: Scaled) -> None:
    module.inner.bias = None


def another_item(module: Scaled) -> None:
    module.offsets[0] = 2.0


def another_name(module: Scaled) -> None:
    global scale
    scale = 3.0


def another_attribute_of_the_class(module: Scaled) -> None:
    Scaled.factor = 3.0


def a_hook(module: Scaled) -> None:
    module.inner.register_forward_hook(lambda _, inputs, output: output * 2)


def an_attribute_that_hides_that_of_the_class(module: Scaled) -> None:
    module.factor = 5.0


def another_function_of_a_partial(module: Scaled) -> None:
    module.partial.__setstate__((raised, (), module.partial.keywords, None))  # type: ignore[attr-defined]


def another_keyword_of_a_partial(module: Scaled) -> None:
    module.partial.keywords["by"] = 2.0


def an_attribute_of_a_partial(module: Scaled) -> None:
    module.partial.shift = 2.0  # type: ignore[attr-defined]


CHANGES = (
    another_function_of_a_partial,
    another_keyword_of_a_partial,
    an_attribute_of_a_partial,
    another_power,
    another_child,
    one_child_more,
    another_parameter,
    another_registry,
    the_first_buffer,
    no_bias,
    another_item,
    another_name,
    another_attribute_of_the_class,
    a_hook,
    an_attribute_that_hides_that_of_the_class,
)


@pytest.fixture(autouse=True)
def as_it_was() -> Any:
    global scale
    yield
    scale, Scaled.factor = 1.0, 1.0
    globals().pop("counted", None)


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    walk = ModuleWalk.over

    def counting(self: ModuleWalk, roots: Any) -> Any:
        found.append(roots)
        return walk(self, roots)

    monkeypatch.setattr(ModuleWalk, "over", counting)
    return found


def steps(wrap: Callable[[nn.Module], Any], change: Callable[[Scaled], None], *, is_between: bool) -> list[Any]:
    """Three steps, and the change before the third: in between two of them, or between forward and backward."""
    torch.manual_seed(0)
    module = Scaled()
    fn = wrap(module)
    x = torch.randn(4, 4, requires_grad=True)
    found: list[Any] = []
    for number in range(3):
        if number == 2 and is_between:
            change(module)
        out = fn(x)
        parameters = list(module.parameters())
        if number == 2 and not is_between:
            change(module)
        found += [out, *torch.autograd.grad(out.sum(), [x, *parameters], allow_unused=True)]
    return found


@pytest.fixture(params=["versions of dicts", "their items"])
def what_is_compared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "their items":
        versions = itertools.count()
        for room in (parts, holders):
            monkeypatch.setattr(room, "version_of_dict", lambda items: next(versions))
    return request.param  # type: ignore[no-any-return]


def with_policy(module: nn.Module) -> nn.Module:
    """The module as a region in a model, with a child of its own saved."""
    model = nn.Sequential(module)
    reactivate.apply(model, policies.first_match(policies.save_modules("0.inner"), policies.recompute_modules("0")))
    return model


@pytest.mark.usefixtures("what_is_compared")
@pytest.mark.parametrize("wrap", [reactivate.checkpoint, with_policy], ids=["checkpoint", "apply"])
@pytest.mark.parametrize("is_between", [True, False], ids=["between steps", "before the backward"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_changes_is_seen(
    change: Callable[[Scaled], None], is_between: bool, wrap: Callable[[nn.Module], Any], walks: list[Any]
) -> None:
    global scale
    expected = steps(lambda module: module, change, is_between=is_between)
    scale, Scaled.factor = 1.0, 1.0
    found = steps(wrap, change, is_between=is_between)
    assert_alike(expected, found)
    # Which tensor or which plain value there is makes no difference to the structure.
    values = another_parameter, another_registry, another_power, another_item, another_name
    values = *values, another_keyword_of_a_partial, an_attribute_of_a_partial
    assert len(walks) == 1 + (is_between and change not in values)


def has_versions() -> bool:
    items = {"item": 0}
    return parts.version_of_dict(items) == parts.version_of_dict(items)


@pytest.mark.skipif(not has_versions(), reason="without versions of dicts, items are compared")
def test_items_are_not_compared_as_long_as_nobody_writes_to_a_dict(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    x = torch.randn(4, 4, requires_grad=True)
    fn = reactivate.checkpoint(module)
    fn(x).sum().backward()
    compared: list[Any] = []
    compare = parts.Layout.read

    def counting(self: Any, namespaces: Any) -> Any:
        compared.append(namespaces)
        return compare(self, namespaces)

    monkeypatch.setattr(parts.Layout, "read", counting)
    for _ in range(3):
        fn(x).sum().backward()
    assert not compared
    module.train().eval()
    fn(x).sum().backward()
    assert compared


def test_a_registry_in_another_order(walks: list[Any]) -> None:
    """Of a subclass of `dict`, which can change its order without a new version."""
    module = nn.Linear(4, 4)
    module._parameters = OrderedDict(module._parameters)
    fn = reactivate.checkpoint(
        lambda x: sum(x @ item.mT if item.ndim > 1 else x * item for item in module.parameters())
    )
    x = torch.randn(4, 4, requires_grad=True)
    for number in range(4):
        out = fn(x)
        module._parameters.move_to_end(("bias", "weight")[number % 2], last=False)
        expected = sum(x @ item.mT if item.ndim > 1 else x * item for item in reversed(list(module.parameters())))
        assert_bitwise(expected, out, "out")
        torch.autograd.grad(out.sum(), x)
        assert next(iter(module._parameters)) == ("bias", "weight")[number % 2]


def test_a_name_that_the_first_call_makes() -> None:
    def run(wrap: Callable[[nn.Module], Any]) -> list[Tensor]:
        globals().pop("counted", None)
        fn = wrap(Counting())
        x = torch.randn(4, generator=torch.Generator().manual_seed(0)).requires_grad_()
        found = []
        for _ in range(3):
            out = fn(x)
            found += [out, *torch.autograd.grad(out.sum(), x)]
        assert counted == 3
        return found

    compare(run)


def test_objects_that_change_with_every_call_are_not_remembered_for_ever(walks: list[Any]) -> None:
    module = Scaled()
    fn = reactivate.checkpoint(module)
    x = torch.randn(4, 4, requires_grad=True)
    for number in range(12):
        module.offsets = [float(number)]
        fn(x).sum().backward()
    assert len(walks) == 12
    assert id(module) not in whole_trees.kept


def test_values_that_change_with_every_call_need_no_walk(walks: list[Any]) -> None:
    module = Scaled()
    fn = reactivate.checkpoint(module)
    x = torch.randn(4, 4, requires_grad=True)
    for number in range(4):
        module.power = 10**6 + number
        fn(x).sum().backward()
    assert len(walks) == 1


@pytest.mark.parametrize("is_large", [False, True])
def test_nothing_is_kept_alive(is_large: bool) -> None:
    class Holder(Holding):
        def step(self, x: Tensor, index: int) -> Tensor:
            return self.blocks[index](x)

    holder = Holder(blocks=nn.ModuleList(Scaled() for _ in range(70 if is_large else 2)))
    x = torch.randn(4, 4, requires_grad=True)
    for _ in range(3):
        y = x
        for index in range(2):
            y = reactivate.checkpoint(holder.step)(y, index)
        y.sum().backward()
    del y
    gc.collect()
    trees = single_modules if is_large else whole_trees
    assert trees.kept
    with without_collector():
        weight = weakref.ref(holder.blocks[0].inner.weight)
        holder.blocks[0].inner = nn.Linear(4, 4)
        assert weight() is None
        block = weakref.ref(holder.blocks[1])
        del holder.blocks[1]
        assert block() is None
        everything = weakref.ref(holder)
        del holder
        assert everything() is None


def test_a_policy_that_leads_to_its_model_goes_with_it() -> None:
    model = nn.Sequential(Scaled())

    def recompute_blocks(site: Any, model: nn.Module = model) -> Any:
        return policies.Recompute() if any(site.module is child for child in model) else None

    reactivate.apply(model, recompute_blocks)
    x = torch.randn(4, 4, requires_grad=True)
    for _ in range(3):
        model(x).sum().backward()
    assert id(model[0]) in whole_trees.kept
    weight = weakref.ref(model[0].inner.weight)
    del model, recompute_blocks
    gc.collect()
    assert weight() is None


def test_a_forward_below_a_policy_may_hold_state(walks: list[Any]) -> None:
    """A function of the user's in the place of `forward` is looked at in every call."""

    def run(with_policy: Callable[[nn.Module], Any]) -> list[Tensor]:
        torch.manual_seed(0)
        module, factors = Scaled(), [1.0]
        own = module.forward

        def forward(x: Tensor) -> Tensor:
            factors[0] += 1
            return own(x) * factors[0]

        module.forward = forward
        fn = with_policy(module)
        x = torch.randn(4, 4, requires_grad=True)
        found = []
        for _ in range(3):
            out = fn(x)
            found += [out, *torch.autograd.grad(out.sum(), [x, *module.parameters()])]
        assert factors == [4.0]
        return found

    for one, other in zip(run(lambda module: module), run(with_policy), strict=True):
        assert_bitwise(one, other, "a forward of the user's")
    assert len(walks) == 3


class Counter(nn.Module):
    """Counts its calls, and computes with the number."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("total", torch.zeros(40, 40))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.total += 0.1
        return (x * self.calls + self.total[0, 0]).sin()


class Large(nn.Module):
    """More modules than are noted for every region, and a counter inside of two of them."""

    def __init__(self) -> None:
        super().__init__()
        counter = Counter()
        self.first, self.second = nn.Sequential(nn.Linear(4, 4), counter), nn.Sequential(counter, nn.Linear(4, 4))
        self.others = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.GELU()) for _ in range(40))

    def step(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.second(x)
        for other in self.others[:3]:
            x = other(x)
        return x


def test_the_modules_of_a_large_tree_are_noted_by_small_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that was reached before is not noted again: at that time it held something else."""
    noted: list[int] = []

    class Watched(reached_modules.Moment):
        def __init__(self, holders: Any, tensors: Any, arguments: Any, tree: Any, *more: Any) -> None:
            noted.append(len(tree.modules))
            super().__init__(holders, tensors, arguments, tree, *more)

    def trained(wrap: Callable[..., Any]) -> list[Tensor]:
        torch.manual_seed(0)
        model, found = Large(), []
        for _ in range(3):
            x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
            wrap(model.step)(x).sum().backward()
            found += [
                x.grad,
                torch.tensor(float(model.first[1].calls)),
                *(p.grad for p in model.parameters() if p.grad is not None),
            ]
        return [*found, *model.buffers()]

    expected = trained(lambda fn: fn)
    monkeypatch.setattr(reached_modules, "Moment", Watched)
    for one, other in zip(expected, trained(reactivate.checkpoint), strict=True):
        assert_bitwise(one, other, "a tensor")
    # The model; its first part, whole; of the second what was not reached; the list and a part of it; three blocks, whole.
    assert noted[-9:] == [1, 3, 1, 1, 1, 1, 4, 4, 4]
