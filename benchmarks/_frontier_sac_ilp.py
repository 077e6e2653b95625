"""A trial of `torch.distributed._tools.sac_ilp`, torch's own planner, here. What stands in its way is recorded."""

from __future__ import annotations

import subprocess
import sys

import torch

PARTS = {
    "its solver": "import torch.distributed._tools.sac_ilp",
    "its cost model": """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.runtime_estimator import RuntimeEstimator
with FakeTensorMode():
    x = torch.randn(8, 8, device={device!r})
    RuntimeEstimator._roofline_estimate(torch.ops.aten.mm.default, (x, x), {{}})
""",
}
"""Each in a process of its own: a part may end it."""


def obstacles(device: torch.device) -> list[str]:
    """Return what its parts say when they are tried; where all of them run, that they leave the rest to their user."""
    found = [
        f"{name}: {said}" for name, code in PARTS.items() if (said := _last_words(code.format(device=str(device))))
    ]
    return found or [
        "It runs, and returns which share of each module's activations to discard: the policies that do so are left to its "
        "user, so that there is nothing to time."
    ]


def _last_words(code: str) -> str | None:
    """Of a program that fails; None if it does not."""
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    if not ran.returncode:
        return None
    lines = [line.strip() for line in ran.stderr.splitlines() if line.strip() and "what():" not in line]
    said = next(reversed(lines), "it says nothing")
    return said if ran.returncode > 0 else f"the process ends by signal {-ran.returncode}: {said}"
