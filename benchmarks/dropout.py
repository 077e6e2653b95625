"""Measure a block with dropout whose region recomputes it, keeps it as bits, or keeps what it returned.

python benchmarks/dropout.py                    on the terminal, in about two minutes
python benchmarks/dropout.py --out DIRECTORY    JSON and Markdown as well, named for device and torch version
python benchmarks/dropout.py --rounds 2 --rows 16    a trial

A step is a forward and a backward of a small MLP with two dropouts. All ways run once in each round, in random order.
Every way gives the plain step's gradients, bit for bit, or the script ends with an error.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from _presentation import Record, Table, describe_machine, megabytes, show, with_interval, write
from _timing import SINGLE, Estimate, Timer, estimate, progress, silent, single_calls
from torch import Tensor, nn
from torch.nn import functional

import reactivate
from reactivate import policies

PLAIN, RECOMPUTED, BITS, WHOLE = "plain", "dropout recomputed", "dropout kept as bits", "what dropout returned, kept"
WIDTH = 256
Block = Callable[[Tensor], Tensor]


class Mlp(nn.Module):
    """Two linear layers, with a dropout behind each.

    Args:
        drop: the dropout.
    """

    def __init__(self, drop: Block) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        """Add what it computes to `x`."""
        hidden = self.drop(functional.gelu(self.up(self.norm(x))))
        return x + self.drop(self.down(hidden))


def dropout(x: Tensor) -> Tensor:
    """Drop a tenth."""
    return functional.dropout(x, 0.1)


def blocks() -> dict[str, tuple[Mlp, Block]]:
    """Return for each way the module, and what is called."""
    found: dict[str, tuple[Mlp, Block]] = {}
    for way in (PLAIN, RECOMPUTED, BITS, WHOLE):
        torch.manual_seed(0)
        # Of a function of the user's, what it returned is kept.
        block = Mlp(reactivate.site(dropout, name="drop") if way == WHOLE else dropout)
        policy = {BITS: policies.save_ops("dropout"), WHOLE: policies.save_names("drop")}.get(way)
        found[way] = block, block if way == PLAIN else reactivate.checkpoint(block, policy=policy)
    return found


@dataclass(frozen=True)
class Row:
    """One way.

    Attributes:
        way: its name.
        kept_bytes: between forward and backward.
        over_plain: the time of a step beyond a plain one, as a part of that.
    """

    way: str
    kept_bytes: int
    over_plain: Estimate


@dataclass(frozen=True)
class Results(Record):
    """All of them.

    Attributes:
        rows: one for each way.
        rounds: how often each way ran.
        elements: of the block's input.
        saved: the time of a step with bits below one with dropout recomputed, as a part of a plain step.
    """

    benchmark: ClassVar[str] = "dropout"
    explained: ClassVar[dict[str, object]] = {"method": SINGLE.describe, "clock": "of the processor"}
    rows: tuple[Row, ...]
    rounds: int
    elements: int
    saved: Estimate

    def table(self) -> Table:
        """Return a row for each way."""
        header = "way", "kept, MB", "slower than plain, %"
        rows = [(row.way, megabytes(row.kept_bytes), with_interval(row.over_plain.scaled(100))) for row in self.rows]
        return Table("A step of an MLP with two dropouts", header, rows)

    def note(self) -> str:
        """Say how it was measured."""
        return (
            f"An input of {self.elements // WIDTH:,} x {WIDTH}, float32, one thread of {self.machine['cpu']}, torch "
            f"{self.machine['torch']}; {self.rounds} rounds, {SINGLE.describe}. Bits take "
            f"{with_interval(self.saved.scaled(100))} % of a plain step less than recomputing."
        )


def measure(rows: int, rounds: int, shown: bool = False) -> Results:
    """Measure all ways.

    Args:
        rows: of the input.
        rounds: how often each runs.
        shown: whether to draw how far it is.

    Raises:
        AssertionError: a way has other gradients than the plain step.
    """
    torch.set_num_threads(1)
    found = blocks()
    x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(0), requires_grad=True)
    steps = {way: _step(call, x) for way, (_, call) in found.items()}
    expected = _gradients(steps[PLAIN], found[PLAIN][0], x)
    for way, step in steps.items():
        assert all(map(torch.equal, expected, _gradients(step, found[way][0], x))), way
    timer, track = Timer(x.device, "cpu"), silent
    if shown:
        with progress() as bars:
            times = single_calls(steps, rounds, timer, bars("steps", rounds))
    else:
        times = single_calls(steps, rounds, timer, track("steps", rounds))

    def over(way: str, base: str) -> Estimate:
        return estimate(lambda view: view.over(way, base) / view.level(PLAIN), times, SINGLE)

    results = [
        Row(way, reactivate.explain(call, (x,)).kept_bytes, over(way, PLAIN)) for way, (_, call) in found.items()
    ]
    return Results(describe_machine(x.device), tuple(results), rounds, x.numel(), over(RECOMPUTED, BITS))


def _step(call: Block, x: Tensor) -> Callable[[], None]:
    def step() -> None:
        call(x).square().sum().backward()

    return step


def _gradients(step: Callable[[], None], block: Mlp, x: Tensor) -> list[Tensor]:
    leaves = [x, *block.parameters()]
    for leaf in leaves:
        leaf.grad = None
    torch.manual_seed(1)
    step()
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, help="of each way (default: 200)")
    parser.add_argument("--rows", type=int, default=512, help="of the input (default: 512)")
    parser.add_argument("--out", type=Path, metavar="DIRECTORY", help="where to write the results")
    options = parser.parse_args(arguments)
    results = measure(options.rows, options.rounds, shown=True)
    show([results.table(), results.note()])
    if options.out:
        text = f"{results.table().to_markdown()}\n\n{results.note()}\n"
        write(options.out, results.name, json=results.to_json(), md=text)


if __name__ == "__main__":
    main()
