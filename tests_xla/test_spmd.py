"""Regions on tensors that are sharded over devices (SPMD): two devices of one process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
CODE = """
    import json, sys
    sys.path.insert(0, "benchmarks")
    import numpy as np
    import torch, torch_xla
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr
    from _xla_case import NONE, OURS, TORCH_XLA, WAYS, Mlp, read_program

    xr.use_spmd()
    mesh = xs.Mesh(np.arange(2), (2,), ("data",))

    def step(way):
        torch.manual_seed(0)
        blocks = [torch.nn.Sequential(Mlp(64), torch.nn.Dropout(0.2)).to("xla") for _ in range(4)]
        x = torch.randn(1024, 64).to("xla").requires_grad_()
        xs.mark_sharding(x, mesh, ("data", None))
        if sys.argv[1] == "weights":
            for block in blocks:
                xs.mark_sharding(block[0][0].weight, mesh, ("data", None))
        torch_xla.manual_seed(5)
        torch_xla.sync()
        y = x
        for block in blocks:
            y = WAYS[way](block)(y)
        loss = y.square().mean()
        loss.backward()
        found = [loss.detach(), x.grad, *(item.grad for block in blocks for item in block.parameters())]
        traced = read_program(torch_xla._XLAC._get_xla_tensors_hlo(found))
        torch_xla.sync(wait=True)
        return [tensor.cpu() for tensor in found], [traced.barriers, traced.dots], torch_xla._XLAC._xla_get_rng_seed("")

    plain, theirs, ours = (step(way) for way in (NONE, TORCH_XLA, OURS))
    said = {
        "devices": xr.global_runtime_device_count(),
        "equal": all(map(torch.equal, plain[0], ours[0])) and plain[2] == ours[2],
        "traced": [plain[1], theirs[1], ours[1]],
    }
    print(json.dumps(said))
"""


@pytest.mark.parametrize("sharded", ["batch", "weights"])
def test_a_sharded_step(sharded: str, tmp_path: Path) -> None:
    """Every bit, dropout included, and as little memory as with torch_xla's own function."""
    flags = f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text --xla_disable_hlo_passes=cse_barrier_expander"
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(CODE), sharded],
        env={**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2", "XLA_FLAGS": flags},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not ran.returncode, ran.stderr[-2000:]
    said = json.loads(ran.stdout.splitlines()[-1])
    assert said["devices"] == 2 and said["equal"]
    assert said["traced"] == [[0, 24], [4, 28], [4, 28]]
    plain, theirs, ours = temps(tmp_path)
    assert ours < 0.6 * plain
    assert ours <= 1.05 * theirs


def temps(dump: Path) -> list[int]:
    """Return the preallocated bytes of each step that was compiled, on one device, in their order."""
    found: list[Any] = sorted(dump.glob("*SyncTensorsGraph*after_optimizations-buffer-assignment.txt"))
    sizes = [re.findall(r"size (\d+), preallocated-temp", path.read_text(encoding="utf-8")) for path in found]
    return [sum(map(int, size)) for size in sizes if size]
