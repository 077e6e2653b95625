"""A policy's decisions on the calls inside of a region, asked for as rarely as possible.

A policy is a function of a site. Asking it about every op would cost more than the ops, so the answer for an op is kept
where it depends on nothing else, and ops that the policy cannot speak of are not looked at again.
"""

from __future__ import annotations

from collections.abc import Sequence
from sys import _getframe
from types import FrameType, FunctionType
from typing import Any, NamedTuple
from weakref import ref

from torch import nn
from torch.nn import Module
from torch.nn.functional import multi_head_attention_forward

from reactivate._torch.modes import without_function_modes
from reactivate._torch.modules import MODULE_CALL_CODE
from reactivate._types import Action, Policy, Save, Site
from reactivate.errors import UsageError
from reactivate.policies._base import ReadyMade, interest_of, parts_of
from reactivate.policies._select import did_you_mean
from reactivate.policies.canonical import name_of
from reactivate.policies.host_copies import OPS as COPIES, is_copy_to_host
from reactivate.policies.unfused import OPS as ATTENTION, is_unfused

# They draw no random number and write to no module: nothing has to be brought along where they are skipped.
_QUIET = frozenset(
    {
        *("linear", "matmul", "mm", "bmm", "mv", "dot", "addmm", "baddbmm", "einsum", "bilinear", "tensordot", "outer"),
        *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "embedding"),
        *("layer_norm", "rms_norm", "group_norm", "softmax", "log_softmax", "gelu", "silu", "relu", "tanh", "sigmoid"),
        *("exp", "log", "sin", "cos", "mul", "add", "sub", "div", "pow", "sqrt", "rsqrt", "max", "sum", "mean", "cat"),
    }
)
_QUIET_MODULES = frozenset(
    {
        *(
            nn.Linear,
            nn.Bilinear,
            nn.Conv1d,
            nn.Conv2d,
            nn.Conv3d,
            nn.Embedding,
            nn.LayerNorm,
            nn.GroupNorm,
            nn.RMSNorm,
        ),
        *(nn.GELU, nn.SiLU, nn.ReLU, nn.Tanh, nn.Sigmoid, nn.Softmax, nn.Identity),
    }
)
_BY_ARGUMENTS = COPIES | ATTENTION
# Functions written in Python that stand for many ops: these are looked at, unless the policy saves the whole.
_OPENED = frozenset({multi_head_attention_forward})


class CallDecision(NamedTuple):
    """The decision on an op, a module or a named function.

    Attributes:
        label: what messages call it.
        is_of_interest: whether the policy has a say in calls of it.
        is_opened: whether the policy has a say in what it is made of.
        is_quiet: whether a call of it leaves generators and modules alone.
        action: the policy's answer, if that is always the same.
        path: the module, of a module's call.
        is_users: whether a call of it may run code of the user's, which may do what no op does.
    """

    label: str
    is_of_interest: bool = False
    is_opened: bool = False
    is_quiet: bool = False
    action: Action | None = None
    path: str | None = None
    op: str | None = None
    name: str | None = None
    module: Module | None = None
    function: Any = None
    is_users: bool = False


class Unmatched:
    """The parts of a policy that have matched nothing so far.

    Args:
        policy: the policy.
        asked_by: what messages call the function that was given the policy.
        regions: how many regions the policy is for.
        has_modules: whether they are modules, or methods of modules.
    """

    def __init__(self, policy: Policy, asked_by: str, regions: int = 1, has_modules: bool = True) -> None:
        self.asked_by = asked_by
        self.has_modules = has_modules
        self.regions = regions
        self._ran: set[str] = set()
        self.parts = [part for part in parts_of(policy) if isinstance(part, ReadyMade) and not part.may_match_nothing]
        self.seen: set[str] = set()
        self._paths: set[str] = set()

    def look_at(self, site: Site) -> None:
        """Cross off what matches `site`."""
        self.seen.add(repr(site.name) if site.name else site.op or site.path)
        self._paths.add(site.path)
        if self.parts:
            self.parts = [part for part in self.parts if part(site) is None]

    def region_has_run(self, path: str) -> None:
        """Once all have, every part must have matched something.

        Raises:
            UsageError: one has not.
        """
        is_all = path in self._ran or len(self._ran) + 1 >= self.regions
        self._ran.add(path)
        if self.parts and is_all:
            part, self.parts = self.parts[0], []
            seen = ", ".join(sorted(self.seen)) or "no call at all"
            interest = interest_of(part)
            if not self.has_modules and (interest.modules or interest.paths):
                raise UsageError(
                    f"{self.asked_by}: {part} selects modules, and the region is a function, which has none. Checkpoint the "
                    "module itself, reactivate.checkpoint(module, policy=...), or use reactivate.apply(model, policy)."
                )
            meant = did_you_mean(part.patterns(), self._paths)
            raise UsageError(f"{self.asked_by}: {part} matches nothing.{meant} What there was to match: {seen}.")


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
        self._paths: dict[int, str] = {}
        self.is_watching = False  # whether it hears of collectives in place
        self.sees_functions = self.interest.any_function
        self.decisions: dict[Any, CallDecision] = {}
        self.ignored: set[Any] = set()  # functions that are of no interest
        self._modules: dict[str, CallDecision] = {}
        self._names: dict[str, CallDecision] = {}
        self._looks_for_modules = self.interest.modules and root is not None and not is_applied
        self.modules_inside: dict[int, CallDecision] = {}  # by the ids of the modules

    def find_modules(self) -> Sequence[Module]:
        """The modules inside of the root whose calls the policy has a say in, which nothing stands in for yet."""
        root = self._root() if self._looks_for_modules and self._root is not None else None
        if root is None:
            return ()
        inside = ((module, path) for path, module in root.named_modules(prefix=self.path) if module is not root)
        found = [(module, self.of_module(module, path)) for module, path in inside]
        found = [(module, decision) for module, decision in found if decision.is_of_interest]
        self.modules_inside = {id(module): decision for module, decision in found}
        return [module for module, _ in found]

    def look_at(self, function: Any) -> CallDecision:
        """The decision about a function of torch's, from now on in `decisions`."""
        op = name_of(function)
        ops = self.interest.ops
        decision = CallDecision(op, op=op, function=function, is_quiet=op in _QUIET)
        if function in _OPENED and not (ops is not None and op in ops):
            decision = decision._replace(is_opened=True)
        elif op in _BY_ARGUMENTS and self.interest.arguments:
            decision = decision._replace(is_of_interest=True)  # which of its calls are, their arguments say
        elif op != "get" and (ops is None or op in ops):
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

    def ask(self, decision: CallDecision, counts: dict[Any, int], args: Any, kwargs: Any) -> Action | None:
        """Return the policy's answer about one call."""
        key = (decision.label,)
        index = counts.get(key, 0)
        counts[key] = index + 1
        with without_function_modes():
            is_copy, is_split = is_copy_to_host(decision.op, args, kwargs), is_unfused(decision.op, args, kwargs)
        site = self._site(decision, index, counts, is_copy_to_host=is_copy, is_unfused=is_split)
        if self.unmatched.parts:
            self.unmatched.look_at(site)
        return self.policy(site)

    def _decide(self, decision: CallDecision) -> CallDecision:
        if self.interest.calls or (self.interest.paths and decision.path is None):
            self.unmatched.seen.add(decision.label)
            return decision._replace(is_of_interest=True)
        site = self._site(decision, 0, {})
        self.unmatched.look_at(site)
        action = self.policy(site)
        return decision._replace(is_of_interest=isinstance(action, Save), action=action)

    def _site(self, decision: CallDecision, index: int, counts: dict[Any, int], **facts: bool) -> Site:
        path = decision.path
        if path is None:
            path = self._innermost_path() if self.interest.paths else ""
        return Site(
            path,
            op=decision.op,
            name=decision.name,
            index=index,
            module=decision.module,
            function=decision.function,
            counts=counts,
            **facts,
        )

    def _innermost_path(self) -> str:
        """The path of the module whose call is running."""
        if not self._paths:
            self._find_paths()
        frame: FrameType | None = _getframe(1)
        while frame is not None:
            if frame.f_code is MODULE_CALL_CODE:
                path = self._paths.get(id(frame.f_locals["self"]))
                if path is not None:
                    return path
            frame = frame.f_back
        return self.path

    def _find_paths(self) -> None:
        root = None if self._root is None else self._root()
        if root is not None:
            self._paths = {id(module): path for path, module in root.named_modules(prefix=self.path)}
