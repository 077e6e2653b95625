"""A policy's decisions on the calls inside of a region, asked for as rarely as possible.

A policy is a function of a site. Asking it about every op would cost more than the ops, so the answer for an op is kept
where it depends on nothing else, and ops that the policy cannot speak of are not looked at again.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType
from typing import Any, NamedTuple
from weakref import ref

from torch import nn
from torch.nn import Module
from torch.nn.functional import multi_head_attention_forward

from reactivate._modules.paths import modules_below
from reactivate._saved_calls.torchs_own import are_torchs, is_torchs_alone, is_torchs_forward
from reactivate._torch.dynamo import COMPILED_CODE, compiled_call_of
from reactivate._torch.modes import without_function_modes
from reactivate._torch.ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from reactivate._types import Action, Policy, Save, Site
from reactivate.policies._base import answer_of, interest_of
from reactivate.policies._unmatched import Unmatched
from reactivate.policies.by_arguments import OPS as BY_ARGUMENTS, is_copy_to_host, is_unfused
from reactivate.policies.canonical import name_of

# They draw no random number and write to nothing but their arguments.
_QUIET = frozenset(
    [
        *("linear", "matmul", "mm", "bmm", "mv", "dot", "addmm", "baddbmm", "einsum", "bilinear", "tensordot", "outer"),
        *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "embedding"),
        *("layer_norm", "rms_norm", "group_norm", "softmax", "log_softmax", "gelu", "silu", "relu", "tanh", "sigmoid"),
        *("exp", "log", "sin", "cos", "mul", "add", "sub", "div", "pow", "sqrt", "rsqrt", "max", "sum", "mean", "cat"),
    ]
)
_QUIET_MODULES = frozenset(
    [
        *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm),
        *(nn.GELU, nn.SiLU, nn.ReLU, nn.Softmax),
    ]
)
# What modes are told of and computes nothing: attributes such as `grad`, and what code around ops asks and sets.
_NO_OPS = frozenset({"get", "set", "delete", "_is_view", "_set_grad_enabled", "_set_view_replay_enabled"})
# Functions written in Python that stand for many ops: these are looked at, unless the policy saves the whole.
_OPENED = frozenset({multi_head_attention_forward})


class CallDecision(NamedTuple):
    """The decision on an op, a module or a named function.

    Attributes:
        label: what messages call it.
        is_of_interest: whether the policy has a say in calls of it.
        is_opened: whether the policy has a say in what it is made of.
        is_quiet: whether a call of it draws no random number and writes to nothing but its arguments.
        is_torchs: whether it is an op of torch's own, which writes to its arguments and to random streams at most.
        action: the policy's answer, if that is always the same.
        path: the module, of a module's call.
        is_users: whether a call of it may run code of the user's, which may do what no op does.
    """

    label: str
    is_of_interest: bool = False
    is_opened: bool = False
    is_quiet: bool = False
    is_torchs: bool = False
    action: Action | None = None
    path: str | None = None
    op: str | None = None
    name: str | None = None
    module: Module | None = None
    function: Any = None
    is_users: bool = False

    def of_call(self, fn: Any, args: Any, kwargs: dict[str, Any]) -> CallDecision:
        """Return the decision on one call, in which code of the user's may run although the function is torch's."""
        # Inductor's code writes to its arguments alone, and empties the list of them.
        if self.is_users or self.op == COMPILED_CODE:
            return self
        if not (are_torchs(args) and (not kwargs or are_torchs(kwargs.values()))):
            return self.of_users()
        module = self.module
        if module is None:
            return self if is_torchs_alone(fn) else self.of_users()
        is_torchs = type(module) in _QUIET_MODULES and is_torchs_forward(module, fn)  # it may have another class by now
        return self if is_torchs else self.of_users()

    def of_users(self) -> CallDecision:
        """Return the decision on a call that runs code of the user's as well."""
        return self._replace(is_quiet=False, is_torchs=False, is_users=True)


def _is_torchs(function: Any, op: str) -> bool:
    """Return whether a function is torch's own code: no op of a library, and none that is given code to run."""
    is_of_library = isinstance(function, (OpOverload, OpOverloadPacket)) and "." in op
    module = getattr(function, "__module__", None) or "torch"
    return module.partition(".")[0] == "torch" and not is_of_library and not isinstance(function, HigherOrderOperator)


def number_of(policy: Policy) -> int:
    """Return a number that tells policies apart, and holds none: a function may be made for each call."""
    if isinstance(policy, FunctionType):
        return hash(policy.__code__)
    try:
        return hash(policy)
    except TypeError:
        return id(type(policy))


class Choice:
    """The answers of one policy about what is inside of one region.

    Args:
        policy: the policy; equal ones have one `number`.
        unmatched: told of every site that is looked at.
        root: a reference to the module that is the region, if it is one.
        path: its path.
        is_applied: whether something stands in the place of every module's `forward` that the policy saves.
        region: the path of the region, where that is a span of the root.
    """

    def __init__(
        self,
        policy: Policy,
        unmatched: Unmatched,
        root: ref[Module] | None = None,
        path: str = "",
        is_applied: bool = True,
        region: str | None = None,
    ) -> None:
        self.policy = policy
        self.number = number_of(policy)
        self.interest = interest_of(policy)
        self.unmatched = unmatched
        self._root = root
        self.path = path
        self.region = path if region is None else region
        self.is_watching = False  # whether it hears of collectives in place
        self.sees_functions = self.interest.any_function
        self.decisions: dict[Any, CallDecision] = {}
        self.ignored: set[Any] = set()  # functions that are of no interest
        self._is_applied = is_applied
        self._modules: dict[str, CallDecision] = {}
        self._names: dict[str, CallDecision] = {}
        self._selects_modules = self.interest.modules and not is_applied

    def find_modules(self) -> Iterator[tuple[Module, str, CallDecision | None]]:
        """Find the modules inside of the root whose calls a log has to see.

        Yields:
            The module, its path, and the decision on its calls: None if they only say where functions are called.
        """
        root = None if self._root is None or not (self._selects_modules or self.interest.paths) else self._root()
        if root is None:
            return
        is_root_compiled = not self._is_applied and compiled_call_of(root) is not None
        for path, module, is_compiled in modules_below(root, self.path, is_compiled=is_root_compiled):
            decision = self.of_module(module, path) if self._selects_modules else None
            is_saved = decision is not None and decision.is_of_interest
            # Compiled code is recomputed, and has one graph for equal modules as long as each has the `forward` of its class.
            if not is_compiled and (is_saved or self.interest.paths):
                yield module, path, decision if is_saved else None

    def look_at(self, function: Any) -> CallDecision:
        """The decision about a function of torch's, from now on in `decisions`."""
        op = name_of(function)
        ops = self.interest.ops
        decision = CallDecision(op, op=op, function=function, is_quiet=op in _QUIET, is_torchs=_is_torchs(function, op))
        if function in _OPENED and not (ops is not None and op in ops):
            decision = decision._replace(is_opened=True)
        elif op in BY_ARGUMENTS and self.interest.arguments:
            decision = decision._replace(is_of_interest=True)  # which of its calls are, their arguments say
        elif op not in _NO_OPS:
            if ops is None or op in ops:
                decision = self._decide(decision)
            else:
                self.unmatched.seen.add(op)
        self.decisions[function] = decision
        if not (decision.is_of_interest or decision.is_opened):
            self.ignored.add(function)
        return decision

    def of_module(self, module: Module, path: str) -> CallDecision:
        """The decision about a call of a module."""
        found = self._modules.get(path)
        if found is None or found.module is not module:
            label = f"{path} ({type(module).__name__})"
            is_quiet = type(module) in _QUIET_MODULES
            self._modules[path] = self._decide(
                CallDecision(label, path=path, module=module, is_quiet=is_quiet, is_users=not is_quiet)
            )
        return self._modules[path]

    def of_name(self, name: str, function: Any) -> CallDecision:
        """The decision about a function that `reactivate.site` named."""
        if name not in self._names:
            op = getattr(function, "__name__", type(function).__name__)
            self._names[name] = self._decide(
                CallDecision(f"site {name!r}", op=op, name=name, function=function, is_users=True)
            )
        return self._names[name]

    def of_class(self, kind: Any) -> CallDecision:
        """The decision about a custom `torch.autograd.Function`."""
        if kind not in self.decisions:
            self.decisions[kind] = self._decide(
                CallDecision(kind.__name__, op=kind.__name__, function=kind, is_users=True)
            )
        return self.decisions[kind]

    def ask(self, decision: CallDecision, path: str, counts: dict[Any, int], args: Any, kwargs: Any) -> Action | None:
        """Return the policy's answer about one call of a function in the module at `path`, or of a module."""
        key = (decision.label,)
        index = counts.get(key, 0)
        counts[key] = index + 1
        with without_function_modes():
            is_copy, is_split = is_copy_to_host(decision.op, args, kwargs), is_unfused(decision.op, args, kwargs)
        site = self._site(decision, path, index, counts, is_copy_to_host=is_copy, is_unfused=is_split)
        if self.unmatched.parts:
            self.unmatched.look_at(site)
        return answer_of(self.policy, site)

    def _decide(self, decision: CallDecision) -> CallDecision:
        if self.interest.calls or (self.interest.paths and decision.path is None):
            self.unmatched.seen.add(decision.label)
            return decision._replace(is_of_interest=True)
        site = self._site(decision, "", 0, {})
        self.unmatched.look_at(site)
        action = answer_of(self.policy, site)
        return decision._replace(is_of_interest=isinstance(action, Save), action=action)

    def _site(self, decision: CallDecision, path: str, index: int, counts: dict[Any, int], **facts: bool) -> Site:
        return Site(
            decision.path if decision.path is not None else path if self.interest.paths else "",
            op=decision.op,
            name=decision.name,
            index=index,
            module=decision.module,
            function=decision.function,
            counts=counts,
            **facts,
        )
