"""A policy that is another one for each call of the model: which one holds is looked up where the model is called.

The model's own `forward` asks for the policy of the call. A module that some of these policies select has a stand-in that
does what the policy of the call says, for as long as the call runs. That policy is in a context variable: a recomputation may
come when the model has been called again, and runs in the context of its forward, so regions inside of regions are what they
were.
"""

from __future__ import annotations

import weakref
from contextvars import ContextVar
from typing import Any

from torch import is_grad_enabled
from torch.compiler import is_compiling
from torch.nn import Module

from reactivate._model.applied import Applied
from reactivate._model.handle import AppliedForward, applied_to
from reactivate._modules.standin import own_forward_of
from reactivate._region.options import Options
from reactivate._setting import set_to
from reactivate._torch.dynamo import is_jit_tracing, leave_out_of_graphs
from reactivate._types import Policy
from reactivate.errors import UnsupportedError
from reactivate.policies._base import PerCall

_MOST_POLICIES = 256
Chosen = dict[int, AppliedForward]  # what one policy does, by the ids of modules

_running: ContextVar[tuple[AppliedPerCall, Chosen | None] | None] = ContextVar("reactivate.running", default=None)


class AppliedPerCall(Applied):
    """A policy that is another one for each call, on one model."""

    def __init__(self, policy: Policy, options: Options) -> None:
        assert isinstance(policy, PerCall)
        super().__init__(policy, options)
        self.per_call = policy
        self._known: dict[int, tuple[Policy, Chosen]] = {}  # with the policy, whose id is the key

    def attach(self, model: Module) -> None:
        """Take the place of the model's own `forward`; of those of regions when a policy first selects them."""
        self.root = weakref.ref(model)
        CalledForward(self, model, "", own_forward_of(model)).place()

    def chosen_for(self, model: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Chosen | None:
        """Return what the policy of a call does."""
        policy = self.per_call.of_call(model, args, kwargs)
        if policy is None:
            return None
        known = self._known.get(id(policy))
        if known is None:
            if len(self._known) >= _MOST_POLICIES:  # the oldest, which is found again if it is needed again
                self._known.pop(next(iter(self._known)), None)
            known = self._known[id(policy)] = policy, self._attach_one(model, policy)
        return known[1]

    def _attach_one(self, model: Module, policy: Policy) -> Chosen:
        chosen = {id(forward.module()): forward for forward in Applied(policy, self.options).forwards_in(model)}
        for forward in chosen.values():
            module = forward.module()
            if not isinstance(applied_to(module), SwitchedForward):
                SwitchedForward(self, module, forward.path, own_forward_of(module)).place()
        return chosen

    def __deepcopy__(self, memo: dict[int, Any]) -> AppliedPerCall:
        return AppliedPerCall(self.policy, self.options)

    def __reduce__(self) -> tuple[Any, ...]:
        return AppliedPerCall, (self.policy, self.options)


class SwitchedForward(AppliedForward):
    """The module does what the policy of the model's call says."""

    @property
    def stands_for(self) -> type | None:
        return None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            _refuse_compilation()
        running = _running.get()
        return self._run(None if running is None else running[1], args, kwargs)

    def _run(self, chosen: Chosen | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        forward = None if chosen is None else chosen.get(id(self.module()))
        return (forward or self.original())(*args, **kwargs)


class CalledForward(SwitchedForward):
    """The model is called: from here to the end of the call a policy holds."""

    @property
    def stands_for(self) -> type:
        return type(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            _refuse_compilation()
        if not is_grad_enabled() or is_jit_tracing():  # there regions are plain calls, and shapes no numbers
            return self.original()(*args, **kwargs)
        assert isinstance(self.applied, AppliedPerCall)
        running = _running.get()
        if running is not None and running[0] is self.applied:  # the model calls itself, inside of one call
            return self._run(running[1], args, kwargs)
        chosen = self.applied.chosen_for(self.module(), args, kwargs)
        with set_to(_running, (self.applied, chosen)):
            return self._run(chosen, args, kwargs)


def _refuse_compilation() -> None:
    raise UnsupportedError(
        "apply: a policy that is another one for each call is not supported under torch.compile, whose graphs have one "
        "policy in them. Apply the plan of one batch, plan.of_batch(model, args), to the model that you compile; or run it "
        "in eager mode."
    )


leave_out_of_graphs(_refuse_compilation, "an error that is raised in a graph would only end the graph")
