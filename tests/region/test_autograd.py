"""Rules 4 to 9: every way to differentiate, and every way to nest."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from journal import Journal
from oracle import Case, assert_same, check, compare, cotangents, leaf, run
from torch import Tensor, nn

import reactivate
from reactivate._passes.observing import without_regions
from reactivate._region.sharing import current_group
from reactivate.errors import UnsupportedError

Backward = Callable[[list[Tensor], dict[str, Tensor]], Any]


def two_outputs() -> Case:
    weight = leaf(16, 16)

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h = (x @ weight).tanh()
        return h.exp() * y, (h * y.sin()).softmax(-1)

    return Case(fn, (leaf(8, 16), leaf(8, 16)), leaves={"weight": weight})


def random_block() -> Case:
    block = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 16), nn.BatchNorm1d(16))
    return Case(lambda x: (block(x), block[0](x).sin()), (leaf(8, 16),), modules=[block])


def grad_of_all(outputs: list[Tensor], inputs: dict[str, Tensor]) -> Any:
    return torch.autograd.grad(outputs, list(inputs.values()), cotangents(outputs), allow_unused=True)


def backward_into_some(outputs: list[Tensor], inputs: dict[str, Tensor]) -> Any:
    torch.autograd.backward(outputs, cotangents(outputs), inputs=[next(iter(inputs.values()))])


def backward_three_times(outputs: list[Tensor], inputs: dict[str, Tensor]) -> Any:
    for retain in (True, True, False):
        torch.autograd.backward(outputs, cotangents(outputs), retain_graph=retain)


def one_output_after_the_other(outputs: list[Tensor], inputs: dict[str, Tensor]) -> Any:
    for output, cotangent in zip(outputs, cotangents(outputs)):
        output.backward(cotangent, retain_graph=True)


def double_backward(outputs: list[Tensor], inputs: dict[str, Tensor]) -> Any:
    first = torch.autograd.grad(
        outputs, list(inputs.values()), cotangents(outputs), create_graph=True, allow_unused=True
    )
    first = [gradient for gradient in first if gradient is not None and gradient.requires_grad]
    torch.autograd.backward([gradient.square().sum() for gradient in first])
    return first


def triple_backward(outputs: list[Tensor], inputs: dict[str, Tensor]) -> Any:
    x = next(iter(inputs.values()))
    value = sum(output.sum() for output in outputs)
    for _ in range(3):
        (value,) = torch.autograd.grad(value.sum(), x, create_graph=True)
    return value


BACKWARDS: list[tuple[Backward, int]] = [
    (grad_of_all, 1),
    (backward_into_some, 1),
    (backward_three_times, 3),
    (one_output_after_the_other, 2),
    (double_backward, 2),
]


@pytest.mark.parametrize("early_stop", [True, False], ids=["early_stop", "whole"])
@pytest.mark.parametrize(("backward", "recomputations"), BACKWARDS, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("make", [two_outputs, random_block])
def test_backwards(make: Callable[[], Case], backward: Backward, recomputations: int, early_stop: bool) -> None:
    check(make, backward=backward, recomputations=recomputations, early_stop=early_stop)


def smooth_block() -> Case:
    """As `random_block`, without batch norm: torch >= 2.14 differentiates that twice, and refuses a third time."""
    block = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 16), nn.LayerNorm(16))
    return Case(lambda x: (block(x), block[0](x).sin()), (leaf(8, 16),), modules=[block])


@pytest.mark.parametrize("early_stop", [True, False], ids=["early_stop", "whole"])
@pytest.mark.parametrize("make", [two_outputs, smooth_block])
def test_triple_backward(make: Callable[[], Case], early_stop: bool) -> None:
    check(make, backward=triple_backward, recomputations=3, early_stop=early_stop)


def differentiates_itself(x: Tensor) -> Tensor:
    h = x.sin()
    z = h.exp()
    (inner,) = torch.autograd.grad(z.sum(), h, create_graph=False)
    return (x.cos() * inner).exp()


def with_retained_graph_and_dropout(x: Tensor) -> tuple[Tensor, Tensor]:
    h = nn.functional.dropout(x.sin())
    z = h.exp()
    (inner,) = torch.autograd.grad(z.sum(), x, retain_graph=True)
    return z, nn.functional.dropout(inner * x.cos()).exp()


@pytest.mark.parametrize(
    ("fn", "saves_memory"), [(differentiates_itself, False), (with_retained_graph_and_dropout, True)]
)
@pytest.mark.parametrize("early_stop", [True, False])
def test_backward_inside_the_forward(fn: Any, saves_memory: bool, early_stop: bool) -> None:
    make = lambda: Case(fn, (leaf(8, 16),))  # noqa: E731
    check(make, recomputations=2, early_stop=early_stop, saves_memory=saves_memory)


def test_overlapping_graphs() -> None:
    """A hook of one backward runs another one over the same region."""

    def once(wrap: Any) -> list[Any]:
        a = leaf(4)
        x, out = wrap(lambda a: (lambda x: (x, x.sin()))(a.sin().cos()))(a)
        out.grad_fn.register_hook(lambda *_: x.backward(torch.ones(4), retain_graph=True))
        out.sum().backward(retain_graph=True)
        return [a.grad]

    compare(once)


class Bulk(torch.autograd.Function):
    """Saves in bulk: an input twice, None, an intermediate, the output; reads twice, each time all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        w = x * y
        out = w.exp()
        ctx.save_for_backward(x, None, y, x, w, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, nothing, y, again, _, _ = ctx.saved_tensors
        w, out = ctx.saved_tensors[4], ctx.saved_tensors[5]
        assert nothing is None and torch.equal(x, again)
        return grad * out * y * w.exp() / out, grad * out * x


def test_custom_functions() -> None:
    def make() -> Case:
        return Case(lambda x, y: Bulk.apply(x.sin(), y.cos()).sin(), (leaf(8, 16), leaf(8, 16)))

    check(make)
    check(make, backward=backward_three_times, recomputations=3)


def test_custom_function_reads_again_after_others_have_run() -> None:
    """Its saved tensors are kept for it while the rest goes."""
    read = Journal()

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            first = ctx.saved_tensors[0]
            value = first.clone()
            del first
            read.append(torch.equal(value, ctx.saved_tensors[0]))
            return grad

    x = leaf(8)
    _, ours = check(lambda: Case(lambda x: Twice.apply(x.sin()).exp(), (leaf(8),)))
    assert ours.recomputations == 1 and read == [True, True] and x is not None


def test_early_stop_ends_the_recomputation_and_not_inside_a_custom_forward() -> None:
    reached = Journal()

    class Careful(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            with torch.enable_grad():
                inner = x.detach().requires_grad_()
                value = inner.exp()  # saved, in the middle of this forward
            reached.append("end of the custom forward")
            ctx.inner, ctx.value = inner, value
            return value.detach()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return torch.autograd.grad(ctx.value, ctx.inner, grad)[0]

    def fn(x: Tensor) -> Tensor:
        out = Careful.apply(x.sin())
        reached.append("tail")
        return out + 1

    x = leaf(4)
    reactivate.checkpoint(fn, check="metadata")(x).sum().backward()
    assert reached[:2] == ["end of the custom forward", "tail"]
    assert "end of the custom forward" in reached[2:], "the custom forward was not cut short"
    expected = torch.autograd.grad(x.sin().exp().sum(), x)[0]
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize(("early_stop", "calls"), [(True, 1), (False, 2)])
def test_early_stop_leaves_the_tail_out(early_stop: bool, calls: int) -> None:
    tail = Journal()

    def fn(x: Tensor) -> Tensor:
        h = x.sin().cos()
        tail.append(reactivate.is_recomputing())
        return h.clone()

    reactivate.checkpoint(fn, early_stop=early_stop, check="metadata")(leaf(4)).sum().backward()
    assert tail == [False, True][:calls]


def test_a_recomputation_that_is_compared_with_its_forward_stops_as_early_as_any_other() -> None:
    tail = Journal()

    def fn(x: Tensor) -> Tensor:
        h = x.sin().cos()
        tail.append(reactivate.is_recomputing())
        return h.clone()

    for _ in range(5):  # the 1st, 2nd and 4th are compared
        tail.clear()
        reactivate.checkpoint(fn)(leaf(4)).sum().backward()
        assert tail == [False]


# -- nesting --------------------------------------------------------------------------------------------------------


def nested(depth: int) -> Callable[[], Case]:
    def make() -> Case:
        blocks = [nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3), nn.Tanh()) for _ in range(depth)]
        fn: Any = None
        for block in blocks:
            inner = None if fn is None else reactivate.checkpoint(fn)

            def fn(x: Tensor, block: nn.Module = block, inner: Any = inner) -> Tensor:
                h = block(x).sin()
                return h if inner is None else inner(h).exp().sin()

        return Case(fn, (leaf(8, 16),), modules=blocks)

    return make


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_nested_to_any_depth(depth: int) -> None:
    make = nested(depth)
    with without_regions():
        plain = run(make)
    ours = run(make, reactivate.checkpoint)
    assert_same(plain, ours)
    assert ours.kept_bytes < plain.kept_bytes
    assert ours.recomputations == depth, "each region of the forward pass was recomputed once"


def test_nested_closure_does_not_keep_an_intermediate_of_the_outer_region() -> None:
    def make() -> Case:
        def fn(x: Tensor) -> Tensor:
            h = x.sin()
            return reactivate.checkpoint(lambda a: (a * h).cos().exp())(h)

        return Case(fn, (leaf(64, 64),))

    plain = run(lambda: Case(lambda x: (lambda h: (h * h).cos().exp())(x.sin()), (leaf(64, 64),)))
    ours = run(make, reactivate.checkpoint)
    assert torch.equal(plain.outputs[0], ours.outputs[0]) and ours.kept_bytes == 0


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_same_module_several_times_and_microbatches_in_any_order(order: tuple[int, ...]) -> None:
    """fwd A, fwd B, bwd A, bwd B; and the other way round."""

    def once(wrap: Any) -> list[Any]:
        block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Tanh())
        fn = wrap(block)
        inputs = [leaf(4, 8), leaf(4, 8), leaf(4, 8)]
        outputs = [fn(fn(x)) for x in inputs]
        for index in order:
            outputs[index].sum().backward()
        return [x.grad for x in inputs] + [p.grad for p in block.parameters()] + list(block.buffers())

    compare(once)


# -- where there is nothing to do, and what is refused ------------------------------------------------------------------


def test_without_grad_it_is_the_plain_call() -> None:
    calls = Journal()

    def fn(x: Tensor) -> Tensor:
        calls.append(reactivate.is_recomputing())
        return x.sin().exp()

    x = leaf(4)
    with torch.no_grad():
        assert not reactivate.checkpoint(fn)(x).requires_grad
    with torch.inference_mode():
        assert reactivate.checkpoint(fn)(x).is_inference()
    out = reactivate.checkpoint(fn)(torch.randn(4))
    assert out.grad_fn is None and calls == [False] * 3


def test_an_output_without_grad_in_a_region_with_grad() -> None:
    x, y = leaf(4), torch.randn(4)
    out, constant = reactivate.checkpoint(lambda x, y: (x.sin().exp(), y.sin()))(x, y)
    assert out.requires_grad and not constant.requires_grad
    out.sum().backward()


@pytest.mark.parametrize("had_gradient", [False, True])
@pytest.mark.parametrize("owner", ["module", "argument"])
@pytest.mark.parametrize("backwards", [2, 3])
def test_several_backwards_inside_of_a_forward_accumulate_once(backwards: int, owner: str, had_gradient: bool) -> None:
    """Each of them recomputes what was before it, with the backwards before it."""

    def once(wrap: Any) -> list[Any]:
        x, linear, holder = leaf(3, 4), torch.nn.Linear(4, 4), torch.nn.ParameterList([leaf(4)])
        inner = holder[0]
        inner.grad = torch.ones(4) if had_gradient else None

        def fn(x: Tensor, weight: Tensor | None = None) -> Tensor:
            for _ in range(backwards):
                x = linear(x).sin()
                given = holder[0] if weight is None else weight
                (given.sin() * x.detach()).sum().backward()
            return x

        for _ in range(2):
            wrap(fn)(x, *([inner] if owner == "argument" else [])).sum().backward()
        return [inner.grad, linear.weight.grad, x.grad]

    compare(once)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev])
def test_function_transforms_are_refused_by_name(transform: Any) -> None:
    fn = reactivate.checkpoint(lambda x: x.sin().exp().sum())
    with pytest.raises(UnsupportedError, match=r"torch\.func"):
        transform(fn)(torch.randn(4, 4))


def test_function_transform_inside_a_region_is_refused() -> None:
    """torch.func turns saved-tensor hooks off for its functions, and says so where there are some already."""
    fn = reactivate.checkpoint(lambda x: torch.func.vmap(torch.func.grad(lambda v: v.sin().sum()))(x).tanh())
    with pytest.raises(UnsupportedError, match=r"torch\.func.*saved-tensor hooks"):
        fn(leaf(4, 8))


@pytest.mark.unfenced(reason="torch has no batching rule for what an exit returns")
def test_a_batched_backward_of_a_region_that_draws() -> None:
    """vmap refuses random numbers, and the recomputation is outside of it, as the forward was: torch's checkpoint raises."""

    def gradients(wrap: Any) -> Any:
        block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        x = torch.rand(3, 4, requires_grad=True)
        inside = wrap(block)
        found = []
        for region in (inside, wrap(lambda x: inside(x.sin()).exp())):
            out = region(x)
            rows = torch.eye(12).view(12, 3, 4)
            found += torch.autograd.grad(out, x, rows, is_grads_batched=True, retain_graph=True)
            found += torch.func.vmap(lambda row: torch.autograd.grad(out, x, row, retain_graph=True)[0])(rows)
            out.sum().backward()
        return [*found, x.grad, *block.buffers(), torch.get_rng_state()]

    assert compare(gradients).recomputations >= 6


@pytest.mark.unfenced(reason="refused there")
def test_forward_mode_is_right() -> None:
    x, tangent = leaf(4, 8), torch.randn(4, 8)

    def once(wrap: Any) -> tuple[Tensor, Tensor]:
        with forward_ad.dual_level():
            out = wrap(lambda x: x.sin().exp())(forward_ad.make_dual(x, tangent))
            _, jvp = forward_ad.unpack_dual(out)
            (grad,) = torch.autograd.grad(jvp.sum(), x)
            return jvp.detach(), grad

    compare(once)


def test_shared_recompute() -> None:
    calls = Journal()

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        calls.append("call")
        y = x.sin().cos()
        return y, y.sin().cos()

    x = leaf(4)
    grads = []
    for context in (torch.enable_grad(), reactivate.shared_recompute()):
        calls.clear()
        y, z = reactivate.checkpoint(fn)(x)
        with context:
            (grad_y,) = torch.autograd.grad(z, y, torch.ones(4))
            grads.append(torch.autograd.grad(y, x, grad_y)[0])
        grads.append(torch.tensor(len(calls)))
    assert torch.equal(grads[0], grads[2])
    assert (grads[1].item(), grads[3].item()) == (3, 2)


def test_shared_recompute_frees_at_its_end_and_refuses_itself() -> None:
    x = leaf(64, 64)
    y, _ = reactivate.checkpoint(lambda x: (x.sin().cos(), x.exp().sin()))(x)
    with reactivate.shared_recompute():
        y.sum().backward(retain_graph=True)
        with pytest.raises(reactivate.errors.ReactivateError, match="inside of itself"), reactivate.shared_recompute():
            pass
    y.sum().backward()


@pytest.mark.unfenced(reason="the node of an output is its exit")
def test_saved_tensors_read_outside_a_backward() -> None:
    calls = Journal()

    def fn(x: Tensor) -> Tensor:
        calls.append("call")
        return torch.exp(x)

    x = leaf(4)
    out = reactivate.checkpoint(fn)(x)
    for _ in range(2):
        assert torch.equal(out.grad_fn._saved_result, x.exp())
    assert len(calls) == 3


def test_a_shared_recompute_on_a_thread_of_autograds_own() -> None:
    """Such a thread, as each device has one, is none of Python's: it shares what the context opened last shares."""
    found: list[Any] = []

    def look() -> None:
        found.append(current_group())
        threading.current_thread()  # Python has a name for it from here on
        found.append(current_group())

    for start in (lambda: _thread.start_new_thread(lambda: (look(), done.set()), ()), lambda: (look(), done.set())):
        with reactivate.shared_recompute() as group:
            done = threading.Event()
            start()
            assert done.wait(10)
        assert found == [group, group]
        found.clear()
    with reactivate.shared_recompute():
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert found == [None, None], "a thread of the user's shares nothing that it has not asked for"
    assert current_group() is None
