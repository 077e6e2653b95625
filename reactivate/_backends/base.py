"""A device type through its device module (`torch.xpu`, `torch.mps`, a privateuse1 backend's), whatever that offers."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

from reactivate._torch.modes import is_same_state
from reactivate.errors import UnsupportedError

_GENERATORS = ("device_count", "get_rng_state", "set_rng_state")


class Backend:
    """One device type.

    Args:
        device_type: as in `torch.device(device_type)`.
        module: its device module. `device_count`, `get_rng_state` and `set_rng_state` are about its generators: a module
            without one of these has none. `is_initialized`, `is_available`, `current_device`, `device`, `current_stream` and
            `stream` are used where they exist, too.

    Attributes:
        offloads_in_graphs: whether its compiler lowers `CheckpointPolicy.MUST_CPU_OFFLOAD`, torch's tag of a graph's nodes.
    """

    offloads_in_graphs = False

    def __init__(self, device_type: str, module: Any) -> None:
        self.device_type = device_type
        self._module = module

    def is_initialized(self) -> bool:
        """Return whether the device is in use: to look at its generators would initialise it otherwise."""
        module = self._module
        if hasattr(module, "is_initialized"):
            return bool(module.is_initialized())
        return not hasattr(module, "is_available") or bool(module.is_available())

    def read_rng(self) -> Any:
        """The state of the generator of every device."""
        module = self._module
        if not all(hasattr(module, name) for name in _GENERATORS):
            return []
        count = module.device_count()
        if count == 1:
            return [module.get_rng_state()]
        return [module.get_rng_state(index) for index in range(count)]

    def write_rng(self, states: Any) -> None:
        """Set the generators to what `read_rng` gave."""
        module = self._module
        if len(states) == 1:
            module.set_rng_state(states[0])
            return
        for index, state in enumerate(states):
            module.set_rng_state(state, index)

    def seed_rng(self, seed: int) -> None:
        """Let the generators of all devices begin with a seed.

        Raises:
            UnsupportedError: the device module has no function for it.
        """
        for name in ("manual_seed_all", "manual_seed"):
            if hasattr(self._module, name):
                getattr(self._module, name)(seed)
                return
        raise UnsupportedError(
            f"A stream of random numbers cannot begin on {self.device_type}, whose device module has no `manual_seed`."
        )

    def exchange_rng(self, states: Any) -> Any:
        """Set the generators to `states`. Return all that `write_rng` needs to bring back what was before."""
        now = self.read_rng()
        self.write_rng(states)
        return now

    def give_back_rng(self, held: Any, backward: int) -> bool:
        """Set the generators to what `exchange_rng` returned, in a backward that may exchange them again.

        Args:
            held: the states.
            backward: the number of the backward.

        Returns:
            whether `settle_rng` has to be called when the backward ends, for what nothing reads until then.
        """
        self.write_rng(held)
        return False

    def settle_rng(self, backward: int) -> None:
        """Finish what `give_back_rng` has left to the end of this backward."""

    def count_unseeded(self) -> int:
        """Return how many calls there were so far of ops that draw random numbers and follow no generator."""
        return 0

    def refuse_unseeded(self, before: int) -> None:
        """Raise if there was such a call in a recomputation: it has drawn other numbers than its forward.

        Args:
            before: what `count_unseeded` returned when the recomputation began.

        Raises:
            UnsupportedError: there was one.
        """

    def rewind_rng(self, states: Any) -> None:
        """Set the generators to states that were read since more was done than draw."""
        self.write_rng(states)

    def rng_of_forward(self, before: Any) -> Any:
        """Return the states for the recomputation of a region whose forward began with `before`, and has just ended."""
        return before

    def is_same_rng(self, first: Any, second: Any) -> bool:
        """Return whether no number was drawn between two reads."""
        return all(map(is_same_state, first, second))

    def first_rng(self) -> Any | None:
        """The state that the generators had when the device was initialised, None if that cannot be known."""
        return None

    def op_by_op(self) -> AbstractContextManager[Any]:
        """A context in which no compiler decides how results are rounded."""
        return contextlib.nullcontext()

    def read_place(self) -> tuple[Any, Any]:
        """The current device and the current stream."""
        module = self._module
        device = module.current_device() if hasattr(module, "current_device") else None
        stream = module.current_stream() if hasattr(module, "current_stream") else None
        return device, stream

    def at_place(self, place: tuple[Any, Any]) -> AbstractContextManager[Any]:
        """A context in which device and stream are those of `place`."""
        device, stream = place
        stack = contextlib.ExitStack()
        if device is not None and hasattr(self._module, "device"):
            stack.enter_context(self._module.device(device))
        if stream is not None and hasattr(self._module, "stream"):
            stack.enter_context(self._module.stream(stream))
        return stack
