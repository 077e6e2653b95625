"""Measure what XLA's compiler makes of checkpointed regions, against torch's and torch_xla's own; no accelerator needed.

python benchmarks/xla.py                         every model on the terminal, in about ten minutes
python benchmarks/xla.py --models mlp,open       some of them
python benchmarks/xla.py --out DIRECTORY         a JSON file as well
python benchmarks/xla.py --out DIRECTORY --page PAGE    and a page of the docs of the JSON file there
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

from _options import models_among, refuse_page_without_results
from _xla_models import MODELS
from _xla_page import to_markdown
from _xla_results import Results, measure, read
from _xla_ways import WAYS


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    options = parse(arguments)
    if options.models:
        if find_spec("torch_xla") is None:
            sys.exit("This needs torch_xla: pip install torch_xla, with the version of torch that goes with it.")
        results = _run(options.models, quietly=options.json)
        if options.json:
            sys.stdout.write(results.to_json())
        if options.out:
            write(results, options.out)
    if options.page:
        write_page(options.out, options.page)


def write(results: Results, directory: Path) -> None:
    """The results as JSON."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{results.name}.json").write_text(results.to_json(), encoding="utf-8")


def write_page(directory: Path, page: Path) -> None:
    """Of the results that are in the directory; where there are those of several versions of torch, of the last."""
    page.write_text(to_markdown(read(max(directory.glob("xla-*.json")))), encoding="utf-8")


def _run(models: Iterable[str], quietly: bool) -> Results:
    """Measure, with progress and tables unless `quietly`."""
    if quietly:
        return measure(models, WAYS)
    try:
        from _terminal import progress
        from _xla_terminal import show
    except ImportError as error:
        sys.exit(f"This needs {error.name}: pip install '.[bench]' in a clone. (With --json it does without.)")
    with progress() as track:
        results = measure(models, WAYS, track=track)
    show(results)
    return results


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Checked options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = models_among(MODELS)
    parser.add_argument("--models", type=models, default=[*MODELS], help=f"of {', '.join(MODELS)}; '' for none")
    parser.add_argument("--out", type=Path, metavar="DIRECTORY", help="where to write the results")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write a page about the results in DIRECTORY")
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of tables")
    options = parser.parse_args(arguments)
    refuse_page_without_results(parser, options)
    if options.out and 0 < len(options.models) < len(MODELS):
        parser.error("--out writes results of every model: leave --models out")
    return options


if __name__ == "__main__":
    main()
