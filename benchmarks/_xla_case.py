"""One step of one model in one way, in a process of its own: XLA reads its flags once.

Reads a request from the command line, writes a line of JSON. `measured` runs it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from _xla_dump import Compiled, Program, read_dump, read_program

KEEPS_BARRIERS = "--xla_disable_hlo_passes=cse_barrier_expander"
"""Otherwise the pipeline of XLA:CPU drops barriers before it schedules, those of JAX's remat as well."""

LONGEST_SECONDS = 300


@dataclass(frozen=True)
class Case:
    """The findings on a model in a way.

    Attributes:
        keeps_barriers: whether XLA was told to keep barriers until after it has scheduled.
        seconds: on the wall, for tracing, compiling and one step.
    """

    model: str
    way: str
    keeps_barriers: bool
    traced: Program
    compiled: Compiled
    seconds: float


def measured(model: str, way: str, size: Any, keeps_barriers: bool = True) -> tuple[Case, dict[str, str]]:
    """Run the case, and read what XLA dumps; with the versions that it ran on.

    Args:
        size: of the model, a `Size`.

    Raises:
        RuntimeError: the process failed; with the end of what it said.
    """
    with TemporaryDirectory(prefix="xla-dump-") as directory:
        flags = f"--xla_dump_to={directory} --xla_dump_hlo_as_text" + f" {KEEPS_BARRIERS}" * keeps_barriers
        said = _run({"model": model, "way": way, "size": asdict(size)}, flags)
        compiled = read_dump(Path(directory))
    case = Case(model, way, keeps_barriers, Program(**said["traced"]), compiled, said["seconds"])
    return case, said["versions"]


def _run(request: dict[str, Any], flags: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, json.dumps(request)],
        env={**os.environ, "PJRT_DEVICE": "CPU", "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=LONGEST_SECONDS,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{request['model']}, {request['way']}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Trace, compile and run the step: forward, loss, backward."""
    import torch
    import torch_xla
    from _xla_models import MODELS, Size
    from _xla_ways import WAYS

    blocks, x = MODELS[request["model"]].resized(Size(**request["size"])).make()
    blocks, x = blocks.to("xla"), x.to("xla").requires_grad_()
    torch_xla.sync()
    begin = perf_counter()
    y = x
    for block in blocks:
        y = WAYS[request["way"]](block)(y)
    loss = y.square().sum()
    loss.backward()
    del y
    outputs = [loss.detach(), x.grad, *(parameter.grad for parameter in blocks.parameters())]
    text = torch_xla._XLAC._get_xla_tensors_hlo(outputs)
    torch_xla.sync(wait=True)
    seconds = perf_counter() - begin
    versions = {"torch": torch.__version__, "torch_xla": torch_xla.__version__}
    return {"traced": asdict(read_program(text)), "seconds": seconds, "versions": versions}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(json.loads(sys.argv[1]))) + "\n")
