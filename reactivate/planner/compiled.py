"""The modules of a step that are compiled: the whole model, or each of its blocks.

The memory of a compiled step is that of its graphs. torch's partitioner keeps what the plan keeps, and recomputes what
the plan recomputes; but the graph of a backward hands over the gradients of all its parameters when it ends, where eager
adds each to those that are there and frees it. Of a whole model these are all gradients at once: a traced step in which
they stay (`TrainingStep.compiled`) has the peak of that graph. What the code that a backend generates takes beside, only
a run tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.nn import Module

from reactivate._modules.blocks import blocks_of
from reactivate._modules.paths import THE_MODEL, is_below, is_compiled_module
from reactivate._text.words import described
from reactivate._torch.dynamo import called_through, compiled_call_of, is_loaded, is_wrapped_by_compiler, own_call_of
from reactivate.errors import UsageError
from reactivate.planner.step import BLOCKS
from reactivate.planner.units import find_units

Call = Callable[..., Any]

DEFAULT_BACKEND = "inductor"


def check_compiled(asked_by: str, compiled: Any, **others: Any) -> None:
    """Refuse what is no way to compile a model, and what a compiled step cannot have."""
    backends = [] if isinstance(compiled, bool) or compiled == BLOCKS else torch.compiler.list_backends(None)
    if not isinstance(compiled, bool) and compiled != BLOCKS and compiled not in backends:
        raise UsageError(
            f"{asked_by}(compiled={described(compiled)}): it takes True, False, {BLOCKS!r}, or the name of a backend of "
            f"torch.compile: {', '.join(map(repr, torch.compiler.list_backends()))}."
        )
    for name, value in others.items():
        if compiled and value:
            raise UsageError(f"{asked_by}(compiled={compiled!r}) is not supported with {name}=, {_WHY_NOT[name]}.")


_WHY_NOT = {
    "step": "in which the model is called as it is: pass args and loss=",
    "maximize": "which tries many sizes, each to be compiled: maximize first, then plan with a batch of that size",
    "storage": "since what a compiled region keeps stays on the device",
}


def compiled_parts(model: Module) -> list[str]:
    """List the paths of what is compiled already, in place or by a wrapper; "" for the model itself."""
    return [path for path, module in model.named_modules() if is_compiled_module(module)]


def uncompiled() -> AbstractContextManager[Any]:
    """Return a context in which what is compiled already runs eagerly, as a step does that is traced.

    The compiler leaves most such code alone by itself, but refuses to where the whole graph was asked for. Nothing is
    compiled before the compiler is imported, which takes a second.
    """
    return torch.compiler.set_stance("force_eager") if is_loaded() else nullcontext()


class CompiledModules:
    """The modules of a model that are compiled, and what stands in the places of their calls.

    Blocks that are compiled in place already (`block.compile()`) stay as they are, with all that was said of them. If none
    is, each block of the model is compiled with torch's default backend.

    Args:
        compiled: true for the whole model under torch's default backend, or the name of one; or "blocks".

    Attributes:
        calls: what stands in the place of the call of each module.

    Raises:
        UsageError: the blocks cannot be measured one by one.
    """

    def __init__(self, model: Module, compiled: bool | str) -> None:
        if compiled != BLOCKS:
            backend = DEFAULT_BACKEND if compiled is True else compiled
            self.calls = {model: _compiled(model, str(backend))}
            return
        given = {path: module for path, module in model.named_modules() if compiled_call_of(module) is not None}
        _check_blocks(model, given)
        blocks = given or blocks_of(model)
        if not blocks:
            raise UsageError(
                f"plan(compiled={BLOCKS!r}): the {type(model).__name__} has no blocks, repeated layers that are made of "
                "modules. Compile those that you mean with module.compile(), and plan again; or plan with compiled=True."
            )
        self.calls = {module: compiled_call_of(module) or _compiled(module) for module in blocks.values()}

    @contextmanager
    def running(self, watched: Callable[[Module, Call], Call] | None = None) -> Iterator[None]:
        """Run them compiled, inside of the context.

        Args:
            watched: from a module and its call to what is called in its place.
        """
        watch = watched or (lambda module, call: call)
        calls = {module: watch(module, call) for module, call in self.calls.items()}
        with torch.compiler.set_stance("default"), called_through(calls):
            yield

    def has(self, unit: Module) -> bool:
        """Return whether a unit is compiled, or a part of it."""
        return any(module in self.calls for module in unit.modules())


def _compiled(module: Module, backend: str = DEFAULT_BACKEND) -> Call:
    return torch.compile(own_call_of(module), backend=backend, dynamic=False)


def _check_blocks(model: Module, given: Mapping[str, Module]) -> None:
    """See to it that what is compiled already are blocks, compiled in place."""
    wrapped = [path for path, module in model.named_modules() if is_wrapped_by_compiler(module)]
    if wrapped:
        raise UsageError(
            f"plan(compiled={BLOCKS!r}): {wrapped[0] or THE_MODEL} was replaced by what torch.compile(module) returns, under "
            "other paths than the plan's. Plan and apply first, and compile then; or compile in place: block.compile()."
        )
    units = find_units(model)
    for path in given:
        inside = [unit for unit in units if unit != path and is_below(unit, path)]
        if inside:
            raise UsageError(
                f"plan(compiled={BLOCKS!r}): {path or THE_MODEL} is compiled with the blocks {', '.join(inside[:3])} in it, "
                "so these cannot be told apart. Compile each of them, block.compile(), or plan with compiled=True."
            )
