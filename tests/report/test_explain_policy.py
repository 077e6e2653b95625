"""`compare`: the plain model beside the model under a policy, to the byte, as text, page and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from report_cases import HOSTILE, read, texts_of
from several import each
from torch import Tensor, nn
from torch.nn import functional as F

import reactivate
from reactivate import report
from reactivate.errors import UsageError
from reactivate.policies import first_match, full, none, recompute_every, recompute_modules, save_ops
from reactivate.report import Comparison
from reactivate.report.comparison_page import page


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(16), nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.mlp(self.norm(x)))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), *(Block() for _ in range(4)), nn.Linear(16, 4))


X = torch.randn(32, 16)


def compared(policy: object, net: nn.Module | None = None) -> Comparison:
    return reactivate.compare(net or model(), X, policy=policy)


@each("fake", [None, True])
@each(
    "policy",
    [full(), none(), recompute_every(2), recompute_modules("*.mlp"), first_match(save_ops("linear"), full())],
    ids=str,
)
def test_both_sides_are_those_of_explain_and_add_up(policy: object, fake: bool | None) -> None:
    net = model()
    found = reactivate.compare(net, X, policy=policy, fake=fake)
    plain = reactivate.explain(net, X, fake=fake)
    with reactivate.apply(net, policy):  # type: ignore[arg-type]
        under = reactivate.explain(net, X, fake=fake)
    assert found.before.kept_bytes == plain.kept_bytes and found.after.kept_bytes == under.kept_bytes
    assert found.after.recomputed_bytes == under.recomputed_bytes
    assert (found.after.recomputed_bytes > 0) is (policy != none())
    for side, name in ((found.before, "before_bytes"), (found.after, "after_bytes")):
        assert sum(getattr(change, name) for change in found.changes) == side.kept_bytes
    assert sum(change.recomputed_bytes for change in found.changes) == found.after.recomputed_bytes
    assert not found.before.regions


def test_what_is_done_is_said_of_each_layer() -> None:
    actions = {change.path: change.action for change in compared(recompute_every(2)).changes}
    assert actions == {"0": "keep", "1": "recompute", "2": "keep", "3": "recompute", "4": "keep", "5": "keep"}
    inside = {change.path: change.action for change in compared(recompute_modules("*.mlp")).changes}
    assert inside["2"] == "recompute mlp"
    saving = {change.path: change.action for change in compared(first_match(save_ops("gelu"), full())).changes}
    assert saving["2"] == "recompute but mlp.1 gelu"
    around = {change.path: change.action for change in compared(recompute_modules(nn.Sequential)).changes}
    assert around["2"] == "inside of the model itself"
    assert around[""].startswith("recompute")


def test_the_model_keeps_the_policy_that_it_has() -> None:
    net = model()
    reactivate.apply(net, full())
    found = compared(recompute_every(4), net)
    assert [change.action for change in found.changes].count("recompute") == 1
    assert not found.before.regions
    assert len(reactivate.explain(net, X).regions) == 4


def test_a_function_is_one_region_with_the_policy() -> None:
    net = model()
    found = reactivate.compare(lambda x: net(x), X, policy=save_ops("linear"))
    assert not found.before.regions and len(found.after.regions) == 1
    assert "but 10 saved calls" in str(found)


def test_what_is_no_policy_is_refused() -> None:
    with pytest.raises(UsageError, match=r"compare\(policy=\.\.\.\)"):
        compared("full")
    with pytest.raises(UsageError, match="nothing"):
        compared(recompute_modules("nowhere.*"))


def test_the_text_says_what_the_values_say() -> None:
    found = compared(full())
    lines = found.text(plain=True).splitlines()
    plain, under = (report.html.in_words(side.kept_bytes) for side in (found.before, found.after))
    assert lines[0].startswith(f"Kept for the backward: plain {plain}, with the policy {under} (-")
    (row,) = [line for line in lines if line.startswith("1…4 (4 alike) Block")]
    assert "recompute" in row
    assert lines[-1].split()[:3] == ["all", *plain.split()]
    assert "ms" in lines[0]
    assert "ms" not in reactivate.compare(model(), X, policy=full(), fake=True).title


def test_json_takes_it_back() -> None:
    found = compared(full())
    assert Comparison.from_json(json.loads(json.dumps(found.to_json()))) == found
    with pytest.raises(UsageError, match="version 7"):
        Comparison.from_json({**found.to_json(), "version": 7})


def test_the_page_has_the_table_and_bars_of_the_same_lengths(tmp_path: Path) -> None:
    found = compared(recompute_every(2))
    path = tmp_path / "compared.html"
    report.write(found, path)
    root = read(path.read_text("utf-8"))
    rows = texts_of(root, 0)
    assert [row[:-1] for row in rows[:-1]] == [list(row.cells) for row in found.table().rows[:-1]]
    widths = [item.attributes["style"] for item in root.all("div") if item.attributes.get("class") == "bar before"]
    most = max(change.before_bytes for change in found.changes)
    assert widths == [f"width: {100 * change.before_bytes / most:.2f}%" for change in found.changes]
    assert len(root.all("script")) == 1 and not root.all("link")
    report.write(found, tmp_path / "compared.txt")
    assert (tmp_path / "compared.txt").read_text("utf-8").startswith("Kept for the backward")
    with pytest.raises(UsageError, match=r"takes \.html, \.json, \.txt; .*'\.png'"):
        report.write(found, tmp_path / "compared.png")


def test_hostile_names_are_only_text_there_too() -> None:
    name = HOSTILE.replace(".", "_")
    found = compared(none(), Named(name))
    root = read(page(found))
    assert any(name in row[0] for row in texts_of(root, 0))


class Named(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.add_module(name, nn.Linear(16, 4))
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.name)(x).exp()  # type: ignore[no-any-return]
