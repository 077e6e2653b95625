"""Programs with streams give the right bits on an accelerator that is simulated, and wrong ones with a mistake in them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FILES = [
    ("simulated_cases.py", "privateuseone"),
    ("simulated_dropin.py", "privateuseone"),
    pytest.param("simulated_offload.py", "privateuseone", marks=pytest.mark.slow),
    pytest.param("simulated_plan.py", "privateuseone", marks=pytest.mark.slow),
    pytest.param("simulated_heirs.py", "tpu", marks=pytest.mark.slow),
    pytest.param("simulated_heirs.py", "neuron", marks=pytest.mark.slow),
]

GUARDS = hasattr(getattr(torch._C, "_acc", None), "register_python_privateuseone_device_guard")


@pytest.mark.skipif(not GUARDS, reason="this torch has no device guards written in Python")
@pytest.mark.parametrize(("file", "device"), FILES)
def test_in_a_process_of_its_own(file: str, device: str) -> None:
    """torch has one accelerator at most, and cannot forget it."""
    run(file, device)


@pytest.mark.slow
@pytest.mark.skipif(not GUARDS, reason="this torch has no device guards written in Python")
def test_long_runs() -> None:
    run("simulated_offload.py", "privateuseone", "--all", "-m", "slow")


def run(file: str, device: str, *options: str) -> None:
    path = Path(__file__).parents[1] / file
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "SIMULATED_DEVICE": device}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, str(path)]
    found = subprocess.run(
        command, check=False, capture_output=True, text=True, env=environment, cwd=path.parent.parent
    )
    assert found.returncode == 0, found.stdout[-5000:] + found.stderr[-2000:]
