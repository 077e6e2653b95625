"""One step of a model, forward and backward, from the state that it is called in, and back to that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import filterfalse
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from reactivate._passes.observing import observed_by
from reactivate._region.accounts import Ledger
from reactivate._region.region import Region
from reactivate._snapshot.call import Call
from reactivate._snapshot.inputs import Input, IteratorInput, rebuild
from reactivate._snapshot.moment import Moment
from reactivate._snapshot.rewound_moment import RewoundMoment
from reactivate._snapshot.shadows import note_written
from reactivate._text.warnings import warn
from reactivate._torch.ops import flatten, leaves_with_paths
from reactivate.errors import UnsupportedError, UsageError
from reactivate.guards.rng import all_sources
from reactivate.policies._base import shortened

Change = Callable[[Callable[..., Any]], AbstractContextManager[Callable[..., Any]]]


@dataclass
class Outcome:
    """The results of one run.

    Attributes:
        results: whatever came out, by name.
        kept_bytes: what autograd kept.
        regions, recomputations: how many there were.
    """

    results: dict[str, Any] = field(default_factory=dict)
    kept_bytes: int = 0
    regions: int = 0
    recomputations: int = 0

    def forward_done(self, region: Region) -> None:
        self.regions += 1

    def recomputation_done(self, region: Region) -> None:
        self.recomputations += 1


class Step:
    """A model and its arguments, with the state that both can reach.

    Attributes:
        has_changed: whether a run has written to parameters or arguments before there were copies, so that they stay changed.
    """

    has_changed = False

    def __init__(self, model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        self.reach = reach = Call(model, args, kwargs)
        self.sources = all_sources(reach)
        self.modules = reach.modules
        self._moment = self._present()
        self.inputs = _leaves_requiring_grad("args", args) | _leaves_requiring_grad("kwargs", kwargs)
        known = {id(tensor) for tensor in self.inputs.values()}
        for root in reach.roots:
            for name, parameter in root.named_parameters():
                if parameter.requires_grad and id(parameter) not in known:
                    known.add(id(parameter))
                    self.inputs[name] = parameter
        closed_over = [item for item in reach.reached() if item.requires_grad and id(item) not in known]
        self.inputs |= {f"closed-over tensor {index}": item for index, item in enumerate(closed_over)}

    def run(self, model: Callable[..., Any], change: Change = nullcontext) -> Outcome:
        """Run forward and backward from the state that the call was made in, and go back to it."""
        run = Outcome()
        with self.held(), observed_by(run), change(model) as subject:
            self._run(subject, run)
        return run

    @contextmanager
    def held(self) -> Iterator[None]:
        """Begin in the state that the call was made in, and go back to it: modules, objects and random numbers."""
        with ExitStack() as stack:
            for source in self.sources:
                stack.callback(source.write, source.read())
            stack.enter_context(torch.enable_grad())
            stack.enter_context(self._gradients_put_back())
            for cell in self.reach.cells:  # before anything is rewound
                cell.prepare({})
                stack.callback(cell.let_go)
            stack.enter_context(RewoundMoment(self._moment))
            yield
        self._note_writes()

    @contextmanager
    def _gradients_put_back(self) -> Iterator[None]:
        """Put back the gradients: the forward itself may run a backward."""
        leaves = [item for item in self.inputs.values() if item.is_leaf or item.retains_grad]
        before = [leaf.grad for leaf in leaves]
        try:
            yield
        finally:
            for leaf, gradient in zip(leaves, before):
                if leaf.grad is not gradient:
                    leaf.grad = gradient

    def _present(self) -> Moment:
        reach = self.reach
        return Moment(reach.holders, reach.tensors, (), reach.tree, reach.may_write_unseen)

    def _note_writes(self) -> None:
        """Have copies of the parameters and arguments that the step writes to from now on: all are too many to copy first."""
        reach = self.reach
        moved = [(item.tensor, item.place) for item in self._moment.unrestored() if isinstance(item.tensor, Tensor)]
        written = list(filter(_is_written, reach.inputs))
        reach.inputs = list(filterfalse(_is_written, reach.inputs))
        reach.tensors += (item.tensor for item in written)
        moved += ((item.tensor, item.place) for item in written)
        if not moved:
            return
        for tensor, _ in moved:
            note_written(tensor)
        self._moment, self.has_changed = self._present(), True
        names = shortened((place for _, place in moved), 3)
        warn(
            f"The model writes to parameters or arguments in its forward: {names}. This run has changed them, since nothing "
            "had a copy of them; the runs that follow put them back."
        )

    def given(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of one run, which uses iterators up."""
        reach, args, kwargs = self.reach, self.args, self.kwargs
        return (
            tuple(_copied(spec, item) for spec, item in zip(reach.args, args)),
            {name: _copied(reach.kwargs[name], item) for name, item in kwargs.items()},
        )

    def _roots_of(self, outputs: Iterable[Tensor]) -> list[Tensor]:
        """Return the outputs that a backward begins from.

        Raises:
            UsageError: there is none.
        """
        roots = [leaf for leaf in outputs if leaf.requires_grad]
        if not self.inputs:
            raise UsageError(
                "No parameter and no argument requires a gradient, so a step has no backward and keeps nothing for it. Write "
                "model.requires_grad_(), or unfreeze what is to be trained."
            )
        if not roots:
            raise UsageError(
                f"Nothing that the model returns requires a gradient, although {next(iter(self.inputs))} does: the model "
                "detaches it, computes under torch.no_grad(), or does not use it."
            )
        return roots

    def _run(self, model: Callable[..., Any], run: Outcome) -> None:
        ledger = Ledger(self.inputs.values())

        def count(tensor: Tensor) -> Tensor:
            run.kept_bytes += ledger.enter(tensor)
            return tensor

        with saved_tensors_hooks(count, lambda tensor: tensor):
            args, kwargs = self.given()
            output = model(*args, **kwargs)
        outputs = leaves_of("output", output)
        roots = self._roots_of(outputs.values())
        gradients = gradients_of(roots, list(self.inputs.values()))
        for name, leaf in outputs.items():
            run.results[name] = leaf.detach().clone()
        for name, gradient in zip(self.inputs, gradients):
            run.results[f"gradient of {name}"] = gradient
        for number, module in enumerate(self.modules):
            for name, buffer in module.named_buffers(recurse=False):
                run.results[f"buffer {name} of {type(module).__name__} {number}"] = buffer.clone()
        for source in self.sources:
            run.results[f"random state of {source.name}"] = source.told()


def _is_written(item: Input) -> bool:
    return item.is_constant and item.tensor._version != item.version


def _copied(spec: Any, item: Any) -> Any:
    return rebuild(spec, {}) if isinstance(spec, IteratorInput) else item


def leaves_of(name: str, value: Any) -> dict[str, Tensor]:
    """The tensors in nested containers and dataclasses, by the way to them."""
    found: dict[str, Tensor] = {}
    for path, leaf in _leaves_with_paths(value):
        if isinstance(leaf, Tensor):
            found[name + path] = leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            for item in fields(leaf):
                found |= leaves_of(f"{name}{path}.{item.name}", getattr(leaf, item.name))
    return found


def _leaves_with_paths(value: Any) -> list[tuple[str, Any]]:
    try:
        return leaves_with_paths(value)
    except ValueError:  # a container in it is registered without keys
        return [(step + path, leaf) for step, item in _items_of(value) for path, leaf in _leaves_with_paths(item)]


def _items_of(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        items: Iterable[tuple[Any, Any]] = value.items()
    else:
        items = enumerate(value if isinstance(value, (list, tuple)) else flatten(value)[0])
    return ((f"[{key!r}]", item) for key, item in items)


def _leaves_requiring_grad(name: str, value: Any) -> dict[str, Tensor]:
    return {path: leaf for path, leaf in leaves_of(name, value).items() if leaf.requires_grad}


class _Total(torch.autograd.Function):
    """A number with given gradients with respect to the outputs of a step.

    (To pass these to torch.autograd.grad would import sympy, which takes longer than most steps.)
    """

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *roots: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros((), device=roots[0].device)

    @staticmethod
    def backward(ctx: Any, *given: Any) -> tuple[Tensor | None, ...]:
        return None, *ctx.gradients


def gradients_of(roots: list[Tensor], inputs: list[Tensor]) -> tuple[Tensor | None, ...]:
    """Run the backward from the outputs of a step, with a gradient for each that has no symmetry.

    (With ones, the sum of a softmax, say, would have gradient zero.)

    Raises:
        UnsupportedError: the step uses torch's reentrant checkpoint.
    """
    generator = torch.Generator().manual_seed(0)
    given = [
        torch.randn(root.shape, generator=generator, dtype=torch.float32).to(device=root.device, dtype=root.dtype)
        for root in roots
    ]
    try:
        return torch.autograd.grad(_Total.apply(given, *roots), inputs, allow_unused=True)
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
        raise UnsupportedError(
            "The model calls torch's reentrant checkpoint, which knows no backward to given inputs, as it runs here. Write "
            "use_reentrant=False there, or run this inside of reactivate.dropin.install()."
        ) from error
