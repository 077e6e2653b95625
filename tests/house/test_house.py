"""The house: what may import what, what is public, and that every example in a docstring runs."""

from __future__ import annotations

import ast
import doctest
import importlib
import subprocess
import sys
from functools import partial
from pathlib import Path

import torch
from house import MODULES, PACKAGE, PLANNER_FLOORS, floor_of, imports_of, page
from several import check_each

import reactivate
from reactivate.dropin import deepspeed


def test_imports_point_down() -> None:
    above = [
        f"{name} imports {other}, which stands above it"
        for name in MODULES
        for other in imports_of(name)
        if floor_of(other) > floor_of(name)
    ]
    assert not above, "\n".join(above)


BELOW_GUARDS = ("_snapshot", "_passes", "_storing", "_saved_calls", "_region", "_xla")


def test_regions_are_given_their_guards() -> None:
    """The options of a region bring the guards, since a user can leave some out: no room below knows which there are."""
    for room in BELOW_GUARDS:
        names = [name for name in MODULES if name.startswith(f"reactivate.{room}.")]
        assert len(names) > 3
        for name in names:
            assert not [other for other in imports_of(name) if other.startswith("reactivate.guards")], name


def test_imports_inside_the_planner_point_down() -> None:
    """From a call to the step that it is about: api, planner, search, table, candidates, step."""
    floors = {name: floor for floor, row in enumerate(PLANNER_FLOORS) for name in row}
    inside = [name for name in MODULES if name.startswith("reactivate.planner.")]
    assert {name.split(".")[2] for name in inside} == set(floors)
    for name in inside:
        for other in imports_of(name):
            if other.startswith("reactivate.planner."):
                assert floors[other.split(".")[2]] <= floors[name.split(".")[2]], f"{name} imports {other}"


def test_there_is_no_cycle() -> None:
    """Among all files, also those of one room: each can be read, and changed, after those that it imports."""
    graph = {name: imports_of(name) - {name} for name in MODULES}
    done: set[str] = set()
    while len(done) < len(graph):
        free = {name for name, others in graph.items() if name not in done and not (others & graph.keys()) - done}
        assert free, f"these import one another: {sorted(graph.keys() - done)}"
        done |= free


def test_no_two_classes_share_a_name() -> None:
    """But for what hosts call by one name, a class for each of them; and a protocol shows less of a class by its name."""
    homes: dict[str, set[str]] = {}
    for name in MODULES:
        for item in vars(importlib.import_module(name)).values():
            is_own = isinstance(item, type) and item.__module__ == name
            if is_own and not issubclass(item, torch.autograd.Function) and not getattr(item, "_is_protocol", False):
                homes.setdefault(item.__name__.strip("_"), set()).add(name)
    shared = {name: sorted(modules) for name, modules in homes.items() if len(modules) > 1}
    assert shared.keys() <= {"ActivationCheckpointing", "CheckpointFunction"}, shared


def test_all_is_the_truth() -> None:
    modules = [importlib.import_module(name) for name in ("reactivate", *MODULES)]
    missing = [
        f"{module.__name__}.{public}"
        for module in modules
        for public in getattr(module, "__all__", ())
        if not hasattr(module, public)
    ]
    assert not missing


def test_examples_run(whole_heap: None) -> None:
    def run(name: str) -> None:
        results = doctest.testmod(importlib.import_module(name), extraglobs={"torch": torch, "reactivate": reactivate})
        deepspeed.get_cuda_rng_tracker.cache_clear()  # each tracker there is makes the notes of all regions larger
        assert results.failed == 0, f"{results.failed} of {results.attempted} examples: see the output"

    check_each({name: partial(run, name) for name in ("reactivate", *MODULES)})


def test_the_public_functions_have_examples() -> None:
    for name in reactivate.__all__:
        value = getattr(reactivate, name)
        if callable(value) and not isinstance(value, type):
            assert ">>>" in (value.__doc__ or ""), f"{name} has no example"


EVERYTHING = "from reactivate import *"
FIRST_REGION = "import reactivate; reactivate.checkpoint(torch.nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()"


def brought_in(statement: str) -> list[str]:
    """The modules that a statement imports in a new process that has imported torch."""
    code = f"import sys, torch; before = set(sys.modules); {statement}; print(*sorted(set(sys.modules) - before))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def test_import_brings_in_little_and_a_first_region_what_it_runs_on() -> None:
    """The names of the package are imported when they are used: an import costs by the module."""
    assert len(brought_in("import reactivate")) <= 20
    above = ("_model", "_inspect", "planner", "report", "recipe", "dropin", "integrations", "storage")
    found = brought_in(FIRST_REGION)
    assert {"reactivate._region.recompute", "reactivate._snapshot.walk"} <= set(found)
    assert not [name for name in found if name.startswith(tuple(f"reactivate.{room}" for room in above))]


INSPECTED = """
import reactivate
net, x = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), torch.ones(1, 2)
reactivate.plan(net, x, budget="100%")
reactivate.explain(net, x)
"""


def test_planning_and_inspecting_bring_in_no_compiler() -> None:
    """torch imports its own where a mode of ops is first told of one, and sympy for some backwards: that takes seconds."""
    found = brought_in(f"exec({INSPECTED!r})")
    assert {"reactivate.planner.api", "reactivate._inspect.explain"} <= set(found)
    assert not [name for name in found if name.startswith(("torch._dynamo", "torch._inductor", "sympy"))]


def test_everything_brings_in_torch_and_nothing_else() -> None:
    """Imports make an import slow: of these there is the standard library and this package."""
    found = brought_in(EVERYTHING)
    assert {"reactivate.planner.api", "reactivate.integrations.recipe"} <= set(found)
    assert {name.partition(".")[0] for name in found} - set(sys.stdlib_module_names) <= {"reactivate", "torch"}
    assert not [name for name in found if name.startswith(("torch._dynamo", "torch._inductor", "torch.distributed"))]


def test_what_type_checkers_see_is_what_a_program_gets() -> None:
    [block] = [
        node.body
        for node in ast.parse(Path(str(reactivate.__file__)).read_text(encoding="utf-8")).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    seen = {alias.name: str(node.module) for node in block if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert sorted(seen) == reactivate.__all__
    for name, module in seen.items():
        whole = importlib.import_module(f"reactivate.{name}") if module == "reactivate" else None
        assert getattr(reactivate, name) is (whole or getattr(importlib.import_module(module), name)), name


def test_names_are_listed_before_they_are_imported() -> None:
    """By `dir`, as editors complete them, and by a first use inside of a compiled function."""
    code = """
import torch, reactivate
assert "plan" not in vars(reactivate) and {"plan", "policies", "__version__"} <= set(dir(reactivate))

@torch.compile(fullgraph=True, backend="aot_eager")
def step(x):
    return reactivate.checkpoint(torch.tanh)(x).sum()

x = torch.randn(3, requires_grad=True)
step(x).backward()
assert torch.equal(x.grad, torch.autograd.grad(torch.tanh(x).sum(), x)[0])
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_dir_lists_what_is_offered() -> None:
    assert set(dir(reactivate)) == {*reactivate.__all__, "__version__"}
    for room in ("policies", "storage", "guards", "errors", "dropin", "integrations", "loss"):
        assert dir(getattr(reactivate, room)) == sorted(getattr(reactivate, room).__all__), room


def test_the_page_of_the_house_is_as_the_house_is() -> None:
    found = (Path(__file__).parents[2] / "docs" / "house.md").read_text(encoding="utf-8")
    assert found == page() + "\n", "write it again: python tests/house.py > docs/house.md"


TESTS = Path(__file__).parents[1]


def test_no_file_is_too_long_to_read() -> None:
    """One object is one file: a limit below the longest of them would make two files that are read as one."""
    for room, count_of_files in ((PACKAGE, 100), (TESTS, 200)):
        lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in room.rglob("*.py")}
        assert len(lines) > count_of_files
        assert not {str(path): count for path, count in lines.items() if count > 500}
