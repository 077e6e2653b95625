"""The house: what may import what, what is public, and that every example in a docstring runs."""

from __future__ import annotations

import ast
import doctest
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import reactivate

PACKAGE = Path(reactivate.__file__).parent
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages([str(PACKAGE)], "reactivate.")
    if not module.name.endswith("__main__")
)

# From the ground up: what stands in a row may import what stands in it or above.
FLOORS = [
    ["reactivate.errors", "reactivate._types", "reactivate._nearest"],
    ["reactivate._torch", "reactivate._standin", "reactivate._view", "reactivate.storage"],
    ["reactivate._backends", "reactivate.policies", "reactivate._blocks", "reactivate.report.table"],
    ["reactivate._arguments"],
    ["reactivate._state"],
    [
        *(f"reactivate.planner.{name}" for name in ("budget", "devices", "prediction", "progress", "roofline")),
        *(f"reactivate.planner.{name}" for name in ("bound", "chain", "solve", "units", "treatments")),
    ],
    ["reactivate.guards", "reactivate._in_graph"],
    ["reactivate._engine"],
    ["reactivate._in_jax"],
    ["reactivate._checkpoint", "reactivate._site"],
    ["reactivate._apply", "reactivate._cache_watch"],
    ["reactivate._verify", "reactivate._explanation", "reactivate._fake", "reactivate._explain"],
    ["reactivate.planner", "reactivate.report.plan_table", "reactivate.report.planned"],
    ["reactivate._plan"],
    ["reactivate.report"],
    ["reactivate.dropin", "reactivate.integrations", "reactivate.recipe"],
    ["reactivate"],
    ["reactivate.cli", "reactivate._doctor"],
]


def floor_of(name: str) -> int:
    """Return how high `name` stands: as high as the longest room name that it starts with."""
    best = max((room for row in FLOORS for room in row if name == room or name.startswith(room + ".")), key=len)
    return next(index for index, row in enumerate(FLOORS) if best in row)


def imports_of(name: str) -> set[str]:
    module = importlib.import_module(name)
    found = set()
    for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("reactivate"):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in MODULES else str(node.module))
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("reactivate")}
    return found


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_down(name: str) -> None:
    for other in imports_of(name):
        assert floor_of(other) <= floor_of(name), f"{name} imports {other}, which stands above it"


def test_the_engine_is_given_its_guards() -> None:
    engine = [name for name in MODULES if name.startswith("reactivate._engine.")]
    assert len(engine) > 5
    for name in engine:
        assert not [other for other in imports_of(name) if other.startswith("reactivate.guards")]


def test_there_is_no_cycle() -> None:
    graph = {name: imports_of(name) - {name} for name in MODULES}
    done: set[str] = set()
    while len(done) < len(graph):
        free = {name for name, others in graph.items() if name not in done and not (others & graph.keys()) - done}
        assert free, f"these import one another: {sorted(graph.keys() - done)}"
        done |= free


@pytest.mark.parametrize("name", ["reactivate", *MODULES])
def test_all_is_the_truth(name: str) -> None:
    module = importlib.import_module(name)
    for public in getattr(module, "__all__", ()):
        assert hasattr(module, public)


@pytest.mark.parametrize("name", ["reactivate", *MODULES])
def test_examples_run(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name), extraglobs={"torch": torch, "reactivate": reactivate})
    assert results.failed == 0


def test_the_public_functions_have_examples() -> None:
    for name in reactivate.__all__:
        value = getattr(reactivate, name)
        if callable(value) and not isinstance(value, type):
            assert ">>>" in (value.__doc__ or ""), f"{name} has no example"


def test_import_brings_in_torch_and_nothing_else() -> None:
    """Imports make an import slow: of these there is the standard library and this package."""
    code = (
        "import sys, torch; before = set(sys.modules); import reactivate;"
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert set(found) - set(sys.stdlib_module_names) <= {"reactivate", "torch"}


def test_import_brings_in_few_modules_of_torch() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import reactivate;"
        "print(*sorted(name for name in set(sys.modules) - before if name.startswith('torch.')))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not [name for name in found if name.startswith(("torch._dynamo", "torch._inductor", "torch.distributed"))]
