"""The table of devices, and devices of one's own."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from several import each
from torch import Tensor, nn

import reactivate
from reactivate.errors import UsageError
from reactivate.planner.cost.devices import DEVICES, FORMATS, DeviceSpec, find, load
from reactivate.planner.cost.overhead import Overhead

TPUS = [device for device in DEVICES.values() if device.name.startswith(("TPU", "Trainium"))]
GPUS = [device for device in DEVICES.values() if device.name != "cpu" and device not in TPUS]
MINE: dict[str, Any] = {
    "name": "mine",
    "memory_bytes": 8 * 10**9,
    "bandwidth_bytes_per_second": 1e11,
    "flops_per_second": {"float32": 1e12, "bfloat16": 4e12},
}


@each("device", GPUS, ids=lambda device: device.name)
def test_a_row_is_from_a_vendor_and_is_sane(device: DeviceSpec) -> None:
    assert all(part.startswith("https://") for part in device.source.split())
    assert any(vendor in device.source for vendor in ("nvidia.com", "amd.com"))
    rate = device.flops_per_second
    assert rate["float16"] == rate.get("bfloat16", rate["float16"])
    assert rate.get("float64", 0) <= rate["float32"] <= rate["float16"] / 1.9
    if "tfloat32" in rate:
        assert rate["float32"] <= rate["tfloat32"] == pytest.approx(rate["float16"] / 2, rel=0.03)
    if "float8" in rate:
        assert rate["float8"] == pytest.approx(rate["float16"] * 2, rel=0.03)
    assert 60 < rate["float16"] / device.bandwidth_bytes_per_second < 500, "FLOPs a byte"
    assert 0.015 < device.memory_bytes / device.bandwidth_bytes_per_second < 0.1, "seconds to read its memory"


@each("device", TPUS, ids=lambda device: device.name)
def test_a_row_of_another_accelerator_is_sane(device: DeviceSpec) -> None:
    assert all(part.startswith("https://") for part in device.source.split())
    assert any(vendor in device.source for vendor in ("cloud.google.com", "awsdocs-neuron"))
    rate = device.flops_per_second
    assert rate["float32"] <= rate["bfloat16"]
    assert 150 < rate["bfloat16"] / device.bandwidth_bytes_per_second < 600, "FLOPs a byte"
    assert 0.015 < device.memory_bytes / device.bandwidth_bytes_per_second < 0.1, "seconds to read its memory"


def test_a_part_of_a_package_has_its_part_of_the_published_numbers() -> None:
    trainium, gb200 = DEVICES["Trainium2"], DEVICES["GB200"]
    assert trainium.memory_bytes * 4 == 96 * 2**30
    assert {name: 4 * rate / 1e12 for name, rate in trainium.flops_per_second.items()} == {
        "float32": 181, "tfloat32": 667, "bfloat16": 667, "float16": 667, "float8": 1299
    }  # fmt: skip
    assert 2 * gb200.bandwidth_bytes_per_second == 16e12


@each(("name", "gibibytes"), [("H100-SXM", 79.11), ("A100-80GB", 79.25), ("H200", 139.72), ("T4", 14.56)])
def test_memory_is_what_torch_reports(name: str, gibibytes: float) -> None:
    assert DEVICES[name].memory_bytes == round(gibibytes * 2**30)


def test_the_overhead_of_a_device_is_part_of_its_description(tmp_path: Path) -> None:
    slow = load(saved(tmp_path / "slow.json", {**MINE, "overhead": {"region_seconds": 1}}))
    assert slow.overhead == Overhead(region_seconds=1) != load(saved(tmp_path / "mine.json", MINE)).overhead
    assert Overhead().region_seconds > Overhead().saved_call_seconds > Overhead().saved_tensor_seconds > 0


def test_rates_are_those_without_sparsity() -> None:
    """On the data sheets these are the smaller numbers, or half of the only one."""
    tera = {name: round(DEVICES[name].flops_per_second["float16"] / 1e12) for name in ("A100-80GB", "H200", "L4")}
    assert tera == {"A100-80GB": 312, "H200": 990, "L4": 121}


def test_the_table_has_its_names_and_says_what_is_assumed() -> None:
    assert all(name == device.name for name, device in DEVICES.items())
    assert {"A100-40GB", "H100-SXM", "H200", "B200", "T4", "RTX-4090", "MI300X", "cpu"} <= DEVICES.keys()
    assert DEVICES["cpu"].source.startswith("assumed: ")
    assert len(set(DEVICES.values())) == len(DEVICES) >= 17


@each(
    ("name", "found"),
    [
        ("h100-sxm", "H100-SXM"),
        ("H100 PCIe", "H100-PCIe"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("AMD Instinct MI300X", "MI300X"),
        ("CPU", "cpu"),
    ],
)
def test_found_by_name(name: str, found: str) -> None:
    assert find(name) is DEVICES[found]


def test_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(
        UsageError, match=r"device='H10O-SXM' is not known. Did you mean 'H100-SXM'\? There are A100-40GB,"
    ):
        find("H10O-SXM")
    with pytest.raises(
        UsageError, match=r"device='abacus' is not known. There are .*JSON file: device=\"my_device.json\""
    ):
        find("abacus")
    with pytest.raises(UsageError, match=r"'A100' is not known. Did you mean 'A100-\d0GB' or 'A100-\d0GB'\? There are"):
        find("A100")


def test_a_format_without_units_runs_as_float32() -> None:
    t4 = find("T4")
    assert t4.rate("bfloat16") == t4.rate("tfloat32") == t4.rate("float32") == 8.1e12
    assert t4.rate("float64") == 8.1e12 / 2
    assert find("A100-40GB").rate("float64") == 19.5e12


def test_the_longer_of_arithmetic_and_traffic_counts() -> None:
    device = DeviceSpec(**MINE, source="me", launch_seconds=1.0, compute_efficiency=0.5, bandwidth_efficiency=0.25)
    assert device.seconds(flops=2e12, moved_bytes=1) == 1 + 4
    assert device.seconds(flops=2e12, moved_bytes=1, format_="bfloat16") == 1 + 1
    assert device.seconds(flops=1, moved_bytes=1e11) == 1 + 4


def saved(path: Path, content: object) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_device_of_ones_own(tmp_path: Path) -> None:
    path = saved(tmp_path / "mine.json", MINE)
    assert find(str(path)) == load(path)
    device = load(path)
    assert device == DeviceSpec(**MINE, source=str(path))
    assert load(saved(path, {**MINE, "source": "measured", "launch_seconds": 0})).source == "measured"
    assert load(saved(path, asdict(find("B200")))) == find("B200")


@each(
    ("change", "message"),
    [
        (
            {"bandwidth": 1},
            "unknown key 'bandwidth'. Did you mean 'bandwidth_bytes_per_second' or 'bandwidth_efficiency'?",
        ),
        ({"zzz": 1}, "unknown key 'zzz'. It takes name, memory_bytes, "),
        ({"name": 3}, "name=3 is not allowed. It takes a text"),
        ({"source": ""}, "source='' is not allowed"),
        ({"memory_bytes": 8e9}, "memory_bytes=8000000000.0 is not allowed. It takes an int above 0"),
        ({"memory_bytes": "8GB"}, "memory_bytes='8GB'"),
        ({"memory_bytes": True}, "memory_bytes=True"),
        ({"memory_bytes": 0}, "memory_bytes=0"),
        ({"bandwidth_bytes_per_second": "1e11"}, "bandwidth_bytes_per_second='1e11'"),
        ({"bandwidth_bytes_per_second": math.inf}, "bandwidth_bytes_per_second=inf"),
        ({"bandwidth_bytes_per_second": math.nan}, "bandwidth_bytes_per_second=nan"),
        ({"launch_seconds": -1}, "launch_seconds=-1"),
        ({"launch_seconds": None}, "launch_seconds=None"),
        ({"launch_seconds": False}, "launch_seconds=False"),
        ({"compute_efficiency": 0}, "compute_efficiency=0"),
        ({"bandwidth_efficiency": 1.01}, "bandwidth_efficiency=1.01"),
        ({"bandwidth_efficiency": "0.8"}, "bandwidth_efficiency='0.8'"),
        ({"flops_per_second": 1e12}, "flops_per_second=1000000000000.0"),
        ({"flops_per_second": {"float16": 1e12}}, 'It takes {"float32": FLOPs per second'),
        ({"flops_per_second": {"float32": 1e12, "fp16": 1e12}}, "has the format 'fp16'. It takes float64, float32"),
        ({"flops_per_second": {"float32": 1e12, "float8": "2e12"}}, "flops_per_second['float8']='2e12'"),
        ({"workspace_bytes": -1}, "workspace_bytes=-1 is not allowed. It takes an int from 0"),
        ({"workspace_bytes": 1.0}, "workspace_bytes=1.0"),
        ({"overhead": {"region": 1}}, "It takes an object with region_seconds, saved_tensor_seconds"),
        ({"overhead": {"region_seconds": -1}}, "overhead: region_seconds=-1 is not allowed"),
    ],
)
def test_a_file_with_a_mistake_is_refused_by_key(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        load(saved(tmp_path / "mine.json", {**MINE, **change}))
    assert message in str(caught.value)


def test_a_file_that_is_no_device_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    missing = {key: value for key, value in MINE.items() if key != "memory_bytes"}
    for content, message in [(missing, "missing 'memory_bytes'"), ([MINE], "a list. It takes"), ("{", "not JSON")]:
        with pytest.raises(UsageError, match=message):
            load(saved(path, content))
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none.json")


def test_better_in_one_number_is_never_slower() -> None:
    base = DeviceSpec(**MINE, source="me")
    better = [
        replace(base, bandwidth_bytes_per_second=2e11),
        replace(base, flops_per_second=dict.fromkeys(FORMATS, 4e12)),
        replace(base, launch_seconds=0),
        replace(base, compute_efficiency=1.0),
        replace(base, bandwidth_efficiency=1.0),
    ]
    calls = [(flops, moved, format_) for flops in (0, 1e9) for moved in (1, 1e9) for format_ in FORMATS]
    for device in better:
        seconds = [(device.seconds(*call), base.seconds(*call)) for call in calls]
        assert all(one <= other for one, other in seconds) and any(one < other for one, other in seconds)


def test_h100_is_the_module_and_a_missing_file_is_said() -> None:
    assert find("NVIDIA H100").name == "H100-SXM"
    with pytest.raises(UsageError, match=r"device='none\.json': this file cannot be read: No such file"):
        find("none.json")


# -- workspaces of libraries ------------------------------------------------------------------------------------------


def test_workspaces_are_those_that_torch_gives_its_libraries() -> None:
    """Hopper and Blackwell have 32 MiB, what is older 8 MiB and 128 KiB, where a matrix product is called at all."""
    mebibytes = {name: device.workspace_bytes / 2**20 for name, device in DEVICES.items()}
    assert {mebibytes[name] for name in ("H100-SXM", "H100-PCIe", "H200", "B200", "GB200", "RTX-5090")} == {32}
    assert {mebibytes[name] for name in ("A100-40GB", "L4", "T4", "V100-32GB", "RTX-4090")} == {8.125}
    assert {mebibytes[device.name] for device in (*TPUS, DEVICES["cpu"])} == {0}


@each(
    ("make", "count"),
    [
        (lambda: nn.Linear(4, 4, bias=False), 2),  # cuBLAS, in the thread of the forward pass and in autograd's
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False)), 4),  # and cuBLASLt
        (lambda: nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU()), 0),
    ],
    ids=["products", "with a bias", "none"],
)
def test_a_plan_counts_them_all_the_time(make: Any, count: int) -> None:
    """A device without workspaces has the same plan, with a peak that is smaller by theirs."""
    with torch.device("meta"):
        model, batch = make(), torch.empty(1, 1, 4, 4)
    with_them, without = (
        reactivate.plan(model, batch, loss=Tensor.sum, budget="1GiB", device=replace(find("H100-SXM"), **change))
        for change in ({}, {"workspace_bytes": 0})
    )
    assert without.fixed.others == 0
    assert with_them.fixed.others == with_them.peak_bytes - without.peak_bytes == count * 32 * 2**20
