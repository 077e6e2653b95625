"""Measure what `reactivate.plan` brings in equal memory, against other checkpointing and torch's own budgets.

python benchmarks/frontier.py                         every model on the terminal, in about ten minutes
python benchmarks/frontier.py --models gpt            one of them
python benchmarks/frontier.py --compile gpt           with torch.compile among the peers of this one
python benchmarks/frontier.py --out DIRECTORY         a JSON file and a plot a model as well
python benchmarks/frontier.py --out DIRECTORY --page PAGE    and a page of the docs of all the JSON files there
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "6")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the profiler tells of releases that it saw no beginning of

import torch

try:
    from _frontier_measure import measure_model
    from _frontier_models import MODELS
    from _frontier_page import to_markdown
    from _frontier_plot import plot
    from _frontier_results import Frontier, Settings, read
    from _frontier_sac_ilp import obstacles
    from _frontier_terminal import show
    from _measure import CLOCKS
    from _options import models_among, refuse_page_without_results
    from _results import Track, silent
    from _terminal import progress
except ImportError as error:
    sys.exit(f"This needs {error.name}: pip install '.[bench]' in a clone")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    options = parse(arguments)
    settings = replace(Settings(), seconds=options.seconds, compiled=tuple(options.compile), clock=options.clock)
    device = torch.device(options.device)
    if options.json:
        found = [*measure(options.models, settings, device, silent, options.out)]
        sys.stdout.write(json.dumps([json.loads(frontier.to_json()) for frontier in found], indent=1) + "\n")
    elif options.models:
        with progress() as track:
            found = [*measure(options.models, settings, device, track, options.out)]
        for frontier in found:
            show(frontier)
    if options.page:
        write_page(options.out, options.page)


def measure(
    models: Sequence[str], settings: Settings, device: torch.device, track: Track = silent, out: Path | None = None
) -> Iterator[Frontier]:
    """Each of `models`, one after the other; what is found of one is written before the next begins."""
    sac_ilp = obstacles(device)
    for name in models:
        found = measure_model(name, settings, device, track, sac_ilp)
        if out is not None:
            write(found, out)
        yield found


def write(found: Frontier, directory: Path) -> None:
    """The results as JSON, and the plot."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / found.name
    path.with_name(path.name + ".json").write_text(found.to_json(), encoding="utf-8")
    plot(found, path.with_name(path.name + ".png"))


def write_page(directory: Path, page: Path) -> None:
    """Of all results that are in the directory."""
    frontiers = [read(path) for path in directory.glob("frontier-*.json")]
    order = list(MODELS)
    page.write_text(
        to_markdown(sorted(frontiers, key=lambda found: (found.machine["device"] != "cpu", order.index(found.model)))),
        encoding="utf-8",
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Checked options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = models_among(MODELS)
    parser.add_argument("--models", type=models, default=[*MODELS], help=f"of {', '.join(MODELS)}; '' for none")
    parser.add_argument(
        "--compile", type=models, default=[], metavar="MODELS", help="those with compiled peers: minutes for each"
    )
    parser.add_argument("--seconds", type=float, default=Settings().seconds, help="of rounds for a model (%(default)g)")
    parser.add_argument("--device", default="cpu", help="where the tensors are (default: cpu)")
    parser.add_argument("--clock", choices=CLOCKS, default="cpu", help="time of the processor (default) or of the wall")
    parser.add_argument("--out", type=Path, metavar="DIRECTORY", help="where to write results and plots")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write a page about all results in DIRECTORY")
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of tables")
    options = parser.parse_args(arguments)
    if "llama" in options.models and find_spec("transformers") is None:
        parser.error(
            "llama needs transformers: pip install '.[models]' in a clone, or leave it out: --models gpt,resnet"
        )
    refuse_page_without_results(parser, options)
    return options


if __name__ == "__main__":
    main()
