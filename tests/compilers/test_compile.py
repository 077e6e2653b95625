"""`torch.compile` around a region and inside of one: the same call, and the bits of the same compiled code without it."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._higher_order_ops.wrap
import torch.nn.functional as F
import torch.utils.checkpoint
from functorch.compile import min_cut_rematerialization_partition
from oracle import Ran, assert_bitwise
from saved_call_cases import Square
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

import reactivate
from reactivate import Save, Site, policies
from reactivate._passes.observing import observed_by
from reactivate.errors import UnsupportedError

pytestmark = pytest.mark.usefixtures("fresh_compiler")

EXACT_BACKENDS = ["eager", "aot_eager"]
torch_checkpoints_them = hasattr(torch._higher_order_ops.wrap, "_always_prefer_recompute")  # since 2.12
has_version_switch = hasattr(torch._C._dynamo.eval_frame, "_set_lru_cache")


class Block(nn.Module):
    def __init__(self, width: int = 16, dropout: float = 0.2) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self, wrap: Callable[[Any], Any], dropout: float = 0.2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout=dropout) for _ in range(3))
        self.wrap = wrap

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.wrap(block)(x)
        return x


def plain(fn: Any) -> Any:
    return fn


def torchs(fn: Any) -> Any:
    return lambda *args: torch.utils.checkpoint.checkpoint(fn, *args, use_reentrant=False)


def gradients(model: nn.Module, call: Callable[[Tensor], Tensor], shapes: list[tuple[int, ...]]) -> list[Tensor]:
    torch.manual_seed(3)
    found = []
    for shape in shapes:
        x = torch.randn(shape, requires_grad=True)
        out = call(x)
        out.square().sum().backward()
        found += [out.detach(), x.grad]
    return [*found, *(parameter.grad for parameter in model.parameters()), torch.get_rng_state()]


def assert_same(one: list[Tensor], other: list[Tensor]) -> None:
    for index, (first, second) in enumerate(zip(one, other, strict=True)):
        assert_bitwise(first, second, f"result {index}")


def make(wrap: Callable[[Any], Any], dropout: float = 0.2) -> Model:
    torch.manual_seed(0)
    return Model(wrap, dropout)


# -- around -------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:A checkpointed region is in a graph")
@pytest.mark.parametrize("backend", EXACT_BACKENDS)
def test_around_is_bitwise(backend: str) -> None:
    shapes = [(4, 16)] * 3
    one, other = make(plain), make(reactivate.checkpoint)
    expected = gradients(one, torch.compile(one, backend=backend, fullgraph=True), shapes)
    torch._dynamo.reset()
    assert_same(expected, gradients(other, torch.compile(other, backend=backend, fullgraph=True), shapes))


def test_in_place_ops_of_a_region_are_right() -> None:
    """torch's log asks for regions without them. Our import leaves that log as it was."""

    def once(wrap: Callable[[Any], Any]) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Linear(16, 16), nn.Dropout(inplace=True))
        compiled = torch.compile(lambda x: wrap(module)(x).mul_(2).tanh_(), backend="aot_eager", fullgraph=True)
        return gradients(module, compiled, [(4, 16)] * 3)

    assert_same(once(plain), once(reactivate.checkpoint))
    assert not logging.getLogger("torch._higher_order_ops.wrap").filters


@pytest.mark.slow
def test_around_with_inductor_is_close() -> None:
    """Not bitwise: the generated kernels fuse other ops where some are recomputed, and fused sums round differently."""
    shapes = [(4, 16)] * 2
    one, other = make(plain, dropout=0.0), make(reactivate.checkpoint, dropout=0.0)
    expected = gradients(one, torch.compile(one, fullgraph=True), shapes)
    torch._dynamo.reset()
    for first, second in zip(expected, gradients(other, torch.compile(other, fullgraph=True), shapes), strict=True):
        torch.testing.assert_close(first, second)


def test_a_graph_that_is_run_as_it_was_traced_keeps_its_activations() -> None:
    """Batch norm would be updated twice, and dropout drawn anew, where torch runs a traced region on an engine of its own."""

    def once(wrap: Callable[[Any], Any]) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout())
        compiled = torch.compile(lambda x: wrap(module)(x).tanh(), backend="eager", fullgraph=True)
        return [*gradients(module, compiled, [(4, 16)] * 3), *module.buffers()]

    words = 'runs as it was traced .backend="eager".. It keeps its activations'
    with pytest.warns(UserWarning, match=words) if torch_checkpoints_them else contextlib.nullcontext():
        ours = once(reactivate.checkpoint)
    assert_same(once(plain), ours)


class GraphsOfBackward:
    """A backend that counts the ops of the compiled forward and backward graphs."""

    def __init__(self) -> None:
        self.forward: Counter[str] = Counter()
        self.backward: Counter[str] = Counter()
        self.backend = aot_autograd(
            fw_compiler=self._count(self.forward),
            bw_compiler=self._count(self.backward),
            partition_fn=min_cut_rematerialization_partition,
        )

    @staticmethod
    def _count(ops: Counter[str]) -> Callable[..., Any]:
        def compiler(graph: Any, inputs: Any) -> Any:
            ops.update(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
            return graph

        return compiler


def test_the_backward_graph_contains_the_recomputed_ops(whole_heap: None) -> None:
    counts = []
    for wrap in (plain, reactivate.checkpoint):
        torch._dynamo.reset()
        graphs, model = GraphsOfBackward(), make(wrap, dropout=0.0)
        torch.compile(model, backend=graphs.backend, fullgraph=True)(
            torch.randn(4, 16, requires_grad=True)
        ).sum().backward()
        counts.append((graphs.forward["aten.addmm.default"], graphs.backward["aten.addmm.default"]))
    with reactivate.dropin.install():
        graphs, model = GraphsOfBackward(), make(torchs, dropout=0.0)
        torch._dynamo.reset()
        torch.compile(model, backend=graphs.backend, fullgraph=True)(
            torch.randn(4, 16, requires_grad=True)
        ).sum().backward()
        counts.append((graphs.forward["aten.addmm.default"], graphs.backward["aten.addmm.default"]))
    assert counts[0] == (6, 0)
    for forward, backward in counts[1:]:
        assert forward == 6
        assert backward >= 3, "at least the first matmul of each block is computed again"


def test_the_graph_has_a_checkpoint_in_it() -> None:
    found: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        found.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch.compile(make(reactivate.checkpoint), backend=backend, fullgraph=True)(torch.randn(4, 16, requires_grad=True))
    assert found.count("tag_activation_checkpoint") == 3


@pytest.mark.parametrize("place", ["around", "inside", "module"])
def test_no_recompilation_a_step(place: str) -> None:
    counter = CompileCounter()
    model = make(reactivate.checkpoint)
    call: Any = model
    if place == "around":
        call = torch.compile(model, backend=counter)
    elif place == "inside":
        for block in model.blocks:
            block.compile(backend=counter)
    else:
        model.compile(backend=counter)
    gradients(model, call, [(4, 16)])
    compiled = counter.frame_count
    assert compiled >= 1
    gradients(model, call, [(4, 16)] * 5)
    assert counter.frame_count == compiled


def test_a_checkpoint_built_in_every_call() -> None:
    def fn(x: Tensor, scale: float) -> Tensor:
        return reactivate.checkpoint(lambda x: (x * scale).sin().exp(), name="scaled")(x)

    counter = CompileCounter()
    compiled = torch.compile(fn, backend=counter, fullgraph=True)
    for _ in range(4):
        x = torch.randn(4, requires_grad=True)
        ours, expected = (
            torch.autograd.grad(compiled(x, 2.0).sum(), x),
            torch.autograd.grad((x * 2.0).sin().exp().sum(), x),
        )
        assert_same(list(expected), list(ours))
    assert counter.frame_count == 1


def test_as_a_decorator_and_with_keywords() -> None:
    @reactivate.checkpoint(name="decorated")
    def block(x: Tensor, *, scale: Tensor) -> Tensor:
        return (x * scale).sin().exp()

    x, scale = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    compiled = torch.compile(lambda x, scale: block(x, scale=scale).sum(), backend="aot_eager", fullgraph=True)
    ours = torch.autograd.grad(compiled(x, scale), (x, scale))
    assert_same(list(torch.autograd.grad((x * scale).sin().exp().sum(), (x, scale))), list(ours))


@pytest.mark.parametrize("backend", EXACT_BACKENDS)
def test_a_graph_break_inside_leaves_the_region_to_this_engine(backend: str) -> None:
    def body(x: Tensor) -> Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return F.dropout(y.exp() * y)

    def model(wrap: Callable[[Any], Any]) -> Callable[[Tensor], Tensor]:
        return lambda x: wrap(body)(x.cos()).tanh()

    ran = Ran()
    expected = gradients(nn.Module(), torch.compile(model(plain), backend=backend), [(4, 16)] * 3)
    torch._dynamo.reset()
    with observed_by(ran):
        ours = gradients(nn.Module(), torch.compile(model(reactivate.checkpoint), backend=backend), [(4, 16)] * 3)
    assert_same(expected, ours)
    assert ran.regions == ran.recomputations == 3


def test_what_cannot_be_compiled_is_refused_by_name() -> None:
    with pytest.raises(Exception, match=r'check="every" cannot be used under torch.compile') as caught:
        torch.compile(reactivate.checkpoint(torch.sin, check="every"), backend="eager", fullgraph=True)(
            torch.randn(2, requires_grad=True)
        )
    assert "UnsupportedError" in str(caught.value) or isinstance(caught.value, UnsupportedError)


# -- inside -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [*EXACT_BACKENDS, "inductor"])
def test_inside_is_bitwise(backend: str) -> None:
    """Here inductor too: both passes, and the model without a region, run the same compiled code."""
    results, ran, counts = [], Ran(), []
    for wrap in (plain, reactivate.checkpoint):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend(backend)
        model = make(wrap, dropout=0.2 if backend != "inductor" else 0.0)
        for block in model.blocks:
            block.compile(backend=counter, fullgraph=True)
        with observed_by(ran):
            results.append(gradients(model, model, [(4, 16)] * 3))
        counts.append(counter.frame_count)
    assert_same(*results)
    assert counts[0] == counts[1] >= 1, "neither the engine nor a recomputation is compiled"
    assert ran.regions == ran.recomputations == 9


@pytest.mark.parametrize("backend", [*EXACT_BACKENDS, "inductor"])
def test_a_constant_that_compiled_code_makes(backend: str) -> None:
    """AOTAutograd counts its writes in another way in the call that compiles it."""

    def gradient(wrap: Callable[[Any], Any]) -> Tensor:
        torch._dynamo.reset()
        compiled = torch.compile(lambda x: Square.apply(x) @ torch.ones(8, 8), backend=backend)
        x = torch.linspace(0, 1, 32).reshape(4, 8).requires_grad_()
        return torch.autograd.grad(wrap(lambda x: compiled(x * 1.1).exp())(x).sum(), x)[0]

    ran = Ran()
    with observed_by(ran):
        assert_bitwise(gradient(plain), gradient(reactivate.checkpoint), "gradient")
    assert ran.recomputations == 1


def save_linears(site: Site) -> Save | None:
    return Save() if site.op == "linear" and site.path else None


def compile_in_place(model: Model, backend: Any) -> None:
    for block in model.blocks:
        block.compile(backend=backend)


def compile_with_a_wrapper(model: Model, backend: Any) -> None:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend=backend)


def compile_the_forward(model: Model, backend: Any) -> None:
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend=backend)


def compile_the_class(model: Model, backend: Any) -> None:
    for block in model.blocks:
        kind = type(block)
        block.__class__ = type(kind.__name__, (kind,), {"forward": torch.compile(kind.forward, backend=backend)})


WAYS_TO_COMPILE = [compile_in_place, compile_with_a_wrapper, compile_the_forward, compile_the_class]


@pytest.mark.parametrize("is_made_anew", [False, True], ids=["made once", "made in each call"])
@pytest.mark.parametrize("policy", [save_linears, policies.save_modules("*up")], ids=["function", "modules"])
@pytest.mark.parametrize("place", ["model", "block"])
@pytest.mark.parametrize("how", WAYS_TO_COMPILE)
@pytest.mark.parametrize("backend", EXACT_BACKENDS)
def test_a_policy_of_modules_around_compiled_ones(
    backend: str, how: Callable[..., None], place: str, policy: Any, is_made_anew: bool
) -> None:
    """The compiler traces what it traces without a region, and no step after the first makes it trace again."""
    results, counts = [], []
    for wrap in (plain, functools.partial(reactivate.checkpoint, policy=policy)):
        torch._dynamo.reset()
        counter, ran = CompileCounterWithBackend(backend), Ran()
        made = functools.cache(wrap) if not is_made_anew else wrap
        model = make(made if place == "block" else plain)
        how(model, counter)
        with observed_by(ran):
            for steps in (1, 11):
                results.append(
                    gradients(model, lambda x: (made if place == "model" else plain)(model)(x), [(4, 16)] * steps)
                )
                counts.append(counter.frame_count)
    assert_same([*results[0], *results[1]], [*results[2], *results[3]])
    assert ran.regions == ran.recomputations == 12 * (3 if place == "block" else 1)
    assert counts == [counts[0]] * 4 and counts[0] >= 1


def bias_gelu(y: Tensor, bias: Tensor) -> Tensor:
    x = y + bias
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


# One step for each list: all forward passes, then all backwards. Batch size 1, sizes and numbers of dimensions that vary,
# and more of them than the compiler keeps versions of a function for (8).
STEPS: list[list[tuple[int, ...]]] = [
    [(1, 16)],
    [(1, 16), (3, 16)],
    [(5, 16), (1, 16), (2, 3, 16)],
    [(1, 1, 16), (2, 2, 2, 16), (1, 16)],
    [(size, 16) for size in range(1, 14)],
    [(*(1,) * count, 2, 16) for count in range(12)],
    [(1, 16), (3, 16)],
]


@pytest.mark.parametrize("backend", [*EXACT_BACKENDS, pytest.param("inductor", marks=pytest.mark.slow)])
def test_fused_bias_gelu_with_shapes_that_vary_past_the_limit(backend: str) -> None:
    results, ran = [], Ran()
    for wrap in (plain, reactivate.checkpoint):
        torch._dynamo.reset()
        torch.manual_seed(0)
        fused = torch.compile(bias_gelu, backend=backend)
        fn = wrap(lambda x, bias, fused=fused: fused(x.sin(), bias).cos())
        bias, found = torch.randn(16, requires_grad=True), []
        for shapes in STEPS:
            xs = [torch.randn(shape, requires_grad=True) for shape in shapes]
            with observed_by(ran):
                outs = [fn(x, bias) for x in xs]
                for out in outs:
                    out.square().sum().backward()
            found += [x.grad for x in xs]
        results.append([*found, bias.grad])
    assert_same(*results)
    assert ran.regions == ran.recomputations == sum(map(len, STEPS))


@pytest.mark.parametrize("backend", EXACT_BACKENDS)
def test_around_with_shapes_that_vary_past_the_limit(backend: str) -> None:
    results = []
    for wrap in (plain, reactivate.checkpoint):
        torch._dynamo.reset()
        torch.manual_seed(0)
        fn = torch.compile(lambda x, bias, wrap=wrap: wrap(bias_gelu)(x.sin(), bias).cos(), backend=backend)
        bias, found = torch.randn(16, requires_grad=True), []
        for shapes in STEPS:
            xs = [torch.randn(shape, requires_grad=True) for shape in shapes]
            for out in [fn(x, bias) for x in xs]:
                out.square().sum().backward()
            found += [x.grad for x in xs]
        results.append([*found, bias.grad])
    assert_same(*results)


class Versions:
    """A backend whose every version of a function is another one: it says which ran, and saves other tensors."""

    def __init__(self) -> None:
        self.count = 0
        self.ran: list[int] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        number, self.count = self.count, self.count + 1

        def version(*args: Any) -> Any:
            self.ran.append(number)
            (out,) = graph(*args)
            for _ in range(number):
                out = out.sin().asin()
            return (out,)

        return version


@pytest.mark.skipif(not has_version_switch, reason="torch 2.9 takes whichever compiled version fits (docs/limits.md)")
def test_a_recomputation_runs_the_version_that_its_forward_pass_ran() -> None:
    """A dynamic version is compiled between forward and backward, and would fit the recomputation too."""
    versions = Versions()
    fused = torch.compile(lambda x: x.tanh() * 0.5, backend=versions)
    fn = reactivate.checkpoint(lambda x: fused(x).exp())
    xs = [torch.randn(size, 16, requires_grad=True) for size in (4, 7, 4, 9)]
    outs = [fn(x) for x in xs]
    forward = list(versions.ran)
    for out in outs:
        out.sum().backward()
    assert forward == versions.ran[len(forward) :] == [0, 1, 0, 1]


@pytest.mark.filterwarnings("ignore:A checkpointed region is in a graph")
@pytest.mark.parametrize("backend", EXACT_BACKENDS)
def test_torchs_function_with_the_drop_in_installed(backend: str, whole_heap: None) -> None:
    def model(x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(lambda x: F.dropout(x.sin()).exp(), x, use_reentrant=False).cos()

    found: list[str] = []

    def spy(graph: Any, inputs: Any) -> Any:
        found.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    expected = gradients(
        nn.Module(), torch.compile(lambda x: F.dropout(x.sin()).exp().cos(), backend=backend), [(4, 4)] * 2
    )
    with reactivate.dropin.install():
        ours = gradients(nn.Module(), torch.compile(model, backend=spy, fullgraph=True), [(4, 4)] * 2)
    assert_same(expected, ours)
    assert found.count("tag_activation_checkpoint") == 1
