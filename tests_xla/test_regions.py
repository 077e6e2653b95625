"""Regions on XLA: the plain model's bits, one barrier each, and nothing that stays behind."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_xla
from lazy import DEVICE, MLP, XLA, Wrap, assert_same, ours, plain, traced
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as upstream
from torch_xla.debug import metrics
from torch_xla.utils.checkpoint import checkpoint as torch_xlas

import reactivate
from reactivate import policies
from reactivate.errors import MutationError, UnsupportedError

MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": MLP,
    "dropout": lambda: MLP(dropout=0.3),
    "batch norm": lambda: MLP(norm=True),
    "batch norm, dropout": lambda: MLP(norm=True, dropout=0.3),
}
CALLS: dict[str, Wrap] = {
    "module": ours,
    "bound method": lambda block: ours(block.forward),
    "lambda": lambda block: ours(lambda x: block(x)),
    "keyword": lambda block: lambda x: ours(lambda *, given: block(given["x"]))(given={"x": x}),
    "closed over": lambda block: lambda x: ours(lambda: block(x))(),
}


# -- what a region is in the program ----------------------------------------------------------------------------------


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", ["mlp", "dropout"])
def test_one_barrier_a_region_and_every_bit(name: str, call: str) -> None:
    before, after = traced(MODELS[name]), traced(MODELS[name], CALLS[call])
    assert (after.regions, after.recomputations) == (4, 4)
    assert (before.count("opt-barrier"), after.count("opt-barrier")) == (0, 4)
    assert after.count("dot") == before.count("dot") + 4  # of two products in a block, one saves nothing that is needed
    assert_same(before, after)


@pytest.mark.parametrize("name", MODELS)
def test_every_bit_op_by_op(name: str, op_by_op: None) -> None:
    after = traced(MODELS[name], ours, steps=2)
    assert after.recomputations == 8
    assert_same(traced(MODELS[name], steps=2), after)


def test_autocast(op_by_op: None) -> None:
    def step(wrap: Wrap) -> Wrap:
        def run(block: Any) -> Any:
            def call(x: Tensor) -> Tensor:
                with torch.autocast("xla", dtype=torch.bfloat16):
                    return wrap(block)(x)

            return call

        return run

    before, after = traced(MLP, step(plain)), traced(MLP, step(ours))
    assert after.recomputations == 4
    assert_same(before, after)
    assert not torch.equal(before.values()["loss"], traced(MLP).values()["loss"])


def test_whatever_the_recomputation_reads_stands_behind_the_barrier() -> None:
    """No op of the recomputation reads what the forward pass read: arguments, parameters, buffers, closures, attributes.

    But for vectors that are no parameters, as batch norm's statistics, to which a forward writes unseen.
    """

    class Holder:
        scale = torch.full((1, 16), 1.5, device=DEVICE)

    shift, holder = torch.ones(1, 16, device=DEVICE), Holder()

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, 16))
            self.register_buffer("offset", torch.ones(1, 16))

        def forward(self, x: Tensor, table: Tensor) -> Tensor:
            return ((x @ self.weight + self.offset + shift) * holder.scale * table).exp().sin()

    block = Block().to(DEVICE)
    x, table = torch.randn(8, 16).to(DEVICE).requires_grad_(), torch.randn(1, 16).to(DEVICE)
    torch_xla.sync()
    loss = reactivate.checkpoint(block)(x, table=table).sum()
    loss.backward()
    program = XLA._get_xla_tensors_hlo([loss, x.grad, block.weight.grad])
    reads = [line.partition("(")[2] for line in program.splitlines() if " = " in line and " tuple(" not in line]
    for name in re.findall(r"(\S+) = \S+ parameter\(", program):
        readers = sum(bool(re.search(rf"{re.escape(name)}[,)]", read)) for read in reads)
        assert readers <= 3, (
            name
        )  # the forward pass, the fence, and the backward itself, which needs x, weight and table
    assert program.count("opt-barrier(") == 1


# -- random numbers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 2**31, 2**63 - 1, 2**63 + 5, 2**64 - 1])
def test_seeds_of_the_whole_range(seed: int) -> None:
    left = []
    for wrap in (plain, ours):
        torch.xla.set_rng_state(seed)
        x = torch.ones(64, device=DEVICE).requires_grad_()
        wrap(lambda x: (F.dropout(x, 0.5) * torch.rand_like(x)).exp())(x).sum().backward()
        left.append((x.grad.cpu(), torch.xla.get_rng_state()))
    assert torch.equal(left[0][0], left[1][0])
    assert left[0][1] == left[1][1]


def test_seeds_that_are_none_are_refused() -> None:
    for seed in (-1, 2**64):
        with pytest.raises(ValueError, match=str(seed)):
            torch.xla.set_rng_state(seed)


def test_a_device_that_is_first_used_inside_of_a_region() -> None:
    code = """
        import queue, torch, torch_xla, reactivate
        torch.manual_seed(0)
        drawn = queue.SimpleQueue()  # which no recomputation rewinds
        def fn(x):
            out = torch.nn.functional.dropout(x.to("xla"), 0.5)
            drawn.put(out)
            return out.exp().cpu()
        x = torch.ones(64, requires_grad=True)
        reactivate.checkpoint(fn)(x).sum().backward()
        assert drawn.qsize() == 2 and torch.equal(drawn.get().cpu(), drawn.get().cpu())
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)], check=True)


def test_the_order_of_imports_does_not_matter_for_regions_and_drop_in() -> None:
    """torch's own checkpoint needs `torch.xla`, which the first of them registers where torch_xla comes later."""
    code = """
        import reactivate
        import torch, torch_xla
        from torch.utils.checkpoint import checkpoint as upstream

        def gradient(call):
            x = torch.linspace(-1, 1, 9, device="xla", requires_grad=True)
            call(lambda x: (x.sin() * x).exp(), x).sum().backward()
            return x.grad.cpu()

        plain = gradient(lambda fn, x: fn(x))
        with reactivate.dropin.install():
            assert torch.equal(plain, gradient(lambda fn, x: upstream(fn, x, use_reentrant=False)))
        assert torch.equal(plain, gradient(lambda fn, x: reactivate.checkpoint(fn)(x)))
        assert torch.equal(plain, gradient(lambda fn, x: upstream(fn, x, use_reentrant=False)))
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)], check=True)


# -- autograd in full -------------------------------------------------------------------------------------------------


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, x.exp())
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, _ = ctx.saved_tensors
        return 2 * x * gradient


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "several": lambda x, w: {"one": (x @ w).sin(), "two": [(x * 2).exp(), None, 3]},
    "one from the other": lambda x, w: ((y := (x @ w).sin()), y.exp()),
    "an input": lambda x, w: (x, (x @ w).sin().exp()),
    "a view of an input": lambda x, w: (x[0], x.t(), (x @ w).sin().exp()),
    "views of one memory": lambda x, w: (y := (x @ w).sin().exp(), y[0], y.t()),
    "parts": lambda x, w: (x @ w).sin().exp().chunk(2),
    "in place": lambda x, w: (x @ w).sin().mul_(2).add_(1),
    "custom": lambda x, w: Square.apply((x @ w).sin()).exp(),
    "saves nothing at the end": lambda x, w: x + (x @ w).sin().view(-1).view(8, 8),
    "without a gradient": lambda x, w: ((x @ w).sin().exp(), (x @ w).detach(), torch.arange(3, device=x.device)),
    "nested": lambda x, w: ours(lambda y: ours(torch.sin)((y @ w).exp()) * y)(x.cos()).exp(),
    "no_grad": lambda x, w: (x @ w).sin() * _without_gradient(x),
}


def _without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.exp()


def once(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    loss.backward()
    return [leaf.grad for leaf in leaves]


def twice(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    loss.backward(retain_graph=True)
    return once(loss, leaves)


def asked(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(loss, leaves))


def double(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    first = torch.autograd.grad(loss, leaves, create_graph=True)
    return [*first, *torch.autograd.grad(sum(item.square().sum() for item in first), leaves)]


def tensors_in(value: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


@pytest.mark.parametrize("backward", [once, twice, asked, double], ids=lambda backward: backward.__name__)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_autograd(name: str, backward: Any, op_by_op: None) -> None:
    if (name, backward) == ("custom", double):
        backward = twice  # its backward reads a saved tensor that is not an input: it cannot be differentiated
    found = []
    for wrap in (plain, ours):
        torch.manual_seed(0)
        leaves = [torch.randn(8, 8).to(DEVICE).requires_grad_() for _ in range(2)]
        outputs = tensors_in(wrap(FUNCTIONS[name])(*leaves))
        loss = sum(output.sum() for output in outputs if output.requires_grad)
        found.append([item.cpu() for item in (*outputs, *backward(loss, leaves))])
    assert len(found[0]) == len(found[1])
    for one, other in zip(*found):
        assert torch.equal(one, other)


def test_what_is_written_to_one_output_is_read_through_its_views() -> None:
    found = []
    for wrap in (plain, ours):
        x = torch.ones(4, 4, device=DEVICE).requires_grad_()
        whole, row = wrap(lambda x: ((y := x.sin() * 2), y[0]))(x)
        row.mul_(3)
        whole.square().sum().backward()
        found.append((whole.cpu(), row.cpu(), x.grad.cpu()))
    for one, other in zip(*found):
        assert torch.equal(one, other)


def test_arguments_of_two_devices(op_by_op: None) -> None:
    found = []
    for wrap in (plain, ours):
        torch.manual_seed(0)
        x, y = torch.randn(8, 8).to(DEVICE).requires_grad_(), torch.randn(8, 8).requires_grad_()
        out = wrap(lambda x, pair: (x @ pair["y"].exp().to(DEVICE)).sin().exp())(x, pair={"y": y})
        out.sum().backward()
        found.append((out.cpu(), x.grad.cpu(), y.grad))
    for one, other in zip(*found):
        assert torch.equal(one, other)


def test_a_written_argument_is_refused() -> None:
    x = torch.ones(4, 4, device=DEVICE).requires_grad_()
    y = x * 1
    out = ours(lambda y: y.sin().exp())(y)
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(MutationError, match=r"4, 4"):
        out.sum().backward()


def test_a_write_that_does_not_matter_is_right() -> None:
    """A large input that is only written to: no copy is there, and the outputs prove that none is needed."""
    log, x = torch.zeros(2, 200, 200, device=DEVICE), torch.randn(200, 200).to(DEVICE).requires_grad_()

    def block(x: Tensor, index: int) -> Tensor:
        y = x.relu()
        log[index].copy_(y.detach())
        return y * y * 0.5

    out = x
    for index in range(2):
        out = reactivate.checkpoint(block)(out, index)
    out.sum().backward()
    expected = x.detach().clone().requires_grad_()
    y = expected.relu()
    z = (y * y * 0.5).relu()
    (z * z * 0.5).sum().backward()
    assert torch.equal(x.grad.cpu(), expected.grad.cpu())
    assert torch.equal(log[1].cpu(), z.detach().cpu())


def test_a_write_that_matters_is_refused_until_there_is_a_copy() -> None:
    table, x = torch.ones(200, 200, device=DEVICE), torch.randn(200, 200).to(DEVICE).requires_grad_()

    def block(x: Tensor, table: Tensor) -> Tensor:
        y = x + table
        table.add_(1)
        return y * y

    with pytest.raises(MutationError, match=r"`args\[1\]`"):
        reactivate.checkpoint(block)(x, table).sum().backward()
    reactivate.checkpoint(block)(x, table).sum().backward()
    assert torch.equal(x.grad.cpu(), 2 * (x.detach() + 2).cpu())
    assert torch.equal(table.cpu(), torch.full((200, 200), 3.0))


def test_an_argument_that_the_region_itself_writes_to() -> None:
    x = torch.randn(8, 8).to(DEVICE).requires_grad_()
    reactivate.checkpoint(lambda h: h.relu_() * h)(x * 1).sum().backward()
    assert torch.equal(x.grad.cpu(), 2 * x.detach().relu().cpu())
    out = reactivate.checkpoint(lambda h: (h.mul_(2) * h).exp())(x * 1)
    with pytest.raises(MutationError, match=r"wrote in place to `args\[0\]`"):
        out.sum().backward()


def test_forward_mode_is_refused() -> None:
    from torch.autograd import forward_ad

    x = torch.ones(4, device=DEVICE).requires_grad_()
    with forward_ad.dual_level(), pytest.raises(UnsupportedError, match="forward_ad on xla"):
        ours(lambda x: x.sin().exp())(forward_ad.make_dual(x, torch.ones(4, device=DEVICE)))


# -- policies ---------------------------------------------------------------------------------------------------------

POLICIES: dict[str, Any] = {
    "linear": policies.save_ops("linear"),
    "random": policies.save_ops("dropout"),
    "both": policies.save_ops("linear", "dropout"),
}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("model", ["dropout", "batch norm, dropout"])
def test_saved_calls(model: str, name: str, op_by_op: None) -> None:
    after = traced(MODELS[model], lambda block: ours(block, policy=POLICIES[name]))
    assert after.regions == 4
    assert_same(traced(MODELS[model]), after)


def test_saved_modules_of_a_model(op_by_op: None) -> None:
    def make() -> nn.Module:
        model = MLP(dropout=0.3, norm=True)
        reactivate.apply(
            model, policies.first_match(policies.save_modules("blocks.*.2", "blocks.*.3"), policies.full())
        )
        return model

    after = traced(make)
    assert after.regions == 4
    assert_same(traced(MODELS["batch norm, dropout"]), after)


class Level(nn.Module):
    """Blocks with a product each, in a module of their own."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.product, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.inner = Level(depth - 1) if depth else nn.Identity()

    def forward(self, x: Tensor, wrap: Wrap = plain) -> Tensor:
        x = self.norm(self.product(x.sin()).tanh()).exp().tanh()
        out: Tensor = self.inner(x).sin().exp()
        return out


def test_saved_calls_in_nested_regions(op_by_op: None) -> None:
    def make() -> nn.Module:
        model = nn.Sequential(Level())
        policy = policies.first_match(policies.save_modules("product"), policies.recompute_modules(Level))
        assert len(reactivate.apply(model, policy).regions) == 3
        return model[0]

    after = traced(make)
    assert after.recomputations == 3
    assert_same(traced(Level), after)


def test_saved_products_are_computed_once() -> None:
    before, after = traced(MLP), traced(MLP, lambda block: ours(block, policy=policies.save_ops("linear")))
    assert after.count("dot") == before.count("dot")
    assert after.count("opt-barrier") >= 4
    assert_same(before, after)


# -- what stays behind ------------------------------------------------------------------------------------------------


def live() -> int:
    """Count the tensors that would come out of the program if it ended here."""
    return XLA._xla_tensors_report(0, str(DEVICE) + ":0").count("tensor_id") or len(
        XLA._xla_tensors_report(0, "").split("\n\n")
    )


@pytest.mark.parametrize("name", ["mlp", "dropout", "batch norm"])
def test_as_many_outputs_as_plain(name: str) -> None:
    counts = []
    for wrap in (plain, ours, lambda block: ours(block, policy=policies.save_ops("linear"))):
        ran = traced(MODELS[name], wrap)
        counts.append(live())
        assert ran.count("parameter") > 0
        del ran
    assert counts[1:] == [counts[0]] * 2, counts


def test_nothing_is_compiled_after_the_second_step() -> None:
    torch.manual_seed(0)
    model = MLP(dropout=0.3, norm=True).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(8, 16).to(DEVICE)
    compiled = []
    for _ in range(12):
        optimizer.zero_grad()
        model(x, ours).square().mean().backward()
        optimizer.step()
        torch_xla.sync()
        compiled.append(metrics.counter_value("UncachedCompile") or 0)
    assert compiled[1] == compiled[-1], compiled


# -- other functions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_in_the_place_of_torch_xlas_own(use_reentrant: bool) -> None:
    def wrap(block: nn.Module) -> Any:
        return lambda x: reactivate.dropin.xla.checkpoint(block.forward, x, use_reentrant=use_reentrant)

    after = traced(MODELS["dropout"], wrap)
    assert after.count("opt-barrier") == 4
    assert_same(traced(MODELS["dropout"], lambda block: lambda x: torch_xlas(block.forward, x)), after)


def test_installed_in_the_place_of_torchs() -> None:
    with reactivate.dropin.install():
        after = traced(
            MODELS["dropout"], lambda block: lambda x: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        )
    assert (after.regions, after.count("opt-barrier")) == (4, 4)
    assert_same(traced(MODELS["dropout"]), after)


def test_torchs_own_with_a_context(op_by_op: None) -> None:
    def wrap(block: nn.Module) -> Any:
        return lambda x: upstream(block, x, use_reentrant=False, context_fn=reactivate.dropin.xla.context_fn)

    assert_same(traced(MODELS["dropout"]), traced(MODELS["dropout"], wrap))


def test_torchs_own_with_a_context_stands_behind_barriers() -> None:
    def wrap(block: nn.Module) -> Any:
        return lambda x: upstream(block, x, use_reentrant=False, context_fn=reactivate.dropin.xla.context_fn)

    def without(block: nn.Module) -> Any:
        return lambda x: upstream(block, x, use_reentrant=False)

    assert traced(MLP, without).count("opt-barrier") == 0
    after = traced(MLP, wrap)
    assert after.count("opt-barrier") >= 4
    assert_same(traced(MLP), after)
