"""`reactivate devices`."""

from __future__ import annotations

import dataclasses

import click

from reactivate._text.table import WIDTH, Column, Row, Table
from reactivate.cli.options import REPORTING
from reactivate.cli.outcome import Code, answer
from reactivate.planner.cost.devices import DEVICES, FORMATS, DeviceSpec


@click.command()
@REPORTING
def devices(as_json: bool) -> int:
    """List the devices that a plan can be made for without having one."""
    answer(as_json, [dataclasses.asdict(device) for device in DEVICES.values()], _table())
    return Code.YES


def _table() -> str:
    columns = [Column("device"), *(Column(name, True) for name in ("GiB", "GB/s", "host GB/s", *FORMATS, "source"))]
    sources = list(dict.fromkeys(device.source for device in DEVICES.values()))
    rows = [Row([*_figures(device), f"[{sources.index(device.source) + 1}]"]) for device in DEVICES.values()]
    notes = (f"[{number}] {source}" for number, source in enumerate(sources, start=1))
    title = (
        "Memory as torch reports it; published peaks of its bandwidth and, in TFLOP/s, of dense matrix products; what copies "
        "to the host reach."
    )
    return "\n".join([Table(columns, rows, title).text(width=WIDTH), "", *notes])


def _figures(device: DeviceSpec) -> list[str]:
    host = device.links.get("host")
    rates = (device.flops_per_second.get(name) for name in FORMATS)
    return [
        device.name,
        f"{device.memory_bytes / 2**30:.4g}",
        f"{device.bandwidth_bytes_per_second / 1e9:.0f}",
        f"{host.out_bytes_per_second / 1e9:.4g}" if host is not None else "",
        *("" if rate is None else f"{rate / 1e12:.4g}" for rate in rates),
    ]
