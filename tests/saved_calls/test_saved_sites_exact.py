"""Saved calls of copies and casts, of modules, under other checkpoints and hooks. Every bit is the plain one's."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from journal import Journal
from oracle import Case, assert_same, check, run
from saved_call_cases import SAVED, Fn, compare_call, leaf, once, saved, weighted
from several import each
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import reactivate
from reactivate import policies

# -- what is derived from an argument ---------------------------------------------------------------------------------


def clone_then_write(x: Tensor, w: Tensor) -> Tensor:
    copied = x.clone()
    with torch.no_grad():
        copied.mul_(2)
    return copied * w


def clone_of_clone(x: Tensor, w: Tensor) -> Tensor:
    copied = x.clone()
    with torch.no_grad():
        copied.mul_(2)
    return copied.clone() * w


def clone_then_view(x: Tensor, w: Tensor) -> Tensor:
    copied = x.clone()
    with torch.no_grad():
        copied.mul_(2)
    return copied.t() * w


def write_then_view(x: Tensor, w: Tensor) -> Tensor:
    copied = x.clone()
    copied[0] = 0
    return copied.t() * w


def without_a_graph(x: Tensor, w: Tensor) -> Tensor:
    constant = torch.ones(4, 4, dtype=torch.float64).float()
    return constant.mul_(2) * x * w


def region(call: Fn, x: Tensor, w: Tensor) -> Tensor:
    y = x.sin()
    return call(y, w).exp() * y.cos()


@pytest.mark.parametrize("call", [clone_then_write, clone_of_clone, clone_then_view, write_then_view, without_a_graph])
def test_a_copy_that_is_written_to_is_no_copy_any_more(call: Fn) -> None:
    compare_call(region, call, runs=1)


def test_a_copy_made_before_its_origin_was_written_to() -> None:
    def fn(call: Fn, x: Tensor, w: Tensor) -> Tensor:
        y = x.tanh() + 1
        copied = y.clone()
        with torch.no_grad():
            y.mul_(3)
        return call(y, w, copied).exp().sin()

    def call(y: Tensor, w: Tensor, copied: Tensor) -> Tensor:
        return (copied.t() * w) + y

    compare_call(fn, call, runs=1)


class Held:
    copied: Tensor


def test_a_copy_from_a_closure_made_before_its_origin_was_written_to() -> None:
    def fn(call: Fn, x: Tensor, w: Tensor) -> Tensor:
        y = x + 1
        held = Held()
        held.copied = y.clone()
        with torch.no_grad():
            y.mul_(3)
        return call(y, w, held).exp().sin()

    compare_call(fn, lambda y, w, held: held.copied * w + y, runs=1)


def test_a_cast_of_a_leaf_made_before_the_leaf_was_written_to() -> None:
    """The plain model goes on with the cast that autocast has in its cache."""

    def fn(call: Fn, x: Tensor, w: Tensor) -> Tensor:
        v = w.detach().clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = call(x.sin(), v)
            with torch.no_grad():
                v.mul_(2)
            return call(y.sin(), v).float().exp() * w

    linear = policies.every_nth(2, policies.save_ops("linear"), 1)
    for policy in (linear, policies.save_ops("linear")):
        check(weighted(partial(fn, F.linear)), policy=policy, saves_memory=False)


def test_a_weight_that_is_cast_once_for_two_saved_calls_is_not_kept() -> None:
    w, x = nn.Parameter(torch.randn(64, 64)), leaf(2, 64)

    def fn(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(F.linear(x, w).sin(), w).exp()

    packed: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: packed.append(tensor) or tensor, lambda tensor: tensor):
        out = reactivate.checkpoint(fn, policy=policies.save_ops("linear"))(x)
    assert sum(tensor.nbytes for tensor in packed if tensor is not w) < 64 * 64 * 2
    out.sum().backward()


def test_nothing_is_compared_by_contents(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator each comparison would wait for the device."""

    def fail(*args: Any) -> bool:
        raise AssertionError("compared")

    constant = torch.randn(4, 4, dtype=torch.float64)
    fn = reactivate.checkpoint(
        lambda x: (x.sin() * constant.float()).exp(), policy=policies.save_ops("mul"), check="metadata"
    )
    monkeypatch.setattr(torch, "equal", fail)
    fn(leaf()).sum().backward()


def test_a_tensor_that_is_written_to_after_it_was_saved_raises_as_without_a_region() -> None:
    def write(x: Tensor, w: Tensor) -> Tensor:
        y = x.exp() * 1
        result = y * w
        y.mul_(2)
        return result

    x, w = leaf(), leaf()
    for wrap in (lambda fn: fn, lambda fn: reactivate.checkpoint(fn, policy=SAVED)):
        out = wrap(lambda x: saved(write)(x.sin(), w).exp())(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_a_parameter_whose_cast_was_derived_and_that_changed_is_refused() -> None:
    w, x = nn.Parameter(torch.randn(4, 4)), leaf()

    def fn(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(x.sin(), w).float().exp()

    out = reactivate.checkpoint(fn, policy=policies.save_ops("linear"))(x)
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(reactivate.errors.ReactivateError, match="inplace"):
        out.sum().backward()


# -- modules of a checkpointed module ---------------------------------------------------------------------------------


class Counted(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.calls = Journal()

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(1)
        return super().forward(x)


@pytest.mark.parametrize("early_stop", [True, False])
def test_a_policy_of_modules_for_a_checkpointed_module(early_stop: bool) -> None:
    def make(models: list[nn.Sequential]) -> Case:
        models.append(nn.Sequential(Counted(), nn.Tanh(), Counted(), nn.Tanh()))
        return Case(models[-1], (leaf(),))

    models: list[nn.Sequential] = []
    plain = run(partial(make, models))
    policy = policies.save_modules("0")
    ours = run(
        partial(make, models), partial(reactivate.checkpoint, policy=policy, early_stop=early_stop, check="metadata")
    )
    assert_same(plain, ours)
    counts = [[len(model[index].calls) for index in (0, 2)] for model in models]  # type: ignore[union-attr,arg-type]
    assert counts == [[1, 1], [1, 2]] and ours.regions == 1
    assert all("forward" not in vars(module) for model in models for module in model.modules())
    for module in models[1][::2]:
        del module.calls
    copy.deepcopy(models[1])


def test_a_method_of_a_module_and_hooks_of_a_saved_one() -> None:
    seen = Journal()

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = Counted()
            self.first.register_forward_hook(lambda module, args, out: seen.append(1))

        def run(self, x: Tensor) -> Tensor:
            return self.first(x.sin()).exp().sin()

    block, x = Block(), leaf()
    expected = torch.autograd.grad(block.run(x).sum(), x)[0]
    count = len(block.first.calls)
    out = reactivate.checkpoint(block.run, policy=policies.save_modules("first"))(x)
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], expected)
    assert len(block.first.calls) == count + 1


def test_modules_that_are_not_there_are_refused() -> None:
    with pytest.raises(reactivate.errors.UsageError, match="matches nothing"):
        reactivate.checkpoint(nn.Sequential(nn.Linear(4, 4)), policy=policies.save_modules("7"))(leaf())


def test_the_stand_ins_go_when_the_forward_fails() -> None:
    class Failing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise ArithmeticError

    model = nn.Sequential(nn.Linear(4, 4), Failing(4, 4))
    with pytest.raises(ArithmeticError):
        reactivate.checkpoint(model, policy=policies.save_modules("0"))(leaf())
    assert all("forward" not in vars(module) for module in model.modules())


# -- torch's own checkpoint, and other hooks --------------------------------------------------------------------------


def inner_block(x: Tensor, w: Tensor) -> Tensor:
    return F.dropout(F.linear(x.sin(), w).exp(), 0.3).tanh()


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("ops", [("linear",), ("linear", "sin", "exp"), ("cos",), ("tanh",), ("dropout",)])
def test_torchs_checkpoint_inside_of_a_region_with_a_policy(
    ops: tuple[str, ...], use_reentrant: bool, early_stop: bool
) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = F.linear(x.cos(), w).tanh()
        y = checkpoint(inner_block, y, w, use_reentrant=use_reentrant)
        return F.linear(F.dropout(y, 0.1).sin(), w).exp().cos()

    check(weighted(fn), policy=policies.save_ops(*ops), early_stop=early_stop, saves_memory=False)


def test_calls_under_hooks_of_the_users_run_again() -> None:
    """The hooks change what the backward reads, also of a saved call."""

    def fn(call: Fn, x: Tensor, w: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda tensor: tensor.bfloat16(), lambda tensor: tensor.float()):
            y = call(x.sin(), w)
        return y.exp().sin()

    compare_call(fn, lambda y, w: (y * w).exp() * y, runs=2)


def own_modules(site: Any) -> Any:
    """Save every module, as a policy of the user's own, which is asked about ops as well."""
    return reactivate.Save() if site.path and not site.op else None


def own_ops(site: Any) -> Any:
    return reactivate.Save() if site.op == "linear" else None


@each("hooks", [save_on_cpu, partial(saved_tensors_hooks, Tensor.bfloat16, Tensor.float)])
@each("policy", [own_modules, own_ops, policies.save_modules("0", "1", "2")])
def test_ops_that_unpack_what_is_kept_are_no_calls_of_the_region(policy: Any, hooks: Any) -> None:
    """The values are those that these hooks do not change."""

    def make(wrap: Any) -> Case:
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.sign())

        def fn(x: Tensor) -> Any:
            with hooks():
                return checkpointed(x)

        checkpointed = wrap(model)
        return Case(fn, (torch.ones(2, 4, requires_grad=True),), leaves=dict(model.named_parameters()))

    plain = run(partial(make, lambda model: model), None, once)
    ours = run(partial(make, partial(reactivate.checkpoint, policy=policy, check="every")), None, once)
    assert_same(plain, ours)


# -- ops that fill a tensor after they had it saved -------------------------------------------------------------------


RRELUS: dict[str, Fn] = {
    "module attribute": lambda x: torch.rrelu(x, 0.1, 0.3, True),
    "functional": lambda x: F.rrelu(x, 0.1, 0.3, training=True),
    "partial": partial(torch.rrelu, lower=0.1, upper=0.3, training=True),
    "getattr": lambda x: getattr(torch, "r" + "relu")(x, 0.1, 0.3, True),
    "list": lambda x: [torch.sin, torch.rrelu][1](x, 0.1, 0.3, True),
    "aten": lambda x: getattr(torch.ops.aten, "r" + "relu")(x, 0.1, 0.3, True),
    "alias": lambda x: noisy_relu(x, 0.1, 0.3, True),
    "module": nn.RReLU(0.1, 0.3),
}
noisy_relu = torch.rrelu


@each("policy", [None, policies.save_ops("sin"), policies.save_ops("rrelu"), policies.save_ops("exp")])
@each("name", RRELUS)
def test_rrelu_by_any_name(name: str, policy: Any) -> None:
    """The noise is the last tensor that is saved, and it is filled afterwards."""
    rrelu = RRELUS[name]
    if policy == policies.save_ops("rrelu") and name == "aten":
        pytest.skip("it goes by the same name")
    check(lambda: Case(lambda x: rrelu(x.sin() - x.exp()), (leaf(64, 64),)), policy=policy, saves_memory=False)


def test_a_gradient_that_is_cleared_in_one_pass_only() -> None:
    """To set an attribute is no call: there is a gradient to clear when the recomputation begins."""
    linear, x = nn.Linear(4, 4), leaf()

    def clearing(x: Tensor) -> Tensor:
        for parameter in linear.parameters():
            if parameter.grad is not None:
                parameter.grad = None
        return linear(x.exp()).sin()

    out = reactivate.checkpoint(clearing, policy=own_ops)(x)
    linear.weight.grad = torch.ones(4, 4)
    (found,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(linear.weight.grad, torch.ones(4, 4))
    assert torch.equal(found, torch.autograd.grad(linear(x.exp()).sin().sum(), x)[0])
