"""`Recompute(inputs=storage)`: what a region is called with waits in a storage."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import re
import warnings
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from offload_cases import Shelf, Stack, block, grads, same, trained
from several import each
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.weak import WeakIdKeyDictionary

import reactivate
from reactivate import policies
from reactivate.errors import MutationError, RecomputeMismatchError, StorageError, UsageError


@pytest.mark.parametrize(
    "make",
    [
        lambda shelf: policies.full(inputs=shelf),
        lambda shelf: policies.recompute_every(2, inputs=shelf),
        lambda shelf: policies.recompute_modules("layers.*", inputs=shelf),
        lambda shelf: policies.first_match(policies.save_ops("linear"), policies.full(inputs=shelf)),
        lambda shelf: policies.first_match(policies.save_ops("linear", storage=shelf), policies.full(inputs=shelf)),
        lambda shelf: policies.union(policies.save_modules("layers.*.1"), policies.full(inputs=shelf)),
    ],
)
def test_a_model_whose_inputs_wait_in_a_storage(make: Any) -> None:
    torch.manual_seed(1)
    model = Stack()
    expected = trained(copy.deepcopy(model))
    shelf = Shelf()
    handle = reactivate.apply(model, make(shelf))
    assert same(trained(model), expected)
    assert shelf.taken >= 3 * len(handle.regions)
    assert shelf.given > 0
    assert shelf.alive() == 0


def test_the_input_is_let_go_until_the_backward() -> None:
    shelf = Shelf()
    region = reactivate.checkpoint(block(), inputs=shelf)
    x = torch.randn(4, 8, requires_grad=True)
    inner = x * 2
    inside = ref(inner)
    out = region(inner)
    del inner
    gc.collect()
    assert inside() is None
    assert shelf.taken == 1 and shelf.given == 0 and shelf.alive() == 1
    out.sum().backward()
    assert shelf.given == 1
    del out
    assert shelf.alive() == 0


def test_without_the_storage_the_input_stays() -> None:
    region = reactivate.checkpoint(block())
    x = torch.randn(4, 8, requires_grad=True)
    inner = x * 2
    memory = inner.untyped_storage()._weak_ref()
    out = region(inner)
    del inner
    gc.collect()
    assert not torch.UntypedStorage._expired(memory)
    assert out.requires_grad


def test_parameters_and_leaves_are_never_moved() -> None:
    shelf = Shelf()
    weight = nn.Parameter(torch.randn(8, 8))
    leaf = torch.randn(4, 8, requires_grad=True)
    data = torch.randn(4, 8)
    region = reactivate.checkpoint(lambda w, x, y: (x @ w + y).sin() @ w, inputs=shelf)
    region(weight, leaf, data).sum().backward()
    assert shelf.taken == 0


def test_without_gradients_nothing_is_moved() -> None:
    shelf = Shelf()
    region = reactivate.checkpoint(block(), inputs=shelf)
    with torch.no_grad():
        region(torch.randn(4, 8))
    with torch.inference_mode():
        region(torch.randn(4, 8))
    assert shelf.taken == 0


def test_two_backwards_and_a_double_backward() -> None:
    def run(wrap: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = block()
        x = torch.randn(4, 8, requires_grad=True)
        y = wrap(model)(x.sin()).square().sum()
        first = torch.autograd.grad(y, [x, *model.parameters()], retain_graph=True)
        (again,) = torch.autograd.grad(y, x, create_graph=True)
        return [*first, again, *torch.autograd.grad(again.square().sum(), [x, *model.parameters()], allow_unused=True)]

    shelf = Shelf()
    assert same(run(lambda fn: reactivate.checkpoint(fn, inputs=shelf)), run(lambda fn: fn))
    assert shelf.given >= 2
    assert shelf.alive() == 0


def test_containers_closures_and_keywords() -> None:
    class Config:
        pass

    def run(wrap: Any) -> list[Any]:
        x = torch.arange(12.0).reshape(3, 4).requires_grad_()
        h, closed = x * 2, x.exp()
        views = h[:, :2], h[:, 2:]

        def f(a: Tensor, pair: tuple[Tensor, Tensor], *, scale: Tensor) -> Tensor:
            return (a * closed).sin() + (pair[0] * pair[1]).sum() * scale

        f(h, views, scale=x.sum())
        out = wrap(f)(h, views, scale=x.sum())
        del h, views
        out.sum().backward()
        return [out, x.grad]

    shelf = Shelf()
    assert same(run(lambda fn: reactivate.checkpoint(fn, inputs=shelf)), run(lambda fn: fn))
    assert shelf.taken == 5


def test_a_region_that_writes_to_its_input_is_refused_as_without_a_storage() -> None:
    def f(x: Tensor) -> Tensor:
        x.mul_(2)
        return x.sin() * x

    for options in ({}, {"inputs": Shelf()}):
        x = torch.arange(6.0).requires_grad_()
        with pytest.raises(MutationError, match="wrote in place to `args"):
            reactivate.checkpoint(f, **options)(x + 1).sum().backward()


def test_an_input_that_somebody_writes_to_afterwards_is_what_it_was() -> None:
    """The storage has what the region was called with; without one this is refused."""
    shelf = Shelf()
    x = torch.arange(6.0).requires_grad_()
    h = x + 1
    out = reactivate.checkpoint(lambda t: t.sin().cos(), inputs=shelf)(h)
    with torch.no_grad():
        h.zero_()
    out.sum().backward()
    other = torch.arange(6.0).requires_grad_()
    (other + 1).sin().cos().sum().backward()
    assert torch.equal(x.grad, other.grad)


def test_regions_inside_of_regions_leave_it_to_the_outer_one() -> None:
    def run(wrap: Any) -> list[Any]:
        torch.manual_seed(0)
        first, second = block(), block()
        inner = wrap(second)
        outer = wrap(lambda t: inner(first(t).sin()).cos())
        x = torch.randn(4, 8, requires_grad=True)
        outer(x * 2).sum().backward()
        return [x.grad, *grads(first), *grads(second)]

    shelf = Shelf()
    assert same(run(lambda fn: reactivate.checkpoint(fn, inputs=shelf)), run(lambda fn: fn))
    assert shelf.taken == 1
    assert shelf.alive() == 0


def test_inside_of_torchs_checkpoint_nothing_goes() -> None:
    shelf = Shelf()
    inner = reactivate.checkpoint(block(), inputs=shelf)
    x = torch.randn(4, 8, requires_grad=True)
    torch_checkpoint(lambda t: inner(t.sin()), x, use_reentrant=False).sum().backward()
    assert shelf.taken == 0


@pytest.mark.parametrize("around", [save_on_cpu, lambda: saved_tensors_hooks(Tensor.clone, Tensor.clone)])
def test_hooks_around_the_region(around: Any) -> None:
    torch.manual_seed(1)
    model = Stack()
    expected = trained(copy.deepcopy(model))
    shelf = Shelf()
    reactivate.apply(model, policies.full(inputs=shelf))
    with around():
        assert same(trained(model), expected)
    assert shelf.taken == 12


def test_a_storage_that_changes_bits_is_noticed() -> None:
    class Rounds:
        def save(self, tensor: Tensor) -> Tensor:
            return tensor.bfloat16()

        def load(self, handle: Tensor) -> Tensor:
            return handle.float()

    x = torch.randn(4, 8, requires_grad=True)
    region = reactivate.checkpoint(lambda t: t.sin().cos(), inputs=Rounds())
    with pytest.raises(RecomputeMismatchError, match="computes other values than its forward"):
        region(x * 2).sum().backward()


def test_a_handle_that_is_a_tensor_is_seen_by_hooks_around_the_region() -> None:
    class Twin:
        def save(self, tensor: Tensor) -> Tensor:
            return tensor.clone()

        def load(self, handle: Tensor) -> Tensor:
            return handle.clone()

    seen: list[Tensor] = []
    x = torch.randn(4, 8, requires_grad=True)
    region = reactivate.checkpoint(lambda t: t.sin().cos(), inputs=Twin())
    with saved_tensors_hooks(lambda tensor: seen.append(tensor) or tensor, lambda tensor: tensor):
        out = region(x * 2)
    assert [tensor.shape for tensor in seen] == [x.shape]
    out.sum().backward()


def test_the_attributes_of_a_moved_tensor() -> None:
    def f(t: Tensor) -> Tensor:
        return (t * t.scale).sin()  # type: ignore[attr-defined]

    shelf = Shelf()
    x = torch.ones(3, requires_grad=True)
    h = x * 2
    h.scale = 3.0  # type: ignore[attr-defined]
    out = reactivate.checkpoint(f, inputs=shelf)(h)
    del h
    out.sum().backward()
    assert torch.equal(x.grad, 6 * torch.full((3,), 6.0).cos())


def test_a_forward_that_fails_leaves_nothing_behind() -> None:
    shelf = Shelf()

    def f(x: Tensor) -> Tensor:
        raise ValueError("no")

    x = torch.ones(3, requires_grad=True)
    with pytest.raises(ValueError, match="no"):
        reactivate.checkpoint(f, inputs=shelf)(x * 2)
    assert shelf.taken == 1 and shelf.alive() == 0


def test_copies_of_a_model_share_the_storage() -> None:
    model = Stack()
    host = reactivate.storage.Host(least_bytes=0)
    reactivate.apply(model, policies.full(inputs=host))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert reactivate.Recompute  # the policy went along
        found = {type(forward).__name__: forward.options.inputs for forward in map(_forward, twin.layers)}
        assert found == {"RegionForward": host}


def _forward(module: nn.Module) -> Any:
    return module.forward.__self__


def test_what_is_no_storage_is_refused() -> None:
    with pytest.raises(UsageError, match=r"checkpoint\(inputs=...\) takes a storage"):
        reactivate.checkpoint(block(), inputs="host")
    with pytest.raises(UsageError, match=r"takes a storage"):
        reactivate.checkpoint(block(), inputs=reactivate.storage.Host)
    with pytest.raises(UsageError, match=r"full\(inputs=...\) takes a storage"):
        policies.full(inputs="cpu")


def test_how_it_is_written() -> None:
    host = reactivate.storage.Host()
    assert repr(policies.full(inputs=host)).startswith("full(inputs=Host(")
    assert repr(policies.full()) == "full()"


def test_compiled_regions_refuse_it() -> None:
    region = reactivate.checkpoint(lambda x: x.sin().cos(), inputs=Shelf())
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(Exception, match="under torch.compile that stays on the device"):
        torch.compile(lambda t: region(t * 2), backend="eager", fullgraph=True)(x)


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (
            lambda host: reactivate.checkpoint(block(), inputs=host)(X * 2),
            r": the 1 tensor that it was given stayed .*\. For tensors of a CPU, use reactivate\.storage\.Disk",
        ),
        (
            lambda host: reactivate.checkpoint(block(), inputs=host)(X),
            "parameters, other leaves, or .* stay. Leave it out.$",
        ),
        (
            lambda host: reactivate.checkpoint(block(), policy=policies.save_ops("linear", storage=host))(X),
            "they are on the host already",
        ),
    ],
)
def test_a_storage_that_moves_nothing_is_named_once(run: Any, said: str) -> None:
    host = reactivate.storage.Host(last=1000 + next(NUMBERS))  # equal ones are one, and this was named before
    out = run(host).sum()
    with pytest.warns(UserWarning, match=r"The storage Host\(.*\) has moved nothing in this step") as seen:
        out.backward()
    # Of this storage alone: others, which other tests have left, may be named in the same step.
    texts = [str(item.message) for item in seen if repr(host) in str(item.message)]
    assert len(texts) == 1 and re.search(said, texts[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(host).sum().backward()


def test_a_disk_for_which_all_is_too_small_says_what_to_pass(tmp_path: Path) -> None:
    with pytest.warns(
        UserWarning, match=r"1 tensor: smaller than .*\. To move small tensors as well, pass least_bytes=0\.$"
    ):
        reactivate.checkpoint(block(), inputs=reactivate.storage.Disk(tmp_path))(X * 2).sum().backward()


X = torch.ones(4, 8, requires_grad=True)
NUMBERS = itertools.count()


def test_a_storage_that_moves_something_is_not_named(recwarn: pytest.WarningsRecorder) -> None:
    region = reactivate.checkpoint(block(), inputs=Shelf())
    region(X * 2).sum().backward()
    region(X).sum().backward()
    assert not recwarn.list


def test_explain_says_where_inputs_are() -> None:
    model = Stack()
    reactivate.apply(model, policies.full(inputs=Shelf()))
    explanation = reactivate.explain(model, torch.randn(16, 8))
    assert "recompute, inputs to" in str(explanation)
    assert [entry.storage for entry in explanation.walk() if entry.kind == "region"] == ["Shelf"] * 4
    assert explanation.offloaded_bytes == 4 * 16 * 8 * 4


class Swapped(Tensor):
    """A plain subclass, which computes something else."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(torch.cos if func is torch.sin else func, types, args, kwargs)


@pytest.mark.parametrize("determinism", ["first", "metadata"])
@pytest.mark.parametrize("is_saved", [False, True])
def test_the_class_of_a_tensor_that_comes_back(determinism: Any, is_saved: bool) -> None:
    def run(wrap: Any) -> list[Any]:
        x = torch.arange(1.0, 5.0).requires_grad_()
        h = (x * 2).as_subclass(Swapped)

        def f(a: Tensor) -> Tensor:
            assert type(a) is Swapped
            return torch.sin((a * 2).exp() if is_saved else a)

        out = wrap(f)(h)
        del h
        out.sum().backward()
        return [x.grad.as_subclass(Tensor)]

    shelf = Shelf()
    policy = policies.save_ops("exp", storage=shelf) if is_saved else None
    assert same(
        run(lambda fn: reactivate.checkpoint(fn, inputs=shelf, policy=policy, check=determinism)),
        run(lambda fn: fn),
    )
    assert shelf.given > 0


class InCOrder(Shelf):
    def save(self, tensor: Tensor) -> Any:
        return super().save(tensor.contiguous())


@pytest.mark.parametrize(
    "view", [lambda t: t.t(), lambda t: t[:, ::2], lambda t: t[:1].expand(5, -1), lambda t: t[None].transpose(0, 2)]
)
def test_strides_that_a_storage_loses_come_back(view: Any) -> None:
    def run(wrap: Any) -> list[Any]:
        torch.manual_seed(0)
        x = torch.randn(6, 6, requires_grad=True)
        h = view(x * 2)

        def f(a: Tensor) -> Tensor:
            assert a.stride() == strides
            return F.dropout(a, 0.5) * a.sum()

        strides = h.stride()
        out = wrap(f)(h)
        del h
        out.sum().backward()
        return [x.grad]

    shelf = InCOrder()
    assert same(run(lambda fn: reactivate.checkpoint(fn, inputs=shelf, check="metadata")), run(lambda fn: fn))
    assert shelf.given > 0


@each(
    ("load", "said"),
    [
        (lambda copy: None, "None, which is no tensor"),
        (lambda copy: copy.double(), "torch.float64 on cpu"),
        (lambda copy: copy[:1], r"of shape \(1, 8\)"),
        (lambda copy: in_inference(copy), "an inference tensor"),
    ],
)
def test_a_storage_that_gives_back_something_else_is_named(load: Any, said: str) -> None:
    class Wrong(Shelf):
        def load(self, handle: Any) -> Any:
            return load(handle.copy)

    region = reactivate.checkpoint(block(), inputs=Wrong())
    out = region(X * 2).sum()
    with pytest.raises(StorageError, match=rf"The storage .*Wrong.* was given a Tensor of shape \(4, 8\).*{said}"):
        out.backward()


def in_inference(tensor: Tensor) -> Tensor:
    with torch.inference_mode():
        return tensor.clone()


def test_an_input_that_nobody_holds_comes_back_as_another_object() -> None:
    """In docs/offload.md: weak tables do not find it. The comparison of the first calls shows that."""
    table: WeakIdKeyDictionary = WeakIdKeyDictionary()
    region = reactivate.checkpoint(lambda a: (a * table.get(a, 1.0)).sin().cos(), inputs=Shelf())
    x = torch.ones(3, requires_grad=True)
    h = x * 2
    table[h] = 3.0
    out = region(h).sum()
    del h
    with pytest.raises(RecomputeMismatchError):
        out.backward()
