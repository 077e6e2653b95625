"""The table of devices: peaks as their vendors publish them, each with its source."""

from __future__ import annotations

from collections.abc import Mapping

from reactivate.planner.cost.device_spec import DeviceSpec
from reactivate.planner.cost.links import Link


def _gpu(
    name: str,
    gibibytes: float,
    gigabytes_per_second: float,
    source: str,
    host: float | None = None,
    **teraflops_per_second: float,
) -> DeviceSpec:
    rates = {format_: rate * 1e12 for format_, rate in teraflops_per_second.items()}
    links = {} if host is None else {"host": Link(host / 2 * _HOST_EFFICIENCY * 1e9, host / 2 * _HOST_EFFICIENCY * 1e9)}
    return DeviceSpec(name, round(gibibytes * 2**30), gigabytes_per_second * 1e9, rates, source, links=links)


# Memory is what torch says that a device has, in GiB: `mem_get_info`, and the "total capacity" of its errors; of TPUs, what
# XLA's errors call the capacity. It is less than the data sheet's number, by what the driver and error correction take.
# Drivers differ by some tenths: the table has the least of those that are common.

# The same sheets print what PCI Express carries in both directions together, in 10^9 bytes per second, `host` below: each
# direction has half. Of devices whose sheet has no such number nothing is said. That copies reach 0.8 of it is assumed.
_HOST_EFFICIENCY = 0.8


_A100 = (
    "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
    "nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
)
_A10 = "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a10/pdf/a10-datasheet.pdf"
_H100 = "https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet"
_H200 = "https://www.nvidia.com/en-us/data-center/h200/"
# An HGX B200 at 1000 W.
_B200 = "https://resources.nvidia.com/en-us-blackwell-architecture https://www.nvidia.com/en-us/data-center/dgx-b200/"
_L4 = "https://www.nvidia.com/en-us/data-center/l4/"
_L40S = "https://www.nvidia.com/en-us/data-center/l40s/"
_TURING = (
    "https://images.nvidia.com/aem-dam/en-zz/Solutions/design-visualization/technologies/turing-architecture/"
    "NVIDIA-Turing-Architecture-Whitepaper.pdf"
)
_V100 = "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf"
_GB200 = "https://www.nvidia.com/en-us/data-center/gb200-nvl72/ https://glennklockwood.com/garden/processors/B200"
_AMPERE = "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"
_ADA = "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
_BLACKWELL = "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"
_MI250X = "https://www.amd.com/en/products/accelerators/instinct/mi200/mi250x.html"
_MI300X = (
    "https://www.amd.com/content/dam/amd/en/documents/instinct-tech-docs/data-sheets/amd-instinct-mi300x-data-sheet.pdf"
)

# The sheets of TPUs have a rate of bfloat16 alone; float32 is multiplied in bfloat16 unless a program asks for more passes.
_TPU_FLOAT32 = "https://docs.jax.dev/en/latest/201/precision.html"
_V5E = f"https://docs.cloud.google.com/tpu/docs/v5e {_TPU_FLOAT32}"
_V5P = f"https://docs.cloud.google.com/tpu/docs/v5p {_TPU_FLOAT32}"
_V6E = f"https://docs.cloud.google.com/tpu/docs/v6e {_TPU_FLOAT32}"
_TRAINIUM2 = (
    "https://awsdocs-neuron.readthedocs-hosted.com/en/latest/about-neuron/arch/neuron-hardware/trainium2.html "
    "https://awsdocs-neuron.readthedocs-hosted.com/en/latest/nki/arch/trainium2_arch.html"
)

# One core at 3 GHz with two 8-lane FMA units (AVX2): 3e9 * 2 * 8 * 2. A core alone reaches about ten outstanding cache
# lines of 64 bytes per 80 ns of latency, less than its socket's bandwidth.
_CPU = DeviceSpec(
    name="cpu",
    memory_bytes=16 * 2**30,
    bandwidth_bytes_per_second=8e9,
    flops_per_second={"float32": 96e9, "float64": 48e9},
    source="assumed: one core at 3 GHz with two AVX2 FMA units, ten cache lines in flight per 80 ns, and 16 GiB",
    launch_seconds=2e-6,
)

# fmt: off
_TABLE = (
    _gpu("A100-40GB", 39.39, 1555, _A100, 64, float64=19.5, float32=19.5, tfloat32=156, bfloat16=312, float16=312),
    _gpu("A100-80GB", 79.25, 2039, _A100, 64, float64=19.5, float32=19.5, tfloat32=156, bfloat16=312, float16=312),
    _gpu("H100-SXM", 79.11, 3350, _H100, 128,
         float64=67, float32=67, tfloat32=494.5, bfloat16=989.5, float16=989.5, float8=1979),
    _gpu("H100-PCIe", 79.1, 2000, _H100, 128,
         float64=51, float32=51, tfloat32=378, bfloat16=756.5, float16=756.5, float8=1513),
    _gpu("H200", 139.72, 4800, _H200, 128,
         float64=67, float32=67, tfloat32=494.5, bfloat16=989.5, float16=989.5, float8=1979),
    _gpu("B200", 178.35, 8000, _B200, float64=40, float32=80, tfloat32=1100, bfloat16=2250, float16=2250, float8=4500),
    # One of the two GPUs of the superchip, whose numbers are published for both.
    _gpu("GB200", 184.31, 8000, _GB200, float64=45, float32=90, tfloat32=1250, bfloat16=2500, float16=2500, float8=5000),
    _gpu("L4", 21.95, 300, _L4, 64, float32=30.3, tfloat32=60, bfloat16=121, float16=121, float8=242.5),
    _gpu("L40S", 44.39, 864, _L40S, 64, float32=91.6, tfloat32=183, bfloat16=362.05, float16=362.05, float8=733),
    _gpu("A10", 21.98, 600, _A10, 64, float32=31.2, tfloat32=62.5, bfloat16=125, float16=125),
    _gpu("T4", 14.56, 320, _TURING, float32=8.1, float16=65),
    _gpu("V100-32GB", 31.73, 900, _V100, float64=7.8, float32=15.7, float16=125),
    _gpu("RTX-3090", 23.56, 936, _AMPERE, float32=35.6, tfloat32=35.6, bfloat16=71, float16=71),
    _gpu("RTX-4090", 23.52, 1008, _ADA, float32=82.6, tfloat32=82.6, bfloat16=165.2, float16=165.2, float8=330.3),
    _gpu("RTX-5090", 31.36, 1792, _BLACKWELL, float32=104.8, tfloat32=104.8, bfloat16=209.5, float16=209.5, float8=419),
    # One of the two dies, which is what torch sees as a device: half of the published numbers.
    _gpu("MI250X", 63.98, 1600, _MI250X, float64=47.85, float32=47.85, bfloat16=191.5, float16=191.5),
    _gpu("MI300X", 191.69, 5300, _MI300X,
         float64=163.4, float32=163.4, tfloat32=653.7, bfloat16=1307.4, float16=1307.4, float8=2614.9),
    _gpu("TPU-v5e", 15.75, 819, _V5E, float32=197, bfloat16=197),
    _gpu("TPU-v5p", 95.73, 2765, _V5P, float32=459, bfloat16=459),
    _gpu("TPU-v6e", 31.25, 1638, _V6E, float32=918, bfloat16=918),
    # Two of the eight cores, which are one device of torch's by default: a quarter of the published numbers (96 GiB).
    _gpu("Trainium2", 24, 725, _TRAINIUM2,
         float32=45.25, tfloat32=166.75, bfloat16=166.75, float16=166.75, float8=324.75),
    _CPU,
)
# fmt: on

DEVICES: Mapping[str, DeviceSpec] = {device.name: device for device in _TABLE}
"""Devices by name. A100, V100 and H100-SXM are modules, not the PCIe cards. MI250X is one of its two dies, GB200 one of its
two GPUs, Trainium2 two of its eight cores."""
