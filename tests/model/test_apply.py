"""`reactivate.apply`: in place, nothing renamed, copied with the model, undone by its handle (Rules 17, 22)."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

import oracle
import pytest
import torch
from journal import Journal
from several import each
from torch import Tensor, nn

import reactivate
from reactivate import policies
from reactivate.errors import UsageError

WIDTH = 16


class Block(nn.Module):
    """A residual block with dropout and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x + scale * self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(blocks)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return x


KEEP_LINEAR = policies.first_match(policies.save_ops("linear", within="*.up"), policies.full())
KEEP_MODULES = policies.first_match(policies.save_modules("*.down"), policies.full())
POLICIES = {"full": policies.full(), "ops": KEEP_LINEAR, "modules": KEEP_MODULES}


def case(change: Callable[[Model], Any] = lambda model: model) -> Callable[[], oracle.Case]:
    """The model after `change`, with its argument. Gradients and buffers of the result are compared."""

    def make() -> oracle.Case:
        model = change(Model())
        inner = getattr(model, "_orig_mod", model)
        return oracle.Case(model, (torch.randn(8, WIDTH, requires_grad=True),), modules=[inner])

    return make


def check(change: Callable[[Model], Any], regions: int = 4) -> None:
    """The changed model does what the plain one does, by regions, with less kept."""
    plain, ours = oracle.run(case()), oracle.run(case(change))
    oracle.assert_same(plain, ours)
    assert (ours.regions, ours.recomputations) == (regions, regions)
    assert ours.kept_bytes < plain.kept_bytes


def applied(policy: Any, then: Callable[[Model], Any] = lambda model: model) -> Callable[[Model], Any]:
    def change(model: Model) -> Any:
        reactivate.apply(model, policy)
        return then(model)

    return change


@pytest.mark.parametrize("name", POLICIES)
def test_bitwise(name: str) -> None:
    check(applied(POLICIES[name]))


@pytest.mark.parametrize("name", POLICIES)
def test_nothing_is_renamed(name: str) -> None:
    model, before = Model(), Model()
    handle = reactivate.apply(model, POLICIES[name])
    assert list(model.state_dict()) == list(before.state_dict())
    assert [path for path, _ in model.named_modules()] == [path for path, _ in before.named_modules()]
    assert [path for path, _ in model.named_parameters()] == [path for path, _ in before.named_parameters()]
    assert all(type(one) is type(other) for one, other in zip(model.modules(), before.modules()))
    model.load_state_dict(before.state_dict())
    handle.remove()
    assert all(vars(one).keys() == vars(other).keys() for one, other in zip(model.modules(), before.modules()))


def through_pickle(model: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(model))


def through_a_file(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle, through_a_file])
@pytest.mark.parametrize("name", POLICIES)
def test_a_copy_is_applied_too(name: str, copied: Callable[[Any], Any]) -> None:
    """Bound to the copy, also when the original is gone."""
    check(applied(POLICIES[name], copied))
    model = Model()
    handle = reactivate.apply(model, POLICIES[name])
    twin = copied(model)
    handles = [handle, reactivate.Handle.of(twin)]
    assert handles[1] is not None and handles[1] is not handle
    assert (handles[1].regions, handles[1].saved) == (handle.regions, handle.saved)
    handle.remove()
    assert reactivate.Handle.of(model) is None and reactivate.Handle.of(twin) is handles[1]
    handles[1].remove()
    assert reactivate.Handle.of(twin) is None


def test_what_stands_in_the_place_of_a_forward_looks_like_it() -> None:
    plain, model = Model(), Model()
    reactivate.apply(model, policies.full())
    before, after = plain.layers[0].forward, model.layers[0].forward
    for name in ("__name__", "__qualname__", "__module__", "__doc__", "__annotations__"):
        assert getattr(after, name) == getattr(before, name)
    assert inspect.signature(after) == inspect.signature(before)


def bind_to_modules(model: Model) -> Model:
    """Take the function of each method and bind it to the module, as accelerate does to what it prepares."""
    for module in (model, *model.layers):
        function = getattr(module.forward, "__func__", None)
        module.forward = MethodType(function, module)
    return model


@each("name", POLICIES)
def test_a_forward_that_is_taken_out_of_its_method(name: str) -> None:
    ours = oracle.run(case(lambda model: bind_to_modules(applied(POLICIES[name])(model))))
    oracle.assert_same(oracle.run(case()), ours)


def test_a_forward_that_is_taken_out_of_its_method_in_a_copy_is_refused() -> None:
    model = Model()
    reactivate.apply(model, policies.full())
    with pytest.raises(UsageError, match=r"Block\.forward was taken out of its method"):
        bind_to_modules(copy.deepcopy(model))(torch.randn(2, WIDTH))


def test_options_are_copied() -> None:
    model = Model()
    reactivate.apply(model, policies.full(), guards=reactivate.guards.DEFAULT.without("rng"), early_stop=False)
    for twin in (copy.deepcopy(model), through_pickle(model)):
        options = twin.layers[0].forward.__self__.options
        assert options.early_stop is False
        assert not [guard for guard in options.guards if guard.name == "rng"]


def test_a_second_policy_is_refused_and_names_the_first() -> None:
    model = Model()
    handle = reactivate.apply(model, policies.full())
    with pytest.raises(UsageError, match=r"Handle\(full\(\), regions=4\) \(at `layers\.0`\)"):
        reactivate.apply(model, KEEP_LINEAR)
    with pytest.raises(UsageError, match="already"):
        reactivate.apply(nn.Sequential(model), policies.recompute_modules("first"))
    with pytest.raises(UsageError, match=r"replace=True\); with policies\.none\(\) that removes it"):
        reactivate.apply(model, policies.full(), early_stop=False)
    handle.remove()
    handle.remove()
    assert "removed" in repr(handle) and "recomputed" not in str(handle)
    assert "removed" in str(handle)
    reactivate.apply(model, KEEP_LINEAR)


@pytest.mark.parametrize("name", POLICIES)
def test_the_same_call_again_changes_nothing(name: str) -> None:
    def twice(model: Model) -> Model:
        handle = reactivate.apply(model, POLICIES[name])
        forwards = {path: module.forward for path, module in model.named_modules()}
        again = policies.full() if name == "full" else copy.deepcopy(POLICIES[name])
        assert reactivate.apply(model, again) is handle
        assert all(
            module.forward is forwards[path] or path not in handle.regions for path, module in model.named_modules()
        )
        return model

    check(twice)


def test_the_same_policy_on_a_model_that_has_grown_is_refused() -> None:
    """The handle that it has is not that of the new layer."""
    model = Model()
    handle = reactivate.apply(model, policies.full())
    model.layers.append(Block())
    with pytest.raises(UsageError, match="selects other modules"):
        reactivate.apply(model, policies.full())
    with pytest.raises(UsageError, match="by other paths"):
        reactivate.apply(nn.Sequential(model), policies.full())
    assert reactivate.apply(model, policies.full(), replace=True).regions == (*handle.regions, "layers.4")


def test_the_end_of_a_context_leaves_what_was_there_before() -> None:
    model = Model()
    handle = reactivate.apply(model, policies.full())
    with reactivate.apply(model, policies.full()) as same:
        assert same is handle
    assert reactivate.Handle.of(model) is handle
    reactivate.apply(model, policies.full())
    handle.remove()
    assert reactivate.Handle.of(model) is None


def test_the_model_is_freed_without_the_collector() -> None:
    model = Model()
    handle = reactivate.apply(model, KEEP_MODULES)
    model(torch.randn(8, WIDTH)).sum().backward()
    gone = [weakref.ref(module) for module in model.modules()]
    gc.disable()
    try:
        del model
        assert not [reference for reference in gone if reference() is not None]
    finally:
        gc.enable()
    handle.remove()


def test_a_forward_of_the_users_own_is_kept() -> None:
    """A library that put its own `forward` on the instance finds it again."""
    model = Model()
    calls = Journal()
    own = model.layers[0].forward

    def noted(*args: Any, **kwargs: Any) -> Any:
        calls.append("called")
        return own(*args, **kwargs)

    model.layers[0].forward = noted
    handle = reactivate.apply(model, policies.full())
    model(torch.randn(8, WIDTH)).sum().backward()
    assert len(calls) == 2
    handle.remove()
    assert model.layers[0].forward is noted


def test_hooks_of_a_region_fire_once() -> None:
    model = Model()
    seen: list[bool] = []
    model.layers[1].register_forward_hook(lambda *_: seen.append(reactivate.is_recomputing()))
    reactivate.apply(model, policies.full())
    model(torch.randn(8, WIDTH)).sum().backward()
    assert seen == [False]


def test_layers_do_not_depend_on_other_models() -> None:
    policy = policies.recompute_every(3, offset=1)
    for _ in range(3):
        assert reactivate.apply(Model(6), policy).regions == ("layers.1", "layers.4")


@each(
    ("policy", "says"),
    [
        (policies.recompute_modules("blocks.*"), "layers.0, layers.1"),
        (policies.recompute_modules(nn.Conv2d), "matches nothing"),
        (policies.first_match(policies.save_modules("*.out"), policies.full()), r"save_modules\('\*.out'\) matches"),
        (policies.save_ops("linear"), "makes no region"),
        (policies.save_modules("*.up"), "no module is recomputed"),
        (policies.first_match(policies.save_modules("first"), policies.full()), r"save_modules\('first'\) matches"),
    ],
)
def test_what_matches_nothing_is_refused_at_once(policy: Any, says: str) -> None:
    model = Model()
    with pytest.raises(UsageError, match=says):
        reactivate.apply(model, policy)
    assert reactivate.Handle.of(model) is None


@pytest.mark.parametrize("part", [policies.save_ops("einsum"), policies.save_names("query")])
def test_calls_that_match_nothing_are_told_when_all_regions_have_run(part: Any) -> None:
    model = Model()
    reactivate.apply(model, policies.first_match(part, policies.full()))
    with pytest.warns(UserWarning, match="matches nothing"):
        model(torch.randn(8, WIDTH))
    with pytest.warns(UserWarning, match="matches nothing"):
        reactivate.checkpoint(Block(), policy=part)(torch.randn(8, WIDTH))


def test_not_a_model_and_not_a_policy() -> None:
    with pytest.raises(UsageError, match=r"checkpoint\(\)"):
        reactivate.apply(torch.sin, policies.full())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="a function of a site"):
        reactivate.apply(Model(), "full")  # type: ignore[arg-type]


class Cached(nn.Module):
    """A block that keeps its last rows in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.rows = torch.zeros(1, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        self.rows = torch.cat([self.rows, h.detach()])[-5:]
        return h + self.rows.mean(0)


@pytest.mark.parametrize("held", ["forward", "weakly"])
def test_a_region_finds_the_module_behind_what_it_calls(held: str) -> None:
    def run(checkpoint: Callable[[Any], Any], is_applied: bool) -> tuple[list[Tensor], int]:
        torch.manual_seed(0)
        model, x, calls = Cached(), torch.randn(3, WIDTH, requires_grad=True), Journal()
        if is_applied:
            reactivate.apply(nn.Sequential(model), policies.recompute_modules("0"))
        weak = weakref.ref(model)
        inner = model.forward if held == "forward" else lambda h: weak()(h)  # type: ignore[misc]

        def outer(h: Tensor) -> Tensor:
            calls.append(None)
            return checkpoint(inner)(h * 2)  # type: ignore[no-any-return]

        out = model(checkpoint(outer)(x))
        out.square().mean().backward()
        return [out.detach(), model.rows, x.grad, *(p.grad for p in model.parameters())], len(calls)  # type: ignore[list-item]

    plain, _ = run(lambda fn: fn, False)
    ours, calls = run(reactivate.checkpoint, True)
    assert calls > 1, "it was recomputed"
    assert all(map(torch.equal, plain, ours))


class Mixed(Model):
    """Layers with a norm between them, and one of another class."""

    def __init__(self) -> None:
        super().__init__(3)
        self.layers.append(nn.LayerNorm(WIDTH))
        self.layers.append(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_handle_says_what_was_done() -> None:
    handle = reactivate.apply(Mixed(), policies.recompute_every(2))
    assert handle.regions == ("layers.0", "layers.2")
    assert set(handle.kept) == {"layers.1", "layers.3", "layers.4"}
    assert str(handle).splitlines() == [
        "recompute_every(2): 2 regions, recomputed in backward.",
        "  Block: layers.0, layers.2",
        "Beside the regions, not recomputed:",
        "  layers.1, layers.4: the policy does not select them",
        "  layers.3: single layers without modules inside, of which recomputation would drop little",
    ]
    assert repr(handle) == "Handle(recompute_every(2), regions=2)"
    saved = reactivate.apply(Model(), KEEP_MODULES)
    assert "Saved inside of regions:\n  layers.0.down, layers.1.down" in str(saved)
    assert saved.kept == {}


def test_a_copy_says_what_was_done() -> None:
    model = Mixed()
    handle = reactivate.apply(model, policies.full())
    for twin in (copy.deepcopy(model), through_pickle(model)):
        assert str(reactivate.Handle.of(twin)) == str(handle)


def test_a_policy_is_replaced() -> None:
    model = Model()
    first = reactivate.apply(model, policies.full(), replace=True)
    second = reactivate.apply(model, policies.recompute_every(2), replace=True)
    assert reactivate.Handle.of(model) is second
    first.remove()
    assert reactivate.Handle.of(model) is second
    with pytest.raises(UsageError, match="matches nothing"):
        reactivate.apply(model, policies.recompute_modules("nowhere"), replace=True)
    assert reactivate.Handle.of(model) is second
    reactivate.apply(model, policies.none(), replace=True)
    assert reactivate.Handle.of(model) is None
    assert all("forward" not in vars(module) for module in model.modules())


def test_what_the_refusal_of_a_second_policy_says_to_write_removes_every_first_one() -> None:
    model = Model()
    for layer in (model.layers[0], model.layers[1]):
        reactivate.apply(layer, policies.recompute_modules(nn.Linear))
    with pytest.raises(UsageError, match=r"replace=True\); with policies.none\(\) that removes it"):
        reactivate.apply(model, policies.full())
    for _ in range(2):  # the second time there is nothing to remove
        reactivate.apply(model, policies.none(), replace=True)
        assert reactivate.Handle.of(model) is None


def test_exceptions_are_taken_away_from_saved_modules() -> None:
    policy = policies.exclude(policies.save_modules("*.up", "*.down"), policies.save_modules("*.down"))
    handle = reactivate.apply(Model(), policies.first_match(policy, policies.full()))
    assert handle.saved and all(path.endswith(".up") for path in handle.saved)


def test_a_part_of_a_larger_model_keeps_its_policy() -> None:
    model = Model()
    handle = reactivate.apply(model, policies.full())
    with pytest.raises(UsageError, match="larger model"):
        reactivate.apply(model.layers[0], policies.recompute_modules(nn.Linear), replace=True)
    assert reactivate.Handle.of(model) is handle and reactivate.Handle.of(model.layers[0]) is handle


def test_a_handle_is_a_context() -> None:
    model = Model()
    with reactivate.apply(model, policies.full()) as handle:
        assert reactivate.Handle.of(model) is handle
    assert reactivate.Handle.of(model) is None
    with pytest.raises(KeyError), reactivate.apply(model, policies.full()):
        raise KeyError
    assert reactivate.Handle.of(model) is None


def test_verify_with_a_policy_leaves_the_applied_one() -> None:
    model = Model()
    handle = reactivate.apply(model, policies.full())
    forward = model.layers[0].forward
    verdict = reactivate.verify(model, torch.randn(8, WIDTH), policy=policies.recompute_every(2))
    assert verdict and verdict.regions == 2
    assert reactivate.Handle.of(model) is handle and model.layers[0].forward is forward
    assert reactivate.verify(model, torch.randn(8, WIDTH)).regions == 4


def test_the_handle_of_what_is_no_model_is_refused() -> None:
    with pytest.raises(UsageError, match=r"Handle\.of takes the model .*; got None"):
        reactivate.Handle.of(None)  # type: ignore[arg-type]
