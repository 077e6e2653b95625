"""The command `reactivate`: its exit codes, missing extras, processes, and the commands demo, devices, doctor and run."""

from __future__ import annotations

import importlib
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cli_cases import answer, line, run
from torch import nn

import reactivate
from reactivate import _doctor
from reactivate._torch.private_api import Way
from reactivate.cli.where import where_of
from reactivate.planner.cost.devices import DEVICES

PACKAGE = Path(reactivate.__file__).parents[1]


# -- demo and devices -------------------------------------------------------------------------------------------------

demo = importlib.import_module("reactivate.cli.commands.demo")  # as a name of the room it is the command


@pytest.fixture
def small_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "STEPS", 3)
    monkeypatch.setattr(demo, "SIZE", demo.Size(layers=3, dim=32, heads=2, context=64, batch=4))


def test_demo(small_demo: None, tmp_path: Path) -> None:
    before = torch.get_rng_state()
    document = answer("demo", "--out", tmp_path / "demo")
    assert document["identical"] is True
    assert document["plain"]["losses"] == document["planned"]["losses"]
    assert len(set(document["plain"]["losses"])) == 3, "it learns"
    assert document["planned"]["peak_bytes"] <= document["budget_bytes"] < document["plain"]["peak_bytes"]
    assert document == json.loads((tmp_path / "demo/results.json").read_text())
    plan = reactivate.Plan.load(tmp_path / "demo/plan.json")
    assert any(item.candidate.name != "keep" for item in plan.decisions)
    assert torch.equal(before, torch.get_rng_state())


def test_demo_notices_a_difference(small_demo: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nudge(model: nn.Module, plan: reactivate.Plan) -> None:
        with torch.no_grad():
            next(model.parameters())[0, 0] += 1

    monkeypatch.setattr(demo, "standard_library", lambda: torch.randint(256, (1000,), dtype=torch.uint8))
    monkeypatch.setattr(reactivate, "apply", nudge)
    result = run("demo", "--out", tmp_path)
    assert result.exit_code == 1
    assert "The two runs differ, first in the " in result.stdout


def test_devices() -> None:
    result = run("devices")
    assert result.exit_code == 0
    for device in DEVICES.values():
        assert device.name in result.stdout
        assert device.source in result.stdout
    assert [(item["name"], item["memory_bytes"]) for item in answer("devices")] == [
        (device.name, device.memory_bytes) for device in DEVICES.values()
    ]


def test_where() -> None:
    assert where_of("cpu", on_meta=False).device == torch.device("cpu")
    assert where_of("cpu", on_meta=True).spec == DEVICES["cpu"]
    assert where_of("meta", on_meta=False).on_meta
    assert where_of(None, on_meta=False) == where_of(None, on_meta=False)
    assert where_of("B200", on_meta=False).spec == DEVICES["B200"]


# -- exit codes -------------------------------------------------------------------------------------------------------


def test_what_a_target_raises_is_one_line() -> None:
    assert line("plan", "cli_cases:failing", code=4) == "error: ValueError: no luck (--traceback shows where)"
    assert answer("verify", "cli_cases:failing", code=4)["error"]["kind"] == "failed"
    assert "sys.exit(0)" in line("verify", "cli_cases:leaving", code=4)
    traced = run("explain", "cli_cases:failing", "--traceback")
    assert traced.exit_code == 4
    assert "in failing" in traced.stderr
    stopped = run("plan", "cli_cases:interrupted", "--json")
    assert stopped.exit_code == 130
    assert stopped.stderr.strip() == "error: interrupted"
    assert json.loads(stopped.stdout)["error"]["kind"] == "interrupted"


def without(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [module, *(name for name in sys.modules if name.startswith(f"{module}."))]:
        monkeypatch.setitem(sys.modules, name, None)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    without("transformers", monkeypatch)
    assert "pip install" in line("plan", "LlamaConfig", code=3)
    document = run("plan", "LlamaConfig", "--json")
    assert document.exit_code == 3
    assert json.loads(document.stdout)["error"]["kind"] == "missing_extra"


def test_without_rich_tables_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    without("rich", monkeypatch)
    result = run("devices")
    assert result.exit_code == 0 and "H100-SXM" in result.stdout


def test_help_and_version() -> None:
    for arguments in ([], ["--help"], ["plan", "--help"], ["-h"]):
        result = run(*arguments)
        assert result.exit_code == 0
        assert "Usage: " in result.stdout
    assert "Exit codes: 0 success; 1 no" in run("--help").stdout
    assert reactivate.__version__ in run("--version").stdout


# -- processes --------------------------------------------------------------------------------------------------------


def process(program: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(filter(None, (str(PACKAGE), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths}
    command_line = [sys.executable, *program]
    return subprocess.run(command_line, capture_output=True, text=True, check=False, cwd=folder, env=environment)


def test_a_module_of_the_folder_is_found_and_stdout_has_json_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def make():\n"
        "    layers = (torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()) for _ in range(2))\n"
        "    return torch.nn.Sequential(*layers), torch.randn(2, 4)\n"
    )
    # As the script runs, whose folder is not the current one.
    script = "import sys; sys.path.remove(''); from reactivate.__main__ import main; sys.exit(main())"
    done = process(["-c", script, "plan", "mine:make", "--budget", "100%", "--json"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(reactivate.Plan.from_json(json.loads(done.stdout)).decisions) == 2
    progress = done.stderr.splitlines()  # where that takes long
    assert all(line.startswith("plan: ") for line in progress), done.stderr
    done = process(["-m", "reactivate", "plan", "mine:none"], tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: TARGET 'mine:none'")
    assert done.stdout == ""


def test_without_click_the_extra_is_named(tmp_path: Path) -> None:
    script = "import sys; sys.modules['click'] = None; from reactivate.__main__ import main; sys.exit(main())"
    done = process(["-c", script, "devices"], tmp_path)
    assert done.returncode == 3
    assert done.stderr == "error: the command needs click, which is not installed: pip install click rich\n"
    assert done.stdout == ""
    twice = script.replace(
        "sys.exit(main())", "assert main() == 0; print('-----'); sys.argv += ['--help']; sys.exit(main())"
    )
    done = process(["-c", twice], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    for shown in done.stdout.split("-----"):
        assert "doctor" in shown and "pip install click rich" in shown


# -- doctor -----------------------------------------------------------------------------------------------------------


def test_doctor_names_what_is_installed() -> None:
    document = answer("doctor")
    assert document == _doctor.examine()
    assert (document["torch"], document["python"]) == (torch.__version__, platform.python_version())
    assert document["devices"][0] == "cpu"
    assert document["packages"]["click"]
    result = run("doctor")
    assert result.exit_code == 0
    assert torch.__version__ in result.stdout and platform.platform() in result.stdout


def test_doctor_needs_no_extra(tmp_path: Path) -> None:
    blocked = "".join(f"sys.modules[{name!r}] = None; " for name in ("click", "rich", "matplotlib", "jinja2"))
    script = f"import sys; {blocked}from reactivate.__main__ import main; sys.exit(main())"
    done = process(["-c", script, "doctor", "--json"], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["torch"] == torch.__version__


def test_doctor_names_what_torch_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Way(("torch._C._gone",), "what is gone", False, "every backward")
    slow = Way((), "the memory of something", False)
    monkeypatch.setattr(_doctor, "ways", [Way(("torch._C._there",), "what is there", True, "it"), gone, slow])
    assert _doctor.slow_ways() == [
        {"what": "what is gone", "names": ["torch._C._gone"], "lost": "every backward"},
        {"what": "the memory of something", "names": [], "lost": ""},
    ]
    shown = run("doctor").stdout
    assert "1 private names and layouts" in shown
    assert "not: what is gone (torch._C._gone); lost: every backward" in shown
    assert "not: the memory of something (a layout in memory); a public way takes its place, slower" in shown


SCRIPT = """
import sys
import torch
from torch.utils.checkpoint import checkpoint

x = torch.ones(2, requires_grad=True)
checkpoint(torch.sin, x, use_reentrant=False).sum().backward()
print(__name__, sys.argv[1:], torch.utils.checkpoint.checkpoint.__globals__["__name__"])
{}
"""


@pytest.mark.parametrize(("end", "code"), [("", 0), ("sys.exit(3)", 3), ("raise KeyError('mine')", 1)])
def test_run_runs_a_script_as_python_does(end: str, code: int, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(end), encoding="utf-8")
    command_line = [sys.executable, "-m", "reactivate", "run", str(script), "--lr", "3", "-x"]
    done = subprocess.run(command_line, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == code
    assert done.stdout == "__main__ ['--lr', '3', '-x'] reactivate.dropin.torch\n"
    assert ("KeyError: 'mine'" in done.stderr) is (code == 1)
    assert done.stderr.endswith("reactivate: 1 checkpointed region ran.\n")


def test_run_says_why_no_region_ran(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('trained')", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "reactivate", "run", script], capture_output=True, text=True, check=True
    )
    assert "0 checkpointed regions ran. The script never called torch.utils.checkpoint" in done.stderr
