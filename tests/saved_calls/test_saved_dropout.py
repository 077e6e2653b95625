"""Dropout calls that a policy saves: every bit of the plain model, and no random numbers in the recomputation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
import torch.nn.functional as F
from count_ops import Seen
from several import each
from torch import Tensor, nn

import reactivate
from reactivate import policies
from reactivate.storage import Disk, Host

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def kept_bytes(region: Callable[..., Any], *args: Any) -> int:
    """Return the bytes of the results that a region keeps."""
    return sum(entry.result_bytes for entry in reactivate.explain(region, args).walk() if entry.kind == "saved call")


def case(fn: Callable[..., Any], *shape: int) -> Callable[[], oracle.Case]:
    return lambda: oracle.Case(fn, (oracle.leaf(*(shape or (16, 8))),))


FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[str, ...]]] = {
    "F.dropout": (lambda x: F.dropout(x, 0.3), ("dropout",)),
    "torch.dropout": (lambda x: torch.dropout(x, 0.3, True), ("dropout",)),
    "aten": (lambda x: torch.ops.aten.dropout(x, 0.3, True), ("dropout",)),
    "aten.default": (lambda x: torch.ops.aten.dropout.default(x, 0.3, True), ("dropout",)),
    "native": (lambda x: torch.native_dropout(x, 0.3, True)[0], ("native_dropout",)),
    "most": (lambda x: F.dropout(x, 0.99), ("dropout",)),
    "nearly none": (lambda x: F.dropout(x, 1e-5), ("dropout",)),
}


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_bits_of_the_plain_model(name: str, dtype: torch.dtype, early_stop: bool) -> None:
    function, ops = FUNCTIONS[name]

    def program(x: Tensor) -> Tensor:
        y = function(x.sin())
        z = y.exp() + torch.rand_like(y)  # the stream goes on behind it
        return F.dropout(z, 0.5).cos() * y

    def make() -> oracle.Case:
        x = torch.randn(13, 7, dtype=dtype)
        x[0, :4] = torch.tensor([0.0, -0.0, torch.inf, torch.nan], dtype=dtype)
        return oracle.Case(program, (x.requires_grad_(),))

    oracle.check(make, policy=policies.save_ops(*ops), early_stop=early_stop)


CALLS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "a channel": (lambda x: F.dropout1d(x, 0.4), (4, 6, 5)),
    "an image": (lambda x: F.dropout2d(x, 0.4), (4, 6, 5, 5)),
    "a volume": (lambda x: F.dropout3d(x, 0.4), (4, 6, 3, 3, 3)),
    "an image without a batch": (lambda x: F.dropout1d(x, 0.4), (16, 5)),
    "alpha": (lambda x: F.alpha_dropout(x, 0.4, training=True), (16, 8)),
    "feature alpha": (lambda x: F.feature_alpha_dropout(x, 0.4, training=True), (16, 8, 3)),
    "p = 0": (lambda x: F.dropout(x, 0.0), (16, 8)),
    "p = 1": (lambda x: F.dropout(x, 1.0), (16, 8)),
    "evaluation": (lambda x: F.dropout(x, 0.4, training=False), (16, 8)),
    "transposed": (lambda x: F.dropout(x.t(), 0.4), (16, 8)),
    "a part": (lambda x: F.dropout(x[1:, ::2], 0.4), (16, 8)),
    "expanded": (lambda x: F.dropout(x[:, None].expand(16, 3, 8), 0.4), (16, 8)),
    "channels_last": (lambda x: F.dropout(x.to(memory_format=torch.channels_last), 0.4), (2, 8, 4, 4)),
    "empty": (lambda x: F.dropout(x[:0], 0.4), (16, 8)),
    "one element": (lambda x: F.dropout(x[0, 0], 0.4), (16, 8)),
    "a keyword": (lambda x: F.dropout(input=x, p=0.4, training=True), (16, 8)),
}
ALL = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


@pytest.mark.parametrize("needs_gradient", [True, False])
@each("name", CALLS)
def test_calls(name: str, needs_gradient: bool) -> None:
    call, shape = CALLS[name]

    def program(x: Tensor, y: Tensor) -> Tensor:
        return (call(x.sin()).exp() * y).sin() + F.gelu(y * torch.rand(()))

    def make() -> oracle.Case:
        x = torch.randn(shape, requires_grad=needs_gradient)
        return oracle.Case(program, (x, torch.randn((), requires_grad=True)))

    policy = policies.save_ops(*ALL)
    oracle.check(make, policy=policy)
    if name not in ("p = 0", "evaluation", "empty"):
        assert kept_bytes(reactivate.checkpoint(program, policy=policy), *make().args) > 0


def test_an_argument_under_no_grad() -> None:
    def program(x: Tensor) -> Tensor:
        with torch.no_grad():
            mask = F.dropout(x.cos(), 0.4)
            assert not mask.requires_grad
        return (x.sin() * mask).exp()

    policy = policies.save_ops("dropout")
    oracle.check(case(program), policy=policy)
    assert kept_bytes(reactivate.checkpoint(program, policy=policy), oracle.leaf(16, 8)) >= 16 * 8 * 4


class Block(nn.Module):
    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.drop, self.last = nn.Dropout(0.2, inplace), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(F.gelu(self.up(x)))
        found: Tensor = x + self.last(self.down(h))
        return found


def block_case() -> oracle.Case:
    return oracle.Case(Block(), (oracle.leaf(4, 8),))


POLICIES = {
    "ops": policies.save_ops("dropout"),
    "modules": policies.save_modules(nn.Dropout),
    "paths": policies.save_modules("drop", "last"),
    "with linear": policies.save_ops("dropout", "linear"),
    "a function": lambda site: reactivate.Save() if site.op == "dropout" else None,
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("kind", POLICIES)
def test_modules(kind: str, inplace: bool, autocast: bool) -> None:
    def make() -> oracle.Case:
        block = Block(inplace)

        def run(x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                return block(block(x))

        return oracle.Case(block if not autocast else run, (torch.randn(4, 8, requires_grad=True),), modules=[block])

    if autocast and kind in ("modules", "paths"):
        pytest.skip("the region is a function, which has no modules")
    oracle.check(make, policy=POLICIES[kind], saves_memory=kind != "with linear")
    if kind != "with linear" and not autocast:
        region = reactivate.checkpoint(Block(inplace), policy=POLICIES[kind])
        assert (
            kept_bytes(region, torch.randn(4, 8, requires_grad=True)) == (0 if inplace else 2 * 4 * 32 * 4) + 4 * 8 * 4
        )


def test_named_calls() -> None:
    def program(x: Tensor) -> Tensor:
        return reactivate.site(F.dropout, name="drop")(x.sin(), 0.4).exp().cos().sin().exp()

    policy = policies.save_names("drop")
    oracle.check(case(program), policy=policy)
    assert kept_bytes(reactivate.checkpoint(program, policy=policy), oracle.leaf(16, 8)) >= 16 * 8 * 4


def test_code_of_the_users_around_dropout_keeps_its_result() -> None:
    """Such code may have written to the product unseen."""

    def own(x: Tensor) -> Tensor:
        y = F.dropout(x, 0.4)
        y.data.add_(1)
        return y

    fn = lambda x: reactivate.site(own, name="drop")(x.sin()).exp().cos().sin()  # noqa: E731
    oracle.check(case(fn), policy=policies.save_names("drop"))


def test_a_patched_dropout_keeps_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = F.dropout

    def patched(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        y = plain(x, p, training)
        y.data.add_(1)
        return y

    monkeypatch.setattr(F, "dropout", patched)
    oracle.check(block_case, policy=policies.save_modules(nn.Dropout))


@pytest.mark.parametrize("storage", [None, Host(least_bytes=0)], ids=["device", "host"])
def test_storages(storage: Any) -> None:
    policy = policies.save_ops("dropout", **({} if storage is None else {"storage": storage}))
    oracle.check(block_case, policy=policy)


def test_a_disk(tmp_path: Any) -> None:
    disk = Disk(tmp_path, least_bytes=0, last=0)
    oracle.check(block_case, policy=policies.save_ops("dropout", storage=disk))
    assert disk.traffic.moved_bytes > 0


@pytest.mark.parametrize("backward", [oracle.backward_twice, oracle.double_backward])
@pytest.mark.parametrize("name", ["F.dropout", "native"])
def test_several_backwards(backward: Any, name: str) -> None:
    call, ops = FUNCTIONS[name]
    make = case(lambda x: call(x.sin()).exp().cos().sin().exp())
    oracle.check(make, policy=policies.save_ops(*ops), backward=backward, recomputations=2)


def test_a_mask_that_is_written_to_afterwards() -> None:
    def program(x: Tensor) -> Tensor:
        y, mask = torch.native_dropout(x.sin(), 0.4, True)
        z = y.exp() * mask
        return z.cos()

    def writes(x: Tensor) -> Tensor:
        y, mask = torch.native_dropout(x.detach().sin(), 0.4, True)
        mask.logical_not_()
        return (x.sin() * y).exp() * mask

    for fn in (program, writes):
        oracle.check(case(fn), policy=policies.save_ops("native_dropout"))


def test_a_mask_that_autograd_saved_and_the_program_writes_to() -> None:
    """Autograd refuses that, and so does the region."""

    def writes(x: Tensor) -> Tensor:
        y, mask = torch.native_dropout(x.sin(), 0.4, True)
        mask.logical_not_()
        return y.exp()

    for wrap in (lambda fn: fn, lambda fn: reactivate.checkpoint(fn, policy=policies.save_ops("native_dropout"))):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            wrap(writes)(torch.randn(16, 8, requires_grad=True)).sum().backward()


def test_the_recomputation_draws_nothing_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []

    class Sees(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            drawn.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    x = torch.randn(16, 8, requires_grad=True)
    out = reactivate.checkpoint(lambda x: F.dropout(x.sin(), 0.4).exp().cos(), policy=policies.save_ops("dropout"))(x)
    with Sees():
        out.sum().backward()
    assert "sin" in drawn and "bernoulli_" not in drawn


@pytest.mark.parametrize("needs_gradient", [True, False])
def test_function_modes_do_not_see_how_it_is_computed_again(needs_gradient: bool) -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return (F.dropout(x.sin(), 0.4) * w).exp().cos()

    def names(policy: Any) -> tuple[list[str], list[str]]:
        x, w = torch.randn(16, 8, requires_grad=needs_gradient), torch.randn(16, 8, requires_grad=True)
        with Seen() as seen:
            loss = reactivate.checkpoint(program, policy=policy)(x, w).sum()
            forward = len(seen.names)
            loss.backward()
        used = ("dropout", "detach", "requires_grad_", "mul", "sin", "exp")
        return [item for item in seen.names[:forward] if item in used], [
            item for item in seen.names[forward:] if item in used
        ]

    plain, ours = names(lambda site: None), names(policies.save_ops("dropout"))
    assert ours[0] == plain[0] == ["sin", "dropout", "mul", "exp"]
    assert plain[1] == ["sin", "dropout", "mul", "exp"] and ours[1] == ["sin", "mul", "exp"]


def test_nested_regions() -> None:
    inner = reactivate.checkpoint(lambda x: F.dropout(x.sin(), 0.4).exp().cos(), policy=policies.save_ops("dropout"))

    def outer(x: Tensor) -> Tensor:
        return F.dropout(inner(x.cos()), 0.2).sin().exp()

    oracle.check(case(outer), policy=policies.save_ops("dropout"), regions=3, recomputations=2)


def test_it_is_compared_as_any_other() -> None:
    for determinism in ("metadata", "every", "none"):
        oracle.check(
            lambda: oracle.Case(Block(), (torch.randn(4, 8, requires_grad=True),)),
            policy=policies.save_ops("dropout"),
            check=determinism,
        )


def test_an_applied_policy() -> None:
    model = nn.Sequential(*(Block() for _ in range(3)))
    policy = policies.first_match(policies.save_modules(nn.Dropout), policies.full())
    assert reactivate.verify(model, torch.randn(4, 8), policy=policy)
    reactivate.apply(model, policy)
    calls = [entry for entry in reactivate.explain(model, torch.randn(4, 8)).walk() if entry.kind == "saved call"]
    # The last call of a block keeps its noise alone: its result is not needed.
    assert [entry.result_bytes for entry in calls] == 3 * [2 * 4 * 32 * 4, 4 * 8 * 4]


def test_forward_mode_derivatives_of_an_argument_without_gradient() -> None:
    def program(x: Tensor) -> Tensor:
        return F.dropout(x.sin(), 0.4).exp().cos()

    def tangent(fn: Callable[[Tensor], Tensor]) -> Any:
        torch.manual_seed(0)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(torch.ones(16, 8), torch.full((16, 8), 2.0))
            return torch.autograd.forward_ad.unpack_dual(fn(dual)).tangent

    found = tangent(reactivate.checkpoint(program, policy=policies.save_ops("dropout")))
    assert found is not None
    oracle.assert_bitwise(tangent(program), found, "tangent")
