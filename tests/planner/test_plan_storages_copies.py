"""Copies on the clock of a step: queues, waits, and how fast the way to a storage is."""

from __future__ import annotations

import math
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from several import each

from reactivate.errors import UsageError
from reactivate.planner.cost import links
from reactivate.planner.cost.links import Link, link_between
from reactivate.planner.prediction import Flow, predict, time_copies
from reactivate.planner.trace.records import CopyEvent, Op, Trace
from reactivate.storage import Disk

SLOW_BACK = Link(2.0, 1.0)  # bytes per second


def step(moves: list[CopyEvent], ops: int = 8) -> Trace:
    """Ops of a second each, the second half of them in the backward."""
    return Trace([Op(0, 0, 2 * number >= ops, False, 0, 0, 0, 1.0) for number in range(ops)], moves=moves)


def spans(flow: Flow) -> list[tuple[float, float, bool]]:
    return [(copy.begin_seconds, copy.end_seconds, copy.is_back) for copy in flow.copies]


def test_a_copy_that_is_done_in_time_costs_nothing() -> None:
    moves = [
        CopyEvent(1, "sent", 1, 4),
        CopyEvent(3, "settled", 1, 4),
        CopyEvent(5, "fetched", 1, 2),
        CopyEvent(7, "read", 1, 2),
    ]
    flow = time_copies(step(moves), SLOW_BACK, 1.0, is_awaited=False)
    assert spans(flow) == [(1.0, 3.0, False), (5.0, 7.0, True)]
    assert flow.waited_seconds == 0.0


def test_a_step_waits_for_the_rest_of_a_copy_and_all_that_follows_is_later() -> None:
    moves = [
        CopyEvent(1, "sent", 1, 4),
        CopyEvent(2, "settled", 1, 4),
        CopyEvent(5, "fetched", 1, 4),
        CopyEvent(6, "read", 1, 4),
    ]
    flow = time_copies(step(moves), SLOW_BACK, 1.0, is_awaited=False)
    assert spans(flow) == [(1.0, 3.0, False), (6.0, 10.0, True)]
    assert flow.waits == {2: 1.0, 6: 3.0}
    prediction = predict(step(moves), 0, 8.0, flow)
    assert prediction.seconds == 12.0 and prediction.waited_seconds == 4.0
    assert prediction.forward_seconds == 5.0 and prediction.moments[-1].seconds == 12.0


def test_copies_in_one_direction_wait_for_one_another_and_those_in_the_other_do_not() -> None:
    moves = [
        CopyEvent(0, "sent", 1, 4),
        CopyEvent(1, "sent", 2, 4),
        CopyEvent(1, "fetched", 3, 1),
        CopyEvent(6, "settled", 2, 4),
    ]
    flow = time_copies(step(moves), SLOW_BACK, 1.0, is_awaited=False)
    assert spans(flow) == [(0.0, 2.0, False), (2.0, 4.0, False), (1.0, 2.0, True)]


def test_what_is_on_its_way_out_comes_back_when_it_is_there() -> None:
    moves = [CopyEvent(0, "sent", 1, 8), CopyEvent(1, "fetched", 1, 1)]
    assert spans(time_copies(step(moves), SLOW_BACK, 1.0, is_awaited=False))[1] == (4.0, 5.0, True)


def test_a_program_that_waits_for_each_copy_hides_nothing() -> None:
    moves = [CopyEvent(1, "sent", 1, 4), CopyEvent(5, "fetched", 1, 2), CopyEvent(5, "read", 1, 2)]
    assert time_copies(step(moves), SLOW_BACK, 1.0, is_awaited=True).waits == {1: 2.0, 5: 2.0}


def test_ops_are_scaled_and_copies_are_not() -> None:
    moves = [CopyEvent(1, "sent", 1, 4), CopyEvent(2, "settled", 1, 4)]
    assert time_copies(step(moves), SLOW_BACK, 10.0, is_awaited=False).waited_seconds == 0.0
    assert time_copies(step(moves), None, 1.0, is_awaited=False) == Flow()


def test_the_way_to_a_disk_is_measured_once_in_both_directions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_PROBE_BYTES", 2**20)
    order: list[str] = []
    copies = links._disk_copies

    @contextmanager
    def logged(path: str, device: torch.device) -> Any:
        with copies(path, device) as (out, back):
            yield lambda: (order.append("out"), out()), lambda: (order.append("back"), back())

    monkeypatch.setattr(links, "_disk_copies", logged)
    found = link_between(Disk(str(tmp_path)), torch.device("cpu"))
    assert found.out_bytes_per_second > 0 and found.back_bytes_per_second > 0 and found.tensor_seconds > 0
    assert order == ["out", "back"] * (links._ROUNDS + 1)  # in turns
    assert link_between(Disk(str(tmp_path), limit=5), torch.device("cpu")) is found
    assert not [entry for entry in tmp_path.iterdir() if entry.is_dir() and any(entry.iterdir())]


@each("values", [(0, 1), (1, -1), (1, math.nan), (math.inf, 1), ("1", 1), (1, 1, -1.0), (True, 1)])
def test_a_link_that_cannot_be_is_refused(values: Any) -> None:
    with pytest.raises(UsageError, match="is not allowed"):
        Link(*values)
