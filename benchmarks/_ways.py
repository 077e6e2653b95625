"""Ways to checkpoint a function and a transformer block: torch's, torch_remat's and ours, each at its best, and none."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from queue import SimpleQueue
from types import FunctionType
from typing import Any

import torch
from _bare import bare
from torch import Tensor, nn
from torch.utils import checkpoint as upstream

import reactivate
from reactivate import policies

Function = Callable[[Tensor], Tensor]
Wrap = Callable[[Function], Function]

PLAIN = "plain"
TORCH = "torch non-reentrant"
REENTRANT = "torch reentrant"
SAC = "torch SAC"
REMAT = "torch_remat"
BARE = "hooks alone"
OURS = "reactivate"
PER_CALL = "reactivate, built per call"
INSTALLED = "reactivate, installed"
FUNCTION_SITES = "reactivate, function sites"
MODULE_SITES = "reactivate, module sites"

ALL_OURS = (OURS, PER_CALL, INSTALLED)
MAIN = (TORCH, REENTRANT, REMAT, OURS)
EVERY = (TORCH, REENTRANT, REMAT, BARE, *ALL_OURS)
"""The ways to checkpoint a function."""

OUR_BLOCKS = (OURS, FUNCTION_SITES, MODULE_SITES)
"""Our ways to checkpoint a block."""


def named(system: str, machine: Mapping[str, object]) -> str:
    """The system, with the version where it is another package."""
    return f"{system} {machine['torch_remat']}" if system == REMAT else system


def non_reentrant(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """torch's checkpoint of the function."""
    return partial(upstream.checkpoint, fn, use_reentrant=False, **options)


def selective(ops: list[Any], fn: Callable[..., Any]) -> Callable[..., Any]:
    """torch's selective checkpointing of the function, which keeps the results of these ops."""
    return non_reentrant(fn, context_fn=partial(upstream.create_selective_checkpoint_contexts, ops))


def remat(fn: Callable[..., Any]) -> Callable[..., Any]:
    """torch_remat's checkpoint of the function: it restores no random state and checks no metadata."""
    import torch_remat  # an optional package

    checkpointed: Callable[..., Any] = torch_remat.checkpoint(region_name="region")(fn)
    return checkpointed


# -- of a function, all of which is recomputed ------------------------------------------------------------------------


def make_subjects() -> dict[str, Wrap]:
    """{name: function -> the same function, checkpointed}. Without torch_remat where that is not installed."""
    subjects: dict[str, Wrap] = {
        PLAIN: lambda fn: fn,
        TORCH: non_reentrant,
        REENTRANT: lambda fn: partial(upstream.checkpoint, fn, use_reentrant=True),
        BARE: bare,
        OURS: reactivate.checkpoint,
        PER_CALL: lambda fn: lambda x: reactivate.checkpoint(fn)(x),
        INSTALLED: _installed(),
    }
    if find_spec("torch_remat"):
        subjects[REMAT] = remat
    for name, wrap in subjects.items():
        _check(name, wrap)
    return subjects


def _installed() -> Wrap:
    """Return the function that code which calls `torch.utils.checkpoint.checkpoint` gets while reactivate is installed.

    It is copied out of an installation that ends here, because the others are to be measured in the same process, and
    torch_remat calls torch's functions as well. A copy, since the end of an installation takes all references back.
    """
    with reactivate.dropin.install():
        function = _copy(upstream.checkpoint)
    return lambda fn: partial(function, fn, use_reentrant=False)


def _copy(function: Any) -> FunctionType:
    code, namespace = function.__code__, function.__globals__
    copied = FunctionType(code, namespace, function.__name__, function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def _check(name: str, wrap: Wrap) -> None:
    """A subject must do what its name says: run the function once more in the backward, on the engine it names."""
    noted: SimpleQueue[bool] = SimpleQueue()  # which no recomputation rewinds

    def probe(x: Tensor) -> Tensor:
        noted.put(reactivate.is_recomputing())
        return x.sin()

    wrap(probe)(torch.ones(1, requires_grad=True)).backward()
    expected = [False] if name == PLAIN else [False, name in ALL_OURS]
    runs = [noted.get() for _ in range(noted.qsize())]
    if runs != expected:
        raise RuntimeError(
            f"{name} is not what it is measured as: its function ran with is_recomputing() = {runs}, not {expected}."
        )


# -- of a transformer block, some of whose products are kept ----------------------------------------------------------

LINEARS = ("query_key_value", "out", "gate", "up", "down")
MATMULS = ("scores", "mix")

EVERYTHING, NOTHING, ONLY_LINEARS, PRODUCTS = "everything", "nothing", "5 linear", "5 linear, 2 matmul"
CALLS_OF = {NOTHING: (), ONLY_LINEARS: LINEARS, PRODUCTS: (*LINEARS, *MATMULS)}
"""{what a way keeps: the calls}. All keep the block's argument as well."""

aten = torch.ops.aten
# What `linear` and `matmul` are to SAC, which sees the ops below autograd.
OPS_OF = {
    ONLY_LINEARS: [aten.mm.default, aten.addmm.default],
    PRODUCTS: [aten.mm.default, aten.addmm.default, aten.bmm.default],
}


@dataclass(frozen=True)
class Way:
    """A way to checkpoint the block.

    Attributes:
        keeps: a key of `CALLS_OF`, or `EVERYTHING`.
        wrap: block -> the same function, checkpointed; it may share the block's parameters or copy them.
    """

    system: str
    keeps: str
    wrap: Callable[[Any], Function]

    @property
    def name(self) -> str:
        return f"{self.system} ({self.keeps})"


def make_ways() -> list[Way]:
    """All ways. Without torch_remat where that is not installed."""
    ways = [
        Way(PLAIN, EVERYTHING, lambda block: block),
        Way(TORCH, NOTHING, non_reentrant),
        Way(OURS, NOTHING, reactivate.checkpoint),
        Way(FUNCTION_SITES, PRODUCTS, partial(reactivate.checkpoint, policy=policies.save_ops("linear", "matmul"))),
        Way(MODULE_SITES, ONLY_LINEARS, _module_sites),
        *(Way(SAC, keeps, partial(selective, ops)) for keeps, ops in OPS_OF.items()),
    ]
    if find_spec("torch_remat"):
        ways += [Way(REMAT, keeps, partial(_marked, calls)) for keeps, calls in CALLS_OF.items()]
    order = [EVERYTHING, *CALLS_OF]
    return sorted(ways, key=lambda way: (order.index(way.keeps), way.system in OUR_BLOCKS, way.system == REMAT))


def _module_sites(block: nn.Module) -> Function:
    """On a copy, for a policy that is applied stays on the modules."""
    model = nn.Sequential(copy.deepcopy(block))
    linears = policies.save_modules(*(f"0.{name}" for name in LINEARS))
    reactivate.apply(model, policies.first_match(linears, policies.recompute_modules("0")))
    return model


def _marked(calls: tuple[str, ...], block: Any) -> Function:
    """torch_remat is told by marks in the code of the block.

    Each result has the second mark as well, that code which runs again will read it. It could do without on one or two,
    if torch_remat 0.2.2 did not need, for what is not marked so, a private function that torch 2.13 lacks.
    """
    import torch_remat  # an optional package

    def mark(name: str, call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        region = torch_remat.region(call, name, recompute=False)

        def marked(*tensors: Tensor) -> Tensor:
            result: Tensor = region(*tensors)
            torch_remat.recompute_needs_tensor(result)
            return result

        return marked if name in calls else call

    return remat(MarkedBlock(block, mark))


class MarkedBlock(nn.Module):
    """A `TransformerBlock`, with its parameters, and with something else in the place of its seven products.

    Args:
        mark: (name of a product, the function that computes it) -> the function to call for it.
    """

    def __init__(self, block: Any, mark: Callable[[str, Callable[..., Tensor]], Callable[..., Tensor]]) -> None:
        super().__init__()
        self.heads, self.norm_1, self.norm_2 = block.heads, block.norm_1, block.norm_2
        for name in LINEARS:
            setattr(self, name, getattr(block, name))
        self.product = {name: mark(name, getattr(block, name)) for name in LINEARS}
        self.product |= {name: mark(name, torch.matmul) for name in MATMULS}

    def forward(self, x: Tensor) -> Tensor:
        x, hidden = self.before_down(x)
        return x + self.product["down"](hidden)

    def before_down(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The two terms of the result, the second before its last product."""
        x = x + self.attention(self.norm_1(x))
        hidden = self.norm_2(x)
        return x, nn.functional.silu(self.product["gate"](hidden)) * self.product["up"](hidden)

    def attention(self, x: Tensor) -> Tensor:
        mixed = self.product["query_key_value"](x).unflatten(-1, (3, self.heads, -1))
        query, key, value = mixed.permute(2, 0, 3, 1, 4).unbind()
        scores = (self.product["scores"](query, key.transpose(-2, -1)) * query.size(-1) ** -0.5).softmax(-1)
        return self.product["out"](self.product["mix"](scores, value).transpose(1, 2).flatten(2))


def recomputed_alone(block: nn.Module, keeps: str, x: Tensor) -> Callable[[], object]:
    """The least that a recomputation can do: the forward pass, without a graph, of what is neither kept nor needless.

    The results of kept calls are there, from a forward pass before. The last product and the sum with it are needless,
    since the backward reads only what went into them.
    """
    results: dict[str, Tensor] = {}

    def recording(name: str, call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def record(*tensors: Tensor) -> Tensor:
            results[name] = call(*tensors)
            return results[name]

        return record

    def looked_up(name: str, call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def look_up(*tensors: Tensor) -> Tensor:
            for tensor in tensors:
                tensor.flatten(0, -3)  # as `matmul` does, which copies what is not contiguous, and saves the copy
            return results[name]

        return look_up if name in CALLS_OF[keeps] else call

    recomputation = MarkedBlock(block, looked_up)

    def step() -> None:
        with torch.no_grad():
            recomputation.before_down(x)

    with torch.no_grad():
        MarkedBlock(block, recording)(x)
    return step


# -- what a way leaves different --------------------------------------------------------------------------------------


def differs_from_plain(wrap: Wrap, make: Callable[[], tuple[nn.Module, Tensor]]) -> list[str]:
    """List what one step changes against plain, bit for bit: some of outputs, gradients, buffers, random numbers."""
    return unequal(_one_step(lambda fn: fn, make), _one_step(wrap, make))


def unequal(expected: Mapping[str, list[Any]], found: Mapping[str, list[Any]]) -> list[str]:
    """List the names under which the tensors are not the same, bit for bit."""
    return [what for what in expected if not all(map(torch.equal, expected[what], found[what]))]


@contextmanager
def repeatable(device: torch.device) -> Iterator[None]:
    """Use kernels that give the same bits each time, as a CPU's do: with others not even plain is equal to itself."""
    if device.type == "cpu":
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where there is no such kernel
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)


def _one_step(wrap: Wrap, make: Callable[[], tuple[nn.Module, Tensor]]) -> dict[str, list[Any]]:
    torch.manual_seed(0)
    model, x = make()
    with repeatable(x.device):
        output = wrap(model)(x)
        output.backward(torch.ones_like(output))
    return {
        "output": [output.detach()],
        "gradients": [x.grad, *(parameter.grad for parameter in model.parameters())],
        "buffers": [*model.buffers()],
        "random numbers": [torch.rand(4, device=x.device)],
    }
