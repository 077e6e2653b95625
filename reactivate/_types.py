"""The vocabulary: sites and the actions on them, storages, guards. No logic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.nn import Module


class Storage(Protocol):
    """A storage: the place where a tensor that is kept for the backward waits. It gives back every bit.

    A storage may have more: `takes_names = True` if its `save` takes the name of the tensor as well, for messages,
    `is_collective = True` if each `load` needs the same `load` on other ranks, so that none may be left out, and
    `is_on_host = True` if it is the memory of the host, where a compiler can keep tensors too.
    """

    def save(self, tensor: Tensor) -> Any:
        """Take `tensor` in: a handle for it."""

    def load(self, handle: Any) -> Tensor:
        """The tensor again, on the device it came from."""


@dataclass(frozen=True)
class Device:
    """Kept tensors stay where they are."""

    def save(self, tensor: Tensor) -> Any:
        return tensor

    def load(self, handle: Any) -> Tensor:
        return handle  # type: ignore[no-any-return]


DEVICE: Storage = Device()


@dataclass(frozen=True)
class Recompute:
    """Drop the activations of a call and run it again in the backward.

    Args:
        inputs: where to keep the tensors that it is called with until then.
    """

    inputs: Storage = DEVICE


@dataclass(frozen=True)
class Save:
    """Keep what a call computed, so that a recomputation need not run it.

    Args:
        storage: where to keep it.
    """

    storage: Storage = DEVICE


@dataclass(frozen=True)
class LossByRows:
    """Compute the cross-entropy of the logits that a module returns by rows, and its log-softmax again in the backward."""


@dataclass(frozen=True)
class CompilerBudget:
    """Let torch's compiler keep, of what a module that it compiles would keep for the backward, no more than a share.

    Args:
        share: from 0, its inputs alone, to 1, all that it would keep: torch's `activation_memory_budget`, of this module.
    """

    share: float


Action = Recompute | Save | LossByRows | CompilerBudget


@dataclass(frozen=True)
class Site:
    """A call in a model.

    A call of a module has `module`; any other has `function`. Each of path, op, name and index selects sites.

    Attributes:
        path: the module that is called, or in which the function is called: its name in `model.named_modules()`, "" for
            the model itself.
        op: what the function is called by users: "linear", "matmul"; for a custom op "library.op"; for a custom
            `torch.autograd.Function` and a function named by `reactivate.site`, its own name. None for a module.
        name: what `reactivate.site` named it, or None.
        index: how many calls of this op (this module, this name) there were before in the region's call.
        module, function: what is called.
        block: the number of the block that the module is, if it is one of the model's blocks (its repeated layers).
        blocks: how many blocks the model has.
        is_copy_to_host: whether the call copies a tensor from a device to the host.
        is_unfused: whether the call is attention that runs as many ops instead of one kernel: with dropout on a CPU.
        counts: for policies that count calls: empty at the start of each call of a region.
    """

    path: str
    op: str | None = None
    name: str | None = None
    index: int = 0
    module: Module | None = field(default=None, repr=False)
    function: Any = field(default=None, repr=False)
    block: int | None = None
    blocks: int = 0
    is_copy_to_host: bool = False
    is_unfused: bool = False
    counts: dict[Any, int] = field(default_factory=dict, repr=False, compare=False)


Policy = Callable[[Site], Action | None]


class Call(Protocol):
    """A call as a guard sees it: the state that one call of a checkpointed function can reach."""

    @property
    def modules(self) -> Sequence[Module]:
        """Every module that the function can reach, each once."""

    @property
    def generators(self) -> Sequence[Any]:
        """Every source of randomness that it can reach: `torch.Generator`, `random.Random`, NumPy's."""


class Unrestored(NamedTuple):
    """A tensor that was modified in place, and of which there is no copy.

    Attributes:
        tensor: the tensor.
        place: its name.
        version: what its version counter was.
    """

    tensor: Any
    place: str
    version: int


class Guard:
    """State that a recomputation must see as the forward pass saw it, and must not advance a second time.

    Subclass it, and give an instance to `checkpoint(fn, guards=guards.DEFAULT.adding(MyGuard()))`. The engine calls
    `before`, runs the forward pass, and calls `after` with what `before` returned. What `after` returns is kept until
    the region's backward is done and is given to `recompute` for each recomputation; None keeps nothing and leaves the
    recomputations alone.

    A recomputation skips calls that a policy saves. One that changes what `before` returns is run again instead, unless
    the guard has a method `position(call)`, as those of random numbers do: it returns a function that brings a
    recomputation to the present state, or None if there is none.

    Examples:
        >>> import contextlib, reactivate
        >>> class Counter(reactivate.guards.Guard):
        ...     name = "counter"
        ...     value = 0
        ...     def before(self, call):
        ...         return self.value
        ...     @contextlib.contextmanager
        ...     def recompute(self, snapshot):
        ...         now, self.value = self.value, snapshot
        ...         try:
        ...             yield
        ...         finally:  # also if the function raises
        ...             self.value = now
    """

    name: str = "guard"
    """What `guards.DEFAULT.without(name)` calls it. Several guards may share a name."""

    replaces_tensors: bool = False
    """Whether the function may meet other tensors in a recomputation than in the forward pass, with versions of their own."""

    is_of_modules: bool = False
    """Whether it stands for the state of modules, which the engine restores itself."""

    is_innermost: bool = False
    """Whether `recompute` is entered when all other state is as it was: what a context of the user's sets then holds."""

    def __repr__(self) -> str:
        return f"<guard {type(self).__name__}>"

    def before(self, call: Call) -> Any:
        """Read the state as the forward pass is about to see it.

        None says that there is none, and nothing else is asked: where None is a value of the state, return a tuple of it.
        """
        return None

    def after(self, token: Any) -> Any | None:
        """Return what a recomputation needs to see that state again. May be called twice for one `before`.

        None says that no recomputation will see another state: right only where nothing but the region itself changes it.
        """
        return token

    def recompute(self, snapshot: Any) -> AbstractContextManager[Any] | None:
        """A context with the state as it was; afterwards the state is as if the recomputation had not happened.

        None where nothing has changed and nothing will: that saves entering a context.
        """
        raise NotImplementedError

    def leave(self, token: Any, error: BaseException | None) -> None:
        """The forward pass is over, by `error` if that is not None. For guards that opened something in `before`."""
