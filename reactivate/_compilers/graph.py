"""A policy for torch.compile: what its partitioner is told to keep of a traced region.

The compiler recomputes by ops of ATen; a policy speaks of calls. Each op of a traced region carries where it comes from:
the stack of modules, the function that the model called, the name given by `reactivate.site`. So the site of an op is
put together again, the policy is asked about it, and the op is marked.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Hashable, Mapping
from types import CodeType
from typing import Any
from weakref import ref

from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import Module
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from reactivate._backends import offloads_in_graphs
from reactivate._torch.dynamo import SITE, names_reach_graphs, node_being_traced
from reactivate._torch.ops import flatten
from reactivate._types import DEVICE, Action, Policy, Save, Site, Storage
from reactivate.errors import UnsupportedError
from reactivate.policies._base import ReadyMade, answer_of, interest_of, parts_of
from reactivate.policies.by_arguments import is_copy_to_host
from reactivate.policies.canonical import name_of

# Copies of what the op is called with, which eager saves no more than these: they are recomputed.
_COPIES = frozenset({"_to_copy", "_unsafe_view", "clone", "contiguous", "detach", "alias", "lift_fresh_copy"})
# Keeps a result in the memory of the host. (Not in torch 2.9.)
_OFFLOAD: Any = getattr(CheckpointPolicy, "MUST_CPU_OFFLOAD", None)
_KEYS = re.compile(r"\[['\"]?([^'\"\]]*)['\"]?\]")


Root = ref[Module] | None


def contexts_for(policy: Policy, root: Root, path: str, answers: Hashable = None) -> Callable[[], Any]:
    """A function for what torch.compile enters around a traced region and around its recomputation.

    Args:
        root: a reference to the module that is the region, if it is one.
        path: its path.
        answers: of the policy; see `answers_in`.
    """
    # Dynamo takes for a constant what was made here, if that is no method, or a partial of constants made while it traces.
    if is_compiling():
        return functools.partial(_contexts, policy, None if root is None else root(), path)

    def contexts() -> Any:
        return _contexts(policy, None if root is None else root(), path)

    if answers is not None:  # it knows a function by its code: no other block gets the graph of this one
        contexts.__code__ = _code_for(contexts.__code__, answers)
    return contexts


def answers_in(policy: Policy, module: Module, path: str) -> Hashable:
    """Return what tells a region from one of like modules of which the policy keeps something else; None if nothing does.

    Args:
        policy: the policy.
        module: the module that is the region.
        path: its path.
    """
    if not isinstance(policy, ReadyMade):
        return None
    answers = tuple(policy._kept_in(below) for below, _ in module.named_modules(prefix=path))
    return None if set(answers) == {None} else answers


@functools.lru_cache(maxsize=1024)
def _code_for(code: CodeType, answers: Hashable) -> CodeType:
    """Return a copy of the code, the same for the same answers."""
    return code.replace()


def _contexts(policy: Policy, module: Module | None, path: str) -> Any:
    _refuse_untranslatable(policy)
    return create_selective_checkpoint_contexts(_Marker(policy, module, path))


def _refuse_untranslatable(policy: Policy) -> None:
    interest = interest_of(policy)
    if interest.functions:
        names = ", ".join(sorted(function.__name__ for function in interest.functions))
        raise UnsupportedError(
            f"The policy {policy!r} saves custom autograd functions ({names}), and torch.compile takes these apart: in "
            "its graph nothing says which ops were theirs. Save the module around it, or call it through "
            "reactivate.site(fn, name=...) and save that name."
        )
    if (
        any(isinstance(part, ReadyMade) and part._interest().names for part in parts_of(policy))
        and not names_reach_graphs
    ):
        raise UnsupportedError(
            f"The policy {policy!r} saves calls by name, which torch.compile knows since torch 2.10."
        )
    for part in parts_of(policy):
        storage = getattr(part, "storage", DEVICE)
        if storage != DEVICE and not _is_offloaded(storage):
            raise _refusal(policy, storage)


def _is_offloaded(storage: Storage) -> bool:
    """Return whether a compiler may know where that is: torch has a tag for the memory of the host alone."""
    return _OFFLOAD is not None and getattr(storage, "is_on_host", False)


def _refusal(policy: Policy, storage: Storage) -> UnsupportedError:
    return UnsupportedError(
        f"The policy {policy!r} keeps results in {storage!r}; what torch.compile keeps stays on the device. (torch_tpu "
        "offloads to storage.Host.) Leave out storage=, or run the region in eager: torch.compiler.disable(region)."
    )


class _Marker:
    """One tracing of a region: which of its ops are kept."""

    def __init__(self, policy: Policy, root: Module | None, path: str) -> None:
        self._policy = policy
        self._root = root
        self._path = path
        modules = [] if root is None else list(root.named_modules(prefix=path))[1:]
        self._inside = {str(id(module)): (place, module) for place, module in modules}
        self._answers: dict[Any, Action | None] = {}
        self._counts: dict[Any, int] = {}

    def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_to_host = is_copy_to_host(name_of(op), args, kwargs)
        if getattr(op, "is_view", False) or (name_of(op) in _COPIES and not is_to_host):
            return CheckpointPolicy.PREFER_RECOMPUTE
        meta = node_being_traced()
        actions = [self._about_function(op, meta, is_to_host), *self._about_modules(meta), self._about_name(meta)]
        storages = [action.storage for action in actions if isinstance(action, Save)]
        if not storages:
            return CheckpointPolicy.PREFER_RECOMPUTE
        others = [storage for storage in storages if storage != DEVICE]
        for storage in others:
            if not (_is_offloaded(storage) and any(map(_compiler_offloads, flatten((args, kwargs))[0]))):
                raise _refusal(self._policy, storage)
        return CheckpointPolicy.MUST_SAVE if len(others) < len(storages) else _OFFLOAD

    def _about_function(self, op: Any, meta: Mapping[str, Any], is_to_host: bool) -> Action | None:
        stack = meta.get("source_fn_stack") or []
        call, function = stack[-1] if stack else (str(op), op)
        name = self._name_of(call, function)
        path = self._innermost(meta)
        return self._ask(("call", call), op=name, path=path, function=function, is_copy_to_host=is_to_host)

    @staticmethod
    def _name_of(call: str, function: Any) -> str:
        if isinstance(function, str):  # a method of a tensor
            return function
        if isinstance(function, type):  # one of torch's modules: the call is named for the function in it
            return re.sub(r"_\d+$", "", call)
        return name_of(function)

    def _about_modules(self, meta: Mapping[str, Any]) -> list[Action | None]:
        return [self._ask(("module", path), path=path, module=module) for path, module in self._modules(meta) if module]

    def _about_name(self, meta: Mapping[str, Any]) -> Action | None:
        name = (meta.get("custom") or {}).get(SITE)
        return None if name is None else self._ask(("name", name), name=name, path=self._innermost(meta), function=name)

    def _ask(self, key: Any, path: str, **site: Any) -> Action | None:
        if key not in self._answers:
            kind = (key[0], site.get("op"))
            index = self._counts.get(kind, 0)
            self._counts[kind] = index + 1
            self._answers[key] = answer_of(self._policy, Site(path, index=index, counts=self._counts, **site))
        return self._answers[key]

    def _innermost(self, meta: Mapping[str, Any]) -> str:
        modules = self._modules(meta)
        return modules[-1][0] if modules else self._path

    def _modules(self, meta: Mapping[str, Any]) -> list[tuple[str, Module | None]]:
        """The modules around an op, inside of the region, outermost first: (path, module)."""
        stack: Mapping[str, Any] = meta.get("nn_module_stack") or {}
        if self._root is None:
            return [(_dotted(place), None) for place, _ in stack.values()]
        found = [self._inside.get(key.partition("@")[0]) for key in stack]  # dynamo's keys are ids
        return [entry for entry in found if entry is not None]


def _compiler_offloads(leaf: Any) -> bool:
    """Return whether a tensor is on a device whose compiler does as the tag says. torch's own partitioner does not."""
    return isinstance(leaf, Tensor) and offloads_in_graphs(leaf.device.type)


def _dotted(place: str) -> str:
    """`L['self']._modules['layers'].0` -> "layers.0": without the variable that the model is in."""
    names = _KEYS.sub(r".\1", place.replace("._modules", "").replace(".forward._module()", "")).split(".")
    return ".".join(names[2:]) if names[0] in ("L", "G") else ".".join(names)
