"""`verify`: is the checkpointed model, bit for bit, the plain one?"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module

from reactivate._apply import apply, paused
from reactivate._arguments import example_of
from reactivate._checkpoint import checkpoint
from reactivate._engine.accounts import Ledger, in_words
from reactivate._engine.inputs.capture import Capture
from reactivate._engine.record import Record, observed_by, without_regions
from reactivate._torch.containers import flatten, leaves_with_paths
from reactivate._types import Policy
from reactivate._words import counted
from reactivate.errors import UsageError
from reactivate.guards import Modules, all_sources
from reactivate.policies._base import check_policy


@dataclass(frozen=True)
class Verdict:
    """The verdict of `verify`: true in a condition if the two runs are the same.

    Attributes:
        is_same: whether everything that was compared is bitwise equal.
        difference: the first difference, by name; None if there is none.
        is_deterministic: whether the plain model is bitwise equal to itself. If it is not, `is_same` is False, and
            `difference` is that of the plain model to itself.
        compared: how many tensors and random states were compared.
        regions: how many regions ran in the checkpointed forward pass.
        recomputations: how many recomputations ran in its backward.
        plain_bytes: what autograd kept of the plain forward pass, without parameters.
        kept_bytes: what it kept of the checkpointed one.
    """

    is_same: bool
    difference: str | None
    is_deterministic: bool
    compared: int
    regions: int
    recomputations: int
    plain_bytes: int
    kept_bytes: int

    def __bool__(self) -> bool:
        return self.is_same

    def __str__(self) -> str:
        if not self.is_deterministic:
            return f"The plain model differs between two runs of itself: {self.difference}"
        facts = (
            f"{counted(self.regions, 'region')}, {counted(self.recomputations, 'recomputation')}; autograd kept "
            f"{in_words(self.kept_bytes)} where the plain model keeps {in_words(self.plain_bytes)}"
        )
        if self.is_same:
            return f"The same, bit for bit ({self.compared} tensors and random states; {facts})."
        return f"Not the same: {self.difference} ({facts})."


def verify(
    model: Callable[..., Any], args: Any = (), kwargs: Mapping[str, Any] | None = None, *, policy: Policy | None = None
) -> Verdict:
    """Run `model` plain and checkpointed from the same state, and compare all that comes out.

    Compared are outputs, the gradients of parameters, of inputs and of closed-over tensors, buffers, and the state of
    every random number generator. A gradient that is missing on one side is a difference. The model, its gradients and
    the generators are then as they were.

    If the model has regions of its own (it calls `reactivate.checkpoint`, or torch's with the drop-in installed), these
    are what is verified, against the model with them turned off. Otherwise the whole model is made one region.

    Args:
        model: a module or a function.
        args: the arguments of one call, as a tuple or a list; a dict holds keyword arguments, a lone tensor is one
            argument.
        kwargs: keyword arguments.
        policy: what to recompute, in place of the above and of a policy that is applied: it is applied to `model`
            meanwhile, if that is a module; of a function it says what is kept inside.

    Returns:
        The verdict, with the first difference by name.

    Raises:
        UsageError: nothing that comes out requires a gradient; or `policy` matches nothing.

    Example:
        >>> import torch, reactivate
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1))
        >>> bool(reactivate.verify(model, torch.randn(2, 4)))
        True
    """
    if policy is not None:
        check_policy(policy, "verify(policy=...)")
    return compare(model, args, kwargs, None if policy is None else functools.partial(_under, policy))


Change = Callable[[Callable[..., Any]], AbstractContextManager[Callable[..., Any]]]


def compare(model: Callable[..., Any], args: Any, kwargs: Mapping[str, Any] | None, change: Change | None) -> Verdict:
    """`verify`, for what any `change` makes of the model: model -> a context with the model that is to be the same."""
    call = Step(model, *example_of("verify", model, args, kwargs))
    with without_regions():
        plain, again = call.run(model), call.run(model)
    difference = _first_difference(plain, again)
    if difference is not None:
        return _verdict(plain, again, difference, is_deterministic=False)
    ours = call.run(model, change or nullcontext)
    if change is None and not ours.regions:
        ours = call.run(checkpoint(model))
    return _verdict(plain, ours, _first_difference(plain, ours), is_deterministic=True)


@dataclass
class _Outcome:
    """The results of one run."""

    results: dict[str, Any] = field(default_factory=dict)
    kept_bytes: int = 0
    regions: int = 0
    recomputations: int = 0

    def forward_done(self, record: Record) -> None:
        self.regions += 1

    def recomputation_done(self, record: Record) -> None:
        self.recomputations += 1


@contextmanager
def _under(policy: Policy, model: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """The model with the policy."""
    if isinstance(model, Module):
        with paused(model), apply(model, policy):
            yield model
    else:
        yield checkpoint(model, policy=policy)


class Step:
    """A model and its arguments, with the state that both can reach."""

    def __init__(self, model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        reach = Capture(model, args, kwargs)
        self.sources = all_sources(reach)
        self.modules = reach.modules
        self._guard = Modules()
        self._state = self._guard.before(reach)
        self.inputs = _leaves_requiring_grad("args", args) | _leaves_requiring_grad("kwargs", kwargs)
        known = {id(tensor) for tensor in self.inputs.values()}
        for root in reach.roots:
            for name, parameter in root.named_parameters():
                if parameter.requires_grad and id(parameter) not in known:
                    known.add(id(parameter))
                    self.inputs[name] = parameter
        closed_over = [item for item in reach.reached() if item.requires_grad and id(item) not in known]
        self.inputs |= {f"closed-over tensor {index}": item for index, item in enumerate(closed_over)}

    def run(self, model: Callable[..., Any], change: Change = nullcontext) -> _Outcome:
        """Run forward and backward from the state that the call was made in, and go back to it."""
        run = _Outcome()
        with self.held(), observed_by(run), change(model) as subject:
            self._run(subject, run)
        return run

    @contextmanager
    def held(self) -> Iterator[None]:
        """Begin in the state that the call was made in, and go back to it: modules and random numbers."""
        with ExitStack() as stack:
            for source in self.sources:
                stack.callback(source.write, source.read())
            stack.enter_context(torch.enable_grad())
            if self._state is not None:
                stack.enter_context(self._guard.rewound(self._state))
            yield

    def _run(self, model: Callable[..., Any], run: _Outcome) -> None:
        ledger = Ledger(self.inputs.values())

        def count(tensor: Tensor) -> Tensor:
            run.kept_bytes += ledger.enter(tensor)
            return tensor

        with saved_tensors_hooks(count, lambda tensor: tensor):
            output = model(*self.args, **self.kwargs)
        outputs = leaves_of("output", output)
        roots = [leaf for leaf in outputs.values() if leaf.requires_grad]
        if not roots or not self.inputs:
            raise UsageError("Nothing that the model returns requires a gradient, so there is nothing to verify.")
        inputs = list(self.inputs.values())
        gradients = torch.autograd.grad(roots, inputs, cotangents(roots), allow_unused=True)
        for name, leaf in outputs.items():
            run.results[name] = leaf.detach().clone()
        for name, gradient in zip(self.inputs, gradients):
            run.results[f"gradient of {name}"] = gradient
        for number, module in enumerate(self.modules):
            for name, buffer in module.named_buffers(recurse=False):
                run.results[f"buffer {name} of {type(module).__name__} {number}"] = buffer.clone()
        for source in self.sources:
            run.results[f"random state of {source.name}"] = source.read()


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
    items = value.items() if isinstance(value, Mapping) else enumerate(_parts_of(value))
    return ((f"[{key!r}]", item) for key, item in items)


def _parts_of(value: Any) -> Iterable[Any]:
    return value if isinstance(value, (list, tuple)) else flatten(value)[0]


def _leaves_requiring_grad(name: str, value: Any) -> dict[str, Tensor]:
    return {path: leaf for path, leaf in leaves_of(name, value).items() if leaf.requires_grad}


def cotangents(roots: list[Tensor]) -> list[Tensor]:
    """A gradient for each output that has no symmetry: the sum of a softmax, say, would have gradient zero."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(root.shape, generator=generator, dtype=torch.float32).to(device=root.device, dtype=root.dtype)
        for root in roots
    ]


def _first_difference(one: _Outcome, other: _Outcome) -> str | None:
    for name, first in one.results.items():
        if name not in other.results:
            return f"{name} is missing"
        second = other.results[name]
        if (first is None) != (second is None):
            return f"{name} is {'extra' if first is None else 'missing'}"
        if first is not None and not _is_same(first, second):
            return f"{name} is different{_by_how_much(first, second)}"
    extra = [name for name in other.results if name not in one.results]
    return f"{extra[0]} is extra" if extra else None


def _is_same(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor):
        return repr(one) == repr(other)  # a random state: nested tuples, dicts and arrays
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    # Of a NaN too the bits count; where there is no memory to look at, what `torch.equal` says.
    if one.layout != other.layout:
        return False
    if one.layout is not torch.strided:
        one, other = one.to_dense(), other.to_dense()
    if type(one) is not Tensor:
        return torch.equal(one, other)
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _by_how_much(one: Any, other: Any) -> str:
    if not isinstance(one, Tensor) or not one.is_floating_point() or one.shape != other.shape:
        return ""
    return f", by up to {(one.double() - other.double()).abs().max().item():.3g}"


def _verdict(plain: _Outcome, ours: _Outcome, difference: str | None, *, is_deterministic: bool) -> Verdict:
    return Verdict(
        is_same=difference is None,
        difference=difference,
        is_deterministic=is_deterministic,
        compared=len(plain.results),
        regions=ours.regions,
        recomputations=ours.recomputations,
        plain_bytes=plain.kept_bytes,
        kept_bytes=ours.kept_bytes,
    )
