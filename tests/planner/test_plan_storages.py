"""Plans that keep tensors in a storage: budgets hold to the byte, gradients to the bit, and what is moved is said."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import pickle
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import assert_bitwise
from plan_models import Block, Case, peak_with
from several import each
from torch import Tensor, nn
from torch._subclasses import FakeTensor

import reactivate
from reactivate import policies
from reactivate.errors import PlanInfeasible, UsageError
from reactivate.planner.cost.devices import find
from reactivate.planner.cost.links import Link
from reactivate.planner.plan import Plan
from reactivate.storage import Device, Disk, Host, spool


class Deep(nn.Module):
    """Its blocks are called with tensors that were computed."""

    def __init__(self, layers: int = 8, dim: int = 16) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(dim, dim), nn.Linear(dim, 1)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def deep(layers: int = 8) -> Case:
    return Case(Deep(layers), (torch.randn(8, 64, 16),), loss=lambda out: out.sum())


def planned(case: Case, budget: int | str, storages: Any = None, **options: Any) -> Plan:
    return reactivate.plan(
        case.model, case.args, case.kwargs, budget=budget, loss=case.loss, storage=storages, **options
    )


def least_of(plan: Plan) -> int:
    with pytest.raises(PlanInfeasible) as caught:
        plan.at(1)
    return caught.value.least_bytes


@dataclass
class PlanContents:
    """A model with its plans: where everything fits, for the least with a disk, and what would be the least without."""

    case: Case
    disk: Disk
    roomy: Plan
    tight: Plan
    least_without: int


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlanContents]:
    case = deep()
    disk = Disk(str(tmp_path_factory.mktemp("disk")), least_bytes=0)
    without = least_of(planned(case, "100%"))
    roomy = planned(case, "100%", disk)
    return PlanContents(case, disk, roomy, roomy.at(least_of(roomy)), without)


# -- the budget, and the bits -----------------------------------------------------------------------------------------


def test_where_all_fits_nothing_is_moved(made: PlanContents) -> None:
    plan = made.roomy
    assert plan.storages == () and plan.predicted.copies == ()
    assert {decision.candidate.name for decision in plan.decisions} == {"keep"}
    assert plan.offered == (repr(made.disk),)
    assert "Offered and not used, since the plan without it is as fast or faster: Disk(" in str(plan)


def test_a_budget_that_needs_the_disk_holds_and_one_byte_less_is_refused(made: PlanContents) -> None:
    plan = made.tight
    assert plan.budget_bytes < made.least_without
    moved = made.disk.traffic.moved_bytes
    for _ in range(3):  # however far the disk has come
        assert plan.fixed.total + peak_with(made.case, plan) <= plan.predicted.peak_bytes <= plan.budget_bytes
    assert made.disk.traffic.moved_bytes > moved and made.disk.traffic.loaded_bytes > 0
    with pytest.raises(PlanInfeasible) as caught:
        plan.at(plan.budget_bytes - 1)
    assert caught.value.least_bytes == plan.budget_bytes


def test_between_the_least_with_the_disk_and_without_budgets_hold(made: PlanContents) -> None:
    budget = (made.tight.budget_bytes + made.least_without) // 2
    plan = made.roomy.at(budget)
    assert [use.name for use in plan.storages] == ["disk"]
    assert plan.fixed.total + peak_with(made.case, plan) <= budget


def test_gradients_are_bitwise_those_of_the_plain_model(made: PlanContents) -> None:
    verdict = reactivate.verify(made.case.model, made.case.args, made.case.kwargs, policy=made.tight)
    assert verdict and verdict.regions > 0


def test_a_slow_disk_that_writes_to_the_end_keeps_the_budget(
    made: PlanContents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many tensors as can be are on their way at any time."""
    write = spool.Write.__call__

    def slow(self: Any) -> None:
        time.sleep(0.02)
        write(self)

    monkeypatch.setattr(spool.Write, "__call__", slow)
    plan = made.tight
    assert plan.fixed.total + peak_with(made.case, plan) <= plan.predicted.peak_bytes


def test_a_plan_is_measured(made: PlanContents) -> None:
    found = made.tight.measure()
    assert found.holds and found.measured_bytes <= found.predicted_bytes


# -- what it says -----------------------------------------------------------------------------------------------------


def test_the_plan_says_what_is_moved(made: PlanContents) -> None:
    plan = made.tight
    (use,) = plan.storages
    out = [item for item in plan.predicted.copies if not item.is_back]
    back = [item for item in plan.predicted.copies if item.is_back]
    assert use.stored_bytes >= max(item.nbytes for item in out) > 0
    assert 0 < sum(item.nbytes for item in back) <= sum(item.nbytes for item in out)  # the last ones stay
    assert all(item.end_seconds <= plan.predicted.seconds * 1.5 for item in plan.predicted.copies)
    for lane in (out, back):
        assert all(one.end_seconds <= other.begin_seconds for one, other in itertools.pairwise(lane))
    assert sum(item.moved_bytes for item in plan.decisions) >= sum(item.nbytes for item in out)
    text = str(plan)
    assert "moved" in text and f"{use.written} keeps" in text and "to disk" in text
    assert any(point.label == "planned, disk" for point in plan.frontier)
    least = min(plan.frontier, key=lambda point: point.peak_bytes)
    assert least.peak_bytes == plan.budget_bytes


def test_explain_says_where_inputs_are(made: PlanContents) -> None:
    with reactivate.apply(made.case.model, made.tight):
        text = str(reactivate.explain(made.case.model, made.case.args, fake=True))
    assert "inputs to Disk" in text


def test_the_timeline_and_the_page_show_the_copies(made: PlanContents, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    from reactivate.report import html, timeline
    from reactivate.report.figure import drawn

    figure = drawn(made.tight, timeline.draw)
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert {"to disk", "from disk"} <= set(labels)
    assert "to disk" in timeline.described(made.tight) and "to disk" not in timeline.described(made.roomy)
    page = html.page(made.tight)
    assert "keeps" in page and "moved" in page
    made.tight.save(tmp_path / "plan.png")


# -- files ------------------------------------------------------------------------------------------------------------


def test_a_plan_with_a_storage_is_a_file(made: PlanContents, tmp_path: Path) -> None:
    made.tight.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == made.tight and str(loaded) == str(made.tight)
    assert loaded.live == {"disk": Disk(made.disk.path, least_bytes=0)} and loaded.live["disk"] is not made.disk
    assert reactivate.verify(made.case.model, made.case.args, made.case.kwargs, policy=loaded)
    assert peak_with(made.case, loaded) + loaded.fixed.total <= loaded.budget_bytes


def test_a_file_may_be_given_another_storage(made: PlanContents, tmp_path: Path) -> None:
    elsewhere = Disk(str(tmp_path), least_bytes=0)
    loaded = Plan.from_json(json.loads(json.dumps(made.tight.to_json())), storage=elsewhere)
    assert loaded.live == {"disk": elsewhere}
    with pytest.raises(UsageError, match="this plan uses disk; got Host"):
        Plan.from_json(made.tight.to_json(), storage=Host())
    with pytest.raises(UsageError, match="this plan uses no storage"):
        Plan.from_json(made.roomy.to_json(), storage=elsewhere)


def test_copies_of_a_model_and_pickles_have_the_plan(made: PlanContents) -> None:
    handle = reactivate.apply(made.case.model, made.tight)
    for twin in (copy.deepcopy(made.case.model), pickle.loads(pickle.dumps(made.case.model))):
        found = reactivate.Handle.of(twin)
        assert found is not None and set(found.regions) == set(handle.regions) and found.policy == made.tight
    handle.remove()


def test_another_shape_is_told_of_without_a_promise(made: PlanContents) -> None:
    handle = reactivate.apply(made.case.model, made.tight)
    with pytest.warns(UserWarning, match="holds for these was not predicted"):
        made.case.model(torch.randn(4, 64, 16))
    handle.remove()


# -- storages of one's own --------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Bytes:
    """Keeps tensors in Python's memory."""

    def save(self, tensor: Tensor) -> Any:
        fake = isinstance(tensor, FakeTensor)
        return tensor.new_empty(0), tensor.shape, None if fake else bytearray(tensor.numpy(force=True).tobytes())

    def load(self, handle: Any) -> Tensor:
        like, shape, bits = handle
        return like.new_empty(shape) if bits is None else torch.frombuffer(bits, dtype=like.dtype).view(shape)


def test_a_storage_of_ones_own(made: PlanContents) -> None:
    kept = Bytes()
    plan = planned(made.case, "100%", kept)
    least = least_of(plan)
    assert least < made.least_without
    tight = plan.at(least)
    (use,) = tight.storages
    assert use.name == "bytes" and use.out_bytes_per_second is None
    assert tight.fixed.total + peak_with(made.case, tight) <= least
    with pytest.raises(UsageError, match=r"that no file can make again.*Plan\.load\(path, storage=\[...\]\)"):
        reactivate.apply(made.case.model, Plan.from_json(tight.to_json()))
    again = Plan.from_json(tight.to_json(), storage=kept)
    with reactivate.apply(made.case.model, again) as handle:
        assert handle.regions


# -- what is refused --------------------------------------------------------------------------------------------------


@each(
    ("storages", "message"),
    [
        (Host, "takes a storage"),
        ([Device()], "takes storages that move tensors"),
        (3, "takes a storage"),
        (Host(), "the model is on a CPU, whose memory is the host's"),
    ],
)
def test_what_is_no_storage_here_is_refused(storages: Any, message: str) -> None:
    case = deep(2)
    with pytest.raises(UsageError, match=message):
        planned(case, 1, storages)


@pytest.mark.slow
def test_a_storage_without_room_or_for_larger_tensors_is_refused(tmp_path: Path) -> None:
    case = deep(2)
    with pytest.raises(UsageError, match=r"no tensor is as large as its least_bytes=1,048,576"):
        planned(case, 1, Disk(str(tmp_path)))
    with pytest.raises(UsageError, match=r"has room for .* of a plan's tensors, and the smallest of them takes"):
        planned(case, 1, Disk(str(tmp_path), limit=4096, least_bytes=0))


class TwoSizes(nn.Module):
    """Blocks on all rows, and one on a few of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(16, 16), nn.ModuleList(Block(16) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = block(x if number < 5 else x[:, :8])
        return x


def test_candidates_that_move_nothing_are_not_warned_of(tmp_path: Path) -> None:
    disk = Disk(str(tmp_path), least_bytes=30_000)  # what blocks are given has 32,768 bytes, and the last one's 4,096
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = reactivate.plan(TwoSizes(), (torch.randn(8, 64, 16),), loss=Tensor.sum, budget="70%", storage=[disk])
    assert plan.offered == (repr(disk),)


def test_a_directory_that_is_not_there_is_refused_before_anything_runs(tmp_path: Path) -> None:
    case, calls = deep(2), []
    case.model.register_forward_pre_hook(lambda *_: calls.append("called"))
    with pytest.raises(UsageError, match="there is none at .*inside"):
        planned(case, "100%", Disk(str(tmp_path / "inside"), least_bytes=0))
    assert not calls


# -- limits, and devices that are not here ----------------------------------------------------------------------------


def slow_device(**links: Link) -> Any:
    return dataclasses.replace(find("A100-80GB"), name="mine", links=links)


@pytest.mark.slow
def test_the_limit_of_a_storage_is_held() -> None:
    with torch.device("meta"):
        case = Case(Deep(6, dim=512), (torch.zeros(16, 256, 512, device="cpu"),), loss=lambda out: out.sum())
    device = slow_device(host=Link(2e10, 1e10))
    largest = 16 * 256 * 512 * 4
    roomy = planned(case, "100%", Host(), device=device)
    limited = planned(case, "100%", Host(limit=4 * largest), device=device)
    tight = limited.at(least_of(limited))
    assert 0 < tight.storages[0].stored_bytes <= 4 * largest
    assert least_of(roomy) < least_of(limited)


@pytest.mark.slow
def test_a_slow_link_is_declined_and_a_fast_one_is_not() -> None:
    """At one and the same budget, which recomputation alone can hold."""
    with torch.device("meta"):
        case = Case(Deep(6, dim=512), (torch.zeros(16, 256, 512, device="cpu"),), loss=lambda out: out.sum())
    slow, fast = slow_device(host=Link(1e7, 1e7)), slow_device(host=Link(1e15, 1e15, 0.0))
    alone = planned(case, "34%", device=slow)
    declined, taken = (planned(case, "34%", Host(), device=device) for device in (slow, fast))
    assert declined.storages == () and declined.predicted.seconds == alone.predicted.seconds
    assert [use.name for use in taken.storages] == ["host"]
    assert taken.predicted.seconds < alone.predicted.seconds
    assert taken.predicted.peak_bytes <= taken.budget_bytes


def test_a_device_without_a_link_is_refused_and_a_file_gives_one(tmp_path: Path) -> None:
    from reactivate.planner.cost.devices import load

    case = deep(3)
    with pytest.raises(UsageError, match='it is unknown how fast RTX-4090 reaches Host.*"links": {"host"'):
        planned(case, 1, Host(least_bytes=0), device="RTX-4090")
    known = dataclasses.asdict(find("RTX-4090")) | {
        "links": {"host": {"out_bytes_per_second": 2.4e10, "back_bytes_per_second": 1e10}}
    }
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(known))
    device = load(path)
    assert device.links["host"].out_seconds(24 * 10**9) == 1.0 and device.links["host"].back_seconds(10**10) == 1.0
    for wrong in (
        3,
        {"host": 3},
        {"host": {"speed": 1}},
        {"host": {"out_bytes_per_second": -1, "back_bytes_per_second": 1}},
    ):
        path.write_text(json.dumps(known | {"links": wrong}))
        with pytest.raises(UsageError, match="links"):
            load(path)


def test_fakes_of_an_applied_disk_are_fake() -> None:
    """A storage gives back no real tensor while a step is simulated."""
    case = deep(2)
    with reactivate.apply(case.model, policies.full(inputs=Disk("unused", least_bytes=0))):
        text = str(reactivate.explain(case.model, case.args, fake=True))
    assert "recompute, inputs to Disk" in text and not Path("unused").exists()


def test_the_bits_of_a_plan_trained_for_some_steps(made: PlanContents) -> None:
    def trained(plan: Plan | None) -> dict[str, Tensor]:
        torch.manual_seed(0)
        case = deep()
        if plan is not None:
            reactivate.apply(case.model, plan)
        optimizer = torch.optim.SGD(case.model.parameters(), 0.01)
        for _ in range(3):
            optimizer.zero_grad()
            case.step()
            optimizer.step()
        return dict(case.model.state_dict())

    moved = made.disk.traffic.moved_bytes
    plain, with_disk = trained(None), trained(made.tight)
    assert made.disk.traffic.moved_bytes > moved
    for name, value in plain.items():
        assert_bitwise(value, with_disk[name], name)
