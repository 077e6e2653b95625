"""Compile a program for a TPU, on a machine without one, and say what it takes. It needs jax[tpu], and no torch.

    python _tpu_compiler.py PROGRAM TOPOLOGY ...

PROGRAM is a file of StableHLO. For each topology a line of JSON is written.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

# Read when libtpu is loaded: there is no TPU to ask about, and other processes may have loaded it.
os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "JAX_PLATFORMS": "cpu"}

from jax._src.interpreters.mlir import make_ir_context
from jax.experimental.topologies import get_topology_desc
from jaxlib.mlir.dialects import stablehlo
from jaxlib.xla_client import CompileOptions, DeviceList

PRODUCT = " convolution("
"""The compiler of TPUs writes every matrix product as a convolution."""


def compiled(program: bytes, topologies: list[str]) -> Iterator[dict[str, Any]]:
    """Compile a program for one chip of each topology.

    Args:
        program: StableHLO, as a portable artifact.
        topologies: of one chip each, as "v5e:1x1".
    """
    for name in topologies:
        (device,) = get_topology_desc(platform="tpu", topology_name=name, chips_per_host_bounds=(1, 1, 1)).devices
        begin = perf_counter()
        module = stablehlo.deserialize_portable_artifact(make_ir_context(), program)
        executable = device.client.compile(module, DeviceList((device,)), CompileOptions())
        seconds = perf_counter() - begin
        memory = executable.get_compiled_memory_stats()
        (text,) = (found.to_string() for found in executable.hlo_modules())
        yield {
            "topology": name,
            "dots": text.count(PRODUCT),
            "temp_bytes": memory.temp_size_in_bytes,
            "peak_bytes": memory.peak_memory_in_bytes,
            "seconds": seconds,
            "versions": {
                **{package: version(package) for package in ("jax", "jaxlib", "libtpu")},
                name: device.device_kind,
                "compiler": device.client.platform_version.splitlines()[-1],
            },
        }


if __name__ == "__main__":
    for found in compiled(Path(sys.argv[1]).read_bytes(), sys.argv[2:]):
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()
