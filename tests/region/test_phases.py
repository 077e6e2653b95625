"""Rule 27: code that keeps state of its own for recomputations asks which region it runs in, and in which phase."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, ref

import pytest
import torch
from journal import Journal
from memory import without_collector
from oracle import Case, Watched, check, leaf
from torch import Tensor, nn

import reactivate
from reactivate import policies
from reactivate._passes.observing import observed_by


def where() -> tuple[Any, bool]:
    return reactivate.current_region(), reactivate.is_recomputing()


def noting(seen: Journal) -> Callable[[Tensor], Tensor]:
    def fn(x: Tensor) -> Tensor:
        seen.append(where())
        return x.sin().exp()

    return fn


# -- the identity of a region ------------------------------------------------------------------------------------------


def test_a_region_is_the_same_in_its_forward_and_in_each_of_its_recomputations() -> None:
    seen = Journal()
    out = reactivate.checkpoint(noting(seen))(leaf(4)).sum()
    assert reactivate.current_region() is None
    for _ in range(2):
        out.backward(retain_graph=True)
        assert reactivate.current_region() is None
    region = seen[0][0]
    assert region is not None
    assert seen == [(region, False), (region, True), (region, True)]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_each_call_is_another_region(order: tuple[int, ...]) -> None:
    seen = Journal()
    outs = [reactivate.checkpoint(noting(seen))(leaf(4)).sum() for _ in range(3)]
    for number in order:
        outs[number].backward()
    regions = [region for region, _ in seen[:3]]
    assert len({*regions}) == 3
    assert seen[3:] == [(regions[number], True) for number in order]


def test_without_a_gradient_there_is_no_region() -> None:
    seen = Journal()
    with torch.no_grad():
        reactivate.checkpoint(noting(seen))(leaf(4))
    assert seen == [(None, False)]


def nested(seen: Journal, wrap: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
    def inner(x: Tensor) -> Tensor:
        seen.append(("inner", *where()))
        return x.sin().exp()

    def outer(x: Tensor) -> Tensor:
        seen.append(("outer", *where()))
        x = wrap(inner)(x.cos())
        x = wrap(inner)(x.tanh())
        seen.append(("outer", *where()))
        return x.cos().exp()

    return outer


def test_nested_regions_have_identities_of_their_own_that_outlast_the_outer_recomputation() -> None:
    seen = Journal()
    outer = nested(seen, reactivate.checkpoint)
    reactivate.checkpoint(outer, check="metadata", early_stop=False)(leaf(4)).sum().backward()
    names = {entry[1]: index for index, entry in reversed([*enumerate(seen[:4])])}
    assert [name for name, *_ in seen[:4]] == ["outer", "inner", "inner", "outer"]
    assert [names[region] for _, region, _ in seen[:4]] == [0, 1, 2, 0]
    # The outer recomputation runs both inner forwards again, which are recomputed later, the last one first.
    assert [(name, names[region]) for name, region, _ in seen[4:]] == [
        *(("outer", 0), ("inner", 1), ("inner", 2), ("outer", 0), ("inner", 2), ("inner", 1)),
    ]
    assert all(is_recomputation for *_, is_recomputation in seen[4:])


def test_a_saved_call_with_a_region_inside_does_not_shift_the_identities_after_it() -> None:
    seen = Journal()

    class Body(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(where())
            return x.sin().exp()

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = reactivate.checkpoint(Body())

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x).cos()  # type: ignore[no-any-return]

    model = nn.Sequential(Around(), Around(), nn.Tanh())
    case = Case(reactivate.checkpoint(model, policy=policies.save_modules("0"), check="metadata"), (leaf(4),))
    case.fn(*case.args).sum().backward()
    first, second = (region for region, _ in seen[:2])
    again = [region for region, is_recomputation in seen[2:] if is_recomputation]
    # The first is skipped and recomputed only for itself; the second runs in the outer recomputation and for itself.
    assert [*again] == [second, second, first]


def test_it_is_over_after_an_exception() -> None:
    regions: list[Any] = []

    def fn(x: Tensor) -> Tensor:
        if reactivate.is_recomputing() or fails:
            regions.append(ref(reactivate.current_region()))
            raise ValueError("here")
        return x.sin().exp()

    fails = True
    with pytest.raises(ValueError, match="here"):
        reactivate.checkpoint(fn)(leaf(4))
    assert reactivate.current_region() is None
    gc.collect()
    assert regions[0]() is None  # nothing is left of a forward that failed
    fails = False
    out = reactivate.checkpoint(fn)(leaf(4)).sum()
    with pytest.raises(ValueError, match="here"):
        out.backward()
    assert reactivate.current_region() is None


def test_another_thread_is_in_no_region() -> None:
    seen = Journal()

    def ask() -> None:
        seen.append(where())

    def fn(x: Tensor) -> Tensor:
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        return x.sin()

    reactivate.checkpoint(fn)(leaf(4))
    assert seen == [(None, False)]


# -- state that code keeps under it ------------------------------------------------------------------------------------


class Keeping(nn.Module):
    """Divides by a maximum that the forward measures: a recomputation must not measure its own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.kept: Any = WeakKeyDictionary() if kind == "weak" else {}
        self.measured = 0

    def forward(self, x: Tensor) -> Tensor:
        region: Any = reactivate.current_region()
        self.measured += 1
        if region is None:
            return (x / x.detach().abs().amax()).sin().exp()
        key = {"weak": region, "strong": region, "tuple": (self.measured, region)}[self.kind]
        if reactivate.is_recomputing():
            largest = self.kept.pop(key) if self.kind == "strong" else self.kept[key]
        else:
            largest = self.kept[key] = x.detach().abs().amax()
        return (x / largest).sin().exp()


@pytest.mark.parametrize("kind", ["weak", "strong", "tuple"])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_entries_under_a_region_are_not_rewound(kind: str, order: tuple[int, ...]) -> None:
    results = []
    for wrap in (lambda module: module, reactivate.checkpoint):
        torch.manual_seed(0)
        module = Keeping(kind)
        ran = Watched()
        inputs = [torch.randn(8, requires_grad=True) for _ in range(3)]
        with observed_by(ran):
            outs = [wrap(module)(x * 2).sum() for x in inputs]
            if wrap is reactivate.checkpoint:
                assert len(module.kept) == 3
            for number in order:
                outs[number].backward()
        results.append(([x.grad for x in inputs], [out.detach() for out in outs], module.measured))
    plain, ours = results
    assert (ran.regions, ran.recomputations) == (3, 3)
    assert all(map(torch.equal, plain[0], ours[0])) and all(map(torch.equal, plain[1], ours[1]))
    assert plain[2] == ours[2] == 3  # the module's own counter is rewound, so that it numbers its calls alike
    del outs
    assert len(module.kept) == {"weak": 0, "strong": 0, "tuple": 3}[kind]


def test_a_failed_forward_and_one_without_backward_leave_nothing() -> None:
    module = Keeping("weak")

    def fails(x: Tensor) -> Tensor:
        module(x)
        raise ValueError("after it")

    with without_collector():
        with pytest.raises(ValueError, match="after it"):
            reactivate.checkpoint(fails)(leaf(4))
        assert len(module.kept) == 0
        out = reactivate.checkpoint(module)(leaf(4))
        assert len(module.kept) == 1
        del out
        assert len(module.kept) == 0
        with torch.no_grad():
            reactivate.checkpoint(module)(leaf(4))
        reactivate.checkpoint(module)(torch.randn(4))  # nothing needs a gradient
        assert len(module.kept) == 0


def test_other_entries_of_the_same_dict_are_rewound() -> None:
    table: dict[Any, Any] = {"count": 0}

    def fn(x: Tensor) -> Tensor:
        region = reactivate.current_region()
        table["count"] += 1
        if not reactivate.is_recomputing():
            table[region] = table["count"]
        assert table[region] == table["count"]
        return (x * table["count"]).sin().exp()

    x = leaf(4)
    outs = [reactivate.checkpoint(fn)(x).sum() for _ in range(2)]
    for out in outs:
        out.backward()
    assert table["count"] == 2
    expected = x.detach().requires_grad_()
    for count in (1, 2):
        (expected * count).sin().exp().sum().backward()
    assert x.grad is not None and expected.grad is not None
    assert torch.equal(x.grad, expected.grad)


def test_tensors_under_a_region_are_used_as_they_are() -> None:
    """No copy of them is kept, and what a recomputation writes to them stays."""
    kept: WeakKeyDictionary[Any, Tensor] = WeakKeyDictionary()
    totals = Journal()

    def fn(x: Tensor) -> Tensor:
        region = reactivate.current_region()
        assert region is not None
        if not reactivate.is_recomputing():
            kept[region] = torch.zeros(())
        kept[region] += 1
        totals.append(kept[region].item())
        return x.sin().exp()

    out = reactivate.checkpoint(fn)(leaf(4)).sum()
    out.backward(retain_graph=True)
    out.backward()
    assert totals == [1.0, 2.0, 3.0]


def test_tensors_under_another_region_are_used_as_they_are_too() -> None:
    kept: dict[Any, Tensor] = {}
    regions, totals = Journal(), Journal()

    def first(x: Tensor) -> Tensor:
        if not reactivate.is_recomputing():
            regions.append(reactivate.current_region())
            kept[regions[0]] = torch.zeros(())
        return x.sin().exp()

    def second(x: Tensor) -> Tensor:
        kept[regions[0]] += 1
        totals.append(kept[regions[0]].item())
        return x.sin().exp()

    outs = [reactivate.checkpoint(fn)(leaf(4)).sum() for fn in (first, second)]
    outs[1].backward()
    assert totals == [1.0, 2.0]
    outs[0].backward()


def test_a_copy_of_a_module_keeps_its_own() -> None:
    module = Keeping("weak")
    twin = copy.deepcopy(module)
    out = reactivate.checkpoint(module)(leaf(4))
    assert (len(module.kept), len(twin.kept)) == (1, 0)
    out.sum().backward()


def test_the_contexts_of_a_pair_are_inside_of_all_that_is_rewound() -> None:
    """A flag that the context for recomputations sets holds in them, however the region reaches the flag."""
    flags = {"phase": "none"}
    seen = Journal()

    class Phase:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            self.before, flags["phase"] = flags["phase"], self.name
            seen.append((self.name, *where()))

        def __exit__(self, *error: object) -> None:
            flags["phase"] = self.before

    def fn(x: Tensor) -> Tensor:
        seen.append((flags["phase"], *where()))
        return x.sin().exp()

    pair = reactivate.guards.ContextPair(lambda: (Phase("forward"), Phase("recomputation")))
    guards = reactivate.guards.DEFAULT.adding(pair)
    reactivate.checkpoint(fn, guards=guards)(leaf(4)).sum().backward()
    region = seen[0][1]
    assert region is not None
    assert seen == [("forward", region, False)] * 2 + [("recomputation", region, True)] * 2
    assert flags == {"phase": "none"}


def test_asking_changes_nothing() -> None:
    def fn(x: Tensor) -> Tensor:
        reactivate.current_region()
        return x.sin().exp().cos()

    check(lambda: Case(fn, (leaf(8),)))
