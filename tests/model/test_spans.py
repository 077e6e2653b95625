"""Spans of a `Sequential` as regions: bitwise, with nothing renamed, copied and removed with the model (Rule 22)."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
from journal import Journal
from torch import Tensor, nn

import reactivate
from reactivate import policies
from reactivate._modules.standin import own_forward_of
from reactivate.errors import UsageError

WIDTH = 16
DEPTH = 8


class Block(nn.Module):
    """A residual block with dropout and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.Sequential(*(Block() for _ in range(DEPTH)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.first(x))


class Indexed(Model):
    """A member is called once more, and a slice, outside of the `Sequential`."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[5:7](self.layers[1](super().forward(x)))


class Reversed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for member in reversed(self):
            x = member(x)
        return x


class Iterated(nn.Sequential):
    def __iter__(self) -> Any:
        return reversed(list(self._modules.values()))


class Inherited(nn.Sequential):
    """A class of the user's with the forward of a `Sequential`."""

    def __init__(self, depth: int) -> None:
        super().__init__(*(Block() for _ in range(depth)))


SPANS = policies.recompute_modules("layers[0:3]", "layers[4:8]")
NESTED = policies.recompute_modules("layers[0:8]", "layers.1", "layers.5", "*.up")
AROUND = policies.recompute_modules("layers", "layers[1:4]", "layers[4:7]")
SAVING = policies.first_match(policies.save_ops("linear", within="*.down"), SPANS)
SAVING_MODULES = policies.first_match(policies.save_modules("layers.*.down"), SPANS)
CASES: dict[str, tuple[Any, int]] = {
    "spans": (SPANS, 2),
    "nested": (NESTED, 11),
    "around": (AROUND, 3),
    "ops": (SAVING, 2),
    "modules": (SAVING_MODULES, 2),
    "one member": (policies.recompute_modules("layers[2:3]"), 1),
    "by a pattern": (policies.recompute_modules("*[2:6]"), 1),
    "host": (policies.recompute_modules("layers[0:8]", inputs=reactivate.storage.Host()), 1),
}


def case(change: Callable[[Any], Any] = lambda model: model, make: Callable[[], Any] = Model) -> Any:
    def made() -> oracle.Case:
        model = change(make())
        return oracle.Case(model, (torch.randn(8, WIDTH, requires_grad=True),), modules=[model])

    return made


def check(change: Callable[[Any], Any], regions: int, make: Callable[[], Any] = Model) -> None:
    """The changed model does what the plain one does, by regions, with less kept."""
    plain, ours = oracle.run(case(make=make)), oracle.run(case(change, make))
    oracle.assert_same(plain, ours)
    assert ours.recomputations == regions
    assert ours.kept_bytes < plain.kept_bytes


def applied(policy: Any, then: Callable[[Any], Any] = lambda model: model) -> Callable[[Any], Any]:
    def change(model: nn.Module) -> Any:
        reactivate.apply(model, policy)
        return then(model)

    return change


def through_pickle(model: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("name", CASES)
def test_bitwise(name: str) -> None:
    policy, regions = CASES[name]
    check(applied(policy), regions)


def test_a_span_keeps_one_input() -> None:
    """Less than all of its members as regions: the inputs of the others are recomputed."""
    span = oracle.run(case(applied(policies.recompute_modules("layers[0:8]"))))
    blocks = oracle.run(case(applied(policies.full())))
    assert (span.regions, blocks.regions) == (1, DEPTH)
    input_bytes = 8 * WIDTH * 4
    assert blocks.kept_bytes - span.kept_bytes >= (DEPTH - 1) * input_bytes


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_renamed(name: str) -> None:
    model, before = Model(), Model()
    handle = reactivate.apply(model, CASES[name][0])
    model(torch.randn(4, WIDTH)).sum().backward()
    assert list(model.state_dict()) == list(before.state_dict())
    assert [path for path, _ in model.named_modules()] == [path for path, _ in before.named_modules()]
    assert all(type(one) is type(other) for one, other in zip(model.modules(), before.modules()))
    assert repr(model) == repr(before)
    handle.remove()
    assert all(vars(one).keys() == vars(other).keys() for one, other in zip(model.modules(), before.modules()))


@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle])
@pytest.mark.parametrize("name", ["spans", "around"])
def test_a_copy_is_applied_too(name: str, copied: Callable[[Any], Any]) -> None:
    policy, regions = CASES[name]
    check(applied(policy, copied), regions)
    model = Model()
    handle = reactivate.apply(model, policy)
    twin = copied(model)
    twins = reactivate.Handle.of(twin)
    assert twins is not None and twins is not handle and twins.regions == handle.regions
    handle.remove()
    assert reactivate.Handle.of(model) is None and reactivate.Handle.of(twin) is twins
    twins.remove()
    assert "forward" not in vars(twin.layers)


def test_calls_by_index_and_slice_are_plain() -> None:
    """Only the `Sequential`'s own calls have regions."""
    check(applied(SPANS), 2, Indexed)


def test_hooks_run_as_around_and_inside_of_a_region() -> None:
    """Hooks of the `Sequential` run once; those of a member again when it is recomputed, as inside of any region."""
    ours = Model()
    seen = {name: Journal() for name in ("sequential", "member", "before")}

    def hook(name: str) -> Callable[..., None]:
        return lambda *_: seen[name].append(reactivate.is_recomputing())

    ours.layers.register_forward_hook(hook("sequential"))
    ours.layers[1].register_forward_hook(hook("member"))
    ours.layers[1].register_forward_pre_hook(hook("before"))
    reactivate.apply(ours, policies.recompute_modules("layers[0:3]", "layers[4:8]"))
    ours(torch.randn(8, WIDTH)).sum().backward()
    found = {name: list(journal) for name, journal in seen.items()}
    assert found == {"sequential": [False], "member": [False, True], "before": [False, True]}


def test_hooks_that_change_what_passes() -> None:
    def hooked(model: Any) -> Any:
        model.layers.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        model.layers[1].register_forward_hook(lambda module, args, out: out.sin())
        model.layers[2].register_full_backward_hook(lambda module, given, made: tuple(item * 3 for item in given))
        return model

    plain = oracle.run(case(hooked))
    ours = oracle.run(case(lambda model: applied(SPANS)(hooked(model))))
    oracle.assert_same(plain, ours)
    assert ours.regions == 2


def test_members_that_are_replaced_later() -> None:
    def replaced(model: Any) -> Any:
        torch.manual_seed(1)
        model(torch.randn(4, WIDTH))
        model.layers[1] = Block()
        return model

    plain, ours = oracle.run(case(replaced)), oracle.run(case(applied(SPANS, replaced)))
    oracle.assert_same(plain, ours)
    assert ours.regions == 2 and ours.kept_bytes < plain.kept_bytes


def test_a_member_that_is_there_twice() -> None:
    def make() -> nn.Module:
        one = Block()
        return nn.Sequential(one, Block(), one, Block())

    check(applied(policies.recompute_modules("[0:4]")), 1, make)
    check(applied(policies.recompute_modules("[0:2]", "[2:4]")), 2, make)


@pytest.mark.parametrize(
    "make", [lambda: Inherited(6), lambda: nn.Sequential(nn.Sequential(Block(), Block()), Block())]
)
def test_the_model_itself_may_be_the_sequential(make: Callable[[], Any]) -> None:
    check(applied(policies.recompute_modules("[0:2]")), 1, make)


def test_members_by_names() -> None:
    def make() -> nn.Module:
        return nn.Sequential()

    def named() -> nn.Module:
        model = make()
        for name in ("stem", "body", "neck"):
            model.add_module(name, Block())
        return model

    check(applied(policies.recompute_modules("[0:2]")), 1, named)


def test_lists_and_dicts_of_tensors_pass() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, pair: Any) -> Any:
            one, other = (pair, pair) if isinstance(pair, Tensor) else pair
            return self.block(one), other * 2

    class Ends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(Pair() for _ in range(4)))

        def forward(self, x: Tensor) -> Tensor:
            one, other = self.layers(input=x)
            return one + other

    check(applied(policies.recompute_modules("layers[1:4]")), 1, Ends)


@pytest.mark.parametrize(
    ("make", "span", "says"),
    [
        (
            lambda: nn.ModuleList([Block(), Block()]),
            "layers[0:2]",
            "is a ModuleList, whose members are called one by one",
        ),
        (lambda: Reversed(Block(), Block()), "layers[0:2]", "is a Reversed with a forward of its own"),
        (lambda: Iterated(Block(), Block()), "layers[0:2]", "is a Iterated with a forward of its own"),
        (lambda: Block(), "layers[0:2]", "is a Block, and only a Sequential"),
        (lambda: nn.Sequential(Block(), Block()), "layers[0:3]", "has 2 members"),
        (lambda: nn.Sequential(Block(), Block()), "layer[0:2]", "matches nothing"),
        (lambda: nn.ModuleList([Block(), Block()]), "*[0:2]", "matches nothing"),
    ],
)
def test_what_cannot_be_a_span_is_refused(make: Callable[[], Any], span: str, says: str) -> None:
    model = nn.ModuleDict({"layers": make()})
    with pytest.raises(UsageError, match=says):
        reactivate.apply(model, policies.recompute_modules(span))
    assert reactivate.Handle.of(model) is None


def test_a_forward_on_the_instance_is_refused() -> None:
    model = Model()
    model.layers.forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(UsageError, match="with a forward of its own"):
        reactivate.apply(model, SPANS)


def test_spans_that_overlap_are_refused() -> None:
    with pytest.raises(UsageError, match=r"'layers\[0:3\]' and 'layers\[2:4\]' overlap"):
        reactivate.apply(Model(), policies.recompute_modules("layers[0:3]", "layers[2:4]"))


@pytest.mark.parametrize(
    "text", ["layers[:3]", "layers[3:]", "layers[-3:8]", "layers[3:3]", "layers[0:8:2]", "layers[0:8].0"]
)
def test_what_is_no_span_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is no span"):
        policies.recompute_modules(text)


def test_only_recompute_modules_takes_spans() -> None:
    with pytest.raises(UsageError, match=r"Name the members: 'layers\.\*'"):
        policies.save_modules("layers[0:3]")


def test_a_handle_and_explain_name_spans() -> None:
    model = Model()
    handle = reactivate.apply(model, SPANS)
    assert handle.regions == ("layers[0:3]", "layers[4:8]")
    assert handle.kept == {"layers.3": "the policy does not select them"}
    found = reactivate.explain(model, (torch.randn(4, WIDTH),))
    assert [entry.path for entry in found.regions] == ["layers[0:3]", "layers[4:8]"]
    assert reactivate.apply(model, SPANS) is handle
    with pytest.raises(UsageError, match="a policy is applied"):
        reactivate.apply(model, AROUND)
    around = reactivate.apply(model, AROUND, replace=True)
    assert around.regions == ("layers[1:4]", "layers[4:7]", "layers")
    assert reactivate.apply(model, AROUND) is around
    placed = vars(model.layers)["forward"]
    with pytest.raises(UsageError, match="matches nothing"):
        reactivate.apply(model, policies.recompute_modules("nowhere"), replace=True)
    assert vars(model.layers)["forward"] is placed
    assert not placed.hides_users and own_forward_of(model.layers) is None
    verdict = reactivate.verify(model, (torch.randn(4, WIDTH),), policy=SPANS)  # without the one that is applied
    assert verdict.is_same and verdict.regions == 2
    assert vars(model.layers)["forward"] is placed
    around.remove()
    assert "forward" not in vars(model.layers)


def test_calls_that_are_saved_in_one_of_several_spans() -> None:
    spans = policies.recompute_modules("layers[0:2]", "layers[2:4]", "layers[4:8]")
    check(applied(policies.first_match(policies.save_ops("linear", within="layers.5.down"), spans)), 3)
    check(applied(policies.first_match(policies.save_modules("layers.5.down"), spans)), 3)


def test_exceptions_to_spans() -> None:
    handle = reactivate.apply(Model(), policies.exclude(SPANS, policies.recompute_modules("layers[0:3]")))
    assert handle.regions == ("layers[4:8]",)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", ["spans", "ops"])
def test_compiled(name: str, backend: str) -> None:
    """The model is one graph, with the spans as regions in it, and does what the compiled plain model does."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    plain, ours = Model(), Model()
    ours.load_state_dict(plain.state_dict())
    reactivate.apply(ours, CASES[name][0])
    x = torch.randn(8, WIDTH)
    found, regions = [], []
    for model in (plain, ours):
        graphs = CompileCounterWithBackend(backend)
        compiled = torch.compile(model, backend=graphs, fullgraph=True)
        torch.manual_seed(0)
        out = compiled(x)
        out.square().sum().backward()
        found.append([out, *(item.grad for item in model.parameters()), *model.buffers()])
        (graph,) = graphs.graphs
        regions.append(sum("checkpoint" in str(node.target) for node in graph.graph.nodes))
    assert all(torch.equal(one, other) for one, other in zip(*found))
    assert regions == [0, 2]
    torch._dynamo.reset()


class Equal(nn.Module):
    """Equal to all of its kind."""

    def __init__(self, factor: int) -> None:
        super().__init__()
        self.factor, self.linear = factor, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.factor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal)

    __hash__ = nn.Module.__hash__


def test_a_member_that_is_replaced_by_an_equal_one_is_called() -> None:
    model, x = nn.Sequential(Equal(1), Equal(1)), torch.ones(1, 4)
    reactivate.apply(model, policies.recompute_modules("[0:2]"))
    model(x)
    model[1] = Equal(100)
    assert torch.equal(model(x), model[1](model[0](x)))


def test_a_member_that_is_none_raises_as_in_the_plain_model() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.ones(1, 4)
    reactivate.apply(model, policies.recompute_modules("[1:3]"))
    model._modules["1"] = None
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        model(x)


def test_a_name_means_the_sequentials_of_that_name() -> None:
    """Others of that name have no spans, which is no error."""
    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model = nn.Sequential(inner, nn.Linear(4, 4))
    handle = reactivate.apply(model, policies.recompute_modules("0[0:2]"))
    assert list(handle.regions) == ["0[0:2]"]
    handle.remove()
    with pytest.raises(UsageError, match="'1\\[0:2\\]' cannot be one region: 1 is a Linear"):
        reactivate.apply(model, policies.recompute_modules("1[0:2]"))
