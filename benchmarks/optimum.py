"""Compare the choices of a plan with the exact optimum over single ops, on the blocks of a GPT and on a stage of a ResNet.

python benchmarks/optimum.py                     on the terminal, in about two minutes
python benchmarks/optimum.py --out DIRECTORY     JSON and Markdown as well, named for device and torch version
python benchmarks/optimum.py --json              JSON on the terminal
python benchmarks/optimum.py gpt --small         a trial

The optimum keeps or recomputes the result of each op (see `_optimum_graph`), with dead ops left out, masks as bits, and no
regard to what a recomputation itself needs: no engine reaches it. A plan chooses among the candidates of each block, here
without regard to that either. Both have the same measured times of ops. For budgets between nothing kept but the input, and
all kept, a number is the time of recomputation as a part of that of recomputing everything.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from _optimum_graph import Choice, frontier, graph_of, least_seconds, together, undominated
from _presentation import Record, Table, describe_machine, show, write
from torch import Tensor, nn
from torch.nn import functional

from reactivate.planner.candidates import Candidate, list_candidates
from reactivate.planner.planner import Planner
from reactivate.planner.step import TrainingStep
from reactivate.planner.target import find_target

SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


class GptBlock(nn.Module):
    """A block of GPT-2, with dropout.

    Args:
        dim: its width.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.drop1, self.drop2 = nn.Dropout(0.1), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Add attention and MLP to `x`, of (batch, length, dim)."""
        query, key, value = (
            part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.drop1(self.out(seen.transpose(1, 2).flatten(2)))
        return x + self.drop2(self.down(functional.gelu(self.up(self.norm2(x)))))


class Bottleneck(nn.Module):
    """A block of a ResNet.

    Args:
        channels: of its input and result.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        inner = channels // 4
        self.conv1, self.norm1 = nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv2, self.norm2 = nn.Conv2d(inner, inner, 3, padding=1, bias=False), nn.BatchNorm2d(inner)
        self.conv3, self.norm3 = nn.Conv2d(inner, channels, 1, bias=False), nn.BatchNorm2d(channels)
        self.act1, self.act2, self.act3 = nn.ReLU(), nn.ReLU(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Return what is made of `x`, of (batch, channels, height, width)."""
        made = self.act2(self.norm2(self.conv2(self.act1(self.norm1(self.conv1(x))))))
        return self.act3(self.norm3(self.conv3(made)) + x)


class Blocks(nn.Module):
    """Equal blocks behind a layer that makes their input.

    Args:
        first: that layer.
        blocks: the blocks.
    """

    def __init__(self, first: nn.Module, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.first, self.blocks = first, nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        """Run them one after the other."""
        return self.run(self.first(x))

    def run(self, x: Tensor) -> Tensor:
        """Run the blocks."""
        for block in self.blocks:
            x = block(x)
        return x


def gpt(small: bool) -> tuple[Blocks, Tensor]:
    """Return two blocks of a GPT, and the argument."""
    dim, batch, length = (32, 2, 16) if small else (256, 8, 256)
    return Blocks(nn.Linear(dim, dim), [GptBlock(dim), GptBlock(dim)]), torch.randn(batch, length, dim)


def resnet(small: bool) -> tuple[Blocks, Tensor]:
    """Return a stage of three blocks of a ResNet, and the argument."""
    channels, size = (16, 8) if small else (256, 28)
    stage = Blocks(nn.Conv2d(3, channels, 1), [Bottleneck(channels) for _ in range(3)])
    return stage, torch.randn(2 if small else 8, 3, size, size)


MODELS: dict[str, tuple[str, Callable[[bool], tuple[Blocks, Tensor]]]] = {
    "gpt": ("two blocks of a GPT", gpt),
    "resnet": ("a stage of a ResNet", resnet),
}


@dataclass(frozen=True)
class Row:
    """A budget.

    Attributes:
        share: of what is held where all is kept, above what a plan holds at least.
        held_bytes: the budget.
        fixed, planned, optimum: the time of recomputation, as a part of that of everything: of the fixed candidates, of all
            candidates of a plan, and of the optimum over ops.
    """

    share: float
    held_bytes: int
    fixed: float
    planned: float
    optimum: float


@dataclass(frozen=True)
class Compared:
    """A model.

    Attributes:
        model: what it is.
        rows: the budgets.
        ops: how many the optimum decides on.
        recomputed_seconds: the time of recomputing everything.
    """

    model: str
    rows: tuple[Row, ...]
    ops: int
    recomputed_seconds: float

    def table(self) -> Table:
        """Return a row for each budget."""
        header = "held, MB", "fixed candidates, %", "all candidates, %", "optimum over ops, %", "distance, points"
        rows = [
            (
                f"{row.held_bytes / 1e6:.1f} ({100 * row.share:.0f} %)",
                *(f"{100 * value:.1f}" for value in (row.fixed, row.planned, row.optimum, row.planned - row.optimum)),
            )
            for row in self.rows
        ]
        return Table(f"Time of recomputation at equal bytes, {self.model}", header, rows)

    def note(self) -> str:
        """Say how far the choices are from the optimum, in the mean."""
        before, after = (
            100 * sum(getattr(row, name) - row.optimum for row in self.rows) / len(self.rows)
            for name in ("fixed", "planned")
        )
        name = f"{self.model[0].upper()}{self.model[1:]}"
        return (
            f"{name}, {self.ops} ops: in the mean of these budgets the fixed candidates are {before:.1f} points of the whole "
            f"recomputation ({1000 * self.recomputed_seconds:.0f} ms) above the optimum, all candidates {after:.1f}."
        )


@dataclass(frozen=True)
class Results(Record):
    """All of them.

    Attributes:
        models: one for each.
    """

    benchmark: ClassVar[str] = "optimum"
    models: tuple[Compared, ...]

    def blocks(self) -> list[Table | str]:
        """Return a table and a sentence for each model."""
        return [block for model in self.models for block in (model.table(), model.note())]


def compare(name: str, small: bool = False) -> Compared:
    """Compare the choices of a plan with the optimum.

    Args:
        name: of the model.
        small: for a trial.
    """
    torch.manual_seed(0)
    words, make = MODELS[name]
    model, x = make(small)
    step = TrainingStep(model, (x,), None, lambda output: output.square().mean())
    planner = Planner(step, find_target(model, (x,), {}, None), None, lambda _: None).prepare()
    with torch.enable_grad():
        given = model.first(x).detach().requires_grad_()
        graph = graph_of(model.run, given, [*model.parameters(), *model.buffers()], planner.profile.costs)
    result_bytes = given.nbytes  # as large as what comes out, which is there anyway
    fixed, planned = ([_choices(planner, path, is_fixed) for path in planner.units] for is_fixed in (True, False))
    exact = frontier(graph)
    chosen = {
        name: [Choice(choice.held_bytes - result_bytes, choice.seconds) for choice in together(menus)]
        for name, menus in (("fixed", fixed), ("planned", planned))
    }
    low, high = chosen["fixed"][0], chosen["fixed"][-1].held_bytes
    rows = []
    for share in SHARES:
        budget = low.held_bytes + share * (high - low.held_bytes)
        found = {**chosen, "optimum": exact}
        rows.append(
            Row(share, round(budget), **{key: least_seconds(item, budget) / low.seconds for key, item in found.items()})
        )
    return Compared(words, tuple(rows), len(graph.ops), low.seconds)


def _choices(planner: Planner, path: str, is_fixed: bool) -> list[Choice]:
    """Return the candidates of a block: what each holds, and how long it recomputes."""
    functions = next(call.functions for call in planner.plain.calls[0] if call.path == path)
    menu = list_candidates(planner.units[path], frozenset(functions)) if is_fixed else planner.menus[path]
    return undominated(_choice(planner, path, item) for item in menu)


def _choice(planner: Planner, path: str, candidate: Candidate) -> Choice:
    trace, reading = planner.attempt({path: candidate})
    seconds = sum(op.seconds for op in trace.ops if op.is_recomputation)
    return Choice(reading.calls[reading.paths.index(path)].held_bytes, seconds)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=[*MODELS], help=f"of {', '.join(MODELS)} (default: all)")
    parser.add_argument("--small", action="store_true", help="small tensors, for a trial")
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    parser.add_argument("--out", type=Path, metavar="DIRECTORY", help="where to write the results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    machine = describe_machine(torch.device("cpu"))
    results = Results(machine, tuple(compare(name, options.small) for name in options.models))
    if options.json:
        print(results.to_json(), end="")
    else:
        show(results.blocks())
    if options.out:
        text = "\n\n".join(block if isinstance(block, str) else block.with_title() for block in results.blocks())
        write(options.out, results.name, json=results.to_json(), md=f"{text}\n")


if __name__ == "__main__":
    main()
