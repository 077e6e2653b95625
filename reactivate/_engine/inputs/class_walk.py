"""The classes among what is reached: their attributes, and the members of enums."""

from __future__ import annotations

from collections import deque
from enum import Enum

from reactivate._engine.inputs.kinds import may_be_state, users_classes
from reactivate._engine.inputs.walk import DEPTH, Walk
from reactivate._engine.state.attributes import TensorsNote
from reactivate._engine.state.functions import ClassNote


class ClassWalk(Walk):
    """A walk that looks into classes."""

    def _class(self, kind: type) -> None:
        for base in users_classes(kind):
            if (key := ("class", id(base))) not in self._specs:
                self._specs[key] = base
                self.notes.append(ClassNote(base))
                self.code.add_class(base)
                if issubclass(base, Enum):
                    self._members(base)
                else:
                    self._state_of_class(base)

    def _state_of_class(self, kind: type) -> None:
        """Look at the attributes of a class, but for the functions in containers: mostly these are registries."""
        attributes, follows = vars(kind), self._follows_functions
        for name in [*attributes]:
            value = attributes[name]
            if not may_be_state(type(value)) or name.startswith("__"):
                continue
            self._follows_functions = follows and not isinstance(value, (list, dict, deque, tuple))
            self._look(value, f"{kind.__name__}.{name}", DEPTH)
            self._follows_functions = follows

    def _members(self, kind: type[Enum]) -> None:
        """Note the attributes of the members of an enum, and look at them."""
        members = list(kind.__members__.values())
        self.notes.append(TensorsNote(members))
        for member in members:
            self._look_at_all(vars(member), f"{kind.__name__}.{member.name}", DEPTH)
