"""A construct: a template of code that a random program may contain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from string import Template

ROUNDS = 5
"""The deepest nesting of options in options."""


@dataclass(frozen=True)
class Construct:
    """A few lines for each place of a program; every place may stay empty.

    In all of them `$n` is a number of its own for each use, and `$option` is one of the texts of that option. Block code
    reads and rebinds `h`, a 3 x 4 tensor. `$block` is the block outside of its class, `$called` is the
    block as the model names it, `$peer` is another block.

    Attributes:
        body: statements of the block's forward.
        init: statements of the block's constructor.
        options: texts to choose from, the simplest first.
        arguments: parameters of the block's forward, and the expression that the model passes for each.
        model_init: statements of the model's constructor.
        before: statements of the model's forward just before it calls the block.
        setup: statements after all blocks are made and before the model is.
        loss: an expression that is added to the loss.
        between: statements that may run between forward and backward.
        weight: how often a generator takes this construct.
    """

    body: str
    init: str = ""
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    arguments: Mapping[str, str] = field(default_factory=dict)
    model_init: str = ""
    before: str = ""
    setup: str = ""
    loss: str = ""
    between: tuple[str, ...] = ()
    weight: int = 2


def fill(template: str, values: Mapping[str, str]) -> list[str]:
    """Return the lines of a template with its names replaced; a text of several lines keeps the line's indentation."""
    lines = template.strip("\n").splitlines()
    for _ in range(ROUNDS):
        lines = [part for line in lines for part in _filled(line, values)]
    return lines


def _filled(line: str, values: Mapping[str, str]) -> list[str]:
    text = line.lstrip()
    indent = line[: len(line) - len(text)]
    return [indent + part for part in Template(text).safe_substitute(values).splitlines() if part.strip()]
