"""The ops of a forward pass as a graph, and the exact optimum of keeping and recomputing their results.

A node is the memory of a tensor as an op left it: views are the tensor that they show, and a write makes another node. Some
nodes are read by the backward. Each of these is kept, or its op is recomputed, for which the op's inputs are needed in turn.
`frontier` finds every choice that no other beats in bytes and seconds: from the last op to the first, over the sets of nodes
that are still needed, of each set the choices that are not dominated. So it is exact, and quick where few nodes are needed at
a time, as in models of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from reactivate.planner.trace.records import Costs

Node = tuple[int, int]  # a memory, and how often it was written to


class Choice(NamedTuple):
    """The bytes that are kept, and the seconds of what is recomputed."""

    held_bytes: int
    seconds: float


@dataclass(frozen=True)
class OpNode:
    """An op.

    Attributes:
        seconds: what it takes.
        inputs, outputs: the nodes that it reads and makes; those that are there anyway are left out.
    """

    seconds: float
    inputs: frozenset[Node]
    outputs: frozenset[Node]


@dataclass
class Graph:
    """A forward pass.

    Attributes:
        ops: in order.
        sizes: what it takes to keep a node: masks, and other tensors of zero and one number, as bits.
        needed: by the backward.
    """

    ops: list[OpNode] = field(default_factory=list)
    sizes: dict[Node, int] = field(default_factory=dict)
    needed: frozenset[Node] = frozenset()


def graph_of(forward: Callable[[Tensor], Tensor], x: Tensor, known: Iterable[Tensor], costs: Costs) -> Graph:
    """Run a forward pass and return its graph. What it is given and what it returns is there anyway.

    Args:
        forward: the forward pass.
        x: what it is given.
        known: parameters and buffers.
        costs: what ops cost.
    """
    recorder = _Recorder([x, *known], costs)
    with saved_tensors_hooks(recorder.pack, lambda tensor: tensor), recorder:
        result = forward(x)
    return recorder.graph(result)


class _Recorder(TorchDispatchMode):
    def __init__(self, known: Iterable[Tensor], costs: Costs) -> None:
        super().__init__()
        self._costs = costs
        self._alive = list(known)  # so that no address is used again
        self._free = {_memory_of(tensor) for tensor in self._alive}
        self._versions: dict[int, int] = {}
        self._tensors: dict[Node, Tensor] = {}
        self._ops: list[OpNode] = []
        self._needed: set[Node] = set()

    def pack(self, tensor: Tensor) -> Tensor:
        self._needed.add(self._node_of(tensor))
        self._alive.append(tensor)
        return tensor

    def _node_of(self, tensor: Tensor) -> Node:
        memory = _memory_of(tensor)
        return memory, self._versions.get(memory, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        inputs = frozenset(map(self._node_of, given))
        result = func(*args, **kwargs)
        self._alive += given
        for position, argument in enumerate(func._schema.arguments):
            written = args[position] if position < len(args) else kwargs.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(written, Tensor):
                memory = _memory_of(written)
                self._versions[memory] = self._versions.get(memory, 0) + 1
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self._alive += made
        outputs = {self._node_of(leaf): leaf for leaf in made}
        outputs = {node: leaf for node, leaf in outputs.items() if node not in inputs}  # else a view
        self._tensors |= outputs
        if outputs:
            seconds = self._costs.of(func, args, kwargs, result).seconds
            self._ops.append(OpNode(seconds, self._counted(inputs), self._counted(outputs)))
        return result

    def _counted(self, nodes: Iterable[Node]) -> frozenset[Node]:
        return frozenset(node for node in nodes if node[0] not in self._free)

    def graph(self, result: Tensor) -> Graph:
        """Return what was recorded."""
        self._free.add(_memory_of(result))
        ops = [OpNode(op.seconds, self._counted(op.inputs), self._counted(op.outputs)) for op in self._ops]
        sizes = {node: _kept_bytes(tensor) for node, tensor in self._tensors.items()}
        return Graph(ops, sizes, self._counted(self._needed))


def _memory_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _kept_bytes(tensor: Tensor) -> int:
    """Return what it takes to keep a tensor, as bits where it has two values of which one is zero."""
    size = int(tensor.untyped_storage().nbytes())
    values = tensor.detach().flatten()[:4096].unique()
    is_mask = tensor.numel() > 64 and len(values) == 2 and 0 in values
    return -(-tensor.numel() // 8) if is_mask else size


def frontier(graph: Graph) -> list[Choice]:
    """Return the choices that no other beats, the smallest first. Exact."""
    states: dict[frozenset[Node], list[Choice]] = {graph.needed: [Choice(0, 0.0)]}
    for op in reversed(graph.ops):
        following: dict[frozenset[Node], list[Choice]] = {}
        for needed, choices in states.items():
            wanted = needed & op.outputs
            if not wanted:
                following.setdefault(needed, []).extend(choices)
                continue
            size = sum(graph.sizes[node] for node in wanted)
            kept = [Choice(choice.held_bytes + size, choice.seconds) for choice in choices]
            made = [Choice(choice.held_bytes, choice.seconds + op.seconds) for choice in choices]
            following.setdefault(needed - wanted, []).extend(kept)
            following.setdefault((needed - wanted) | op.inputs, []).extend(made)
        states = {needed: undominated(choices) for needed, choices in following.items()}
    (choices,) = [undominated(found) for needed, found in states.items() if not needed]
    return choices


def undominated(choices: Iterable[Choice]) -> list[Choice]:
    """Return the choices that no other beats, the smallest first."""
    found: list[Choice] = []
    for choice in sorted(choices):
        if not found or choice.seconds < found[-1].seconds:
            found.append(choice)
    return found


def together(menus: Sequence[Sequence[Choice]]) -> list[Choice]:
    """Return the choices of one entry for each block that no other beats, the smallest first."""
    found = [Choice(0, 0.0)]
    for menu in menus:
        found = undominated(
            Choice(one.held_bytes + two.held_bytes, one.seconds + two.seconds) for one in found for two in menu
        )
    return found


def least_seconds(choices: Sequence[Choice], budget_bytes: float) -> float:
    """Return the time of the fastest choice within a budget; infinite if there is none."""
    return min((choice.seconds for choice in choices if choice.held_bytes <= budget_bytes), default=float("inf"))
