"""Options that the command lines of several benchmarks share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection


def models_among(known: Collection[str]) -> Callable[[str], list[str]]:
    """Return a parser of `--models`: names with commas between them, each one of `known`."""

    def read(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"no model {', '.join(unknown)}; there are {', '.join(known)}")
        return names

    return read


def refuse_page_without_results(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """A page is made of results that are in a directory."""
    if options.page and not options.out:
        parser.error("--page is about the results in a directory: give --out as well")
