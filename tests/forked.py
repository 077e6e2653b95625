"""Programs in processes of their own that do not each import torch: they are forks of one that has imported it.

A fork is as new as a process that has run `import torch, reactivate`: these are all that it shares with other programs.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parent.parent


class Forks:
    """A process that runs programs in forks of itself, one after the other."""

    def __init__(self) -> None:
        paths = os.pathsep.join(filter(None, (str(PACKAGE), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": paths, "PYTHONFAULTHANDLER": "1"}
        command = [sys.executable, __file__]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def run(self, program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a file, in its folder, and return its exit code and what it wrote to stderr."""
        assert self.process.stdin is not None and self.process.stdout is not None
        errors = program.with_suffix(".stderr")
        self.process.stdin.write(json.dumps([str(program), str(errors), *arguments]) + "\n")
        self.process.stdin.flush()
        code = int(self.process.stdout.readline())
        return subprocess.CompletedProcess([str(program), *arguments], code, None, errors.read_text("utf-8"))

    def close(self) -> None:
        self.process.communicate()  # it ends where its input does


def main() -> None:
    """Fork for each line of the input; a fork goes on as the program, and ends where that does."""
    import torch  # noqa: F401

    import reactivate  # noqa: F401

    while line := sys.stdin.readline():
        program, errors, *arguments = json.loads(line)
        child = os.fork()
        if child == 0:
            become(program, errors, arguments)
            return
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def become(program: str, errors: str, arguments: list[str]) -> None:
    nothing, file = os.open(os.devnull, os.O_RDWR), os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream, place in enumerate((nothing, nothing, file)):
        os.dup2(place, stream)
    folder = os.path.dirname(program)
    os.chdir(folder)
    sys.argv, sys.path[0] = [program, *arguments], folder
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
