"""Facts about a compiled program, from XLA's text dumps."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_PRODUCT = re.compile(r' dot\(|custom_call_target="[^"]*(?:matmul|gemm|dot)[^"]*"', re.IGNORECASE)
_DRAW = re.compile(r" = u(?:32|64)\[[^ ]* iota\(")
"""XLA:CPU writes a generator of random numbers out as a hash of a count: one `iota` of unsigned numbers each."""


@dataclass(frozen=True)
class Program:
    """A program before XLA optimises it.

    Attributes:
        barriers: optimisation barriers.
        dots: matrix products.
        draws: generators of random numbers.
    """

    barriers: int
    dots: int
    draws: int


@dataclass(frozen=True)
class Compiled:
    """A program as XLA has compiled it.

    Attributes:
        dots: matrix products.
        draws: generators of random numbers.
        outputs: of the program: what the device keeps of it.
        temp_bytes: preallocated for what is neither input nor output.
        total_bytes: of all buffers: inputs and outputs as well.
    """

    dots: int
    draws: int
    outputs: int
    temp_bytes: int
    total_bytes: int


def read_program(text: str) -> Program:
    """Of the text of a program that torch_xla has traced."""
    return Program(text.count(" opt-barrier("), len(_PRODUCT.findall(text)), text.count(" rng-bit-generator("))


def read_dump(directory: Path) -> Compiled:
    """Of what `--xla_dump_to` wrote.

    Raises:
        RuntimeError: there is not exactly one program: a step was compiled in parts, or twice.
    """
    found = [*directory.glob("*after_optimizations.txt")]
    if len(found) != 1:
        raise RuntimeError(f"Expected the dump of one program in {directory}, found {len(found)}: {found}.")
    text = found[0].read_text(encoding="utf-8")
    buffers = found[0].with_name(found[0].stem + "-buffer-assignment.txt").read_text(encoding="utf-8")
    return Compiled(
        len(_PRODUCT.findall(text)),
        len(_DRAW.findall(text)),
        _outputs(text),
        sum(map(int, re.findall(r"^allocation \d+: size (\d+), preallocated-temp", buffers, re.MULTILINE))),
        int(_found(r"^Total bytes used: (\d+)", buffers)),
    )


def _outputs(text: str) -> int:
    entry = text[text.index("\nENTRY ") :]
    return _found(r"^ +ROOT .* tuple\((.*)\)", entry).count("%")


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.MULTILINE)
    if match is None:
        raise RuntimeError(f"The dump has nothing like {pattern!r}: this version of XLA writes something else.")
    return match[1]
