"""The map of the house, from its files: rooms, what stands in them, and what they import.

python tests/house.py > docs/house.md
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import reactivate
from reactivate._text.table import Column, Row, Table

PACKAGE = Path(reactivate.__file__).parent
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages([str(PACKAGE)], "reactivate.")
    if not module.name.endswith("__main__")
)

# From the ground up: what stands in a row may import what stands in it or above.
FLOORS = [
    ["reactivate.errors", "reactivate._types", "reactivate._text", "reactivate._bits", "reactivate._setting"],
    ["reactivate._torch", "reactivate._modules", "reactivate.storage", "reactivate._loss"],
    ["reactivate._backends", "reactivate._xla"],
    ["reactivate.policies"],
    ["reactivate._snapshot"],
    ["reactivate._passes", "reactivate.guards"],
    ["reactivate._storing"],
    ["reactivate._saved_calls"],
    ["reactivate._region"],
    ["reactivate._compilers"],
    ["reactivate._options", "reactivate._run", "reactivate._checkpoint", "reactivate._site"],
    ["reactivate._model"],
    ["reactivate._inspect"],
    ["reactivate.planner"],
    ["reactivate.report"],
    ["reactivate.integrations.recipe"],
    ["reactivate.dropin", "reactivate.integrations"],
    ["reactivate"],
    ["reactivate.cli", "reactivate._doctor", "reactivate._byte_gpt"],
]


def floor_of(name: str) -> int:
    """Return how high `name` stands: as high as the longest room name that it starts with."""
    best = max((room for row in FLOORS for room in row if name == room or name.startswith(room + ".")), key=len)
    return next(index for index, row in enumerate(FLOORS) if best in row)


# The same inside of the planner.
PLANNER_FLOORS = [
    ["step", "units", "solve", "budget", "progress", "shapes"],
    ["trace", "candidates"],
    ["contents"],
    ["cost", "target"],
    [
        "prediction",
        "infeasible",
        "text",
        "distributed",
        "shared_calls",
        "guarded_ranks",
        "offload",
        "watches",
        "compiled",
        "runner",
    ],
    ["table", "plan"],
    ["search", "containers", "call_values"],
    ["head", "recorded_calls"],
    ["simulator", "compiled_steps"],
    ["planner"],
    ["adaptive", "maximize"],
    ["api", "tighter", "memory_guard"],
]


HEAD = """\
# The house

Every room of the package with its files, and the first line of each, from the ground up: what stands on a floor imports from
that floor and those below it. `python tests/house.py > docs/house.md` writes this page, and a test holds it to the code.
"""


def imports_of(name: str) -> set[str]:
    """Return the modules of the package that a module imports, but for those of its room that it names in types alone."""
    module = importlib.import_module(name)
    found = set()
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    for_types = {node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)}
    of_room = {node for node in for_types if str(node.module).rpartition(".")[0] == room_of(name)}
    for node in set(ast.walk(tree)) - of_room:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("reactivate"):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in MODULES else str(node.module))
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("reactivate")}
    return found


def is_room(name: str) -> bool:
    return hasattr(importlib.import_module(name), "__path__")


def room_of(name: str) -> str:
    """Return the room that a module stands in; a room stands in itself."""
    return name if is_room(name) else name.rpartition(".")[0]


def rooms() -> list[str]:
    """Return all rooms, from the ground up."""
    return sorted(["reactivate", *filter(is_room, MODULES)], key=lambda room: (floor_of(room), room))


def files_of(room: str) -> list[str]:
    """Return the modules that stand in a room, itself first."""
    return [room, *(name for name in MODULES if room_of(name) == room and not is_room(name))]


def page() -> str:
    """Return the page of the documentation."""
    return "\n".join([HEAD, *(line for room in rooms() for line in _section(room))])


def _section(room: str) -> Iterator[str]:
    files = files_of(room)
    others = sorted({room_of(other) for name in files for other in imports_of(name)} - {room})
    yield f"## `{_path_of(room)}`"
    yield ""
    yield f"{_first_line(room)} Imports: {', '.join(f'`{_path_of(name)}`' for name in others) or 'nothing'}."
    yield ""
    if len(files) > 1:
        rows = [Row([f"`{name.rpartition('.')[2]}.py`", _first_line(name)]) for name in files[1:]]
        yield Table((Column("File"), Column("")), rows).markdown()
        yield ""


def _path_of(room: str) -> str:
    return room.replace(".", "/") + "/"


def _first_line(name: str) -> str:
    text = importlib.import_module(name).__doc__ or ""
    return " ".join(text.strip().split("\n\n")[0].split()).replace("|", "\\|")


if __name__ == "__main__":
    print(page())
