"""Measure the cost of a checkpointed region, against torch's two variants and torch_remat.

python benchmarks/overhead.py                    every figure on the terminal, in about five minutes
python benchmarks/overhead.py --quick            the same in a minute, with wider intervals
python benchmarks/overhead.py --only fixed       one section
python benchmarks/overhead.py --public           without the private names of torch that have a public way beside them
python benchmarks/overhead.py --out DIRECTORY    JSON, Markdown and a plot as well, named for device and torch version
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from _measure import CLOCKS
from _results import QUICK, Results, Settings, measure
from _sections import SECTIONS, Section
from _tables import to_markdown


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    options = parse(arguments)
    if options.public and "public_ways" not in sys.modules:
        sys.exit(with_public_ways(sys.argv if arguments is None else [sys.argv[0], *arguments]))
    sections = [section for section in SECTIONS if section.name in (options.only or [section.name])]
    settings = replace(QUICK if options.quick else Settings(), clock=options.clock)
    try:
        results = run(sections, settings, options)
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] not in ("rich", "matplotlib"):
            raise
        sys.exit(f"This needs {error.name}: pip install '.[bench]' in a clone. (With --json alone it does without.)")
    if options.json:
        sys.stdout.write(results.to_json())


def run(sections: Sequence[Section], settings: Settings, options: argparse.Namespace) -> Results:
    """Measure, show and write, whatever of these is wanted. What is missing is noticed before a minute is spent."""
    if options.out:
        from _plot import plot  # matplotlib is an extra
    device = torch.device(options.device)
    if options.json:
        results = measure(sections, settings, device)
    else:
        from _terminal import progress, show  # rich is an extra

        with progress() as track:
            results = measure(sections, settings, device, track)
        show(results)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / results.name
        path.with_name(path.name + ".json").write_text(results.to_json(), encoding="utf-8")
        path.with_name(path.name + ".md").write_text(to_markdown(results), encoding="utf-8")
        plot(results, path.with_name(path.name + ".png"))
    return results


def with_public_ways(command: Sequence[str]) -> int:
    """Run this script in another process, in which `public_ways` is imported before the package."""
    start = "import sys, runpy, public_ways; sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"
    tests = str(Path(__file__).parents[1] / "tests")
    path = os.pathsep.join(filter(None, (tests, str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, "-c", start, *command], check=False, env={**os.environ, "PYTHONPATH": path}
    ).returncode


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Checked options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [section.name for section in SECTIONS]
    parser.add_argument("--only", choices=names, nargs="+", metavar="SECTION", help=", ".join(names))
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument(
        "--device", default="cpu", help="where the tensors are; what is timed is the host (default: cpu)"
    )
    parser.add_argument(
        "--public", action="store_true", help="with public names of torch only, where there is such a way"
    )
    parser.add_argument("--clock", choices=CLOCKS, default="cpu", help="time of the processor (default) or of the wall")
    parser.add_argument("--out", type=Path, metavar="DIRECTORY", help="where to write the results")
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of tables")
    options = parser.parse_args(arguments)
    if options.out and options.only:
        parser.error("--out writes results of every section; leave --only out.")
    return options


if __name__ == "__main__":
    main()
