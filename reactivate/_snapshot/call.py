"""The call of a region: its function, its arguments as they are kept until a recomputation, and all that they reach."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import Context, copy_context
from types import CellType, CodeType, FunctionType, GeneratorType, MethodType
from typing import Any

from torch import Tensor
from torch.nn import Module

from reactivate._snapshot.contexts import ContextContainers
from reactivate._snapshot.facts import facts_of_code
from reactivate._snapshot.held import ATOMS, original_of, restored
from reactivate._snapshot.holders import AttributesHolder, CellHolder, Contents, put_cell
from reactivate._snapshot.inputs import GeneratorInput, IteratorInput, SavedInput, TupleInput, rebuild
from reactivate._snapshot.iterators import holds_iterator, is_iterator
from reactivate._snapshot.module_access import sees_all
from reactivate._snapshot.shadows import is_state
from reactivate._snapshot.trees import Tree, large_roots, tree_under, unseen_writers
from reactivate._snapshot.walk import DEPTH, DEPTH_OF_ARGUMENTS, Walk
from reactivate._torch.autograd import has_graph, innermost_pack_hook, is_of_a_region, is_of_checkpointing, save_tensor

Store = Callable[[Tensor, str], Any]
"""Hands a tensor that an op has computed, at a place, to the storage for inputs; None if the tensor stays where it is."""


class CellTensorHolder(CellHolder):
    """A closed-over tensor with a gradient, kept as autograd keeps an input.

    Attributes:
        spec: how it is kept.
    """

    __slots__ = ("_tensor", "spec")

    def __init__(self, target: CellType, spec: Any) -> None:
        super().__init__(target)
        self.spec = spec
        self._tensor: Tensor | None = None

    def record(self) -> Contents:
        return (self.spec,)

    def prepare(self, memo: dict[int, Any]) -> None:
        """Get the tensor, as long as everything is as it is: a region around this one may have to be recomputed."""
        self._tensor = rebuild(self.spec, memo)

    def is_at(self, contents: Contents) -> bool:
        return super().is_at((self._tensor,) if contents[0] is self.spec else contents)

    def put(self, contents: Contents) -> None:
        put_cell(self.target, self._tensor if contents[0] is self.spec else restored(contents[0]))

    def let_go(self) -> None:
        """Forget the tensor of one recomputation."""
        self._tensor = None


class Call(Walk):
    """One call of a function, and the walk over what it reaches.

    Args:
        fn, args, kwargs: the call.
        store: hands inputs to a storage; None if they stay where they are.
        for_region: whether the call is that of a region, which notes its context variables, and the modules of large trees as
            they are reached.

    Attributes:
        fn: the function.
        args, kwargs: the specs of its arguments; see `inputs`.
        given: the tensors that autograd keeps, or a storage: first those among the arguments.
        specs, versions: theirs.
        cells: what holds the closed-over tensors among these.
        is_hooked: whether there are saved-tensor hooks around the region.
        context: the context variables, with nothing in the place of containers of which copies are made.
        closed_code: the code of a function that reads nothing but its arguments: all that there is to note of it.
        is_large: whether there are so many modules that they are noted as they are reached.
        tree: the modules; None if there are none, or too many.
    """

    context: Context
    tree: Tree | None = None
    cells: tuple[CellTensorHolder, ...] = ()
    is_large = False
    closed_code: CodeType | None = None
    _may_write: bool | None = None

    def __init__(
        self,
        fn: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        store: Store | None = None,
        for_region: bool = False,
    ) -> None:
        super().__init__()
        self.fn = fn
        self.given: list[Tensor] = []
        self.specs: list[Any] = []
        self.versions: list[int] = []
        pack = innermost_pack_hook()
        self.is_hooked = pack is not None
        self._is_users_hook = self.is_hooked and not (is_of_checkpointing(pack) or is_of_a_region(pack))
        self._store = None if store is None or is_of_checkpointing(pack) else store
        if type(fn) is FunctionType:  # as mostly, and modules
            facts = facts_of_code.get(id(fn.__code__))
            # A closed function without defaults and attributes: mostly a lambda, or one at module level.
            if (
                facts is not None
                and facts.is_closed
                and facts.namespace is fn.__globals__
                and not (fn.__defaults__ or fn.__kwdefaults__ or fn.__dict__)
            ):
                self.code.functions = (facts,)
                self.closed_code = facts.code
            else:
                self.function(fn, "the function", DEPTH)
        elif isinstance(fn, Module):
            self.roots = (fn,)
            self.seen[id(fn)] = fn
        else:
            self._look_at_callable(fn)
        is_plain = pack is None and self._store is None
        specs = self.seen
        captured: list[Any] = []
        self.args = captured
        for index, item in enumerate(args):
            # As mostly; what `_argument` would do, without its calls.
            if type(item) is Tensor and item.requires_grad and is_plain and id(item) not in specs:
                captured.append(self._keep(item, save_tensor(item, False)))
            else:
                captured.append(item if type(item) in ATOMS else self._argument(item, f"args[{index}]"))
        self.kwargs = (
            {name: self._argument(item, f"kwargs[{name!r}]") for name, item in kwargs.items()} if kwargs else kwargs
        )
        if self._bindings or self.code.classes:
            self.finish()
        containers = None
        if for_region:
            context = self.context = copy_context()
            if context and not ATOMS.issuperset(map(type, context.values())):
                containers = ContextContainers(self, context)
                if self._bindings or self.code.classes:
                    self.finish()
        tensors = self.reached() if self.inputs or self.tensors else self.given
        if any(map(vars, tensors)):
            self.holders.append(AttributesHolder(tensors))
            self.look_at_attributes(tensors)
        if self.roots:
            if for_region and large_roots and sees_all():
                self.is_large = any(map(large_roots.has, self.roots))
            if not self.is_large:
                tree = self.tree = tree_under(self.roots)
                if tree.kept is None:
                    self.generators += tree.generators
                    self.scripts += tree.scripts
                    self.is_lazy = tree.is_lazy
        if containers is not None and containers.holders:
            modules = () if self.tree is None else self.tree.targets
            containers.settle(self.context, modules, is_large=self.is_large)

    def _look_at_callable(self, fn: Any) -> None:
        if type(fn) is MethodType and isinstance(fn.__self__, Module) and type(fn.__func__) is FunctionType:
            self.roots = (fn.__self__,)
            self.seen[id(fn.__self__)] = fn.__self__
            self.function(fn.__func__, "the function", DEPTH)
        else:
            self.look(fn, "the function", DEPTH)

    def arguments(self) -> list[Tensor]:
        """Return the tensors that the function is called with, or finds in what it is called with: first those of `given`."""
        return [*self.given, *(original_of(item.tensor) for item in self.inputs)] if self.inputs else self.given

    @property
    def modules(self) -> Sequence[Module]:
        """Every module that the function can reach, each once; none if there are too many."""
        return () if self.tree is None else self.tree.modules

    def may_write_unseen(self) -> bool:
        """Return whether code that was found may write to tensors without a new version."""
        if self._may_write is None:
            if self.tree is not None:
                self.code.trees += (self.tree.names(),)
            is_writer = self.is_large and any(map(unseen_writers.has, self.roots))
            self._may_write = is_writer or self.code.may_write_unseen()
        return self._may_write

    def reached(self) -> list[Tensor]:
        return [*self.given, *super().reached()]

    def spec_of(self, value: Any) -> Any:
        """Return the spec that a value got in this walk."""
        return self.seen.get(id(value), value)

    # -- arguments ----------------------------------------------------------------------------------------------------

    def _argument(self, value: Any, place: str) -> Any:
        kind: Any = type(value)
        spec: Any
        if kind in ATOMS:
            return value
        key = id(value)
        if key in self.seen:
            return self.seen[key]
        if isinstance(value, Tensor):
            return self._tensor_argument(value, place)
        if isinstance(value, tuple) and self._is_made_anew(value):
            items = [self._argument(item, f"{place}[{index}]") for index, item in enumerate(value)]
            spec = self.seen[key] = TupleInput(kind, items)
            return spec
        if is_iterator(kind):
            is_generator = kind is GeneratorType
            spec = self.seen[key] = GeneratorInput(value, place) if is_generator else IteratorInput(value)
            self.look_at_iterator(value, place, DEPTH_OF_ARGUMENTS)
            return spec
        self.look(value, place, DEPTH_OF_ARGUMENTS)
        return value

    def _is_made_anew(self, value: tuple[Any, ...]) -> bool:
        """Return whether a recomputation needs another tuple: around copied iterators, or tensors that hooks move."""
        is_moved = self.is_hooked or self._store is not None
        return holds_iterator(value) or (is_moved and any(isinstance(item, Tensor) for item in value))

    def _tensor_argument(self, tensor: Tensor, place: str) -> Any:
        spec: Any = tensor
        if (self.is_hooked or tensor.requires_grad) and not is_state(tensor):
            spec = self._stored(tensor, place)
            if spec is None:
                spec = self._saved(tensor) if self.is_hooked else save_tensor(tensor, False)
        if spec is not tensor:
            return self._keep(tensor, spec)
        self.seen[id(tensor)] = tensor
        self.tensor(tensor, place)
        return tensor

    def _keep(self, tensor: Tensor, spec: Any) -> Any:
        """Note the spec of a tensor, and return it."""
        self.seen[id(tensor)] = spec
        self.given.append(tensor)
        self.specs.append(spec)
        self.versions.append(tensor._version)
        return spec

    def _saved(self, tensor: Tensor) -> SavedInput:
        return SavedInput(tensor, is_users=self._is_users_hook)

    def _stored(self, tensor: Tensor, place: str) -> Any:
        return None if self._store is None or not has_graph(tensor) else self._store(tensor, place)

    def cell_tensor(self, cell: CellType, tensor: Tensor, place: str) -> None:
        if not tensor.requires_grad or is_state(tensor):
            super().cell_tensor(cell, tensor, place)
            return
        spec = self.seen.get(id(tensor))
        if spec is None:
            spec = self._keep(tensor, self._stored(tensor, place) or self._saved(tensor))
        holder = CellTensorHolder(cell, spec)
        self.holders.append(holder)
        self.cells += (holder,)
