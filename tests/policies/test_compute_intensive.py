"""`compute_intensive` keeps what torchtitan 0.3 keeps, bit for bit as without; and compiled code in regions with a policy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch._inductor.config
import torch.nn.functional as F
from oracle import assert_bitwise
from several import each
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.library import custom_op
from torch.nn.attention import flex_attention as flex

import reactivate
from reactivate import Save, Site, policies
from reactivate._passes.observing import observed_by
from reactivate.policies import by_arguments
from reactivate.policies.ops import COMPUTE_INTENSIVE
from reactivate.storage import Host

WIDTH = 16
Function = Callable[..., Tensor]


class Saved:
    """Notes the saved calls of forward passes: {label: why it runs again, None if it is skipped}."""

    def __init__(self) -> None:
        self.calls: list[dict[str, str | None]] = []

    def forward_done(self, record: Any) -> None:
        if not reactivate.is_recomputing():
            self.calls.append({site.label: site.reason for site in record.saved_calls})

    def recomputation_done(self, record: Any) -> None:
        pass


def gradients(function: Function, inputs: list[Tensor]) -> list[Tensor]:
    result = function(*inputs)
    return [result, *torch.autograd.grad(result.sum(), inputs)]


def saved_by(function: Function, *inputs: Tensor, policy: Any = None) -> dict[str, str | None]:
    """The saved calls of a region that is bitwise the plain function, three times: compiled code settles in the first."""
    leaves = [item.detach().requires_grad_() for item in inputs]
    saved = Saved()
    region = reactivate.checkpoint(function, policy=policy or policies.compute_intensive())
    for _ in range(3):
        expected = gradients(function, leaves)
        with observed_by(saved):
            found = gradients(region, leaves)
        for index, (one, other) in enumerate(zip(expected, found, strict=True)):
            assert_bitwise(one, other, f"result {index}")
    return saved.calls[-1]


def x(*shape: int) -> Tensor:
    return torch.randn(shape or (4, WIDTH))


# -- ops --------------------------------------------------------------------------------------------------------------


@custom_op("deepep::dispatch", mutates_args=())
def dispatch(tokens: Tensor, expert: Tensor) -> Tensor:
    """Stands for DeepEP's op of that name, which needs GPUs and its library: tokens go in the order of their experts."""
    COMMUNICATED.append("dispatch")
    return tokens[expert.argsort(stable=True)].clone()


@custom_op("deepep::combine", mutates_args=())
def combine(tokens: Tensor, expert: Tensor) -> Tensor:
    """Stands for the op that brings them back."""
    COMMUNICATED.append("combine")
    return tokens[expert.argsort(stable=True).argsort()].clone()


COMMUNICATED: list[str] = []
for one, other in ((dispatch, combine), (combine, dispatch)):
    one.register_autograd(
        lambda ctx, gradient, other=other: (other(gradient.contiguous(), ctx.saved_tensors[0]), None),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
    )


def routed(tokens: Tensor) -> Tensor:
    best, expert = tokens.sin().topk(1, -1)
    dispatched = torch.ops.deepep.dispatch(tokens.exp(), expert[:, 0])
    return torch.ops.deepep.combine(dispatched.tanh(), expert[:, 0]).cos() * best.exp()


def test_top_k_and_the_communication_of_experts_are_kept() -> None:
    assert saved_by(routed, x()) == dict.fromkeys(("topk", "deepep.dispatch", "deepep.combine"))


def test_tokens_are_not_sent_a_second_time() -> None:
    """The third is the backward of one of them, which is the other."""
    region = reactivate.checkpoint(routed, policy=policies.compute_intensive())
    result = region(x().requires_grad_())
    COMMUNICATED.clear()
    result.sum().backward()
    assert sorted(COMMUNICATED) == ["combine", "dispatch"]


def test_scaled_products_are_kept() -> None:
    scale = torch.ones(())
    weight = x(WIDTH, WIDTH).to(torch.float8_e4m3fn).t()

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Tensor) -> Tensor:
            return torch._scaled_mm(value.to(torch.float8_e4m3fn), weight, scale, scale, out_dtype=torch.float32)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient @ weight.to(torch.float32).t()

    assert saved_by(lambda value: Scaled.apply(value.sin()).exp(), x(16, WIDTH)) == {"_scaled_mm": None}


@each("op", ["linear", "mm", "topk", "_scaled_mm", "flex_attention", "convolution"])
def test_what_it_names_exists(op: str) -> None:
    policies.save_ops(op)
    assert op in COMPUTE_INTENSIVE


# -- attention --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("is_named", [False, True])
def test_attention_with_dropout_on_a_cpu_is_recomputed(dropout: float, is_named: bool) -> None:
    """No kernel does that there: the call saves weights, masks and what is left of the weights."""

    def attend(query: Tensor) -> Tensor:
        torch.manual_seed(0)
        key = query.sin()
        if is_named:
            return F.scaled_dot_product_attention(query=query.cos(), key=key, value=key, dropout_p=dropout).exp()
        return F.scaled_dot_product_attention(query.cos(), key, key, None, dropout).exp()

    kept = {"scaled_dot_product_attention": None}
    query = x(2, 2, 8, WIDTH)
    assert saved_by(attend, query) == ({} if dropout else kept)
    assert saved_by(attend, query, policy=policies.save_ops("scaled_dot_product_attention")) == kept
    both = policies.union(policies.compute_intensive(), policies.save("attention"))
    assert saved_by(attend, query, policy=both) == kept


def test_attention_of_sequences_of_several_lengths_is_kept() -> None:
    """Fake tensors: there is no such kernel for CPUs."""
    varlen_attn = pytest.importorskip("torch.nn.attention.varlen").varlen_attn
    saved = Saved()
    with FakeTensorMode(), observed_by(saved):
        q = torch.randn(8, 2, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        lengths = torch.tensor([0, 3, 8], dtype=torch.int32)
        region = reactivate.checkpoint(
            lambda q: varlen_attn(q.sin(), q, q, lengths, lengths, 5, 5).exp(), policy=policies.compute_intensive()
        )
        region(q).sum().backward()
    assert saved.calls == [{"torch_attn._varlen_attn": None}]


@pytest.fixture
def backward_of_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses it on CPUs, as inductor has no kernel for it; what runs in eager has one."""
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)


@pytest.mark.usefixtures("backward_of_flex")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "policy",
    [policies.compute_intensive(), policies.save("attention"), policies.save_ops(flex.flex_attention)],
    ids=repr,
)
def test_flex_attention_is_kept(policy: Any) -> None:
    def attend(q: Tensor) -> Tensor:
        return flex.flex_attention(q.sin(), q, q).exp()

    assert saved_by(attend, x(1, 2, WIDTH, WIDTH), policy=policy) == {"flex_attention": None}


# -- compiled code ----------------------------------------------------------------------------------------------------

WEIGHT = torch.randn(WIDTH, WIDTH)
LINEAR = policies.save_ops("linear")
WRAPS = pytest.mark.skipif(
    not hasattr(torch._inductor.config, "wrap_inductor_compiled_regions"), reason="this torch cannot make it one op"
)


def inner(value: Tensor) -> Tensor:
    return (value.sin() @ value.mT).cos()


def around(compiled: Function) -> Function:
    return lambda value: compiled(F.linear(value.sin(), WEIGHT).tanh()).exp()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("what", ["function", "module"])
def test_compiled_code_runs_in_a_region_whose_policy_saves_ops(backend: str, what: str) -> None:
    """torch.compile used to trace the region's own mode: it failed, or made a graph that differed from the other pass."""
    graphs = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled: Any = torch.compile(inner if what == "function" else nn.Linear(WIDTH, WIDTH), backend=graphs)
    assert saved_by(around(compiled), x(), policy=LINEAR)["linear"] is None
    assert graphs.frame_count == 2  # outside of the region, and inside


@WRAPS
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("is_region", [True, False])
def test_compiled_code_is_kept_where_inductor_wraps_it(is_region: bool) -> None:
    """As in torchtitan, whose flex attention is compiled so."""
    compiled = torch.compile(inner, backend="inductor", options={"wrap_inductor_compiled_regions": is_region})
    calls = saved_by(around(compiled), x())
    assert calls["linear"] is None
    assert calls.get("inductor_compiled_code", "none") == (None if is_region else "none")


@WRAPS
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_code_that_hands_on_a_view_of_a_weight_runs_again() -> None:
    compiled = torch.compile(
        lambda value: (value.sin() @ WEIGHT).cos(), backend="inductor", options={"wrap_inductor_compiled_regions": True}
    )
    calls = saved_by(around(compiled), x())
    assert calls == {"linear": None, "inductor_compiled_code": "its result is a view of an argument"}


# -- copies to the host -----------------------------------------------------------------------------------------------


def split(tokens: Tensor, counts: Tensor) -> Tensor:
    sizes = counts.to(torch.int32).to("cpu", non_blocking=True)
    return tokens.sin().exp() * sizes * tokens.to(torch.float16).to(sizes.device)


def test_copies_to_the_host_are_kept_and_no_others() -> None:
    saved, asked = Saved(), []

    def policy(site: Site) -> Save | None:
        if site.op == "to":
            asked.append(site.is_copy_to_host)
        return policies.compute_intensive()(site)

    for used in (policies.compute_intensive(), policy):
        with FakeTensorMode(), observed_by(saved):
            region = reactivate.checkpoint(split, policy=used)
            # Of a device that is not here there is neither autograd nor a backward.
            region(torch.randn(4, 4, requires_grad=True), torch.zeros(4, device="cuda"))
        assert saved.calls.pop() == {"to": None}
    assert asked[:4] == [False, True, False, False]


@pytest.mark.parametrize("storage", [reactivate.Save().storage, Host()], ids=["device", "host"])
def test_a_kept_copy_is_bitwise(monkeypatch: pytest.MonkeyPatch, storage: Any) -> None:
    """On a CPU, as if its tensors were on a device."""
    monkeypatch.setattr(by_arguments, "_is_on_device", lambda tensor: tensor.dtype == torch.float64)

    def copying(value: Tensor) -> Tensor:
        on_host = value.sin().double().to("cpu", torch.float32)
        return on_host.exp() * value.to(torch.bfloat16).float() * value.double().to(torch.device("cpu"), torch.float16)

    calls = saved_by(copying, x(), policy=policies.compute_intensive(storage))
    assert calls == {"to": None}


@each(
    ("op", "arguments", "options", "is_copy"),
    [
        ("to", ("cpu",), {}, True),
        ("to", (torch.device("cpu"), torch.float16), {}, True),
        ("to", (torch.zeros(1),), {}, True),
        ("to", (), {"device": "cpu"}, True),
        ("to", (), {"other": torch.zeros(1)}, True),
        ("cpu", (), {}, True),
        ("_to_copy", (), {"device": torch.device("cpu")}, True),
        ("to", (torch.float16,), {}, False),
        ("to", ("meta",), {}, False),
        ("to", (), {"dtype": torch.float16}, False),
        ("sin", (), {}, False),
    ],
)
def test_which_calls_copy_to_the_host(op: str, arguments: Any, options: Any, is_copy: bool) -> None:
    on_device, on_host = torch.zeros(1, device="meta"), torch.zeros(1)
    assert by_arguments.is_copy_to_host(op, (on_device, *arguments), options) is is_copy
    assert not by_arguments.is_copy_to_host(op, (on_host, *arguments), options)


def test_a_graph_keeps_copies_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.checkpoint import CheckpointPolicy

    from reactivate._compilers import graph as _in_graph

    monkeypatch.setattr(_in_graph, "node_being_traced", dict)
    marker = functools.partial(_in_graph._Marker(policies.compute_intensive(), None, ""), None)
    on_device = torch.zeros(2, device="meta")
    copy = torch.ops.aten._to_copy.default
    assert marker(copy, on_device, device=torch.device("cpu")) == CheckpointPolicy.MUST_SAVE
    assert marker(copy, on_device, dtype=torch.float16) == CheckpointPolicy.PREFER_RECOMPUTE
