"""Bytes that each rank keeps of the inputs of regions with `storage.Sharded`, on processes of gloo.

python benchmarks/sharded.py                    on the terminal, in half a minute
python benchmarks/sharded.py --out DIRECTORY    JSON and Markdown as well, named for device and torch version

Each rank trains the same model on the same batch, plain and with the inputs of its blocks sharded, and counts the bytes that
it keeps between forward and backward. The sizes are chosen so that some cannot be divided.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _presentation import Table, describe_machine, write
from torch import Tensor, nn

import reactivate
from reactivate import policies
from reactivate.storage import Sharded

RANKS = (1, 2, 4)
INPUTS = [(torch.float32, (8, 128, 64)), (torch.bfloat16, (3, 7, 33))]
LAYERS = 6


class Model(nn.Module):
    """Blocks behind a layer that makes their input an activation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def measure() -> list[dict[str, Any]]:
    """Return what this rank keeps, for each shape."""
    rows = []
    for dtype, shape in INPUTS:
        torch.manual_seed(0)
        model, batch = Model(shape[-1]).to(dtype), torch.randn(shape, dtype=dtype)
        model(batch).square().mean().backward()
        plain = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        storage = Sharded(least_bytes=0)
        before = storage.traffic.moved_bytes
        reactivate.apply(model, policies.full(inputs=storage))
        loss = model(batch).square().mean()
        kept = storage.used_bytes
        loss.backward()
        is_same = all(map(torch.equal, plain, [parameter.grad for parameter in model.parameters()]))
        whole = storage.traffic.moved_bytes - before
        name = f"{str(dtype).removeprefix('torch.')} {list(shape)}"
        rows.append({"shape": name, "ranks": dist.get_world_size(), "whole": whole, "kept": kept, "is_same": is_same})
    return rows


def on_ranks(count: int) -> list[dict[str, Any]]:
    """Return what the first of so many ranks keeps; all keep the same."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {**os.environ}
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, __file__, "--store", f"{directory}/store", "--ranks", str(count), "--rank"]
        processes = [
            subprocess.Popen([*command, str(rank)], env=environment, stdout=subprocess.PIPE, text=True)
            for rank in range(count)
        ]
        found = [json.loads(process.communicate()[0]) for process in processes]
    assert all(rows == found[0] for rows in found), found
    return found[0]  # type: ignore[no-any-return]


def to_markdown(rows: list[dict[str, Any]]) -> str:
    """Return the table."""
    cells = [
        (
            row["shape"],
            str(row["ranks"]),
            f"{row['whole']:,}",
            f"{row['kept']:,}",
            f"{row['kept'] * row['ranks'] - row['whole']:,}",
            "yes" if row["is_same"] else "no",
        )
        for row in rows
    ]
    header = ("input of a block", "ranks", "inputs, bytes", "each rank keeps", "padding on all ranks", "same gradients")
    return Table(f"Inputs of {LAYERS} blocks, sharded", header, cells).with_title()


def main() -> None:
    """Measure, or be one of the ranks that are measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a directory for JSON and Markdown")
    for name in ("--store", "--rank", "--ranks"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.store is not None:
        store = dist.FileStore(given.store, int(given.ranks))
        dist.init_process_group("gloo", store=store, rank=int(given.rank), world_size=int(given.ranks))
        print(json.dumps(measure()))
        dist.barrier()
        dist.destroy_process_group()
        return
    rows = [row for count in RANKS for row in on_ranks(count)]
    rows.sort(key=lambda row: row["shape"], reverse=True)  # stays in the order of the ranks
    print(to_markdown(rows))
    if given.out is not None:
        machine = describe_machine(torch.device("cpu"))
        name = f"sharded-cpu-torch{torch.__version__.partition('+')[0]}"
        record = json.dumps({"machine": machine, "rows": rows}, indent=1)
        write(given.out, name, json=record + "\n", md=to_markdown(rows) + "\n")


if __name__ == "__main__":
    main()
