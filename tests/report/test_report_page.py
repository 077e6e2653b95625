"""The page of a plan: it says what the plan says, is well formed, and needs nothing from outside.

Where there is Chromium or Chrome (REACTIVATE_BROWSER names one that is elsewhere) the page is opened in it as well: what it
makes of the page must be what stands in the file, and nothing may stick out of it, cover another or be cut. Without one the
same page is read by Python's own parser alone, and the boxes of labels are those that matplotlib computes.
"""

from __future__ import annotations

import html
import json
import re
from base64 import b64encode
from collections import Counter
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from report_cases import (
    BROWSER,
    EVIL,
    HOSTILE,
    PLANS,
    TWELVE,
    Element,
    every_plan,
    opened,
    page,
    read,
    rows_of,
    texts_of,
)

from reactivate import Plan
from reactivate.planner import text as plan_text
from reactivate.report import figure

# -- the page ---------------------------------------------------------------------------------------------------------


@every_plan
def test_the_page_is_well_formed(plan: Plan) -> None:
    text = page(plan)
    root = read(text)
    assert text.startswith("<!doctype html>")
    assert len(root.all("head")[0].all("title")) == 1
    for tag in ("html", "head", "body", "main", "h1"):
        assert len(root.all(tag)) == 1, tag
    assert len(root.all("svg")) == 2
    ids = [item.attributes["id"] for item in root.walk() if "id" in item.attributes]
    assert len(ids) == len(set(ids)) > 10
    targets = re.findall(r"(?:url\(|href=\")#([^)\"]+)", text)
    assert set(targets) <= set(ids)
    assert len(targets) > 2


@every_plan
def test_the_page_needs_nothing_from_outside(plan: Plan) -> None:
    root = read(page(plan))
    assert not {item.tag for item in root.walk()} & {
        "link",
        "img",
        "image",
        "iframe",
        "object",
        "embed",
        "base",
    }
    for item in root.walk():
        for name, value in item.attributes.items():
            assert not name.startswith("on")
            if name in ("src", "href", "xlink:href", "srcset", "action"):
                assert value.startswith("#")
            assert not re.search(r"url\((?!#)", value)
    styles = "".join(item.text for item in root.all("style"))
    assert "@import" not in styles
    assert "url(" not in styles
    policies = [item.attributes["content"] for item in root.all("meta") if "http-equiv" in item.attributes]
    (script,) = root.all("script")
    assert script.attributes == {}
    assert "fetch(" not in script.text and "import" not in script.text
    hashed = b64encode(sha256(script.text.encode()).digest()).decode()  # no other script may run, whatever a name says
    assert policies == [f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{hashed}'"]


@every_plan
def test_the_page_has_every_block_once(plan: Plan) -> None:
    blocks = rows_of(read(page(plan)), 0)[:-1]
    found: list[str] = []
    for row in blocks:
        folded = [item.text for item in row[0].all("li")]
        assert not folded or row[0].all("summary")[0].text == f"{folded[0]}…{folded[-1]} ({len(folded)} alike)"
        found += folded or [row[0].text]
    assert found == [decision.path or "the model itself" for decision in plan.decisions]


def test_the_page_says_what_the_plan_says() -> None:
    root = read(page(TWELVE))
    assert root.all("h1")[0].text == root.all("title")[0].text == "GPT in 228 MiB"
    paragraphs = [item.text for item in root.all("p")]
    assert paragraphs == [plan_text.verdict(TWELVE), plan_text.proof(TWELVE)]
    assert texts_of(root, 0)[-1] == ["all 12", "", "", "108 MiB", "270 ms"]
    marked = [row for row in root.all("tr") if row.attributes.get("class") == "marked"]
    assert [[cell.text for cell in row.all("td")][:3] for row in marked] == [["→", "this plan", "225 MiB"]]
    assert texts_of(root, 1) == [
        ["parameters", "20.0 MiB", "8.9 %"],
        ["gradients", "20.0 MiB", "8.9 %"],
        ["optimizer", "40.0 MiB", "17.8 %"],
        ["inputs", "1.00 MiB", "0.4 %"],
        ["kept", "108 MiB", "48.0 %"],
        ["recomputed", "33.0 MiB", "14.7 %"],
        ["workspace", "3.00 MiB", "1.3 %"],
        ["forward and backward", "225 MiB", "100.0 %"],
        ["the optimizer's step", "90.0 MiB", "40.0 %"],
    ]
    facts = dict(zip((item.text for item in root.all("dt")), (item.text for item in root.all("dd"))))
    assert facts["torch"] == "2.13.0"
    assert facts["inputs"] == "args[0]: int64 of (6, 256)"
    assert facts["budget"] == f"75%: {TWELVE.budget_bytes:,} bytes"


def test_the_pictures_of_the_page_are_described() -> None:
    pictures = read(page(TWELVE)).all("figure")
    words = [item.attributes["aria-label"] for item in pictures]
    assert [item.attributes["role"] for item in pictures] == ["img", "img"]
    assert "it rises to 225 MiB" in words[0]
    assert "a line at 228 MiB" in words[0]
    assert "rises to 564 MiB" in words[0]
    assert "full(), 112 MiB and 1.80 s" in words[1]
    assert "This one takes 225 MiB and 1.47 s" in words[1]


def test_the_pictures_of_the_page_have_its_colors() -> None:
    text = page(TWELVE)
    assert "currentColor" in text
    assert figure.PAPER not in text
    assert not {figure.INK, figure.BUDGET} & set(re.findall("#[0-9a-f]{6}", text.partition("<body>")[2]))
    assert text.count("var(--budget)") > 4
    assert "prefers-color-scheme: dark" in text


def test_hostile_names_are_only_text() -> None:
    root = read(page(EVIL))
    assert root.all("h1")[0].text == f"{HOSTILE} in 228 MiB"
    assert rows_of(root, 0)[0][0].text == f"{HOSTILE}.0"
    assert HOSTILE in [text.text for text in root.all("text")]
    assert HOSTILE in root.all("figure")[1].attributes["aria-label"]


# -- the page in a browser --------------------------------------------------------------------------------------------


_LOOK = """<!doctype html><meta charset="utf-8"><title>look</title><body>%s<script>
onload = () => {
  const found = [...document.querySelectorAll("iframe")].map(frame => {
    const inner = frame.contentDocument, bad = [];
    const visible = box => `${box.left|0},${box.top|0} to ${box.right|0},${box.bottom|0}`;
    for (const svg of inner.querySelectorAll("svg")) {
      const edge = svg.getBoundingClientRect();
      const texts = [...svg.querySelectorAll("text")].map(text => [text.textContent, text.getBoundingClientRect()]);
      texts.forEach(([name, box], index) => {
        if (box.left < edge.left - 1 || box.right > edge.right + 1 || box.top < edge.top - 1 || box.bottom > edge.bottom + 1)
          bad.push(`${name} is cut: ${visible(box)} of ${visible(edge)}`);
        for (const [other, beside] of texts.slice(index + 1))
          if (Math.min(box.right, beside.right) - Math.max(box.left, beside.left) > 1
              && Math.min(box.bottom, beside.bottom) - Math.max(box.top, beside.top) > 2)
            bad.push(`${name} covers ${other}`);
      });
    }
    const page = inner.documentElement;
    const cut = [...inner.querySelectorAll(".scroll")].filter(box => box.scrollWidth > box.clientWidth);
    return {cut: cut.map(box => box.getAttribute("aria-label")), asked: frame.clientWidth, width: page.scrollWidth,
            height: page.scrollHeight, bad, texts: inner.querySelectorAll("svg text").length, title: inner.title};
  });
  document.body.textContent = JSON.stringify(found);
};
</script>"""


def shape(root: Element) -> list[tuple[str, dict[str, str], str]]:
    return [
        (item.tag, item.attributes, "".join(part for part in item.inside if isinstance(part, str)).strip())
        for item in root.all("html")[0].walk()
    ]


READERS = {"parser": lambda path: read(path.read_text("utf-8")), **({"browser": opened} if BROWSER else {})}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
@pytest.mark.parametrize("name", ["twelve", "single", "hostile"])
def test_the_page_is_read_as_it_is_written(reader: Any, name: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    path.write_text(page(PLANS[name]), encoding="utf-8")
    root = reader(path)
    assert shape(root) == shape(read(page(PLANS[name])))
    assert Counter(item.tag for item in root.walk())["svg"] == 2


if BROWSER:

    def test_the_page_fits_on_a_phone_and_on_a_screen(tmp_path: Path) -> None:
        widths, names = (360, 1200, 1300), [name for name in PLANS if name != "hostile"]
        frames = [
            f'<iframe style="border:0;width:{width}px;height:3000px" srcdoc="{html.escape(page(PLANS[name]))}"></iframe>'
            for name in names
            for width in widths
        ]
        path = tmp_path / "look.html"
        path.write_text(_LOOK % "".join(frames), encoding="utf-8")
        found = json.loads(opened(path).all("body")[0].text)
        assert [item["asked"] for item in found] == [*widths] * len(names)
        for item, name in zip(found, [name for name in names for _ in widths]):
            assert item["width"] <= item["asked"], (name, item)
            assert item["texts"] > 20, (name, item)
            assert not item["bad"], (name, item)
            assert item["asked"] < 1000 or not item["cut"], (name, item)
