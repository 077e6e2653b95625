"""One step of one model in one way, as the compilers of TPUs compile it ahead of time: no TPU is needed.

torch_xla traces the step in a process of its own, on its CPU device, and writes it as StableHLO. Another Python, which has
libtpu, compiles that (see `_tpu_compiler.py`). The variable TPU_PYTHON names it: an environment of requirements-tpu.txt.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from _xla_case import Program, Size, read_program, traced_step, versions
from torch import Tensor

TOPOLOGIES = ("v5e:1x1", "v5p:1x1x1", "v6e:1x1")
"""One chip each."""

VARIABLE = "TPU_PYTHON"
LONGEST_SECONDS = 3600


@dataclass(frozen=True)
class Case:
    """The findings on a model in a way.

    Attributes:
        topology: of the TPU.
        traced: the program before it is compiled.
        dots: matrix products that are left when it is compiled.
        temp_bytes: in the TPU's memory, for what is neither input nor output.
        peak_bytes: at the peak, inputs and outputs included.
        seconds: on the wall, for compiling.
    """

    model: str
    way: str
    topology: str
    traced: Program
    dots: int
    temp_bytes: int
    peak_bytes: int
    seconds: float


def compiler() -> str | None:
    """Return the path of the Python that has libtpu; None where there is none."""
    return os.environ.get(VARIABLE)


def without_flags() -> dict[str, str]:
    """Return the environment without flags of XLA, some of which torch_xla sets, and without this project's packages."""
    left_out = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "PYTHONPATH")
    return {name: value for name, value in os.environ.items() if name not in left_out}


def measured(
    model: str, way: str, topologies: Iterable[str], script: str = __file__, **options: Any
) -> Iterator[tuple[Case, dict[str, str]]]:
    """Trace the case once, and compile it for each topology; with the versions that this was done with.

    Args:
        script: traces it, as this file does: it reads a request as JSON, writes the program to the path in there, and
            says what `written` returns.
        options: of the request, beside model, way and path.

    Raises:
        RuntimeError: there is no compiler, or a process failed; with the end of what it said.
    """
    python = compiler()
    if python is None:
        raise RuntimeError(
            f"The compiler of TPUs was asked for, and {VARIABLE} names no Python that has it. Run `make bench-xla`, or set "
            f"{VARIABLE} to the Python of an environment with requirements-tpu.txt installed."
        )
    with TemporaryDirectory(prefix="tpu-program-") as directory:
        path = Path(directory, "program.mlirbc")
        request = {"model": model, "way": way, "path": str(path), **options}
        environment = {**os.environ, "PJRT_DEVICE": "CPU"}
        (said,) = _lines([sys.executable, "-W", "ignore", script, json.dumps(request)], f"{model}, {way}", environment)
        compile_it = str(Path(__file__).with_name("_tpu_compiler.py"))
        for found in _lines([python, compile_it, str(path), *topologies], f"{model}, {way}", without_flags()):
            used = said["versions"] | found.pop("versions")
            yield Case(model, way, traced=Program(**said["traced"]), **found), used


def _lines(command: list[str], what: str, environment: dict[str, str]) -> list[Any]:
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=LONGEST_SECONDS, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{what}: {done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def written(outputs: list[Tensor], path: Path, counted: Callable[[str], Program]) -> dict[str, Any]:
    """Write the program of `outputs` to a file as StableHLO; return what `counted` finds in its text, and versions."""
    import torch_xla  # an optional package
    from torch_xla.core.xla_model import get_stablehlo_bytecode

    text = torch_xla._XLAC._get_xla_tensors_hlo(outputs)
    path.write_bytes(get_stablehlo_bytecode(outputs))
    return {"traced": asdict(counted(text)), "versions": versions()}


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Trace the step, and write it to a file."""
    outputs = traced_step(request["model"], request["way"], Size(**request["size"]))
    return written(outputs, Path(request["path"]), read_program)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(json.loads(sys.argv[1]))) + "\n")
