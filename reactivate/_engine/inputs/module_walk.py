"""The modules among what is reached: their attributes, their hooks, and what the methods of their classes read."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Module

from reactivate._backends import fences
from reactivate._engine.inputs.function_walk import FunctionWalk
from reactivate._engine.inputs.namespaces import (
    ClassFacts,
    facts_of_class,
)
from reactivate._engine.inputs.unseen_writers import ReachedCode
from reactivate._engine.inputs.walk import DEPTH, DEPTH_OF_ARGUMENTS
from reactivate._engine.state.contents import (
    ATOMS,
    ListNote,
    Note,
)
from reactivate._engine.state.functions import (
    NameNote,
)
from reactivate._engine.state.iterators import holds_iterator
from reactivate._engine.state.known import Known
from reactivate._engine.state.parts import Parts
from reactivate._engine.state.reaching import tree_of
from reactivate._engine.state.trees import single_modules, whole_trees
from reactivate._modules.standin import Cover
from reactivate._torch.flags import ask
from reactivate._torch.modules import GLOBAL_FORWARD_HOOKS


class Found(NamedTuple):
    """The notes of one module of a large tree.

    Attributes:
        module: the module.
        notes, tensors, generators: what its attributes lead to.
        parts: what it is made of, if that has been looked at.
    """

    module: Module
    notes: Sequence[Note]
    tensors: Sequence[Tensor] = ()
    generators: Sequence[Any] = ()
    parts: Parts | None = None


class ModuleWalk(FunctionWalk):
    """A walk that looks into modules.

    Attributes:
        modules: every module under the roots, each once; the walk finds what their attributes and classes name, too.
        parts: what `modules` are made of, if that has been looked at.
        is_lazy: whether a module has parameters that its first call makes.
    """

    modules: Sequence[Module] = ()
    parts: Parts | None = None
    is_lazy = False

    def __init__(self) -> None:
        super().__init__()
        self._reached: dict[int, Module] = {}

    def _found(self) -> Sequence[Module]:
        walked = whole_trees.again(self.roots[0]) if len(self.roots) == 1 else None
        if walked is not None:
            self.module_notes, self.parts = walked.notes, walked.parts
            self.code.add_tree(walked.names)
            return walked.modules
        roots = self.roots
        modules, code = self._walk()
        if len(roots) == 1 and self.roots is roots and not self._has_found_more(modules):
            whole_trees.remember(roots[0], modules, self.module_notes, code.names)
        return modules

    def _has_found_more(self, modules: Iterable[Module]) -> bool:
        """Return whether there is more to say of these modules than their parts and notes do."""
        if self.scripts or self.generators or self.module_tensors or self.is_lazy:
            return True
        return any(hasattr(type(module), "recompute_state") for module in modules)

    def _walk(self) -> tuple[list[Module], ReachedCode]:
        """Return the modules under the roots, and the code that they lead to."""
        found: dict[Module, None] = {}
        todo: list[Module | None] = []
        scripted: set[Module] = set()  # those inside of them are a part of their code
        count = 0
        outside = self.notes, self.tensors, self._specs, self.code
        self.notes, self.tensors, self._specs, code = self.module_notes, self.module_tensors, {}, ReachedCode()
        self.code = code
        for hooks in filter(None, GLOBAL_FORWARD_HOOKS):
            self._look_at_hooks(hooks)
        while todo or count < len(self.roots):
            if not todo:  # there may be more roots than in the beginning: a class may name some
                todo.append(self.roots[count])
                count += 1
            module = todo.pop()
            if module is not None and module not in found:
                found[module] = None
                children = module._modules
                if children:
                    todo += reversed(children.values())
                facts = facts_of_class(type(module))
                if module._forward_hooks or module._forward_pre_hooks:
                    self._look_at_hooks(module._forward_pre_hooks)
                    self._look_at_hooks(module._forward_hooks)
                if facts.is_plain and _has_plain_attributes(module, facts):
                    continue
                if facts.is_scripted:
                    if module not in scripted:
                        self.scripts += (module,)
                    scripted.update(module.modules())
                    continue
                self.is_lazy = self.is_lazy or facts.is_lazy
                self._look_at_users_module(module, facts)
        if self._bindings:
            self._code()
        self.notes, self.tensors, self._specs, self.code = outside
        self.code.add(code)
        if len(found) > LARGE_TREE and not (self.scripts or self.is_lazy or fences()):
            for root in filter(_has_children, self.roots):
                _large_roots.note(root)
                if code.may_write_unseen():
                    _unseen_writers.note(root)
        return list(found), code

    def _look_at_hooks(self, hooks: dict[int, Any]) -> None:
        """Note what functions and objects of the user's hold that are called before or after a module."""
        for hook in hooks.values():
            self._look(hook, "a hook", DEPTH)

    def reach(self, module: Module) -> list[Found]:
        """Look at one module of a large tree, and at those that its attributes lead to.

        Returns:
            what was found of each that was not reached before.
        """
        reached = []
        todo = [module]
        while todo:
            inner = todo.pop()
            if id(inner) not in self._reached:
                self._reached[id(inner)] = inner
                walked = single_modules.again(inner)
                if walked is not None:
                    reached.append(Found(inner, walked.notes, parts=walked.parts))
                else:
                    found = ModuleWalk()
                    found.look_at(inner)
                    reached.append(Found(inner, found.module_notes, found.module_tensors, found.generators))
                    todo += found.roots
                    if not (found.roots or found._has_found_more((inner,))):
                        single_modules.remember(inner, (inner,), found.module_notes, found.code.names)
                if getattr(inner, "_compiled_call_impl", None) is not None or "_orig_mod" in inner._modules:
                    todo += tree_of(inner)  # compiled code reads what is inside past all functions
        return reached

    def look_at(self, module: Module) -> None:
        """Note the attributes of one module, and nothing of its children."""
        self.modules = (module,)
        facts = facts_of_class(type(module))
        self.notes, self.tensors = self.module_notes, self.module_tensors
        if module._forward_hooks or module._forward_pre_hooks:
            self._look_at_hooks(module._forward_pre_hooks)
            self._look_at_hooks(module._forward_hooks)
        if not ((facts.is_plain and _has_plain_attributes(module, facts)) or facts.is_scripted):
            self._look_at_users_module(module, facts)
        if self._bindings:
            self._code()

    def _look_at_users_module(self, module: Module, facts: Any) -> None:
        if id(facts) not in self._specs:  # another module of its class may have been here
            self._specs[id(facts)] = facts
            self._look_at_code(type(module), facts)
        self._weak = True
        if facts.slots:
            self._slots(module, facts.slots, type(module).__name__, DEPTH)
        attributes = vars(module)
        for name in list(attributes):
            value = attributes[name]
            kind = type(value)
            if kind not in ATOMS and name not in _OF_EVERY_MODULE:
                if isinstance(value, Tensor):
                    self._state_of_module(value)
                elif isinstance(value, Cover) and not value.hides_users:
                    continue
                elif kind is list and not facts.is_users and name in facts.attributes:
                    self.notes.append(ListNote(value))  # of parameters, as an LSTM has one: not to be looked into
                else:
                    if holds_iterator(value):
                        self.notes.append(NameNote(attributes, name))
                    self._look(value, f"{type(module).__name__}.{name}", DEPTH)

    def _look_at_code(self, kind: type, facts: ClassFacts) -> None:
        """Note what the methods of a module's class read."""
        if facts.names:
            self._names(facts.names)
        if facts.bindings is not None:
            self._bindings += (facts.bindings,)
        for fn in filter(None, map(ask, facts.open)):
            if id(fn) not in self._specs:
                self._made_of(fn, f"{kind.__name__}.{fn.__name__}", DEPTH)
        self.scripts += facts.scripts
        if facts.is_users:
            self._class(kind)

    @staticmethod
    def look_into(values: Sequence[Any]) -> tuple[Sequence[Note], Sequence[Tensor]]:
        """Return the notes and the tensors that some objects lead to; tensors by their Python attributes."""
        found = ModuleWalk()
        found.notes, found.tensors = found.module_notes, found.module_tensors
        found._look_at_attributes([value for value in values if isinstance(value, Tensor)])
        for value in values:
            if not isinstance(value, Tensor):
                found._look(value, "an attribute", DEPTH)
        if found._bindings:
            found._code()
        return found.module_notes, found.module_tensors


def left_out(fn: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[str]:
    """Return what a region of `fn` reaches and does not note, with the reasons, for a message."""
    walk = ModuleWalk()
    walk.left_out = []
    walk._look(fn, "the function", DEPTH)
    for index, item in enumerate(args):
        walk._look(item, f"args[{index}]", DEPTH_OF_ARGUMENTS)
    for name, item in kwargs.items():
        walk._look(item, f"kwargs[{name!r}]", DEPTH_OF_ARGUMENTS)
    walk._walk()
    return walk.left_out


LARGE_TREE = 64
"""The number of modules up to which all of them are noted for every region."""

_large_roots = Known()
_unseen_writers = Known()  # those of them with code that may write to tensors without a new version


def is_large(root: Module) -> bool:
    """Return whether a walk has found more than that many modules under `root`."""
    return _large_roots.has(root)


def is_unseen_writer(root: Module) -> bool:
    """Return whether a walk over a large tree has found code that may write to tensors without a new version."""
    return _unseen_writers.has(root)


def _has_children(module: Module) -> bool:
    return bool(module._modules)


_OF_EVERY_MODULE = frozenset(Module().__dict__)
_OF_PLAIN_MODULES = ATOMS | {tuple, dict, OrderedDict, set}  # registries are dicts, and names are in a set
_CONTAINERS = frozenset({dict, OrderedDict, set})


def _has_plain_attributes(module: Module, facts: ClassFacts) -> bool:
    """Return whether a module of torch's has no attributes but those that its class gives it, and no tensor among them."""
    attributes = vars(module)
    if not (attributes.keys() <= facts.attributes and _OF_PLAIN_MODULES.issuperset(map(type, attributes.values()))):
        return False
    own = attributes.keys() - _OF_EVERY_MODULE
    return not own or _CONTAINERS.isdisjoint(
        type(attributes[name]) for name in own
    )  # as a `ParameterDict` has its keys in
