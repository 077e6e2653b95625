"""A training step: forward, loss, backward; for real or on fake tensors, and afterwards as if it had not been."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim.optimizer import register_optimizer_step_pre_hook

from reactivate._inspect.fake import faked
from reactivate._inspect.known_results import KnownCalls
from reactivate._inspect.step import Step, leaves_of
from reactivate._model.cache_watch import Caller, called
from reactivate._text.words import described
from reactivate._torch.modules import DistributedLayout, laid_out, layout_of, padded_sizes, prepare_sharding
from reactivate._torch.ops import flatten, unflatten
from reactivate.errors import UsageError

Loss = Callable[[Any], Tensor]
MakeGradient = Callable[[Tensor], Tensor]
Running = tuple[Callable[[], None], list[Tensor]]
BLOCKS = "blocks"
"""What `compiled=` says of a model each of whose blocks is compiled."""
UNLABELLED = "the sum of the model's output, whose .loss is None"


class StepFacts(NamedTuple):
    """The facts of a step that a plan tells.

    Attributes:
        loss: what the backward begins from, in words.
        trains: whether the model is in training mode.
    """

    loss: str
    trains: bool


class Beginning:
    """The random numbers that the first run of a step began with, and the modes of its modules: so do all others.

    What random numbers decide, which layers run say, is the same in all steps that are compared: in those of a plan for
    another budget, too, which may be made later.
    """

    def __init__(self) -> None:
        self._streams: list[tuple[Any, Any]] | None = None
        self._modes: list[tuple[Module, bool]] = []

    @contextmanager
    def of(self, states: Sequence[Step]) -> Iterator[None]:
        """Begin a run with them; the first one defines them. Running the step puts modes back afterwards.

        Args:
            states: of the model, and of what else runs in the step.
        """
        if self._streams is None:
            self._streams = [(source, source.read()) for state in states for source in state.sources]
            self._modes = [(module, module.training) for state in states for module in state.modules]
        with ExitStack() as stack:
            for source, value in self._streams:
                stack.callback(source.write, source.read())
                source.write(value)
            for module, mode in self._modes:
                module.training = mode
            yield


class GradientLayouts:
    """Layouts of the gradients of DTensors: as a backward makes them, which is not always as the parameters lie.

    The gradient of an embedding that is split over the ranks may be whole on each of them, and stays so while others are
    added to it.
    """

    def __init__(self) -> None:
        # By the numbers of the parameters that lie in another way.
        self._others: dict[int, DistributedLayout] | None = None

    def are_known(self, leaves: Sequence[Tensor]) -> bool:
        """Return whether nothing is to be found out about the gradients of these."""
        if self._others is None and all(layout_of(leaf) is None for leaf in leaves):
            self._others = {}
        return self._others is not None

    def note(self, leaves: Sequence[Tensor]) -> None:
        """Take note of the gradients that a backward has made."""
        pairs = [(layout_of(leaf), layout_of(leaf.grad)) for leaf in leaves]
        self._others = {at: its for at, (own, its) in enumerate(pairs) if its is not None and its != own}

    def made(self, leaves: Sequence[Tensor], make: MakeGradient | None) -> Sequence[Tensor | None]:
        """Return gradients that lie so.

        Args:
            make: from a tensor to one like it; None for no gradients.
        """
        if make is None:
            return [None] * len(leaves)
        others = self._others or {}
        return [laid_out(leaf, others[at], make) if at in others else make(leaf) for at, leaf in enumerate(leaves)]

    def count_bytes(self, leaves: Sequence[Tensor], padded: Mapping[int, int]) -> int:
        """Return the bytes that this rank has of the gradients.

        Args:
            padded: the elements of those parameters that `fully_shard` fills up, by their ids.
        """
        others = self._others or {}
        parts = [others.get(at, layout_of(leaf)) for at, leaf in enumerate(leaves)]
        counts = [leaf.numel() if part is None else part.shape.numel() for leaf, part in zip(leaves, parts)]
        return sum(padded.get(id(leaf), count) * leaf.itemsize for leaf, count in zip(leaves, counts))


@dataclass(frozen=True)
class TrainingStep:
    """A training step: a model, its arguments, and the loss made of its result.

    Args:
        loss: from what the model returns to a scalar; None: see `default_loss`.
        whole: forward and backward in the place of all that; None: model, loss and backward.
        caller: warns once for all runs of the step.
        compiled: whether the model runs under `torch.compile`, as a whole (or under which backend), or each of its blocks.
        known: what is known of calls of ops, from its simulated runs.
        beginning: what each run of the step begins with.
        layouts: how its gradients lie on the ranks.
    """

    model: Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    loss: Loss | None = None
    whole: Callable[[], object] | None = None
    caller: Caller = field(default_factory=lambda: Caller("plan"), compare=False, repr=False)
    compiled: bool | str = False
    known: KnownCalls = field(default_factory=dict, compare=False, repr=False)
    beginning: Beginning = field(default_factory=Beginning, compare=False, repr=False)
    layouts: GradientLayouts = field(default_factory=GradientLayouts, compare=False, repr=False)

    def run_for_real(self, times: int = 1, watch: Callable[[Callable[[], None]], None] | None = None) -> None:
        """Run it, with gradients that are there already; then model, gradients and generators are as they were.

        Args:
            watch: called in place of the step, with the step.
        """
        with self._on(None, torch.zeros_like) as (run, _):
            for _ in range(times):
                run() if watch is None else watch(run)

    @contextmanager
    def observed(self, tell: Callable[[StepFacts], None]) -> Iterator[None]:
        """Tell what there is to say of the step: now, and when it calls the model.

        Args:
            tell: called with that. What it writes must be out of reach of the model, whose state is put back.
        """
        given = "step()" if self.whole is not None else "loss(output)" if self.loss is not None else ""
        tell(StepFacts(given, self.model.training))

        def look(model: Module, args: Any, output: Any) -> None:
            if torch.is_grad_enabled():
                tell(StepFacts(given or default_loss(output)[0], model.training))

        with self.model.register_forward_hook(look):
            yield

    def check_ran(self, has_called: bool, has_gone_back: bool) -> None:
        """See to it that the user's own step is one of this model.

        Args:
            has_called: whether it has called a block of the model.
            has_gone_back: whether it has run a backward.

        Raises:
            UsageError: it has not.
        """
        if self.whole is None or (has_called and has_gone_back):
            return
        name = type(self.model).__name__
        found = f"called no block of the {name} that was given to plan" if not has_called else "ran no backward"
        raise UsageError(
            f"plan(step=...) takes a function that runs forward and backward of the model; this one {found}. Write "
            f"step=lambda: loss_of(model(batch)).backward(), with the {name} itself and not a copy of it."
        )

    @property
    def gradient_bytes(self) -> int:
        """The bytes of all gradients on this rank."""
        return self.layouts.count_bytes(self._trained(), padded_sizes(self.model.modules()))

    @contextmanager
    def on_tensors(self, device: torch.device | None) -> Iterator[Running]:
        """Yield what runs the step, and the tensors that are there before it.

        Gradients are there already, as another step leaves them; that one runs if it is not known how.

        Args:
            device: of fake tensors; None for the tensors themselves: what the step computes decides what it does.
        """
        padded = padded_sizes(self.model.modules())  # `fully_shard` lays gradients as it does parameters
        if not self.layouts.are_known([leaf for leaf in self._trained() if id(leaf) not in padded]):
            with self._on(device, None) as (run, _):
                run()
                self.layouts.note(self._trained())
        # A model that is compiled as a whole hands over all gradients when its backward ends, beside those that are there.
        is_one_graph = self.compiled and self.compiled != BLOCKS
        make = torch.zeros_like if device is None else torch.empty_like
        with self._on(device, None if is_one_graph else make) as found:
            yield found

    @contextmanager
    def _on(self, device: torch.device | None, make: MakeGradient | None) -> Iterator[Running]:
        args, kwargs = self.args, dict(self.kwargs or {})
        with ExitStack() as stack:
            step = stack.enter_context(self._put_back(args, kwargs))
            args, kwargs = step.given()
            if device is not None:
                args, kwargs = stack.enter_context(faked(self.model, args, kwargs, device, self.known, step.reach))
                prepare_sharding(self.model.modules())  # which fills up uneven parts: not in the step
            stack.enter_context(_with_gradients(self._trained(), self.layouts.made(self._trained(), make)))
            known = [*_state_of(self.model), *leaves_of("args", (args, kwargs)).values()]
            yield lambda: self._run(args, kwargs), known

    @contextmanager
    def _put_back(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Step]:
        """Put back what the step changes when it is over; yield the call of the model."""
        states = [Step(self.model, args, kwargs)]
        users = self.loss if self.whole is None else self.whole
        if users is not None:  # it may count its calls, and have modules of its own
            states.append(Step(users, (), {}))
        own = set(map(id, self.model.parameters()))
        leaves = [item for state in states for item in state.inputs.values() if item.is_leaf and id(item) not in own]
        with ExitStack() as stack:
            for state in states:
                stack.enter_context(state.held())
            stack.enter_context(self.beginning.of(states))
            stack.enter_context(_with_gradients(leaves, [None] * len(leaves)))
            stack.enter_context(_refusing_optimizers(is_users=self.whole is not None))
            stack.enter_context(called(self.caller))
            yield states[0]

    def _trained(self) -> list[Tensor]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.whole is not None:
            self.whole()
            return
        self._check_trained(args, kwargs)
        args, kwargs = self._cut_off(args, kwargs)
        output = self.model(*args, **kwargs)  # alive during the backward, as in most training loops
        loss = default_loss(output)[1]() if self.loss is None else self.loss(output)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise UsageError(
                f"plan(loss=...) takes a function whose result is a scalar to go back from; got {described(loss)}."
            )
        if not loss.requires_grad:
            raise UsageError(
                "plan: the loss requires no gradient, so there is no backward to plan: the model or loss= detaches it, or "
                "computes it under torch.no_grad()."
            )
        loss.backward()

    def _cut_off(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments as leaves: the graph of what they were computed from is not the model's, and runs once."""
        leaves, structure = flatten((args, kwargs))
        own = set(map(id, self.model.parameters()))
        cut = [
            leaf.detach().requires_grad_()
            if isinstance(leaf, Tensor) and leaf.requires_grad and id(leaf) not in own
            else leaf
            for leaf in leaves
        ]
        return unflatten(cut, structure)  # type: ignore[no-any-return]

    def _check_trained(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves = [*leaves_of("args", args).values(), *leaves_of("kwargs", kwargs).values()]
        if not any(item.requires_grad for item in (*self.model.parameters(), *leaves)):
            raise UsageError(
                f"plan: all parameters of the {type(self.model).__name__} are frozen (requires_grad is False), so a step has "
                "no backward and keeps nothing for it. Write model.requires_grad_(), or unfreeze what is to be trained."
            )


def default_loss(output: Any) -> tuple[str, Callable[[], Tensor]]:
    """Return the name of the loss and what makes it: the output if it is a scalar, its `.loss`, else its sum."""
    loss = loss_in(output)
    if loss is None:
        return UNLABELLED if hasattr(output, "loss") else "the sum of the model's output", lambda: _sum_of(output)
    return "the model's output" if loss is output else "the output's .loss", lambda: loss


def loss_in(output: Any) -> Tensor | None:
    """Return the output if it is a scalar, or its `.loss`; None if it has neither."""
    if isinstance(output, Tensor) and output.numel() == 1:
        return output
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return loss if isinstance(loss, Tensor) else None


def _sum_of(output: Any) -> Tensor:
    parts = [leaf.sum() for leaf in leaves_of("output", output).values() if leaf.requires_grad]
    if not parts:
        raise UsageError("Nothing that the model returns requires a gradient, so there is nothing to plan.")
    return torch.stack(parts).sum() if len(parts) > 1 else parts[0]


@contextmanager
def _with_gradients(leaves: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Iterator[None]:
    """Give every leaf its gradient, as in the middle of training, or none; afterwards the one that it had."""
    before = [leaf.grad for leaf in leaves]
    try:
        for leaf, gradient in zip(leaves, gradients):
            leaf.grad = gradient
        yield
    finally:
        for leaf, gradient in zip(leaves, before):
            leaf.grad = gradient


def _state_of(model: Module) -> Iterable[Tensor]:
    for parameter in model.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    yield from model.buffers()


@contextmanager
def _refusing_optimizers(*, is_users: bool) -> Iterator[None]:
    def refuse(optimizer: Any, args: Any, kwargs: Any) -> None:
        call = f"{type(optimizer).__name__}.step(), which would change the model"
        if is_users:
            raise UsageError(
                f"plan(step=...) takes a function that runs forward and backward; it called {call}. Leave that out, and pass "
                "plan(optimizer=...) for its memory. If hooks of the backward call it, plan before you register them."
            )
        raise UsageError(
            f"plan runs a forward and a backward; a hook of the model or a parameter called {call}. Plan and measure before "
            "you register such hooks. The plan then counts all gradients at once: no less than such a step keeps."
        )

    with register_optimizer_step_pre_hook(refuse):
        yield
