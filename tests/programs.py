"""A small language of random programs: what it consists of, printed as code.

A program is data. Each value in it is a 4 x 4 matrix, and each reference to one is a number taken modulo how many there
are, so that every program that can be written down means something, and what a shrinker makes of one does too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

WAYS = ("positional", "keyword", "nested", "closed over", "default")
"""How a tensor gets into a region."""


@dataclass(frozen=True)
class Op:
    """A new value from two others, of which many ops use one."""

    name: str
    first: int
    second: int


@dataclass(frozen=True)
class Write:
    """An op in place, on a value that these steps made; with `anywhere` perhaps on what they were given."""

    name: str
    target: int
    other: int
    anywhere: bool = False


@dataclass(frozen=True)
class Use:
    """A call of one of the program's modules."""

    module: int
    value: int


@dataclass(frozen=True)
class Within:
    """Steps inside of a context; the last value is the result."""

    context: str
    values: tuple[int, ...]
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Region:
    """Steps inside of a checkpointed function, which gets each value in some way; the last value is the result."""

    values: tuple[int, ...]
    ways: tuple[str, ...]
    steps: tuple[Step, ...]


Step = Op | Write | Use | Within | Region


@dataclass(frozen=True)
class Backward:
    """One backward call.

    Attributes:
        how: "backward" of all outputs, "one" of one output, "grad" or "double" of one output.
        output: which one.
        retain: whether the graph is kept for another.
    """

    how: str
    output: int
    retain: bool


@dataclass(frozen=True)
class Program:
    """A checkpointed function, what it gets, and what is done with what it returns.

    Attributes:
        kinds: of each input: a "leaf", "computed" from one, or a "constant", which requires no gradient.
        ways: how each input gets into the function.
        modules: names of modules that the steps use.
        steps: the function.
        outputs: which values it returns: first, if it can be, one that requires a gradient.
        container: in what.
        context: what is around the forward pass, and not around the backward.
        late_writes: inputs that are written to between forward and backward.
        backwards: in order.
    """

    kinds: tuple[str, ...]
    ways: tuple[str, ...]
    modules: tuple[str, ...]
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
    container: str
    context: str = "enable_grad"
    late_writes: tuple[int, ...] = ()
    backwards: tuple[Backward, ...] = (Backward("backward", 0, False),)

    def __str__(self) -> str:
        return "\n".join(_lines_of(self))


def at(items: Sequence[Any], index: int) -> Any:
    return items[index % len(items)]


# -- printing ---------------------------------------------------------------------------------------------------------


def _lines_of(program: Program) -> Iterator[str]:
    names = [f"x{index}" for index in range(len(program.kinds))]
    for name, kind, way in zip(names, program.kinds, program.ways):
        yield f"{name} = {kind}()  # {way}"
    yield f"modules = {', '.join(program.modules)}"
    yield f"checkpoint, with {program.context}:"
    scope = list(names)
    yield from _lines_of_steps(program.steps, scope, "    ", program.modules)
    first, *rest = program.outputs
    outputs = [f"differentiable[{first}]", *(at(scope, index) for index in rest)]
    yield f"    return {program.container}({', '.join(outputs)})"
    for index in program.late_writes:
        yield f"{at(names, index)}.mul_(2)"
    for backward in program.backwards:
        yield f"{backward.how}(output {backward.output}, retain_graph={backward.retain})"


def _lines_of_steps(steps: Sequence[Step], scope: list[str], indent: str, modules: Sequence[str]) -> Iterator[str]:
    count = len(scope)
    for number, step in enumerate(steps):
        new = f"{'abcdefgh'[len(indent) // 4 % 8]}{number}"
        match step:
            case Op(name, first, second):
                yield f"{indent}{new} = {name}({at(scope, first)}, {at(scope, second)})"
                scope.append(new)
            case Write(name, target, other, anywhere):
                choice = scope if anywhere else scope[count:]
                if choice:
                    yield f"{indent}{name}({at(choice, target)}, {at(scope, other)})"
            case Use(module, value) if modules:
                yield f"{indent}{new} = modules[{module % len(modules)}]({at(scope, value)})"
                scope.append(new)
            case Within(_, values, inner) | Region(values, _, inner):
                head = f"with {step.context}" if isinstance(step, Within) else f"checkpoint, {', '.join(step.ways)}"
                given = [at(scope, value) for value in values]
                yield f"{indent}{head}, given {', '.join(given)}:"
                yield from _lines_of_steps(inner, given, indent + "    ", modules)
                yield f"{indent}{new} = {given[-1]}"
                scope.append(new)
