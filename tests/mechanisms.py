"""The mechanisms of the snapshot, taken out one at a time: which tests fail then, and how many the self-check catches.

python tests/mechanisms.py                     all of them, in about ten minutes
python tests/mechanisms.py streams hooks       some of them

A test that fails is caught if the error is one of ours, which a user would see, and silent if the test found other numbers.
Tests that turn the self-check off are left out.
As a plugin of pytest (`-p mechanisms`), this takes out the one that the environment names in `WITHOUT`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from reactivate._snapshot import rewound_moment
from reactivate._snapshot.group_copy import GroupCopy
from reactivate._snapshot.moment import Moment
from reactivate._snapshot.parts import Parts
from reactivate._snapshot.shadows import Shadow
from reactivate._snapshot.small_copy import SmallCopy
from reactivate.errors import ReactivateError
from reactivate.guards.ambient import Ambient
from reactivate.guards.rng import RewoundRng

HERE = Path(__file__).parent
FILES = ("exact", "modules", "rng", "mutation", "own_writes", "arguments", "ambient", "autograd", "visibility")
FILES += ("state_code", "state_classes", "state_containers", "state_objects", "state_iterators", "state_modules")
FILES += (
    "state_results",
    "state_hooks",
    "state_between",
    "state_buffers",
    "state_writes",
    "state_views",
    "state_kinds",
)
FILES += ("state_identity", "state_random", "state_memory", "state_tensors")


def _nothing(*arguments: Any, **options: Any) -> None:
    return None


def _without_objects(self: Any, holders: Any, *others: Any, initialise: Any = Moment.__init__) -> None:
    initialise(self, (), *others)


MECHANISMS: dict[str, list[tuple[Any, str, Any]]] = {
    "objects": [(Moment, "__init__", _without_objects)],
    "parts-of-modules": [(Parts, "put", _nothing)],
    "small-tensors": [(SmallCopy, "put", _nothing)],
    "larger-tensors": [(GroupCopy, "put", _nothing), (Shadow, "put", _nothing)],
    "streams": [(RewoundRng, "__enter__", _nothing), (RewoundRng, "__exit__", _nothing)],
    "settings": [(Ambient, "recompute", _nothing)],
    "hooks": [(Moment, "put_hooks", _nothing), (rewound_moment, "put_hooks_on", _nothing)],
    "gradients": [(Moment, "look_at_gradients", _nothing)],
}
"""What stands in for which function, for each mechanism, so that it does nothing."""


# -- as a plugin ------------------------------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    for owner, name, value in MECHANISMS[os.environ["WITHOUT"]]:
        setattr(owner, name, value)


def pytest_runtest_makereport(item: pytest.Item, call: Any) -> None:
    """Write down what a failure was: one line of a file for each, since there may be several processes."""
    if call.when == "call" and call.excinfo is not None and not call.excinfo.errisinstance(pytest.skip.Exception):
        kind = "silent"
        error = call.excinfo.value
        while error is not None:
            kind = "caught" if isinstance(error, ReactivateError) else kind
            error = error.__cause__ or error.__context__
        with Path(os.environ["FAILURES"]).open("a") as file:
            file.write(json.dumps([kind, item.nodeid]) + "\n")


# -- as a script ------------------------------------------------------------------------------------------------------


def failures_without(name: str, jobs: int) -> dict[str, list[str]]:
    """Run the tests without one mechanism; return the names of those that fail, by what they show."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "failures"
        path.touch()
        environment = {**os.environ, "WITHOUT": name, "FAILURES": str(path), "PYTHONPATH": f"{HERE}:{HERE.parent}"}
        files = [str(path) for file in FILES for path in HERE.glob(f"*/test_{file}.py")]
        command = [sys.executable, "-m", "pytest", "-q", "--wide", "-n", str(jobs), "-p", "mechanisms", *files]
        command += ["-k", "not metadata and not none"]
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, cwd=HERE.parent, check=False)
        found: dict[str, list[str]] = {"caught": [], "silent": []}
        for line in path.read_text().splitlines():
            kind, test = json.loads(line)
            found[kind].append(test)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", choices=[[], *MECHANISMS], metavar="NAME", help=", ".join(MECHANISMS))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--silent", action="store_true", help="name the tests that fail without an error of ours")
    options = parser.parse_args()
    caught = failed = 0
    for name in options.names or MECHANISMS:
        found = failures_without(name, options.jobs)
        here, all_here = len(found["caught"]), len(found["caught"]) + len(found["silent"])
        caught, failed = caught + here, failed + all_here
        print(
            f"without {name:18} {all_here:4} tests fail, of which the self-check or a refusal catches {here}",
            flush=True,
        )
        for test in found["silent"] if options.silent else ():
            print(f"    {test}")
    print(f"{caught} of {failed} are caught: {100 * caught / max(1, failed):.0f} %")


if __name__ == "__main__":
    main()
