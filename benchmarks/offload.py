"""Measure storages: how much of their copies a step hides, and what a disk costs on this machine.

python benchmarks/offload.py                    on the terminal, in about three minutes
python benchmarks/offload.py --out DIRECTORY    JSON and Markdown as well, named for device and torch version
python benchmarks/offload.py --rounds 2 --layers 4    a trial
python benchmarks/offload.py --device cuda      the ways to train below, on a GPU and by its clock

*The host, on a simulated device*: its clock runs as the streams of a device would, with copies that take a stated part of the
time of the computation in the same region. What is hidden is what a step does not take longer than without a storage.
The ideal beside it: a copy from the device is hidden as far as the forward of one region goes, a copy to it as far as
its backward, which is three times as long. (A step may hide a little more: its ends compute as well.)

*Ways to train*, on the same device: storages beside what other libraries offer (`_offload_peers`).

*A disk, on this machine*: training steps of one model, plain and with the inputs of its regions in memory and in a file, all
in one process, interleaved; and the bytes per second of the same directory, written and read without a model.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from _presentation import Table, write
from torch import Tensor

import reactivate
from reactivate import policies
from reactivate.storage import Disk, Host

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import _offload_peers
from residual import Residual

PARTS = (0.25, 0.5, 1.0, 1.5, 2.0, 4.0)
"""Time of a copy, as a part of the time in which a region computes."""


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, help="steps of each way (default: 12)")
    parser.add_argument("--layers", type=int, default=8, help="blocks of the model (default: 8)")
    parser.add_argument("--path", help="the directory for the disk (default: a temporary one)")
    parser.add_argument("--out", type=Path, metavar="DIRECTORY", help="where to write the results")
    parser.add_argument("--simulated", action="store_true", help="only print what the simulated device gives, as JSON")
    parser.add_argument("--device", default="cpu", help="cuda: measure ways to train on a GPU, and nothing else")
    parser.add_argument("--clock", default="wall", choices=["wall"], help="time of the wall")
    options = parser.parse_args(arguments)
    if options.simulated:
        print(json.dumps({"hidden": hidden(options.layers), "ways": _offload_peers.on_simulated(options.layers)}))
        return
    if options.device != "cpu":
        on_gpu(torch.device(options.device), options)
        return
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.path) as path:
        disk = on_disk(path, options.rounds, options.layers)
    results = {
        "torch": torch.__version__,
        "layers": options.layers,
        **in_a_process(options.layers),
        "disk": disk,
    }
    print(to_markdown(results))
    if options.out:
        name = f"offload-cpu-torch{torch.__version__.partition('+')[0]}"
        write(options.out, name, json=json.dumps(results, indent=1) + "\n", md=to_markdown(results) + "\n")


# -- the host, on a simulated device ----------------------------------------------------------------------------------


def in_a_process(layers: int) -> dict[str, Any]:
    """Return `hidden` and ways, from a process of its own: torch has one accelerator at most, and cannot forget it."""
    command = [sys.executable, __file__, "--simulated", "--layers", str(layers)]
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    rows: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return rows


def hidden(layers: int) -> list[dict[str, float]]:
    """Return for each part how much of the time of the copies a step hides, and how much it could."""
    import simulated

    def elapsed(policy: Any, copy: float) -> tuple[float, float]:
        """Return the seconds of a step on the device's clock, and those of its copies."""

        def duration(work: Any) -> float:
            return copy if work.kind != "compute" else float("linear" in work.name or "mm" in work.name)

        with simulated.accelerator("eager", 0, duration) as device:
            model = Residual(16, layers).to(device)
            reactivate.apply(model, policy, check="metadata")
            batch = torch.randn(8, 16).to(device)
            start, before = simulated.elapsed(), len(simulated.log())
            model(batch).sum().backward()
            copies = [entry for entry in simulated.log()[before:] if "to_" in entry.name]
            return simulated.elapsed() - start, sum(entry.end - entry.start for entry in copies)

    plain, _ = elapsed(policies.full(), 0.0)
    # Two matrix products of one second in the forward of a region; in its backward these again, and twice as many.
    region = 2.0
    rows = []
    for part in PARTS:
        step, copies = elapsed(policies.full(inputs=Host(least_bytes=0)), part * region)
        rows.append(
            {
                "part": part,
                "hidden": 1 - (step - plain) / copies,
                "ideal": (min(1.0, 1 / part) + min(1.0, 3 / part)) / 2,
            }
        )
    return rows


# -- a GPU --------------------------------------------------------------------------------------------------------------


def on_gpu(device: torch.device, options: argparse.Namespace) -> None:
    """Measure ways to train on a GPU, print them, and write them where that is asked."""
    name = torch.cuda.get_device_name(device).replace(" ", "-")
    results = {"torch": torch.__version__, "layers": options.layers, "device": name}
    results["ways"] = _offload_peers.on_gpu(device, options.layers, options.rounds)
    text = of_ways(f"Ways to train, on {name}", results["ways"], "s").with_title()
    print(text)
    if options.out:
        stem = f"offload-{name}-torch{torch.__version__.partition('+')[0]}"
        write(options.out, stem, json=json.dumps(results, indent=1) + "\n", md=text + "\n")


def of_ways(title: str, rows: list[dict[str, Any]], unit: str) -> Table:
    """Return the table of ways to train."""
    return Table(title, _offload_peers.HEADER, _offload_peers.cells(rows, unit))


# -- a disk, on this machine ------------------------------------------------------------------------------------------


def on_disk(path: str, rounds: int, layers: int) -> dict[str, Any]:
    """Return the seconds of steps and the rates of the directory, each of every round."""
    width, batch = 256, torch.randn(16, 256, 256)
    disks = {
        "disk": Disk(path, least_bytes=0),
        "disk, nothing read ahead": Disk(path, least_bytes=0, ahead=0),
    }
    ways = {"plain": None, "inputs in memory": policies.full()}
    ways |= {name: policies.full(inputs=disk) for name, disk in disks.items()}
    models = {}
    for name, policy in ways.items():
        torch.manual_seed(0)
        models[name] = Residual(width, layers)
        if policy is not None:
            reactivate.apply(models[name], policy, check="metadata")
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    rates: dict[str, list[float]] = {"written": [], "read": []}
    gradients: dict[str, list[Tensor]] = {}
    for _ in range(rounds + 1):
        for name, model in models.items():
            seconds[name].append(_timed(lambda model=model: model(batch).square().mean().backward()))
            gradients[name] = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            for parameter in model.parameters():
                parameter.grad = None
        for kind, rate in raw(path, batch.nbytes * layers).items():
            rates[kind].append(rate)
    for name, found in gradients.items():
        if not all(map(torch.equal, found, gradients["plain"])):
            sys.exit(f"{name}: other gradients than the plain step's")
    counts = {name: disk.traffic.moved + sum(disk.traffic.stayed.values()) for name, disk in disks.items()}
    taken = {name: batch.nbytes * count // (rounds + 1) for name, count in counts.items()}
    return {
        "seconds": {name: values[1:] for name, values in seconds.items()},
        "bytes per second": {name: values[1:] for name, values in rates.items()},
        "bytes taken in by a step": taken,
    }


def raw(path: str, nbytes: int) -> dict[str, float]:
    """Return the bytes per second of a file that is written and read at once, out of the page cache as far as that goes."""
    content = os.urandom(2**20) * (nbytes // 2**20)
    name = os.path.join(path, "raw")

    def written() -> None:
        with open(name, "wb", buffering=0) as file:
            file.write(content)

    def read() -> None:
        with open(name, "rb", buffering=0) as file:
            file.read()

    rates = {"written": len(content) / _timed(written), "read": len(content) / _timed(read)}
    os.unlink(name)
    return rates


def _timed(function: Callable[[], object]) -> float:
    start = perf_counter()
    function()
    return perf_counter() - start


# -- what is printed --------------------------------------------------------------------------------------------------


def to_markdown(results: dict[str, Any]) -> str:
    """Return the tables."""
    hidden_rows = [
        (f"{row['part']:.2f}", f"{100 * row['hidden']:.0f} %", f"{100 * row['ideal']:.0f} %")
        for row in results["hidden"]
    ]
    simulated = Table(
        "Host, on a simulated device: the part of the copies' time that a step hides",
        ("a copy takes, of a region's forward", "hidden", "ideal"),
        hidden_rows,
    )
    disk = results["disk"]
    memory = disk["seconds"]["inputs in memory"]
    rows = []
    for name, seconds in disk["seconds"].items():
        ratios = sorted(one / other for one, other in zip(seconds, memory))
        low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
        rows.append(
            (
                name,
                f"{1000 * statistics.median(seconds):.0f}",
                f"{statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})",
            )
        )
    steps = Table(
        "Disk, on this machine: a step, and its ratio to regions with inputs in memory (quartiles of the rounds)",
        ("way", "ms", "ratio"),
        rows,
    )
    rates = {name: statistics.median(values) for name, values in disk["bytes per second"].items()}
    moved = next(iter(disk["bytes taken in by a step"].values()))
    beside = (
        f"The same directory without a model, through the page cache as `Disk` uses it: {rates['written'] / 1e9:.2f} GB/s "
        f"written, {rates['read'] / 1e9:.2f} GB/s read. A step hands {moved / 1e6:.1f} MB over, of which the "
        "last input stays in memory. Gradients are bitwise those of the plain step. On a GPU: not run (`make bench-gpu`)."
    )
    ways = of_ways("Ways to train, on a simulated device", results["ways"], "s of its clock").with_title()
    return "\n\n".join((simulated.with_title(), ways, steps.with_title(), beside))


if __name__ == "__main__":
    main()
