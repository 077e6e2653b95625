"""Two runs side by side, on the terminal and in a plot."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from _runs import Run, Timeline
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich import box
from rich.table import Table

MIB = 2**20
LABELS = ("plain", "planned")
COLORS = ("#8d99ae", "#d1495b")


def table(results: dict[str, Any]) -> Table:
    """The figures of both runs, and whether they are the same."""
    shown = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for index, name in enumerate(("", *LABELS, "ratio")):
        shown.add_column(name, justify="right" if index else "left")
    rows = {
        "peak activation bytes": ("peak_activation_bytes", lambda count: f"{count / MIB:,.1f} MiB"),
        "bytes kept after the forward": ("kept_after_forward_bytes", lambda count: f"{count / MIB:,.1f} MiB"),
        "step time, median": ("median_step_seconds", lambda seconds: f"{seconds:,.3f} s"),
    }
    for title, (name, shape) in rows.items():
        values = (shape(results[label][name]) for label in LABELS)
        shown.add_row(title, *values, f"{results['ratios'][name]:.2f}")
    plan = results["plan"]
    budget, promised = (
        f"{plan[name] / MIB:,.1f} MiB" for name in ("activation_budget_bytes", "promised_activation_bytes")
    )
    shown.add_section()
    shown.add_row("the budget for activations", "", budget)
    shown.add_row("the peak that the plan promised", "", promised)
    shown.add_section()
    shown.add_row(f"the budget holds: {_verdict(results['holds'])}")
    shown.add_row(f"losses, gradients and RNG identical: {_verdict(results['identical'])}")
    return shown


def _verdict(is_so: bool) -> str:
    return "[bold green]yes[/]" if is_so else "[bold red]no[/]"


def plot(plain: Run, planned: Run, results: dict[str, Any], path: Path) -> None:
    """Left, the memory of a step and the budget; right, losses and step times. The second run is drawn over the first."""
    figure = Figure(figsize=(12, 5.5), layout="constrained")
    memory, loss, time = figure.subplot_mosaic([["memory", "loss"], ["memory", "time"]], width_ratios=(3, 2)).values()
    for run, label, color, width in zip((plain, planned), LABELS, COLORS, (5, 1.5)):
        draw_memory(memory, run.timeline, label, color)
        loss.plot(range(1, len(run.losses) + 1), run.losses, color=color, linewidth=width, label=label)
        median = f"{label}: median {statistics.median(run.step_seconds):.2f} s"
        time.plot(range(1, len(run.step_seconds) + 1), run.step_seconds, color=color, linewidth=1.5, label=median)
    budget = results["plan"]["activation_budget_bytes"] / MIB
    memory.axhline(budget, color="black", linewidth=1, linestyle="--", label=f"the budget: {budget:,.0f} MiB")
    memory.margins(y=0.18)  # room for the legend, above the mountain
    memory.set(title="Memory of one training step", xlabel="seconds; a dot where the forward pass ends", ylabel="MiB")
    loss.set(title="Loss", ylabel="nats per byte")
    time.set(title="Step time", xlabel="step", ylabel="seconds")
    for axes in (memory, loss, time):
        axes.set_title(axes.get_title(), loc="left", fontweight="bold")
        axes.set_title("")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="best" if axes is time else "upper right")
    memory.set_ylim(bottom=0)
    time.set_ylim(bottom=0)
    time.sharex(loss)
    figure.savefig(path, dpi=150)


def draw_memory(axes: Axes, timeline: Timeline, label: str, color: str) -> None:
    """A step's memory as a mountain, with a dot where its forward pass ends."""
    mebibytes = [allocated / MIB for allocated in timeline.allocated_bytes]
    peak = (
        f"{label}: {timeline.peak_bytes / MIB:,.0f} MiB at most, {timeline.kept_bytes / MIB:,.0f} MiB after the forward"
    )
    axes.fill_between(timeline.seconds, mebibytes, step="post", color=color, alpha=0.35, linewidth=0)
    axes.step(timeline.seconds, mebibytes, where="post", color=color, linewidth=1, label=peak)
    axes.plot(timeline.forward_seconds, timeline.kept_bytes / MIB, "o", color=color)
