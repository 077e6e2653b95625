"""Saved calls: what is kept of them, how they fail, and modules with state whose calls are saved."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from journal import Journal
from oracle import Case, assert_alike, assert_bitwise, assert_same, check, compare, leaf, run
from saved_call_cases import once, several
from surroundings import Kept
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import reactivate
from reactivate import policies

save_ops, site = policies.save_ops, reactivate.site


# -- what is kept -----------------------------------------------------------------------------------------------------


def kept_bytes(forward: Callable[[], Tensor]) -> int:
    storages: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = forward()
    del out
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


def selective(ops: list[Any], fn: Callable[..., Tensor], *args: Tensor) -> int:
    """Count what torch's selective checkpointing keeps: its inputs, and what it caches."""

    def must_save(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in ops else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: list[Any] = []

    def make() -> Any:
        contexts.append(create_selective_checkpoint_contexts(must_save))
        return contexts[0]

    out = checkpoint(fn, *args, use_reentrant=False, context_fn=make)
    storages = {argument.untyped_storage().data_ptr(): argument.untyped_storage().nbytes() for argument in args}
    for outputs in contexts[0][0].storage.values():
        for output in outputs.values() if isinstance(outputs, dict) else outputs:
            value = getattr(output, "val", output)
            for tensor in value if isinstance(value, (tuple, list)) else [value]:
                tensor = getattr(tensor, "val", tensor)
                if isinstance(tensor, Tensor):
                    storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    del out
    return sum(storages.values())


aten = torch.ops.aten
MATMULS = [aten.mm.default, aten.addmm.default, aten.bmm.default]
weight, wide = nn.Parameter(torch.randn(16, 16)), nn.Parameter(torch.randn(3, 8, 16))


def block(x: Tensor) -> Tensor:
    return F.linear(F.linear(x, weight).sin(), weight).exp()


def cast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(F.linear(x, weight).sin(), weight).float().exp()


@pytest.mark.parametrize(
    ("fn", "ours", "theirs"),
    [
        (block, save_ops("linear"), MATMULS),
        (cast, save_ops("linear"), MATMULS),
        (
            lambda x: (x.transpose(1, 2) @ wide.transpose(1, 2).sin().transpose(1, 2)).exp().sin(),
            save_ops("matmul"),
            MATMULS,
        ),
        (lambda x: torch.tensordot(x.sin(), wide, dims=([1], [1])).exp(), save_ops("tensordot"), MATMULS),
        (lambda x: torch.einsum("bij,kil->bjkl", x.sin(), wide).exp(), save_ops("einsum"), MATMULS),
        (lambda x: F.softmax(x.sin(), -1).exp(), save_ops("softmax"), [aten._softmax.default]),
        (lambda x: F.layer_norm(x.sin(), (16,)).exp(), save_ops("layer_norm"), [aten.native_layer_norm.default]),
        (lambda x: F.gelu(x.sin()).exp(), save_ops("gelu"), [aten.gelu.default]),
    ],
)
def test_no_more_is_kept_than_torchs_selective_checkpointing_keeps(fn: Any, ours: Any, theirs: list[Any]) -> None:
    x = torch.randn(3, 8, 16, requires_grad=True)
    found = kept_bytes(lambda: reactivate.checkpoint(fn, policy=ours)(x))
    assert x.nbytes < found <= selective(theirs, fn, x)
    assert found < kept_bytes(lambda: fn(x))
    plain, saved = (torch.autograd.grad(call(x).sum(), x) for call in (fn, reactivate.checkpoint(fn, policy=ours)))
    assert_bitwise(plain[0], saved[0], "gradient")


def test_a_result_that_nothing_needs_is_not_kept() -> None:
    x = torch.randn(8, 16, requires_grad=True)
    fn = lambda x: F.linear(x.sin(), weight)  # noqa: E731
    assert kept_bytes(lambda: reactivate.checkpoint(fn, policy=save_ops("linear"))(x)) == x.nbytes


def test_an_offloader_around_the_region_sees_what_saved_calls_keep() -> None:
    x, packed = torch.randn(8, 16, requires_grad=True), []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor.clone()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = reactivate.checkpoint(block, policy=save_ops("linear"))(x)
    assert any(tensor.shape == x.shape and tensor.data_ptr() != x.data_ptr() for tensor in packed)
    packed.clear()
    (found,) = torch.autograd.grad(out.sum(), x)
    assert_bitwise(torch.autograd.grad(block(x).sum(), x)[0], found, "gradient")


# -- failures, threads ------------------------------------------------------------------------------------------------


def test_two_threads_do_not_see_each_others_saved_calls() -> None:
    barrier, results = threading.Barrier(2), dict[int, list[Tensor]]()

    def fn(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(5):
            barrier.wait(10)
            x = F.linear(x.sin(), w)
        return x.exp()

    def work(number: int) -> None:
        x, w = inputs[number]
        region = reactivate.checkpoint(fn, policy=policies.every_nth(2, save_ops("linear", "sin"), number))
        results[number] = list(torch.autograd.grad(region(x, w).sum(), [x, w]))

    inputs = [(leaf(4, 4), leaf(4, 4)) for _ in range(2)]
    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, (x, w) in enumerate(inputs):
        y = x
        for _ in range(5):
            y = F.linear(y.sin(), w)
        assert_alike(torch.autograd.grad(y.exp().sum(), [x, w]), results[number], f"thread {number}:")


def test_a_recomputation_that_calls_something_else_is_refused() -> None:
    calls = Journal()

    def fn(x: Tensor) -> Tensor:
        calls.append(1)
        y = F.linear(x, weight) if len(calls) == 1 else torch.tanh(x)
        return y.exp().sin()

    x = torch.randn(4, 16, requires_grad=True)
    out = reactivate.checkpoint(fn, policy=save_ops("linear", "tanh"))(x)
    with pytest.raises(reactivate.errors.RecomputeMismatchError, match="linear"):
        out.sum().backward()
    with Kept() as kept:
        del out
    assert kept.kept_bytes == 0


@pytest.mark.parametrize("early_stop", [True, False])
def test_a_result_that_is_written_to_after_the_region(early_stop: bool) -> None:
    """Autograd does not need it, so the plain model does not mind: the call runs again in the recomputation."""

    def once(wrap: Any) -> list[Any]:
        weight, x = leaf(8, 8), leaf(4, 8)
        first, second = wrap(lambda x: ((x.sin() @ weight), x.cos().exp()))(x)
        first.add_(1)
        (first.sum() + second.sum()).backward()
        return [first.detach(), x.grad, weight.grad]

    compare(once, policy=save_ops("matmul"), early_stop=early_stop)


def test_what_is_equal_to_an_argument_and_has_other_signs_is_no_copy_of_it() -> None:
    """Zeros: autograd saves `-constant` for the division, and dividing by it tells -0.0 from 0.0."""
    constant = torch.zeros(8)

    def divide(x: Tensor, constant: Tensor) -> Tensor:
        return x.sin() / -constant

    def fn(x: Tensor) -> Tensor:
        return reactivate.site(divide, name="divided")(x.exp(), constant)

    check(
        lambda: Case(lambda x: (fn(x), x.sin().exp().sin()), (torch.rand(8, requires_grad=True),)),
        policy=policies.save_names("divided"),
    )


# -- modules with state -----------------------------------------------------------------------------------------------


class Amax(nn.Module):
    """A linear layer that scales by the largest values of its last calls, as FP8 layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("history", torch.ones(3))
        self.register_buffer("scale", torch.ones(()))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        with torch.no_grad():
            self.history.copy_(self.history.roll(1))
            self.history[0] = x.abs().max()
            self.scale = self.history.max() / self.calls
        return F.linear(x / self.scale, self.weight) * self.scale


def stateful(make: Callable[[], nn.Module]) -> Case:
    module = make()
    calls = {name: site(module, name=name) for name in ("first", "second", "third")}

    def fn(x: Tensor) -> Tensor:
        return calls["third"](calls["second"](calls["first"](x).sin()).exp()).sin()

    return Case(fn, (leaf(4, 4),), modules=[module])


@pytest.mark.parametrize("backward", [once, several])
@pytest.mark.parametrize("saves", ["first", "second", "third", "first second", "first third", "second third"])
@pytest.mark.parametrize(
    "make", [Amax, lambda: nn.BatchNorm1d(4), lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.3))]
)
def test_modules_are_written_once_whichever_of_their_calls_are_saved(
    make: Callable[[], nn.Module], saves: str, backward: Any
) -> None:
    options = {"policy": policies.save_names(*saves.split()), "recomputations": 2 if backward is several else 1}
    check(partial(stateful, make), backward=backward, saves_memory=False, **options)


def test_saved_modules_of_a_model() -> None:
    def make() -> Case:
        block = lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), Amax(), nn.Tanh())  # noqa: E731
        return Case(nn.Sequential(block(), block()), (leaf(8, 4),))

    def applied(saved: tuple[str, ...]) -> Callable[[Any], Any]:
        def wrap(model: Any) -> Any:
            policy = policies.first_match(policies.save_modules(*saved), policies.full())
            assert len(reactivate.apply(model, policy).regions) == 2
            return model

        return wrap

    for saved in [("*.1",), ("*.3",), ("*.1", "*.3"), ("*.2", "*.0")]:
        plain, ours = run(make), run(make, applied(saved))
        assert_same(plain, ours)
        assert ours.regions == 2 and ours.recomputations == 2 and ours.kept_bytes < plain.kept_bytes
