"""The walk over modules: their attributes, their hooks, and what the methods of their classes read."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import Module

from reactivate._modules.standin import cover_in
from reactivate._snapshot.facts import ClassFacts, facts_of_class
from reactivate._snapshot.held import ATOMS
from reactivate._snapshot.holders import ListHolder, NameHolder
from reactivate._snapshot.iterators import holds_iterator
from reactivate._snapshot.kinds import behind_proxy
from reactivate._snapshot.walk import DEPTH, DEPTH_OF_ARGUMENTS, Walk
from reactivate._torch.autograd import has_graph
from reactivate._torch.flags import ask
from reactivate._torch.modules import GLOBAL_FORWARD_HOOKS

_OF_EVERY_MODULE = frozenset(Module().__dict__)
_OF_PLAIN_MODULES = ATOMS | {tuple, dict, OrderedDict, set}  # registries are dicts, and names are in a set
_CONTAINERS = frozenset({dict, OrderedDict, set})


class ModuleWalk(Walk):
    """A walk over modules: their attributes, their hooks, and what the methods of their classes read.

    Attributes:
        modules: the modules, each once, outermost first, but for wrappers of a library that shards what is inside of them.
        has_wrappers: whether there are any of these.
    """

    is_of_modules = True
    has_wrappers = False

    def __init__(self) -> None:
        super().__init__()
        self.modules: list[Module] = []
        self._scripted: set[int] = set()  # ids: those inside of scripted modules are a part of their code

    def over(self, roots: Sequence[Module]) -> ModuleWalk:
        """Look at every module under `roots`, and under those that their attributes and classes name."""
        self.roots = tuple(roots)
        for hooks in filter(None, GLOBAL_FORWARD_HOOKS):
            self._look_at_hooks(hooks)
        found: set[int] = set()  # ids, since a module may have no hash
        count = 0
        while count < len(self.roots):  # attributes lead to more roots, and so does code, at the end
            self._modules_under(self.roots[count], found)
            count += 1
            if count == len(self.roots):
                self.finish()
        return self

    def _modules_under(self, root: Module, found: set[int]) -> None:
        todo: list[Module | None] = [root]
        while todo:
            module = behind_proxy(todo.pop())
            if module is not None and id(module) not in found:
                found.add(id(module))
                if module._modules:
                    todo += reversed(module._modules.values())
                self._module_itself(module)

    def at(self, module: Module) -> ModuleWalk:
        """Look at one module, and at nothing of its children."""
        self._module_itself(module)
        self.finish()
        return self

    def tensor(self, tensor: Tensor, place: str) -> None:
        if has_graph(tensor):
            self.is_settled = False  # it may lose that
        else:
            self.tensors.append(tensor)

    def _look_at_hooks(self, hooks: dict[int, Any]) -> None:
        """Note what functions and objects of the user's hold that are called before or after a module."""
        for hook in hooks.values():
            self.look(hook, "a hook", DEPTH)

    def _module_itself(self, module: Module) -> None:
        facts = facts_of_class(type(module))
        if module._forward_hooks or module._forward_pre_hooks:
            self._look_at_hooks(module._forward_pre_hooks)
            self._look_at_hooks(module._forward_hooks)
        if facts.is_wrapper:
            self.has_wrappers = True
            return
        self.modules.append(module)
        if facts.is_plain and _has_plain_attributes(module, facts):
            return
        if facts.is_scripted:
            if id(module) not in self._scripted:
                self.scripts += (module,)
            self._scripted.update(map(id, module.modules()))
            return
        self.is_lazy = self.is_lazy or facts.is_lazy
        self._users_module(module, facts)

    def _users_module(self, module: Module, facts: ClassFacts) -> None:
        if id(facts) not in self.seen:  # another module of its class may have been here
            self.seen[id(facts)] = facts
            self._code_of_class(type(module), facts)
        if facts.slots:
            self._slots(module, facts.slots, type(module).__name__, DEPTH)
        attributes = vars(module)
        for name in list(attributes):
            value = attributes[name]
            kind = type(value)
            if kind in ATOMS or name in _OF_EVERY_MODULE:
                continue
            if isinstance(value, Tensor):
                self.tensor(value, name)
            elif (cover := cover_in(value)) is not None and not cover.hides_users:
                continue
            elif kind is list and not facts.is_users and name in facts.attributes:
                self.holders.append(ListHolder(value))  # of parameters, as an LSTM has one: not to be looked into
            else:
                if holds_iterator(value):
                    self.holders.append(NameHolder(attributes, name))
                self.look(value, f"{type(module).__name__}.{name}", DEPTH)

    def _code_of_class(self, kind: type, facts: ClassFacts) -> None:
        """Note what the methods of a module's class read."""
        if facts.names:
            self._names(facts.names)
        if facts.bindings is not None:
            self._bindings += (facts.bindings,)
        for fn in filter(None, map(ask, facts.open)):
            if id(fn) not in self.seen:
                self._made_of(fn, f"{kind.__name__}.{fn.__name__}", DEPTH)
        self.asked |= facts.asked
        self.scripts += facts.scripts
        if facts.is_users:
            self._class(kind)


def attributes_of_tensors(tensors: Sequence[Tensor]) -> ModuleWalk:
    """Return a walk over the Python attributes of some tensors."""
    walk = ModuleWalk()
    walk.look_at_attributes(tensors)
    walk.finish()
    return walk


def left_out(fn: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[str]:
    """Return what a region of `fn` reaches and does not restore, with the reasons, for a message."""
    walk = Walk()
    walk.left_out = []
    walk.look(fn, "the function", DEPTH)
    for index, item in enumerate(args):
        walk.look(item, f"args[{index}]", DEPTH_OF_ARGUMENTS)
    for name, item in kwargs.items():
        walk.look(item, f"kwargs[{name!r}]", DEPTH_OF_ARGUMENTS)
    modules = ModuleWalk()
    modules.left_out = walk.left_out
    modules.over(walk.roots)
    return walk.left_out


def _has_plain_attributes(module: Module, facts: ClassFacts) -> bool:
    """Return whether a module of torch's has no attributes but those that its class gives it, and no tensor among them."""
    attributes = vars(module)
    if not (attributes.keys() <= facts.attributes and _OF_PLAIN_MODULES.issuperset(map(type, attributes.values()))):
        return False
    own = attributes.keys() - _OF_EVERY_MODULE
    # A `ParameterDict` has its keys in such a container.
    return not own or _CONTAINERS.isdisjoint(type(attributes[name]) for name in own)
