"""Plans that are reported, and readers of the pages: Python's parser, and a browser where there is one."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from several import each

from reactivate import Plan
from reactivate.planner.candidates import FULL, KEEP, Candidate
from reactivate.planner.contents import Circumstances, Decision, Fixed, LiveBytes, Point, Prediction, Proof
from reactivate.report.html import page as written

MIB = 2**20
FIXED = Fixed(parameters=20 * MIB, gradients=20 * MIB, optimizer=40 * MIB, inputs=1 * MIB)
PRODUCTS = Candidate("recompute but products", ("",), ("mlp",))
HOSTILE = "<script>alert('x')</script> & \"$\\frac{1}{2}$\" <img src=https://example.org/x.png onerror=alert(1)>"


# -- plans ------------------------------------------------------------------------------------------------------------


def step(blocks: int, kept: int, recomputed: int, seconds: float) -> Prediction:
    """A forward that keeps `kept` bytes a block, a backward in which each block makes `recomputed` again."""
    moments = [LiveBytes(seconds * (k + 1) / (3 * blocks), (k + 1) * kept, 0, 2 * MIB) for k in range(blocks)]
    forward = moments[-1].seconds
    for k in range(blocks):
        now = forward + (seconds - forward) * (k + 1) / blocks
        moments.append(LiveBytes(now, (blocks - k) * kept, recomputed, 3 * MIB))
    peak = FIXED.total + max(moment.total for moment in moments)
    return Prediction(peak, seconds, forward, tuple(moments))


def made(candidates: list[Candidate], **changes: Any) -> Plan:
    """A plan as `reactivate.plan` would return it, for a chain of blocks."""
    count = len(candidates)
    plain = step(count, 40 * MIB, 0, 0.1 * count)
    recomputed = sum(candidate is not KEEP for candidate in candidates)
    predicted = plain if not recomputed else step(count, 9 * MIB, 33 * MIB, 0.1 * count + 0.03 * recomputed)
    least = predicted.peak_bytes // 2
    span = plain.peak_bytes - least
    frontier = [
        Point("planned", least + k * span // 11, plain.seconds * (1.4 - 0.4 * (k / 11) ** 0.5)) for k in range(12)
    ]
    policies = [
        Point("none()", plain.peak_bytes, plain.seconds),
        Point("full()", least, plain.seconds * 1.5),
        *(Point(f"recompute_every({k})", least + k * span // 5, plain.seconds * (1.5 - 0.1 * k)) for k in (2, 3)),
    ]
    decisions = [
        Decision(f"blocks.{k}", "Block", "0" * 16, candidate, 9 * MIB, 0.03 * (candidate is not KEEP))
        for k, candidate in enumerate(candidates)
    ]
    plan = Plan(
        budget="75%",
        budget_bytes=predicted.peak_bytes + 3 * MIB,
        made_for=Circumstances("GPT", (("args[0]", (6, 256), "int64"),), "cpu", "2.13.0", "default", False),
        decisions=tuple(decisions),
        fixed=FIXED,
        plain=plain,
        predicted=predicted,
        frontier=tuple(frontier),
        policies=tuple(policies),
        proof=Proof("simulated", predicted.peak_bytes, 2),
        optimizer_bytes=90 * MIB,
        planning_seconds=4.25,
    )
    return replace(plan, **changes)


TWELVE = made([FULL, *[PRODUCTS] * 7, KEEP, FULL, KEEP, KEEP])
SINGLE = made(
    [KEEP], policies=tuple(Point(name, 150 * MIB, 0.1) for name in ("none()", "full()", "recompute_every(2)"))
)
SINGLE = replace(SINGLE, decisions=(replace(SINGLE.decisions[0], path=""),))
EVIL = replace(
    TWELVE,
    made_for=Circumstances(HOSTILE, ((HOSTILE, (1,), HOSTILE),), HOSTILE, HOSTILE, HOSTILE, True),
    decisions=tuple(replace(item, path=f"{HOSTILE}.{k}", kind=HOSTILE) for k, item in enumerate(TWELVE.decisions)),
    policies=tuple(replace(item, label=HOSTILE) for item in TWELVE.policies),
)
LONG = replace(
    made([FULL, PRODUCTS, KEEP] * 6),
    made_for=replace(TWELVE.made_for, model="Qwen3OmniMoeThinkerForConditionalGeneration"),
)
LONG = replace(
    LONG,
    decisions=tuple(
        replace(
            item,
            path=f"thinker.model.language_model.layers.{k}",
            kind="Qwen3OmniMoeThinkerTextDecoderLayer",
            candidate=replace(item.candidate, name="recompute self_attn and mlp, inputs to host"),
            held_bytes=(1000 + k) * MIB,
        )
        for k, item in enumerate(LONG.decisions)
    ),
)
PLANS = {
    "twelve": TWELVE,
    "long": LONG,
    "all kept": made([KEEP] * 12),
    "single": SINGLE,
    "hundred": made([FULL, KEEP] * 20 + [PRODUCTS] * 60),
    "loose": replace(TWELVE, budget="80GiB", budget_bytes=80 * 2**30),
    "optimizer": replace(TWELVE, optimizer_bytes=TWELVE.budget_bytes - 1, largest=48),
    "crowded": replace(
        TWELVE,
        policies=tuple(Point(f"policy_{k}()", 200 * MIB + k * MIB // 2, 1.4 + k / 300) for k in range(6)),
    ),
    "untimed": replace(
        TWELVE,
        plain=replace(TWELVE.plain, seconds=0.0, forward_seconds=0.0),
        predicted=replace(TWELVE.predicted, seconds=0.0, forward_seconds=0.0),
        frontier=(),
        policies=(),
    ),
    "hostile": EVIL,
}
page = functools.cache(written)  # a second each
every_plan = each("plan", PLANS.values(), ids=PLANS)


# -- the page ---------------------------------------------------------------------------------------------------------

_VOID = {"meta", "link", "img", "br", "hr", "input"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str]
    inside: list[Element | str] = field(default_factory=list)

    def walk(self) -> Iterator[Element]:
        yield self
        for item in self.inside:
            if isinstance(item, Element):
                yield from item.walk()

    def all(self, tag: str) -> list[Element]:
        return [item for item in self.walk() if item.tag == tag]

    @property
    def text(self) -> str:
        return "".join(item if isinstance(item, str) else item.text for item in self.inside)


class Reader(HTMLParser):
    """Reads a page, and insists that what is opened is closed."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open = [Element("", {})]

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        names = [name for name, _ in attrs]
        assert len(set(names)) == len(names), f"<{tag}> has an attribute twice"
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.open[-1].inside.append(element)
        if tag not in _VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().tag == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        self.open[-1].inside.append(data)


def read(text: str) -> Element:
    reader = Reader()
    reader.feed(text)
    reader.close()
    (root,) = reader.open
    return root


def rows_of(root: Element, number: int) -> list[list[Element]]:
    return [row.all("td") for row in root.all("tbody")[number].all("tr")]


def texts_of(root: Element, number: int) -> list[list[str]]:
    return [[cell.text.replace("\u00a0", " ") for cell in row] for row in rows_of(root, number)]


# -- the page in a browser --------------------------------------------------------------------------------------------

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = os.environ.get("REACTIVATE_BROWSER") or next(filter(None, map(shutil.which, _NAMES)), None)
_OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--virtual-time-budget=10000")


def opened(path: Path) -> Element:
    """Return what a browser makes of a file."""
    assert BROWSER is not None
    command = [BROWSER, *_OPTIONS, f"--user-data-dir={path.parent / 'profile'}", "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return read(done.stdout.partition("\n")[2] if done.stdout.startswith("<!") else done.stdout)
