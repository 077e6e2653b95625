"""Every private name of torch that the package leans on has a check of what is needed of it, and stands in one room.

When a new torch breaks one of these, the check says which, and what it was for: `needs_of_*.py` have them, a file a topic.
"""

from __future__ import annotations

import ast
import importlib
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from needs import CHECKS, PARTS, needs, room
from several import check_each
from torch.autograd.graph import saved_tensors_hooks

import reactivate
from reactivate._snapshot.random_streams import STREAMS
from reactivate._torch import private_api
from reactivate._torch.private_api import find, is_missing, layout, resolve_private, ways
from reactivate.errors import UnsupportedError

PACKAGE = Path(reactivate.__file__).parent
TOPICS = sorted(path.stem for path in Path(__file__).parent.glob("needs_of_*.py"))

pytest.register_assert_rewrite(*TOPICS)  # so that a check says what it found, as a test does
for topic in TOPICS:
    importlib.import_module(topic)


@needs("written_values")
def test_values_that_ops_write_to() -> None:
    aten, x, room_for_it = torch.ops.aten, torch.ones(2, 2), torch.empty(2, 2)
    assert [item is x for item in room.written_values(aten.add_.Tensor, (x, 1), {})] == [True]
    assert [item is room_for_it for item in room.written_values(aten.mm.out, (x, x), {"out": room_for_it})] == [True]
    assert room.written_values(aten.add.Tensor, (x, x), {}) == []


def test_what_is_needed() -> None:
    check_each({check.__name__: check for check in CHECKS.values()})


def names_of(part: ModuleType) -> set[str]:
    """Names that other rooms may import from a file."""
    tree = ast.parse(Path(str(part.__file__)).read_text())
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    return {
        name
        for name, value in vars(part).items()
        if not name.startswith("_") and not isinstance(value, ModuleType) and name not in imported
    }


def test_every_name_is_listed() -> None:
    assert set().union(*map(names_of, PARTS)) == set(CHECKS)


def private_names_of_torch(path: Path) -> list[str]:
    """Imports of private torch names, and attributes `torch._x`."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            found += [part for part in parts if part.startswith("_")]
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            root, path = node.value, []
            while isinstance(root, ast.Attribute):
                path.append(root.attr)
                root = root.value
            if (
                isinstance(root, ast.Name) and root.id in ("torch", "_torch") and "ops" not in path
            ):  # ops have such names
                found.append(node.attr)
    return found


WITHOUT = """
import sys, torch
import torch.testing._internal.distributed.fake_pg
from operator import attrgetter
for path in sys.argv[1:]:
    parent, _, name = path.rpartition(".")
    owner = attrgetter(parent)(torch) if parent else torch
    if hasattr(owner, name):
        delattr(owner, name)
from reactivate._torch import dynamo, ops
from reactivate._torch.private_api import ways
print(len(ways), sum(way.is_fast for way in ways))
import reactivate._region.region
"""


def test_missing_names_stop_no_import() -> None:
    """Not even all of them at once, but for those that torch itself does not do without."""
    names = [name.removeprefix("torch.") for way in ways for name in way.names]
    own = ("_C._accelerator_getAccelerator", "autograd.Variable._execution_engine.queue_callback")
    names = [name for name in names if name not in own]
    assert len(names) > 40
    done = subprocess.run([sys.executable, "-c", WITHOUT, *names], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[0]) > 30 > 5 > int(done.stdout.split()[1])


def test_a_missing_name_is_named_where_it_is_used() -> None:
    assert find("torch._C._autograd.SavedTensor") is torch._C._autograd.SavedTensor
    missing = find("torch._C._autograd._no_such_name")
    assert is_missing(missing) and is_missing(find("torch._no_such_module.name.of_it"))
    assert not isinstance(3, missing)
    with pytest.raises(UnsupportedError, match=r"torch\._C\._autograd\._no_such_name"):
        missing(1)


@pytest.fixture
def a_list_of_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_api, "ways", [])


@pytest.mark.usefixtures("a_list_of_ways")
def test_the_fastest_way_that_does_what_is_asked_is_taken() -> None:
    name = "torch._C._autograd._get_sequence_nr"

    def fails(found: Any) -> bool:
        raise RuntimeError(found)

    right, wrong = (lambda found: found() >= 0), (lambda found: found() < 0)
    fast = torch._C._autograd._get_sequence_nr
    assert resolve_private("it", name, probe=right, public=abs) is fast
    assert resolve_private("it", name, probe=wrong, public=abs) is abs
    assert resolve_private("it", name, probe=fails, public=abs) is abs
    assert resolve_private("it", name, probe=fails, without=max) is max
    assert resolve_private("it", name, name, probe=lambda *found: False, public=(abs, max)) == (abs, max)
    assert is_missing(resolve_private("it", name, probe=wrong))
    assert all(map(is_missing, resolve_private("it", name, "torch.no_such", probe=lambda *found: True)))
    one = torch.ones(1, requires_grad=True)
    right, wrong = (lambda found: one.exp() > 1), (lambda found: one.exp() < 1)
    with saved_tensors_hooks(fails, fails):  # of the user's, around the first use of the package
        assert resolve_private("it", name, probe=wrong, public=abs) is abs
        assert resolve_private("it", name, probe=right, public=abs) is fast
    assert [way.is_fast for way in private_api.ways] == [True, *[False] * 7, True]


def test_what_has_no_public_way_says_what_is_lost() -> None:
    page = " ".join((PACKAGE.parent / "docs" / "torch-names.md").read_text(encoding="utf-8").split())
    for way in ways:
        for name in way.names:
            assert f"`{name}`" in page, name
        assert way.what in page, way.what
        assert way.lost in page, way.lost


@pytest.mark.usefixtures("a_list_of_ways")
def test_a_layout_that_is_not_as_expected_is_not_used() -> None:
    assert layout("it")(lambda: 3)() == 3
    assert layout("it")(lambda: None)() is None
    assert layout("it")(lambda: 1 // 0)() is None
    assert [way.is_fast for way in private_api.ways] == [True, False, False]


def test_probes_do_not_depend_on_what_is_around_the_import() -> None:
    code = (
        "import torch\n"
        "with torch.inference_mode(), torch.no_grad(), torch.device('meta'):\n"
        "    from reactivate._torch import dynamo, ops\n"
        "from reactivate._torch.private_api import ways\n"
        "print(*(way.what for way in ways if not way.is_fast), sep='; ')\n"
        "print(torch.is_inference_mode_enabled(), torch.is_grad_enabled())\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    slow = "; ".join(way.what for way in ways if not way.is_fast and "NumPy" not in way.what)
    assert found.stdout.splitlines() == [slow, "False True"]


# Public in all but name: the module in which torch documents how to write a mode.
DOCUMENTED = {"_python_dispatch"}


def test_private_names_stand_in_one_room_only() -> None:
    files = [path for path in PACKAGE.rglob("*.py") if path.parent.name != "_torch"]
    found = {str(path): set(private_names_of_torch(path)) - DOCUMENTED for path in files}
    assert len(found) > 200 and not {path: names for path, names in found.items() if names}


def test_the_search_for_private_names_finds_them_where_they_are() -> None:
    files = (PACKAGE / "_torch").glob("*.py")
    assert len([name for path in files for name in private_names_of_torch(path)]) > 10


def test_probes_see_a_draw() -> None:
    """Python's own generator has no private name in torch, but a private layout."""
    state = random.getstate()
    before = STREAMS.now()
    assert STREAMS.now() is before
    random.random()
    assert STREAMS.now() is not before
    random.setstate(state)


def test_the_older_precision_flag_can_be_asked_when_only_the_newer_ones_have_a_word_for_it() -> None:
    assert room._read_float32_matmul() == torch.get_float32_matmul_precision()
    precision = room._fp32_precision("mkldnn", "matmul")
    before = precision.read()
    precision.write("tf32")
    try:
        assert room._read_float32_matmul() in (None, "highest")  # None where torch raises
        room._write_float32_matmul(None)
        assert precision.read() == "tf32"
    finally:
        precision.write(before)
