"""Plans for compiled steps: what they take beside an eager step is counted, and the compiled step that was run holds.

`aot_eager` has the graphs of the default backend, its partitioner among it, without minutes of compiling. How blocks are
compiled is said by compiling them: `block.compile(backend=...)`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from memory import allocated_by
from plan_models import GPT
from torch import Tensor, nn
from torch.nn import functional as F

import reactivate
from reactivate import Plan
from reactivate._torch.dynamo import has_budgets_in_graphs
from reactivate.errors import PlanInfeasible, UsageError
from reactivate.planner.candidates import FULL, KEEP, SHARES, Assignment
from reactivate.planner.planner import holding_compiled

TOKENS = torch.randint(64, (4, 64), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    torch.compiler.reset()


def loss_of(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), torch.zeros(256, dtype=torch.long))


def model() -> GPT:
    torch.manual_seed(0)
    return GPT(dim=64, layers=3)


def planned(net: GPT, budget: int | str, **options: Any) -> Plan:
    return reactivate.plan(net, TOKENS, budget=budget, loss=loss_of, **options)


def least_of(plan: Plan) -> int:
    with pytest.raises(PlanInfeasible) as caught:
        plan.at(1)
    return caught.value.least_bytes


def test_a_compiled_step_takes_more_than_the_eager_one_and_a_plan_for_it_holds() -> None:
    net = model()
    eager = planned(net, "100%")
    least = least_of(eager)
    tight = eager.at(least)
    assert tight.measure().holds
    found = tight.measure(compiled="aot_eager")
    assert not found.holds and "above the budget of" in str(found) and "Compiled step:" in str(found)
    with pytest.raises(PlanInfeasible):
        planned(net, least, compiled="aot_eager")
    budget = found.measured_bytes
    plan = planned(net, budget, compiled="aot_eager")
    assert plan.budget_bytes == budget and plan.proof.method == "compiled"
    assert plan.proof.peak_bytes <= budget
    assert "Proved by a compiled step" in str(plan)
    assert any(decision.candidate.recompute for decision in plan.decisions)
    again = plan.measure(compiled="aot_eager")
    assert again.holds and again.is_compiled and again.measured_bytes == plan.proof.peak_bytes


def test_all_gradients_at_once_are_counted() -> None:
    """Without a device to run on the plan is predicted, and nothing is compiled."""
    with torch.device("meta"):
        net = GPT(dim=64, layers=3)
    plans = [planned(net, "100%", compiled=compiled) for compiled in (False, True)]
    eager, compiled = (plan.at(least_of(plan)) for plan in plans)
    assert compiled.proof.method == "simulated"
    assert eager.predicted.peak_bytes < compiled.predicted.peak_bytes
    assert compiled.predicted.peak_bytes <= eager.predicted.peak_bytes + eager.fixed.gradients
    weights = [item for item in compiled.predicted.alive if item.kind == "workspace" and item.held_by == ("the step",)]
    assert sum(item.nbytes for item in weights) > 0  # gradients that stay


def test_gradients_are_those_of_the_compiled_plain_model() -> None:
    net = model()
    plan = planned(net, "70%", compiled="aot_eager")

    def gradients() -> list[Tensor]:
        torch.compiler.reset()
        net.zero_grad()
        loss_of(torch.compile(net, backend="aot_eager")(TOKENS)).backward()
        return [item.grad.clone() for item in net.parameters() if item.grad is not None]

    for item in net.modules():
        if isinstance(item, torch.nn.Dropout):
            item.p = 0.0
    expected = gradients()
    with reactivate.apply(net, plan):
        found = gradients()
    assert len(found) == len(expected) > 0 and all(map(torch.equal, found, expected))


class MeasuredCosts:
    """A measurement."""

    def __init__(self, plan: Plan, measured: int) -> None:
        self.plan, self.measured_bytes = plan, measured


def test_a_plan_is_tightened_until_its_compiled_step_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    net = model()
    first = planned(net, "80%")
    own_bytes = (
        first.budget_bytes - first.predicted.peak_bytes + 50_000
    )  # the compiler's: more than the first plan leaves
    tried: list[int] = []

    def measure(plan: Plan, *, compiled: bool | str) -> MeasuredCosts:
        tried.append(plan.predicted.peak_bytes)
        return MeasuredCosts(plan, plan.predicted.peak_bytes + own_bytes)

    monkeypatch.setattr(Plan, "measure", measure)
    found = holding_compiled(first, True, lambda budget: first.at(budget.text))
    assert len(tried) > 1 and tried == sorted(tried, reverse=True)
    assert (found.budget, found.budget_bytes) == (first.budget, first.budget_bytes)
    assert found.proof.peak_bytes == tried[-1] + own_bytes <= first.budget_bytes
    assert found.proof.rounds == len(tried)
    with pytest.raises(PlanInfeasible, match="no compiled step keeps within"):
        tight = first.at(least_of(first))
        holding_compiled(tight, True, lambda budget: tight.at(budget.text))


def test_what_a_compiled_step_cannot_have_is_refused() -> None:
    net = model()
    with pytest.raises(UsageError, match=r"plan\(compiled='fast'\): it takes True, False, 'blocks', or the name"):
        planned(net, "50%", compiled="fast")
    with pytest.raises(UsageError, match=r"compiled=True\) is not supported with maximize="):
        planned(net, "1GiB", compiled=True, maximize="batch")
    with pytest.raises(UsageError, match="adaptive"):
        planned(net, "1GiB", compiled=True, shapes="adaptive")
    with pytest.raises(UsageError, match=r"compiled=True\) is not supported with step="):
        reactivate.plan(net, budget="50%", step=lambda: loss_of(net(TOKENS)).backward(), compiled=True)
    whole = reactivate.plan(net, budget="100%", step=lambda: loss_of(net(TOKENS)).backward())
    with pytest.raises(UsageError, match="a function of yours"):
        whole.measure(compiled="aot_eager")


# -- each block compiled ----------------------------------------------------------------------------------------------

needs_budgets = pytest.mark.skipif(not has_budgets_in_graphs, reason="torch's compiler takes budgets since 2.13")
COUNT = 5


def blocks(**options: Any) -> GPT:
    """Return a GPT without dropout, of which compiled and eager steps are the same."""
    torch.manual_seed(0)
    net = GPT(dim=32, layers=COUNT, **options)
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return net


def in_place(net: GPT) -> None:
    for block in net.blocks:
        block.compile(backend="aot_eager", fullgraph=True)


def wrapped(net: GPT) -> None:
    for number, block in enumerate(net.blocks):
        net.blocks[number] = torch.compile(block, backend="aot_eager", fullgraph=True)


IDIOMS = pytest.mark.parametrize("compile_blocks", [in_place, wrapped])


def step_of(net: nn.Module) -> Callable[[], None]:
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step() -> None:
        output = net(TOKENS)
        loss_of(output).backward()

    return step


def gradients_and_peak(net: nn.Module) -> tuple[list[Tensor], int]:
    step = step_of(net)
    step()
    found = [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]
    return found, allocated_by(step).peak_bytes


def plan_blocks(net: nn.Module, budget: int | str) -> Plan:
    return reactivate.plan(net, TOKENS, budget=budget, loss=loss_of, compiled="blocks")


@pytest.fixture(scope="module")
def planned_for_blocks() -> Plan:
    net = blocks()
    in_place(net)
    return plan_blocks(net, "50%")


@IDIOMS
def test_a_plan_for_blocks_holds_in_a_step_of_its_own(planned_for_blocks: Plan, compile_blocks: Any) -> None:
    plan, net, plain = planned_for_blocks, blocks(), blocks()
    assert plan.proof.method == "compiled" and plan.proof.peak_bytes <= plan.budget_bytes
    compile_blocks(plain)
    expected, plain_bytes = gradients_and_peak(plain)
    reactivate.apply(net, plan)
    compile_blocks(net)
    found, peak_bytes = gradients_and_peak(net)
    assert all(map(torch.equal, found, expected))
    assert plan.fixed.total + peak_bytes == plan.proof.peak_bytes == plan.predicted.peak_bytes
    assert plan.fixed.total + plain_bytes == plan.plain.peak_bytes
    assert any(decision.candidate != KEEP for decision in plan.decisions)


def test_what_blocks_come_to_adds_up(planned_for_blocks: Plan) -> None:
    plan = planned_for_blocks
    assert "Proved by a compiled step" in str(plan)
    assert sum(item.nbytes for item in plan.predicted.alive) == plan.predicted.peak_bytes - plan.fixed.total
    tight = plan.at(least_of(plan))
    assert tight.measure(compiled="blocks").holds
    assert tight.predicted.peak_bytes < plan.predicted.peak_bytes < plan.plain.peak_bytes
    assert tight.proof.method == "compiled"


def test_a_plan_for_blocks_goes_through_a_file(planned_for_blocks: Plan, tmp_path: Path) -> None:
    planned_for_blocks.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").decisions == planned_for_blocks.decisions


@needs_budgets
@IDIOMS
def test_every_candidate_survives_compilation(compile_blocks: Any) -> None:
    """Each in a block of its own: fewer bytes than the plain step, and the same gradients."""
    plain, net = blocks(), blocks()
    compile_blocks(plain)
    expected, plain_bytes = gradients_and_peak(plain)
    chosen = (KEEP, FULL, *SHARES[1:])
    with reactivate.apply(net, Assignment({f"blocks.{number}": item for number, item in enumerate(chosen)})) as handle:
        assert handle.regions == ("blocks.1",) and handle.budgets == ("blocks.2", "blocks.3", "blocks.4")
        assert "Recomputed in part, by torch's compiler: blocks.2, blocks.3, blocks.4." in str(handle)
        compile_blocks(net)
        found, peak_bytes = gradients_and_peak(net)
    assert all(map(torch.equal, found, expected))
    assert peak_bytes < plain_bytes


@needs_budgets
def test_equal_blocks_share_a_graph() -> None:
    """Of one function the compiler keeps eight graphs, and leaves the rest to eager."""
    net = blocks()
    reactivate.apply(net, Assignment({f"blocks.{number}": SHARES[1] for number in range(COUNT)}))
    in_place(net)
    counters = torch._dynamo.utils.counters["stats"]
    before = counters["unique_graphs"]
    step_of(net)()
    assert counters["unique_graphs"] - before == 1


@needs_budgets
def test_a_block_that_is_not_compiled_after_all_raises() -> None:
    net = blocks()
    reactivate.apply(net, Assignment({"blocks.2": SHARES[1]}))
    with pytest.raises(UsageError, match=r"keep 50% of 'blocks.2', and that runs uncompiled"):
        net(TOKENS)
    with torch.no_grad():
        net(TOKENS)
    twin = copy.deepcopy(net)
    for block in (*net.blocks, *twin.blocks):
        block.compile(backend="aot_eager")
    for one in (net, twin):
        step_of(one)()


class Breaking(nn.Module):
    """A block whose graph ends in the middle."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(x))
        torch._dynamo.graph_break()
        return x + self.down(F.gelu(hidden))


def test_blocks_of_several_kinds() -> None:
    """Wide ones, some whose graph ends in the middle, a frozen one, and an embedding that is not compiled."""
    net = blocks(wide=(4, 4, 8, 8, 4))
    net.embed = nn.Sequential(nn.Embedding(64, 32), nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32)))
    net.blocks[4] = Breaking(32)
    net.blocks[0].requires_grad_(requires_grad=False)
    for block in net.blocks:
        block.compile(backend="aot_eager")
    plan = plan_blocks(net, "45%")
    assert plan.measure(compiled="blocks").holds
    assert plan.proof.method == "compiled" and plan.proof.peak_bytes <= plan.budget_bytes
    expected, plain_bytes = gradients_and_peak(net)
    with reactivate.apply(net, plan):
        found, peak_bytes = gradients_and_peak(net)
    assert all(map(torch.equal, found, expected))
    assert plan.fixed.total + peak_bytes <= plan.budget_bytes < plan.fixed.total + plain_bytes
    done = {decision.path: decision.candidate for decision in plan.decisions}
    assert "embed" in done or "embed.1" in done
    assert done["blocks.4"] not in SHARES


def test_spans_of_compiled_blocks() -> None:
    """A region around several of them runs on the engine, which runs their compiled code twice."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Embedding(64, 32), nn.Sequential(*(GPT(dim=32, layers=1).blocks[0] for _ in range(8))))
    for module in made.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    net = nn.Sequential(made, nn.Linear(32, 64))
    for block in made[1]:
        block.compile(backend="aot_eager")
    plan = plan_blocks(net, "100%")
    tight = plan.at(least_of(plan))
    assert tight.measure(compiled="blocks").holds
    expected, _ = gradients_and_peak(net)
    with reactivate.apply(net, tight):
        found, peak_bytes = gradients_and_peak(net)
    assert all(map(torch.equal, found, expected))
    assert tight.fixed.total + peak_bytes <= tight.budget_bytes


class Writing(nn.Module):
    """A block that may write to its argument."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.up, self.down, self.writes = nn.Linear(16, 64), nn.Linear(64, 16), writes

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x.mul_(2.0) if self.writes else x)))


def test_blocks_that_write_to_their_arguments_are_kept() -> None:
    torch.manual_seed(0)
    net, batch = nn.Sequential(*(Writing(number in (2, 4)) for number in range(6))), torch.randn(256, 16)
    for block in net:
        block.compile(backend="aot_eager")
    plan = reactivate.plan(net, batch, budget="80%", compiled="blocks")
    chosen = {decision.path: decision.candidate for decision in plan.decisions}
    assert chosen["2"] == chosen["4"] == KEEP and any(item != KEEP for item in chosen.values())
    assert plan.proof.method == "compiled" and plan.measure(compiled="blocks").holds
    with pytest.raises(PlanInfeasible, match="2 blocks, from 2 to 4, are kept: .* written to in place"):
        plan.at(1)

    def gradients() -> list[Tensor]:
        torch.compiler.reset()
        net.zero_grad()
        net(batch).square().sum().backward()
        return [item.grad.clone() for item in net.parameters() if item.grad is not None]

    expected = gradients()
    with reactivate.apply(net, plan):
        found = gradients()
    assert len(found) == len(expected) > 0 and all(map(torch.equal, found, expected))


def test_a_plain_step_that_does_not_fit_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then costs are those of the eager step, and the proof is compiled all the same."""
    net = blocks()
    eager = reactivate.plan(net, TOKENS, budget="100%", loss=loss_of)
    in_place(net)
    own_bytes = eager.plain.peak_bytes - eager.fixed.total
    monkeypatch.setattr("reactivate.planner.planner.available_bytes", lambda device: own_bytes)
    with pytest.warns(UserWarning, match="no candidate is measured on compiled blocks"):
        plan = plan_blocks(net, "70%")
    assert plan.proof.method == "compiled" and plan.proof.peak_bytes <= plan.budget_bytes
    assert {decision.candidate for decision in plan.decisions} == {KEEP, FULL}


def test_what_blocks_cannot_have_is_refused(planned_for_blocks: Plan) -> None:
    with pytest.raises(PlanInfeasible, match=r"budget='1000B'\): no plan keeps this step within"):
        planned_for_blocks.at(1000)
    net = blocks()
    with pytest.raises(UsageError, match=r"compiled='blocks'\) is not supported with maximize="):
        planned(net, "1GiB", compiled="blocks", maximize="batch")
    wrapped(net)
    with pytest.raises(UsageError, match=r"blocks.0 was replaced by what torch.compile\(module\) returns"):
        plan_blocks(net, "50%")
    net = blocks()
    net.compile(backend="aot_eager")
    with pytest.raises(UsageError, match=r"is compiled with the blocks blocks.0, blocks.1, blocks.2 in it"):
        plan_blocks(net, "50%")
    with pytest.raises(UsageError, match=r"the Linear has no blocks"):
        reactivate.plan(nn.Linear(4, 4), torch.randn(2, 4), budget="50%", compiled="blocks")


def test_blocks_that_torch_compile_replaced_are_planned_as_they_run_eagerly() -> None:
    """They have a `__len__` that raises, as their blocks have none."""
    net = model()
    for number, block in enumerate(net.blocks):
        net.blocks[number] = torch.compile(block, backend="eager")
    with pytest.warns(UserWarning, match=r"has compiled modules \(blocks.0…blocks.2 .*, pass compiled='blocks'"):
        plan = planned(net, "60%")
    with reactivate.apply(net, plan):
        verdict = reactivate.verify(net, TOKENS)
    assert verdict.is_same and verdict.regions > 0


def test_blocks_that_must_be_whole_graphs_are_planned_as_they_run_eagerly() -> None:
    net = model()
    for block in net.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    net(TOKENS)  # a graph of the plain block: the plan is not made of it
    with pytest.warns(UserWarning, match=r"has compiled modules \(blocks.0…blocks.2 .*, pass compiled='blocks'"):
        plan = planned(net, "60%")
    assert plan.proof.method == "real"
    assert plan.predicted.seconds > plan.plain.seconds, "something is recomputed"
    with reactivate.apply(net, plan):
        assert reactivate.verify(net, TOKENS)
    assert plan.measure().measured_bytes <= plan.budget_bytes
