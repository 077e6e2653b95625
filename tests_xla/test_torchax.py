"""Regions inside of a trace of JAX: torchax runs the modules, JAX differentiates them."""

from __future__ import annotations

import gc
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
import torchax
from torch import Tensor, nn
from torchax import interop

import reactivate
from reactivate import _run, policies
from reactivate._backends.torchax import BACKEND as RNG
from reactivate._compilers import jax as in_jax
from reactivate._engine.record import without_regions
from reactivate.dropin import torch as dropin
from reactivate.errors import UnsupportedError, UsageError
from reactivate.guards import DEFAULT, ContextPair, Guard

ENVIRONMENT = torchax.default_env()


@pytest.fixture(autouse=True)
def hooked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The place where regions go to JAX; counts them."""
    ran = [0]

    def counting(*args: Any) -> Any:
        ran[0] += 1
        return in_jax.run_traced(*args)

    monkeypatch.setattr(_run, "run_traced", counting)
    return ran


@pytest.fixture(autouse=True)
def same_numbers() -> Iterator[None]:
    torch.manual_seed(0)
    with ENVIRONMENT.override_property(prng=jax.random.key(0)):
        yield
    assert not ENVIRONMENT.enabled


Wrap = Callable[..., Any]


def plain(fn: Any) -> Any:
    return fn


class Block(nn.Module):
    """Make the parts of a block: products, a function that saves its result, random numbers, statistics, a way around."""

    def __init__(self, norm: Callable[..., nn.Module], width: int = 16) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.norm = norm(4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        hidden = reactivate.site(self.up, name="up")(x)
        return x + self.dropout(self.down(torch.tanh(self.norm(hidden))))


class Model(nn.Module):
    def __init__(self, wrap: Wrap = plain, norm: Callable[..., nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(norm) for _ in range(3)])
        self.wrap = wrap

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.wrap(block)(x)
        return x


class Case:
    """A model as a function of JAX: of its parameters and its input, to the loss and what the pass leaves behind."""

    def __init__(self, model: nn.Module) -> None:
        with ENVIRONMENT:
            model = model.to("jax")
        self.model = model
        self.params = {name: tensor.jax() for name, tensor in model.named_parameters()}
        self.buffers = {name: tensor.jax() for name, tensor in model.named_buffers()}
        self.args = (self.params, self.buffers, jax.random.key(3), jax.random.normal(jax.random.key(1), (8, 16)))

    def loss(self, params: Any, buffers: Any, key: Any, x: Any) -> Any:
        with ENVIRONMENT, ENVIRONMENT.override_property(prng=key):
            state = interop.torch_view({**params, **buffers})
            loss = torch.func.functional_call(self.model, state, (interop.torch_view(x),)).square().mean()
            return loss.jax(), ({name: state[name].jax() for name in buffers}, ENVIRONMENT.prng_key)

    @property
    def gradients(self) -> Any:
        return jax.value_and_grad(self.loss, argnums=(0, 3), has_aux=True)

    def jaxpr(self) -> str:
        return str(jax.make_jaxpr(self.gradients)(*self.args))


def kept_by(function: Callable[..., Any], *arrays: Any) -> int:
    """Bytes between forward and backward, in which the arguments are as well."""
    found = jax.tree.leaves(jax.vjp(function, *arrays)[1])
    return sum({id(array): array.nbytes for array in found if hasattr(array, "nbytes")}.values())


def case(wrap: Wrap = plain, norm: Callable[..., nn.Module] = nn.BatchNorm1d) -> Case:
    torch.manual_seed(0)
    return Case(Model(wrap, norm))


def dots(found: Case) -> int:
    return found.jaxpr().count("dot_general")


def equal(one: Any, other: Any) -> bool:
    first, second = jax.tree.leaves(one), jax.tree.leaves(other)
    data = [
        (jax.random.key_data(a), jax.random.key_data(b)) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else (a, b)
        for a, b in zip(first, second, strict=True)
    ]
    return all(bool(jnp.array_equal(a, b)) for a, b in data)


def saving(policy: Any) -> Wrap:
    return lambda fn: reactivate.checkpoint(fn, policy=policy)


def in_jit(fn: Callable[..., Tensor], *arrays: Any) -> Any:
    """Return what `fn`, a function of torch, computes of `arrays` inside of `jax.jit`."""
    return jax.jit(lambda *given: _of_torch(fn, given))(*arrays)


def _of_torch(fn: Callable[..., Any], arrays: Any) -> Any:
    with ENVIRONMENT, ENVIRONMENT.override_property(prng=jax.random.key(5)):
        return interop.jax_view(fn(*interop.torch_view(arrays)))


def gradient(fn: Callable[..., Tensor], *arrays: Any) -> Any:
    """Of the sum of what `fn`, a function of torch, computes, by its first argument, inside of `jax.jit`."""
    return jax.jit(jax.grad(lambda *given: _of_torch(fn, given).sum()))(*arrays)


def jaxpr_of(fn: Callable[..., Tensor], *arrays: Any) -> str:
    return str(jax.make_jaxpr(jax.grad(lambda *given: _of_torch(fn, given).sum()))(*arrays))


ONES = jnp.arange(8.0).reshape(2, 4) / 8


# -- the same numbers, computed twice ----------------------------------------------------------------------------------


POLICIES = {
    "nothing": None,
    "linear": policies.save_ops("linear"),
    "names": policies.save_names("up"),
    "every other": policies.every_nth(2, policies.save_ops("linear")),
    "a function": lambda site: reactivate.policies.save_ops("tanh")(site),
}


@pytest.mark.parametrize("compiled", [plain, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("name", POLICIES)
def test_gradients_are_those_without(compiled: Any, name: str, hooked: list[int]) -> None:
    expected = compiled((before := case()).gradients)(*before.args)
    found = compiled((after := case(saving(POLICIES[name]))).gradients)(*after.args)
    assert hooked == [3]
    assert equal(expected, found)  # loss, statistics, the key afterwards, gradients
    assert after.jaxpr().count("remat") == 3


def test_a_backward_recomputes_what_the_policy_does_not_save() -> None:
    """Of the two products of a block, nothing in the backward needs the second's result."""
    plainly = dots(case())

    def more(policy: Any) -> int:
        return dots(case(saving(policy))) - plainly

    assert more(None) == 3  # of three blocks
    assert more(policies.none()) == 3
    assert more(policies.save_names("up")) == 0
    assert more(policies.save_ops("linear")) == 0
    assert more(policies.save_ops("linear", within="up")) == 0
    assert more(policies.save_ops("linear", within="down")) == 3
    assert more(policies.every_nth(2, policies.save_ops("linear"))) == 0
    assert more(policies.every_nth(2, policies.save_ops("linear"), 1)) == 3


def test_less_is_kept() -> None:
    def kept(wrap: Wrap) -> int:
        found = case(wrap, nn.Identity)
        return kept_by(lambda params, x: found.loss(params, *found.args[1:3], x)[0], found.params, found.args[3])

    nothing, named = kept(reactivate.checkpoint), kept(saving(policies.save_names("up")))
    assert nothing < named < kept(plain)
    assert (
        named - nothing == 3 * 8 * 64 * 4 - 3 * 64 * 4
    )  # three results of `up`, less its bias that they are made with


def test_a_whole_model_by_apply(hooked: list[int]) -> None:
    expected = case()
    torch.manual_seed(0)
    model = Model()
    reactivate.apply(model, policies.first_match(policies.save_modules("*.up"), policies.full()))
    found = Case(model)
    assert equal(jax.jit(expected.gradients)(*expected.args), jax.jit(found.gradients)(*found.args))
    assert hooked == [3]
    assert dots(found) == dots(expected)  # the first product is saved, the second is not needed


def test_a_compiled_module(hooked: list[int]) -> None:
    model = Model(reactivate.checkpoint).eval()
    with ENVIRONMENT:
        x = torch.ones(8, 16).to("jax")
        result = torchax.compile(model.to("jax"))(x)
        expected = torchax.compile(Model.forward.__get__(_with(model, plain)))(x)
    assert hooked == [3]
    # Two programs that XLA compiles: what it fuses, and so how the last bit is rounded, depends on the processor.
    assert jnp.allclose(result.jax(), expected.jax(), rtol=1e-6, atol=1e-6)


def _with(model: Model, wrap: Wrap) -> Model:
    model.wrap = wrap
    return model


def test_the_drop_in(hooked: list[int]) -> None:
    def wrap(fn: Any) -> Any:
        return lambda x: dropin.checkpoint(fn, x, use_reentrant=False)

    expected, found = case(), case(wrap)
    assert equal(jax.jit(expected.gradients)(*expected.args), jax.jit(found.gradients)(*found.args))
    assert hooked == [3]
    assert dots(found) == dots(expected) + 3


def test_regions_in_regions(hooked: list[int]) -> None:
    def model(wrap: Wrap) -> Callable[[Tensor], Tensor]:
        return wrap(lambda x: wrap(lambda y: torch.tanh(torch.matmul(y, y.T)).exp())(x) * 2)

    assert equal(gradient(model(plain), ONES), gradient(model(reactivate.checkpoint), ONES))
    assert hooked == [2]
    # Calls inside of the inner region are none of the outer one's.
    inner = reactivate.checkpoint(lambda y: torch.tanh(y * 2).exp())
    outer = saving(policies.save_ops("tanh", "mul"))(lambda x: inner(x) * torch.tanh(x))
    text = jaxpr_of(outer, ONES)
    assert text.count("name=reactivate.saved.0") == 2


def test_nothing_is_saved_inside_of_a_saved_call() -> None:
    policy = policies.first_match(policies.save_names("both"), policies.save_ops("sin"))
    both = reactivate.site(lambda x: torch.sin(x).exp(), name="both")
    region = saving(policy)(lambda x: both(x) * torch.sin(x))
    assert equal(gradient(lambda x: torch.sin(x).exp() * torch.sin(x), ONES), gradient(region, ONES))
    assert jaxpr_of(region, ONES).count("name=reactivate.saved.0") == 2  # the named call, the sine beside it


def test_what_a_region_inside_saves_is_dropped_with_the_region_around_it() -> None:
    inner = saving(policies.save_ops("sin"))(lambda x: torch.sin(x).exp())

    def outer(x: Any) -> Any:
        return _of_torch(saving(policies.save_ops("cos"))(lambda y: inner(y) * torch.cos(y)), (x,))

    assert kept_by(lambda x: _of_torch(inner, (x,)), ONES) == 2 * ONES.nbytes  # the argument, the sine
    assert kept_by(outer, ONES) == 2 * ONES.nbytes  # the argument, the cosine


def test_a_view_of_an_argument_is_kept_already() -> None:
    region = saving(policies.save_names("row"))(lambda x: reactivate.site(lambda y: y[0], name="row")(x) * x.exp())
    assert equal(gradient(lambda x: x[0] * x.exp(), ONES), gradient(region, ONES))
    assert "name=reactivate.saved" not in jaxpr_of(region, ONES)


def test_nothing_outlives_a_step() -> None:
    region = saving(policies.save_ops("sin"))(lambda x: torch.sin(x).exp())
    step = jax.grad(lambda x: _of_torch(region, (x,)).sum())
    gc.collect()
    gc.disable()
    try:
        counts = [len(jax.live_arrays()) for _ in range(3) if step(ONES) is not None]
    finally:
        gc.enable()
    assert counts[1] == counts[2]


def test_a_region_in_a_scan(hooked: list[int]) -> None:
    def scanned(wrap: Wrap) -> Callable[[Any], Any]:
        body = wrap(lambda x: torch.tanh(torch.matmul(x, x.T)) @ x)
        return lambda x: jax.lax.scan(lambda carry, _: (_of_torch(body, (carry,)), None), x, length=3)[0].sum()

    assert equal(jax.jit(jax.grad(scanned(plain)))(ONES), jax.jit(jax.grad(scanned(reactivate.checkpoint)))(ONES))
    assert hooked[0] >= 1
    assert "remat" in str(jax.make_jaxpr(jax.grad(scanned(reactivate.checkpoint)))(ONES))


def test_second_derivatives_and_batches(hooked: list[int]) -> None:
    def function(wrap: Wrap) -> Callable[[Any], Any]:
        return lambda x: _of_torch(wrap(lambda y: torch.sin(y * y).sum()), (x,))

    for transform in (jax.hessian, jax.vmap, lambda fn: jax.vmap(jax.grad(fn))):
        assert equal(transform(function(plain))(ONES), transform(function(reactivate.checkpoint))(ONES))
    assert hooked == [3]


# -- whatever functions are given and give ------------------------------------------------------------------------------


def test_arguments_and_results_of_every_kind(hooked: list[int]) -> None:
    def function(x: Tensor, pair: Any, options: Any, mode: str, *, scale: float, other: Any = None) -> Any:
        assert (mode, other) == ("sum", None)
        first, (second, nothing) = pair
        assert nothing is None
        return {
            "out": (x * first + options["bias"] * second) * scale,
            "mode": mode,
            "none": None,
            "parts": [first.exp()],
        }

    def whole(wrap: Wrap) -> Callable[[Tensor], Tensor]:
        def call(x: Tensor) -> Tensor:
            found = wrap(function)(x, (x + 1, [x.sin(), None]), {"bias": x.cos()}, "sum", scale=3.0)
            assert (found["mode"], found["none"]) == ("sum", None)
            return found["out"] + found["parts"][0]

        return call

    assert equal(gradient(whole(plain), ONES), gradient(whole(reactivate.checkpoint), ONES))
    assert hooked == [1]


def test_closures_over_tracers(hooked: list[int]) -> None:
    def whole(wrap: Wrap) -> Callable[[Tensor], Tensor]:
        return lambda x: wrap(lambda: torch.sin(x) * x.exp())()

    assert equal(gradient(whole(plain), ONES), gradient(whole(reactivate.checkpoint), ONES))
    assert hooked == [1]


def test_an_argument_comes_back_as_itself() -> None:
    def whole(x: Tensor) -> Tensor:
        same, new = reactivate.checkpoint(lambda y: (y, y.exp()))(x)
        assert same is x
        return same * new

    assert equal(gradient(lambda x: x * x.exp(), ONES), gradient(whole, ONES))


def test_writes_to_arguments_and_buffers() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))
            self.seen = torch.zeros(4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            self.count.add_(1)
            self.seen = self.seen + x.sum(0)
            y[0] = 3.0
            y.mul_(2)
            return x * y * self.count

    def whole(wrap: Wrap) -> Callable[[Tensor], Tensor]:
        def call(x: Tensor) -> Tensor:
            module = Counter().to("jax")
            module.seen = module.seen.to("jax")
            y = x.exp()
            first = wrap(module)(x, y)
            second = wrap(module)(first, y)
            return second + y * module.count + module.seen

        return call

    assert equal(gradient(whole(plain), ONES), gradient(whole(reactivate.checkpoint), ONES))
    assert jaxpr_of(whole(reactivate.checkpoint), ONES).count("remat") == 2


def test_views_stay_views() -> None:
    def whole(wrap: Wrap) -> Callable[[Tensor], Tensor]:
        def call(x: Tensor) -> Tensor:
            y = x.exp()
            base, row, outer = wrap(lambda z: ((made := z * 2), made[0], z[1]))(y)
            row.mul_(3)
            outer.add_(1)
            return base + y

        return call

    assert equal(gradient(whole(plain), ONES), gradient(whole(reactivate.checkpoint), ONES))
    assert equal(in_jit(whole(plain), ONES), in_jit(whole(reactivate.checkpoint), ONES))


def test_random_numbers_go_on_after_a_region() -> None:
    def whole(wrap: Wrap) -> Callable[[Tensor], Tensor]:
        drop = nn.Dropout(0.5)
        return lambda x: drop(wrap(lambda y: drop(y) * y)(drop(x))) * torch.rand(4, device="jax")

    assert equal(gradient(whole(plain), ONES), gradient(whole(reactivate.checkpoint), ONES))
    assert jaxpr_of(whole(reactivate.checkpoint), ONES).count("remat") == 1


def test_an_exception_leaves_nothing_behind(hooked: list[int]) -> None:
    """Tracers that outlive their trace are an error of JAX's wherever they are met."""

    def breaks(x: Tensor) -> Tensor:
        x.add_(1)
        torch.rand(4, device="jax")
        raise KeyError("mine")

    def call(x: Tensor) -> Tensor:
        with pytest.raises(KeyError, match="mine"):
            reactivate.checkpoint(breaks)(x)
        return x * torch.rand(4, device="jax")

    assert equal(gradient(lambda x: x * torch.rand(4, device="jax"), ONES), gradient(call, ONES))
    assert hooked == [1]


def test_hooks_of_the_module_run_once_and_outside(hooked: list[int]) -> None:
    seen: list[Tensor] = []
    block = nn.LeakyReLU(0.5)
    block.register_forward_hook(lambda module, args, output: seen.append(output * 2))

    def whole(wrap: Wrap) -> Callable[[Tensor], Tensor]:
        def call(x: Tensor) -> Tensor:
            seen.clear()
            y = wrap(block)(x - 0.3)
            assert len(seen) == 1
            return y * seen[0]

        return call

    assert equal(gradient(whole(plain), ONES), gradient(whole(reactivate.checkpoint), ONES))
    assert hooked == [1]
    assert jaxpr_of(whole(reactivate.checkpoint), ONES).count("remat") == 1


# -- which calls are JAX's ----------------------------------------------------------------------------------------------


def test_outside_of_a_trace_the_engine_has_them(hooked: list[int]) -> None:
    """Of torchax's functions some have no gradients of torch's (linear); these have."""

    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Parameter(torch.randn(16, 64)), nn.Parameter(torch.randn(64, 16))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(torch.tanh(x @ self.up), 0.25) @ self.down

    def step(wrap: Wrap) -> tuple[list[Any], int]:
        torch.manual_seed(0)
        kept: list[Tensor] = []
        with ENVIRONMENT, ENVIRONMENT.override_property(prng=jax.random.key(7)):
            model = Products().to("jax")
            x = torch.randn(8, 16, device="jax").requires_grad_()
            with torch.autograd.graph.saved_tensors_hooks(
                lambda tensor: kept.append(tensor) or tensor, lambda item: item
            ):
                y = wrap(model)(x)
            y.square().sum().backward()
            tensors = [y, x.grad, *(parameter.grad for parameter in model.parameters())]
            return [tensor.jax() for tensor in tensors] + [ENVIRONMENT.prng_key], len(kept)

    (expected, before), (found, after) = step(plain), step(reactivate.checkpoint)
    assert equal(expected, found)
    assert hooked == [0]
    assert after < before


def test_plain_tensors_during_a_trace_are_the_engines(hooked: list[int]) -> None:
    def call(x: Tensor) -> Tensor:
        weight = torch.ones(3, requires_grad=True)
        reactivate.checkpoint(lambda: torch.sin(weight))().sum().backward()
        assert weight.grad is not None
        reactivate.checkpoint(torch.sin)(weight).sum().backward()
        return x * float(weight.grad[0])

    assert equal(gradient(call, ONES), jnp.full_like(ONES, 2 * torch.cos(torch.ones(())).item()))
    assert hooked == [0]


@pytest.mark.parametrize("name", ["env", "_env", "default_env"])
def test_the_environment_of_each_version(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchax has renamed it; a region on the CPU asks for it as soon as torchax is imported."""
    key = object()
    made = types.SimpleNamespace(param=types.SimpleNamespace(prng=key))
    module = types.SimpleNamespace(**{name: (lambda: made) if name == "default_env" else made})
    monkeypatch.setitem(sys.modules, "torchax", module)
    assert RNG.is_initialized() and RNG.read_rng() == [key]
    RNG.write_rng([None])
    assert made.param.prng is None
    if name != "default_env":
        monkeypatch.setitem(sys.modules, "torchax", types.SimpleNamespace(**{name: None}))
        assert not RNG.is_initialized()


def test_where_regions_are_off(hooked: list[int]) -> None:
    def call(x: Tensor) -> Tensor:
        with without_regions():
            return reactivate.checkpoint(torch.sin)(x)

    assert "remat" not in jaxpr_of(call, ONES)
    assert "remat" in jaxpr_of(reactivate.checkpoint(torch.sin), ONES)
    assert hooked == [2]


def test_is_traced() -> None:
    seen = []

    class Holder:
        def __init__(self, tensor: Tensor) -> None:
            self.inside = {"of": {"something": [tensor]}}

        def __call__(self) -> Tensor:
            return self.inside["of"]["something"][0]

    def call(x: Tensor) -> Tensor:
        module = nn.Linear(4, 4)
        seen.append(in_jax.is_traced(torch.sin, (x,), {}))
        seen.append(in_jax.is_traced(dict, (), {"deep": [{"down": (1, x)}]}))
        seen.append(in_jax.is_traced(lambda: x, (), {}))
        seen.append(in_jax.is_traced(Holder(x), (), {}))
        seen.append(in_jax.is_traced(module.to("jax"), (torch.ones(4),), {}))
        seen.append(not in_jax.is_traced(nn.Linear(4, 4), (torch.ones(4),), {}))
        return x

    in_jit(call, ONES)
    assert seen == [True] * 6
    with ENVIRONMENT:
        assert not in_jax.is_traced(torch.sin, (torch.ones(2).to("jax"),), {})


def test_nothing_is_imported_for_it() -> None:
    code = (
        "import sys, torch; from reactivate._compilers.jax import is_traced;"
        "assert not is_traced(torch.sin, (torch.ones(2),), {});"
        "print([name for name in ('jax', 'torchax') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# -- what is refused ----------------------------------------------------------------------------------------------------


class Note(Guard):
    def before(self, call: Any) -> Any:
        return 1


class Lossy:
    exact = False

    def save(self, tensor: Tensor) -> Any:
        return tensor.half()

    def load(self, handle: Any) -> Tensor:
        return handle.float()


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * x.sigmoid()


REFUSED = {
    "determinism": ({"determinism": "values"}, 'determinism="values" cannot be used inside of a trace of JAX'),
    "a guard": ({"guards": DEFAULT.adding(Note())}, r"These guards .*: Note\. JAX recomputes from the trace"),
    "contexts": ({"guards": DEFAULT.adding(ContextPair(lambda: (None, None)))}, "These guards .*: ContextPair"),
    "a storage": ({"policy": policies.save_ops("sin", storage=Lossy())}, r"Lossy .* stays on the device"),
    "a function": ({"policy": policies.save_ops(Swish)}, r"custom autograd functions \(Swish\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_jax_has_not_is_refused(name: str) -> None:
    options, reason = REFUSED[name]
    region = reactivate.checkpoint(lambda x: torch.sin(x).exp(), **options)
    with pytest.raises(UnsupportedError, match=reason):
        gradient(region, ONES)


def test_a_policy_that_matches_nothing() -> None:
    with pytest.raises(UsageError, match=r"save_ops\('matmul'\) matches nothing.*sin"):
        gradient(saving(policies.save_ops("matmul"))(torch.sin), ONES)
    with pytest.raises(UsageError, match="selects modules|matches nothing"):
        gradient(saving(policies.save_modules("*.up"))(torch.sin), ONES)


def test_a_backward_of_torchs_inside_of_a_trace() -> None:
    def call(x: Tensor) -> Tensor:
        weight = torch.ones(4, device="jax").requires_grad_()
        y = reactivate.checkpoint(lambda z: torch.exp(z * weight))(x)
        y.sum().backward()
        return weight.grad

    with pytest.raises(UnsupportedError, match=r"A backward of torch's came to a region.*jax\.grad"):
        in_jit(call, ONES)
