"""`checkpoint` of a module is a module: registered, copied, pickled; the original stays plain (Rule 1)."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import reactivate
from reactivate import policies
from reactivate._passes.observing import observed_by

WIDTH = 8


class Block(nn.Module):
    """Dropout, batch norm and an attribute that counts calls."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.count = 0

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.count += 1
        return x + scale * self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))

    def extra(self) -> int:
        return self.count + 100

    @property
    def width(self) -> int:
        return self.up.out_features


class Model(nn.Module):
    """Registers checkpointed blocks as anybody registers a child."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module] = lambda block: block) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.block = wrap(Block())
        self.rest = nn.ModuleList([wrap(Block()) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(self.first(x), scale=0.5)
        for block in self.rest:
            x = block(x)
        return x


class Regions:
    """Counts the regions that it watches."""

    def __init__(self) -> None:
        self.forwards = self.recomputations = 0

    def forward_done(self, record: Any) -> None:
        self.forwards += not reactivate.is_recomputing()

    def recomputation_done(self, record: Any) -> None:
        self.recomputations += 1


def regions_of(call: Callable[[], Tensor]) -> int:
    """Count the regions that a step of `call` makes; each is recomputed once."""
    found = Regions()
    with observed_by(found):
        call().sum().backward()
    assert found.recomputations == found.forwards
    return found.forwards


def batch() -> Tensor:
    return torch.randn(4, WIDTH, requires_grad=True)


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "default": reactivate.checkpoint,
    "policy": lambda block: reactivate.checkpoint(block, policy=policies.save_ops("linear"), name="mine"),
    "modules": lambda block: reactivate.checkpoint(block, policy=policies.save_modules("down")),
}


def case(wrap: Callable[[nn.Module], nn.Module], then: Callable[[Any], Any]) -> Callable[[], oracle.Case]:
    def make() -> oracle.Case:
        model = then(Model(wrap))
        return oracle.Case(model, (batch(),), modules=[model])

    return make


def through_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: list[Callable[[Any], Any]] = [copy.deepcopy, through_pickle, through_a_file]


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
@pytest.mark.parametrize("then", [lambda model: model, *COPIES])
def test_a_registered_view_is_bitwise_the_plain_module(wrap: Any, then: Any) -> None:
    plain, ours = oracle.run(case(lambda block: block, lambda model: model)), oracle.run(case(wrap, then))
    oracle.assert_same(plain, ours)
    assert (ours.regions, ours.recomputations) == (3, 3)
    assert ours.kept_bytes < plain.kept_bytes


@pytest.mark.parametrize("around", [reactivate.checkpoint, lambda model: _applied(model)], ids=["checkpoint", "apply"])
def test_views_inside_of_a_region(around: Any) -> None:
    plain = oracle.run(case(lambda block: block, lambda model: model))
    ours = oracle.run(case(reactivate.checkpoint, around))
    oracle.assert_same(plain, ours)
    assert ours.kept_bytes < plain.kept_bytes


def test_attributes_of_the_class_are_seen_by_a_region_around_the_view() -> None:
    def run(wrap: Any, around: Any) -> list[Tensor]:
        class Counting(nn.Module):
            calls = 0

            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(WIDTH, WIDTH)

            def forward(self, x: Tensor) -> Tensor:
                type(self).calls += 1
                return (self.linear(x) * type(self).calls).sin().exp()

        oracle.seed_everything()
        model = around(nn.Sequential(wrap(Counting()), nn.Tanh()))
        x = batch()
        found = [torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()]) for _ in range(3)]
        assert Counting.calls == 3
        return [gradient for step in found for gradient in step]

    expected = run(lambda module: module, lambda module: module)
    for around in (lambda module: module, reactivate.checkpoint):
        for one, other in zip(expected, run(reactivate.checkpoint, around), strict=True):
            oracle.assert_bitwise(one, other, "gradient")


def _applied(model: nn.Module) -> nn.Module:
    reactivate.apply(model, policies.full())
    return model


def test_it_is_a_module_of_that_class_with_those_names() -> None:
    plain, ours = Model(), Model(reactivate.checkpoint)
    assert isinstance(ours.block, Block) and ours.block.__class__ is Block
    assert list(ours.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in ours.named_modules()] == [name for name, _ in plain.named_modules()]
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert repr(ours) == repr(plain)
    assert inspect.signature(ours.block.forward) == inspect.signature(plain.block.forward)
    assert ours.block.extra() == 100 and ours.block.width == 16
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    before = ours.block.up.weight.detach().clone()
    ours(batch()).sum().backward()
    optimizer.step()
    assert not torch.equal(before, ours.block.up.weight)


def test_the_original_stays_plain() -> None:
    block = Block()
    view = reactivate.checkpoint(block)
    assert regions_of(lambda: view(batch())) == 1
    assert regions_of(lambda: block(batch())) == 0
    assert regions_of(lambda: view.forward(batch())) == 0
    assert view.__wrapped__ is block
    assert block.count == view.count == 3
    assert type(block) is Block


def test_what_is_set_on_one_is_set_on_both() -> None:
    block = Block()
    view = reactivate.checkpoint(block)
    view.eval()
    assert not block.training and not block.dropout.training
    block.train()
    assert view.training
    view.to(torch.float64)
    assert block.up.weight.dtype is torch.float64
    block.load_state_dict({name: torch.zeros_like(value) for name, value in view.state_dict().items()})
    assert not view.up.weight.any()
    view.extra_layer = nn.Linear(2, 2)
    block.register_parameter("bias", nn.Parameter(torch.zeros(3)))
    block.register_buffer("noise", torch.zeros(3))
    assert block.extra_layer is view.extra_layer and view.bias is block.bias and view.noise is block.noise
    del view.extra_layer
    assert not hasattr(block, "extra_layer")
    view.requires_grad_(False)
    assert not any(parameter.requires_grad for parameter in block.parameters())


@pytest.mark.parametrize("registered_on", ["view", "original"])
def test_hooks_fire_once_for_either(registered_on: str) -> None:
    block = Block()
    view = reactivate.checkpoint(block)
    seen: list[str] = []
    owner = view if registered_on == "view" else block
    owner.register_forward_pre_hook(lambda *_: seen.append("pre"))
    owner.register_forward_hook(lambda *_: seen.append("post"))
    assert regions_of(lambda: view(batch())) == 1
    assert seen == ["pre", "post"]
    assert regions_of(lambda: block(batch())) == 0
    assert len(seen) == 4


@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_has_a_module_and_options_of_its_own(copied: Any) -> None:
    block = Block()
    view = reactivate.checkpoint(block, policy=policies.save_ops("linear"), early_stop=False, name="mine")
    twin = copied(view)
    assert isinstance(twin, Block) and twin.__wrapped__ is not block
    assert twin.up.weight is not block.up.weight and torch.equal(twin.up.weight, block.up.weight)
    settings = twin._reactivate_region.settings
    assert (settings["early_stop"], settings["name"]) == (False, "mine")
    assert settings["policy"] == policies.save_ops("linear")
    assert regions_of(lambda: twin(batch())) == 1
    both = copied([block, view])
    assert both[1].__wrapped__ is both[0]
    assert copy.copy(view).up is block.up


def test_a_view_of_a_view_is_a_region_in_a_region() -> None:
    block = Block()
    view = reactivate.checkpoint(reactivate.checkpoint(block))
    assert isinstance(view, Block)
    found = Regions()
    x = batch()
    with observed_by(found):
        view(x).sum().backward()
    assert (found.forwards, found.recomputations) == (2, 1)
    assert x.grad is not None and block.count == 1


def test_views_are_freed_without_the_collector() -> None:
    block = Block()
    view = reactivate.checkpoint(block)
    view(batch()).sum().backward()
    gone = [weakref.ref(view), weakref.ref(block), weakref.ref(block.up)]
    gc.disable()
    try:
        del view, block
        assert not [reference for reference in gone if reference() is not None]
    finally:
        gc.enable()


@pytest.mark.parametrize("changed", ["view", "original"])
def test_a_class_that_changes_changes_for_both(changed: str) -> None:
    class Double(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    linear = nn.Linear(WIDTH, WIDTH)
    view = reactivate.checkpoint(linear)
    parametrize.register_parametrization(view if changed == "view" else linear, "weight", Double())
    x = batch()
    assert torch.equal(view(x), linear(x))
    assert regions_of(lambda: view(x)) == 1
    assert isinstance(view, type(linear)) and parametrize.is_parametrized(view)
    parametrize.remove_parametrizations(view, "weight")
    assert type(linear) is nn.Linear
    assert regions_of(lambda: view(x)) == 1


def test_a_lazy_module() -> None:
    lazy = nn.LazyLinear(3)
    model = nn.Sequential(reactivate.checkpoint(lazy), nn.Tanh())
    model(batch())
    assert type(lazy) is nn.Linear and isinstance(model[0], nn.Linear)
    assert regions_of(lambda: model(batch())) == 1


def test_a_class_that_registers_those_derived_from_it_or_has_its_own_call() -> None:
    registered: list[str] = []

    class Registering(nn.Module):
        def __init_subclass__(cls, *, key: str) -> None:
            registered.append(key)

        def __call__(self, x: Tensor) -> Tensor:
            return super().__call__(x) * 2

        def forward(self, x: Tensor) -> Tensor:
            return x.sin().exp()

    class Derived(Registering, key="one"):
        pass

    module = Derived()
    view = reactivate.checkpoint(module)
    x = batch()
    assert registered == ["one"]
    assert torch.equal(view(x), module(x))
    assert regions_of(lambda: view(x)) == 1


def test_modules_of_other_kinds() -> None:
    class Slotted(nn.Module):
        __slots__ = ("extra",)

        def forward(self, x: Tensor) -> Tensor:
            return x.sin().exp()

    assert regions_of(lambda: reactivate.checkpoint(Slotted())(batch())) == 1
    script = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    view = reactivate.checkpoint(script)
    assert isinstance(view, torch.jit.ScriptModule)
    x = batch()
    assert torch.equal(view(x), script(x))
    assert regions_of(lambda: view(x)) == 1


def test_containers_and_compiled_modules() -> None:
    x = batch()
    assert torch.equal(reactivate.checkpoint(nn.Sequential())(x), x)
    chain = reactivate.checkpoint(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    assert len(chain) == 2 and isinstance(chain[1], nn.Tanh)
    compiled = reactivate.checkpoint(torch.compile(chain.__wrapped__, backend="eager"))
    assert regions_of(lambda: compiled(x)) == 1
    traced = reactivate.checkpoint(torch.fx.symbolic_trace(chain.__wrapped__))
    assert regions_of(lambda: traced(x)) == 1
    torch.compiler.reset()


def test_the_blocks_of_a_model_are_those_of_the_originals() -> None:
    model = nn.Sequential(Block(), reactivate.checkpoint(Block()), Block())
    handle = reactivate.apply(model, policies.full())
    assert handle.regions == ("0", "1", "2")
    handle.remove()
    assert bool(reactivate.verify(Model(reactivate.checkpoint), batch()))


def test_explain_names_a_registered_view() -> None:
    explanation = reactivate.explain(Model(reactivate.checkpoint), batch())
    assert [(entry.path, entry.name) for entry in explanation.regions] == [
        ("block", "Block"),
        ("rest.0", "Block"),
        ("rest.1", "Block"),
    ]


@pytest.mark.parametrize("fullgraph", [False, True])
def test_under_torch_compile(fullgraph: bool) -> None:
    torch.compiler.reset()

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(torch.tanh(self.up(x)))

    model = nn.Sequential(reactivate.checkpoint(Plain()), reactivate.checkpoint(Plain()))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)
    x = batch()
    expected = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    found = torch.autograd.grad(compiled(x).square().sum(), [x, *model.parameters()])
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other)  # a compiler may reorder
    torch.compiler.reset()


def test_methods_that_are_regions_under_torch_compile() -> None:
    class WithMethods(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.held = reactivate.checkpoint(squashed)

        @reactivate.checkpoint
        def method(self, x: Tensor) -> Tensor:
            return self.linear(x).sin()

        def forward(self, x: Tensor) -> Tensor:
            return self.held(decorated(self.method(x)))

    torch.compiler.reset()
    model = WithMethods()
    x = batch()
    assert regions_of(lambda: model(x)) == 3
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))  # a compiler may reorder
    compiled(x).sum().backward()
    torch.compiler.reset()


# -- functions --------------------------------------------------------------------------------------------------------


def squashed(x: Tensor, scale: float = 1.0) -> Tensor:
    """Squash."""
    return (x * scale).sin().exp()


@reactivate.checkpoint
def decorated(x: Tensor) -> Tensor:
    return x.sin().exp()


class Owner:
    @reactivate.checkpoint
    def method(self, x: Tensor) -> Tensor:
        return x.sin().exp()


since_2_13 = pytest.mark.skipif(torch.__version__ < (2, 13), reason="before, dynamo needs a plain function")


@since_2_13
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, through_pickle])
def test_a_checkpointed_function_is_copied_where_the_function_is(copied: Any) -> None:
    fn = reactivate.checkpoint(squashed, name="mine")
    twin = copied(fn)
    assert twin.__wrapped__ is squashed and twin.settings["name"] == "mine"
    assert regions_of(lambda: twin(batch(), scale=2.0)) == 1
    assert copied(decorated) is decorated
    assert regions_of(lambda: copied(Owner()).method(batch())) == 1
    block = Block()
    bound = copied(reactivate.checkpoint(block.forward))
    assert regions_of(lambda: bound(batch())) == 1


def test_a_function_that_cannot_be_pickled() -> None:
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(reactivate.checkpoint(lambda x: x))


def test_a_checkpointed_function_looks_like_the_function() -> None:
    fn = reactivate.checkpoint(squashed)
    assert (fn.__name__, fn.__doc__, fn.__module__) == ("squashed", "Squash.", __name__)
    assert inspect.signature(fn) == inspect.signature(squashed)
    assert fn.__wrapped__ is squashed
