"""Random numbers: the recomputation draws what the forward drew, and every stream goes on as in the plain model."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from state_programs import Holding, Programs, Wrap, backward, curve, inputs, leaf, train
from torch import Tensor, nn

from reactivate._snapshot.generators import numpy_stream

PROGRAMS = Programs()
test_program = PROGRAMS.test()
right, right_by, right_with = PROGRAMS.right, PROGRAMS.right_by, PROGRAMS.right_with


def trained(wrap: Wrap, fn: Callable[[Tensor], Tensor], between: Callable[[], Any] = lambda: None) -> Any:
    """Two regions a step over the same function, with `between` run between forward and backward."""
    checkpointed, drawn = wrap(fn), []
    grads = train(lambda x: checkpointed(checkpointed(x).sin()), inputs(), between=lambda: drawn.append(between()))
    return [grads, drawn]


def noisy(x: Tensor) -> Tensor:
    return curve(x, torch.rand(4))


# -- torch's stream -----------------------------------------------------------------------------------------------------


PROGRAMS.rows(
    trained,
    {
        "dropout": (lambda x: F.dropout(x, 0.5).tanh() * F.dropout(x, 0.3),),
        "random_leaky_relu_in_training": (lambda x: F.rrelu(x, training=True).tanh() * torch.rrelu(x, training=True),),
        "data_loader_draws_between_forward_and_backward": (
            lambda x: F.dropout(curve(x, 2), 0.5) * x,
            lambda: torch.randn(3),
        ),
        "state_is_reseeded_between_forward_and_backward": (
            noisy,
            lambda: [torch.manual_seed(3).initial_seed(), torch.rand(2)],
        ),
    },
)


@right_by(trained, lambda: torch.rand(2))
def fork_rng_around_a_draw(x: Tensor) -> Tensor:
    """The state after the region equals the state before, and numbers were drawn."""
    with torch.random.fork_rng():
        return noisy(x)


@right_by(trained, lambda: torch.rand(2))
def fork_rng_with_a_seed_inside(x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(11)
        x = noisy(x)
    return noisy(x)


@right_by(trained, lambda: torch.rand(2))
def state_is_put_back_after_a_draw(x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    x = noisy(x)
    torch.set_rng_state(state)
    return x


@right_by(trained, lambda: torch.rand(2))
def state_is_put_back_and_drawn_again(x: Tensor) -> Tensor:
    """A reversible layer or a shared dropout mask draws one number twice."""
    state = torch.get_rng_state()
    first = F.dropout(x, 0.5)
    torch.set_rng_state(state)
    return curve(first, F.dropout(x, 0.5)) + noisy(x)


@right_by(trained, lambda: torch.rand(2))
def seed_is_set_inside(x: Tensor) -> Tensor:
    x = noisy(x)
    torch.manual_seed(5)
    return noisy(x)


@right_by(trained, lambda: torch.rand(2))
def seed_is_drawn_inside(x: Tensor) -> Tensor:
    torch.manual_seed(int(torch.randint(0, 1000, ())))
    return noisy(x)


@right
def spare_normal_of_torch(wrap: Wrap) -> Any:
    """One normal of a pair is drawn; the state holds the other one."""
    torch.randn(1)

    def fn(x: Tensor) -> Tensor:
        return curve(x, torch.randn(1)) + x * torch.randn(1, dtype=torch.float64).float()

    return trained(wrap, fn, lambda: torch.randn(1))


@right
def regions_without_a_draw_stand_between_draws(wrap: Wrap) -> Any:
    quiet, loud_one = wrap(lambda x: curve(x, 2)), wrap(noisy)
    (x,) = inputs(1)
    h = x
    for index in range(8):
        h = quiet(h) + x
        if index % 3 == 0:
            h = loud_one(h) * torch.rand(4)
    backward(h)
    return [x.grad, torch.rand(2)]


@right
def draws_before_inside_and_after(wrap: Wrap) -> Any:
    checkpointed = wrap(noisy)
    found = []
    for x in inputs():
        h = F.dropout(checkpointed(F.dropout(x, 0.5)), 0.5)
        backward(checkpointed(h), F.dropout(x, 0.2))
        found += [x.grad, torch.rand(2)]
    return found


@right
def microbatches_in_flight_draw(wrap: Wrap) -> Any:
    checkpointed = wrap(noisy)
    leaves, flying = inputs(5), []
    for x in leaves:
        flying.append(checkpointed(x))
        if len(flying) == 2:
            backward(flying.pop(0))
            torch.rand(3)
    backward(flying.pop())
    return [x.grad for x in leaves]


@right_with(recomputations=4)
def nested_regions_draw(wrap: Wrap) -> Any:
    inner = wrap(noisy)
    return trained(wrap, lambda x: F.dropout(inner(F.dropout(x, 0.3)), 0.5) * inner(x), lambda: torch.rand(2))


@right_with(recomputations=6)
def retained_graph_draws_the_same(wrap: Wrap) -> Any:
    checkpointed = wrap(noisy)
    leaves = inputs()
    losses = [checkpointed(x).square().sum() for x in leaves]
    for _ in range(2):
        torch.rand(1)
        for loss in losses:
            loss.backward(retain_graph=True)
    return [x.grad for x in leaves]


@right
def backward_inside_the_region_draws(wrap: Wrap) -> Any:
    inner = wrap(noisy)

    def fn(x: Tensor) -> Tensor:
        probe = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(inner(probe).sum(), probe)
        return curve(noisy(x), grad)

    return trained(wrap, fn, lambda: torch.rand(2))


@right
def hook_draws_in_backward(wrap: Wrap) -> Any:
    """Draws of backward itself follow one another as in the plain model."""

    def fn(x: Tensor) -> Tensor:
        h = noisy(x)
        return curve(h, 2)

    checkpointed = wrap(fn)
    found = []
    for x in inputs():
        h = x * 1
        h.register_hook(lambda grad: grad + torch.rand(4))
        middle = checkpointed(h)
        middle.register_hook(lambda grad: grad * torch.rand(4))
        backward(checkpointed(middle))
        found += [x.grad, torch.rand(2)]
    return found


# -- the streams of Python and NumPy ------------------------------------------------------------------------------------


PROGRAMS.rows(
    trained,
    {
        "python_draws": (lambda x: curve(x, random.random()), random.random),
        "python_draws_between_forward_and_backward_only": (lambda x: curve(x, 2), random.random),
        "numpy_draws": (lambda x: curve(x, float(numpy.random.rand())), numpy.random.random),
    },
)


@right_by(trained, random.random)
def python_state_is_put_back(x: Tensor) -> Tensor:
    state = random.getstate()
    x = curve(x, random.random())
    random.setstate(state)
    return x


@right_by(trained, random.random)
def python_seed_inside(x: Tensor) -> Tensor:
    x = curve(x, random.random())
    random.seed(3)
    return curve(x, random.random())


@right
def spare_normal_of_python(wrap: Wrap) -> Any:
    random.gauss(0, 1)
    return trained(wrap, lambda x: curve(x, random.gauss(0, 1)), lambda: random.gauss(0, 1))


@right_by(trained, numpy.random.random)
def numpy_state_is_put_back(x: Tensor) -> Tensor:
    state = numpy.random.get_state()
    x = curve(x, float(numpy.random.rand()))
    numpy.random.set_state(state)
    return x


@right_by(trained, numpy.random.random)
def numpy_seed_inside(x: Tensor) -> Tensor:
    x = curve(x, float(numpy.random.rand()))
    numpy.random.seed(3)
    return curve(x, float(numpy.random.rand()))


@right
def spare_normal_of_numpy(wrap: Wrap) -> Any:
    numpy.random.randn()
    return trained(wrap, lambda x: curve(x, float(numpy.random.randn())), lambda: float(numpy.random.randn()))


@right
def skipped_layers_are_chosen_by_python(wrap: Wrap) -> Any:
    layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

    def fn(x: Tensor) -> Tensor:
        for layer in layers:
            x = curve(layer(x), 2.0 if random.random() < 0.5 else 3.0)
        return x

    return trained(wrap, fn, lambda: random.randint(0, 9))


# -- generators, wherever they are found --------------------------------------------------------------------------------


GENERATORS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "torch": (
        lambda: torch.Generator().manual_seed(3),
        lambda generator: torch.rand(4, generator=generator),
        lambda generator: generator.get_state(),
    ),
    "python": (
        lambda: random.Random(3),
        lambda generator: generator.random() + generator.gauss(0, 1),
        lambda generator: repr(generator.getstate()),
    ),
    "numpy": (
        lambda: numpy.random.default_rng(3),
        lambda generator: float(generator.random()),
        lambda generator: repr(generator.bit_generator.state),
    ),
}


def with_generators(wrap: Wrap, place: Callable[[Any], Any], find: Callable[[Any], Any]) -> Any:
    """Each kind of generator, put where `place` puts it and found by the function by `find`."""
    found = []
    for make, draw, state in GENERATORS.values():
        generator = make()
        holder = place(generator)
        found += [trained(wrap, lambda x: curve(x, draw(find(holder))), lambda: draw(generator)), state(generator)]
    return found


@right_with(recomputations=12)
def points_of_a_sobol_engine(wrap: Wrap) -> Any:
    """An engine counts in its attributes, and replaces a tensor among them."""

    class Sampled(nn.Module):
        def __init__(self, engine: Any) -> None:
            super().__init__()
            self.engine = engine

        def forward(self, x: Tensor) -> Tensor:
            return curve(x, self.engine.draw(1).sum() + 1)

    found = []
    for scramble in (False, True):
        engine = torch.quasirandom.SobolEngine(4, scramble=scramble, seed=3)
        fn = wrap(lambda x, engine=engine: curve(x, engine.draw(2).sum()))
        for call in (wrap(Sampled(engine), check="metadata"), fn):
            xs = [leaf(4) for _ in range(3)]
            backward(call(xs[0]))
            backward(*map(call, xs[1:]))
            found.append([x.grad for x in xs])
        found.append([engine.num_generated, engine.draw(3)])
    return found


PROGRAMS.rows(
    with_generators,
    {
        "generators_in_closures": (lambda generator: generator, lambda holder: holder),
        "generators_in_lists": (lambda generator: [generator], lambda holder: holder[0]),
        "generators_in_nested_dicts": (lambda generator: {"a": {"b": [generator]}}, lambda holder: holder["a"]["b"][0]),
        "generators_in_attributes_of_objects": (
            lambda generator: SimpleNamespace(rng=generator),
            lambda holder: holder.rng,
        ),
        "generators_in_functions_of_closures": (lambda generator: lambda: generator, lambda holder: holder()),
    },
)


@right_by(with_generators, lambda holder: holder.rng)
class GeneratorsInSlots:
    __slots__ = ("rng",)

    def __init__(self, rng: Any) -> None:
        self.rng = rng


@right
def generators_in_arguments(wrap: Wrap) -> Any:
    found = []
    for make, draw, state in GENERATORS.values():
        generator = make()
        checkpointed = wrap(lambda x, options, generator: curve(curve(x, draw(generator)), draw(options["rng"])))
        step = lambda x: checkpointed(x, {"rng": generator}, generator=generator)  # noqa: E731
        found += [train(step, inputs(), between=lambda: draw(generator)), state(generator)]
    return found


class Noise(nn.Module):
    """Each kind of generator, as attributes and in containers of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = torch.Generator().manual_seed(1)
        self.rngs = [random.Random(1), numpy.random.default_rng(1)]
        self.by_name = {"torch": torch.Generator().manual_seed(2)}

    def forward(self, x: Tensor) -> Tensor:
        x = curve(x, torch.rand(4, generator=self.rng) + self.rngs[0].random())
        return curve(x, torch.rand(4, generator=self.by_name["torch"]) + float(self.rngs[1].random()))

    def states(self) -> Any:
        states = [self.rng.get_state(), repr(self.rngs[0].getstate()), repr(self.rngs[1].bit_generator.state)]
        return [*states, self.by_name["torch"].get_state()]


@right
def generators_of_a_module(wrap: Wrap) -> Any:
    module = Noise()
    return [trained(wrap, module), module.states()]


@right
def generators_of_a_child_in_a_list(wrap: Wrap) -> Any:
    class Model(Holding):
        def forward(self, x: Tensor) -> Tensor:
            for child in self.children_in_a_list:
                x = child(x)
            return x

    module = Model(children_in_a_list=[Noise(), Noise()])
    return [trained(wrap, module), [child.states() for child in module.children_in_a_list]]


def with_generator(wrap: Wrap, fn: Callable[[torch.Generator, Tensor], Tensor]) -> Any:
    generator = torch.Generator().manual_seed(3)
    grads = trained(wrap, lambda x: fn(generator, x), lambda: torch.rand(2, generator=generator))
    return [grads, generator.get_state()]


@right_by(with_generator)
def generator_is_put_back_after_a_draw(generator: torch.Generator, x: Tensor) -> Tensor:
    state = generator.get_state()
    x = curve(x, torch.rand(4, generator=generator))
    generator.set_state(state)
    return x


@right_by(with_generator)
def generator_is_reseeded_inside(generator: torch.Generator, x: Tensor) -> Tensor:
    x = curve(x, torch.rand(4, generator=generator))
    generator.manual_seed(4)
    return curve(x, torch.rand(4, generator=generator))


@right
def generator_is_replaced_inside(wrap: Wrap) -> Any:
    state = SimpleNamespace(rng=torch.Generator().manual_seed(3), step=0)

    def fn(x: Tensor) -> Tensor:
        x = curve(x, torch.rand(4, generator=state.rng))
        state.step += 1
        state.rng = torch.Generator().manual_seed(state.step)
        return curve(x, torch.rand(4, generator=state.rng))

    return [trained(wrap, fn), state.step, state.rng.get_state()]


@right
def generator_is_replaced_before_backward(wrap: Wrap) -> Any:
    module = Noise()

    def replace() -> None:
        module.rng = torch.Generator().manual_seed(9)
        module.rngs[0] = random.Random(9)

    return [trained(wrap, module, replace), module.states()]


@right_by(trained, lambda: torch.rand(1))
def generator_is_made_from_the_stream(x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(int(torch.randint(0, 1000, ())))
    return curve(x, torch.rand(4, generator=generator) + random.Random(int(torch.randint(0, 9, ()))).random())


@right
def default_generator_is_passed_on(wrap: Wrap) -> Any:
    checkpointed = wrap(lambda x, generator: curve(x, torch.rand(4, generator=generator) + torch.rand(4)))
    return train(checkpointed, inputs(), torch.default_generator, between=lambda: torch.rand(3))


@right
def bit_generator_is_shared(wrap: Wrap) -> Any:
    """Two NumPy generators over one bit generator are one stream."""
    bits = numpy.random.PCG64(5)
    first, second = numpy.random.Generator(bits), numpy.random.Generator(bits)

    def fn(x: Tensor) -> Tensor:
        return curve(x, float(first.random()) + 2 * float(second.random()))

    return [trained(wrap, fn, lambda: float(second.random())), repr(bits.state)]


@right
def random_state_of_numpy(wrap: Wrap) -> Any:
    state = numpy.random.RandomState(3)

    def fn(x: Tensor) -> Tensor:
        return curve(x, float(state.randn()))

    return [trained(wrap, fn, lambda: float(state.randn())), repr(state.get_state(legacy=False))]


@right
def initialisation_draws_on_first_use(wrap: Wrap) -> Any:
    state: dict[str, Tensor] = {}

    def fn(x: Tensor) -> Tensor:
        if "projection" not in state:
            state["projection"] = torch.randn(4, 4)
        return curve(x @ state["projection"], torch.rand(4))

    return [trained(wrap, fn), state["projection"]]


def test_states_of_numpy_are_compared_by_all_that_is_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by how they are printed, which `set_printoptions` shortens."""
    before = numpy.random.get_state(legacy=False)
    other = {**before, "state": {**before["state"], "key": before["state"]["key"].copy()}}
    other["state"]["key"][300] += 1
    monkeypatch.setattr(numpy.random, "get_bit_generator", lambda: object())  # as if another one had been set
    stream = numpy_stream()
    try:
        with numpy.printoptions(threshold=1, edgeitems=1):
            assert not stream.memory
            assert stream.ask is not None
            first = stream.ask()
            assert stream.ask() == first
            numpy.random.set_state(other)
            assert stream.ask() != first
    finally:
        numpy.random.set_state(before)
