"""Ways to reach modules in a tree so large that a region notes modules when the forward reaches them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from threading import Thread
from typing import Any
from weakref import ref

import oracle
import torch
from journal import Journal
from oracle import compare, leaf
from several import each
from torch import Tensor, nn
from torch.func import functional_call

import reactivate
from reactivate._snapshot.reached_modules import ReachedModules
from reactivate._snapshot.trees import LARGE_TREE, large_roots

WIDTH, STEPS = 4, 4


class Count(nn.Module):
    """A layer that counts its calls in an attribute before it reads anything else, and in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.number += 1
        self.calls.add_(0.5)
        return x * self.weight * (self.number + self.calls.clone())


class Model(nn.Module):
    """A large model with a layer that `way` reaches, and a copy of some layers for averages."""

    def __init__(self, way: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.count = nn.Linear(WIDTH, WIDTH), Count()
        self.averages = nn.ModuleList(nn.Sequential(nn.BatchNorm1d(WIDTH)) for _ in range(LARGE_TREE))
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, self.linear(x)).tanh()


class Overriding(Model):
    def __getattr__(self, name: str) -> Any:
        modules = self.__dict__["_modules"]
        return modules[name] if name in modules else super().__getattr__(name)


def by_name(model: Any, x: Tensor) -> Tensor:
    return model.count(x)


def from_the_registry(model: Any, x: Tensor) -> Tensor:
    return model._modules["count"](x)


def on_another_thread(model: Any, x: Tensor) -> Tensor:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: model.count(x)).result()


def on_another_thread_from_the_registry(model: Any, x: Tensor) -> Tensor:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: model._modules["count"](x)).result()


def beside_all_parameters(model: Any, x: Tensor) -> Tensor:
    names = [name for name, _ in model.named_modules(prefix="inner", remove_duplicate=False)]
    size = sum(parameter.numel() for parameter in model.parameters(recurse=True))
    return model.count(x) * (len(names) + size)


def by_functional_call(model: Any, x: Tensor) -> Tensor:
    return functional_call(model.count, {"weight": model.count.weight * 2}, (x,))


def average(model: Any) -> Tensor:
    return model.averages._modules["5"]._modules["0"].running_mean


def write_a_state(model: Any, x: Tensor) -> Tensor:
    model.averages.state_dict()["5.0.running_mean"].mul_(0.5).add_(1)
    return x + average(model)


class Keyed(nn.Module):
    def forward(self, x: Tensor, _first: bool = False, _then: float = 1.0, **others: float) -> Tensor:
        return x * _then * sum(others.values()) if _first else x


def by_keyword(model: Any, x: Tensor) -> Tensor:
    if not hasattr(model, "keyed"):
        model.keyed = Keyed()
    return model.keyed(model.count(x), _first=True, _then=2.0, _known=0.5, _original=0.25)


def load_a_state(model: Any, x: Tensor) -> Tensor:
    state = {name: value + 1 for name, value in model.averages.state_dict().items()}
    model.averages.load_state_dict(state)
    return x + average(model)


def write_all_buffers(model: Any, x: Tensor) -> Tensor:
    for buffer in model.averages.buffers():
        buffer.add_(1)
    return x + average(model)


def trained(wrap: Callable[..., Any], kind: type[Model], way: Any, **options: Any) -> list[Any]:
    model = kind(way)
    return oracle.trained(model, wrap(model, **options), STEPS, lambda: [model.count.number])


WAYS = [by_name, from_the_registry, on_another_thread, on_another_thread_from_the_registry, beside_all_parameters]


@each(
    "kind, way",
    [
        *(
            (Model, way)
            for way in [*WAYS, by_functional_call, by_keyword, write_a_state, load_a_state, write_all_buffers]
        ),
        (Overriding, by_name),
    ],
)
def test_modules_of_a_large_tree(kind: type[Model], way: Any) -> None:
    watched = compare(lambda wrap, **options: trained(wrap, kind, way, **options), check="metadata")
    assert watched.regions == watched.recomputations == STEPS


def test_models_of_other_threads_do_not_concern_a_region() -> None:
    """A model that another thread uses meanwhile is not noted: a recomputation finds it as it is."""
    other, seen = Model(by_name), Journal()
    asked: SimpleQueue[bool] = SimpleQueue()
    answered: SimpleQueue[None] = SimpleQueue()

    def answer() -> None:
        while asked.get():
            seen.append(other.count.number)
            answered.put(None)

    def beside(model: Any, x: Tensor) -> Tensor:
        asked.put(True)
        answered.get()
        return model.count(x)

    thread = Thread(target=answer)
    thread.start()
    region = reactivate.checkpoint(Model(beside))
    for _ in range(STEPS):
        out = region(leaf(5, WIDTH))
        other.count.number += 1
        out.sum().backward()
    asked.put(False)
    thread.join()
    assert [*seen][-2:] == [STEPS - 1, STEPS]


def test_a_small_block_that_a_large_model_leads_to_is_noted_at_once() -> None:
    """The model has it in a list: no child, but a module to look at."""
    model = Model(by_name)
    block = nn.Sequential(Count())
    model.others = [block]  # type: ignore[assignment]
    reactivate.checkpoint(model)(leaf(3, WIDTH)).sum().backward()
    assert large_roots.has(model) and not large_roots.has(block)


def test_nothing_is_left_to_the_collector() -> None:
    reached = ReachedModules([Model(by_name)], bool, lambda function, *args: function(*args))
    reached.finish()
    reference = ref(reached)
    del reached
    assert reference() is None
