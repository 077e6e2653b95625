"""A plugin for pytest: every private name of torch that has a public way beside it is taken to do something else.

`make test-public` runs the tests with it: the same bits, slower. `python tests/public_ways.py SCRIPT ARGUMENT ...` runs a
script so.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

NAME = "reactivate._torch.private_api"


class _Finder(importlib.abc.MetaPathFinder):
    """Loads the module that chooses between two ways as it is, and has it choose the public one."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != NAME:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        assert spec is not None and spec.loader is not None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            prefer_public_ways(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def prefer_public_ways(module: Any) -> None:
    """Have `resolve_private` and `layout` find that a private name does something else, where there is a public way."""
    resolve_private = module.resolve_private

    def choose(*names: str, probe: Callable[..., bool] | None = None, public: Any = None, **others: Any) -> Any:
        found = probe if public is None else lambda *names: False
        return resolve_private(*names, probe=found, public=public, **others)

    module.resolve_private = choose
    module.layout = lambda what: lambda find_it: lambda: None


sys.meta_path.insert(0, _Finder())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        marker = item.get_closest_marker("fast_ways")
        if marker is not None:
            item.add_marker(pytest.mark.skip(reason=marker.args[0]))


if __name__ == "__main__":
    sys.argv.pop(0)
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
