"""Plans for batches of varying shapes: each class of shapes has its own, and every bit is the plain model's."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from memory import allocated_by
from oracle import assert_bitwise, random_states
from plan_models import GPT, loss_of, tokens
from several import each
from torch import Tensor, nn
from torch.nn import functional as F

import reactivate
from reactivate import policies
from reactivate._model import per_call
from reactivate._passes.observing import observed_by
from reactivate._region.region import Region
from reactivate._types import Policy
from reactivate.errors import UnsupportedError, UsageError
from reactivate.planner import adaptive
from reactivate.planner.adaptive import AdaptivePlan
from reactivate.planner.candidates import FULL, Assignment, Candidate
from reactivate.planner.shapes import CallShapes
from reactivate.policies._base import PerCall

SHAPES = [(4, 128), (4, 16), (2, 96), (4, 128), (1, 40), (3, 100)]


class Counted:
    """Regions and recomputations that run inside of the context."""

    def __init__(self) -> None:
        self.regions = self.recomputations = 0

    def forward_done(self, region: Region) -> None:
        self.regions += 1

    def recomputation_done(self, region: Region) -> None:
        self.recomputations += 1


def step_of(model: nn.Module, batch: Tensor) -> Counted:
    counted = Counted()
    with observed_by(counted):
        logits = model(batch)
        loss_of(logits).backward()
    return counted


@pytest.fixture(scope="module")
def planned() -> tuple[GPT, AdaptivePlan]:
    model = GPT(layers=4)
    return model, reactivate.plan(model, tokens(4, 128), budget="45%", loss=loss_of, shapes="adaptive")


@pytest.fixture
def applied(planned: tuple[GPT, AdaptivePlan]) -> Any:
    model, plan = planned
    with reactivate.apply(model, plan):
        yield model, plan
    model.zero_grad()


def test_bits_of_batches_of_all_shapes(planned: tuple[GPT, AdaptivePlan]) -> None:
    """Classes are planned in the midst of training: that too leaves gradients and generators as they are."""
    model, plan = copy.deepcopy(planned[0]), planned[1]
    plain = copy.deepcopy(model)
    reactivate.apply(model, plan)
    recomputed = []
    states = []
    for subject in (plain, model):
        torch.manual_seed(0)
        optimizer = torch.optim.AdamW(subject.parameters())
        for shape in SHAPES:
            recomputed.append(step_of(subject, tokens(*shape)).recomputations)
            optimizer.step()
            optimizer.zero_grad()
        states.append(random_states())
    for name, item in plain.state_dict().items():
        assert_bitwise(item, model.state_dict()[name], name)
    for name, state in states[0].items():
        assert_bitwise(state, states[1][name], name)
    count = len(SHAPES)
    assert not any(recomputed[:count]) and recomputed[count] > recomputed[-1] > 0
    assert recomputed[count + 1] == 0 == recomputed[count + 4]


@pytest.mark.parametrize("shape", [(4, 128), (4, 100), (4, 99), (2, 128), (4, 60), (4, 8)])
def test_the_budget_holds_and_short_batches_recompute_nothing(
    applied: tuple[GPT, AdaptivePlan], shape: tuple[int, ...]
) -> None:
    model, plan = applied
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    batch = tokens(*shape)
    counted = step_of(model, batch)
    peak = allocated_by(lambda: step_of(model, batch)).peak_bytes
    fixed = sum(2 * item.nbytes for item in model.parameters()) + batch.nbytes
    found = plan._known[CallShapes.of(model, (batch,), {})]
    assert fixed + peak <= found.peak_bytes <= plan.budget_bytes
    if found.shapes.sizes == (shape,):
        assert found.peak_bytes - (fixed + peak) <= 0.01 * peak
    assert (counted.recomputations == 0) == (found.plain_bytes <= plan.budget_bytes)


def test_a_class_is_planned_once(applied: tuple[GPT, AdaptivePlan]) -> None:
    model, plan = applied
    step_of(model, tokens(4, 112))
    known = plan.classes
    step_of(model, tokens(4, 111))  # in the same sixteenth
    with torch.no_grad():
        model(tokens(9, 130))
    assert plan.classes == known
    step_of(model, tokens(4, 113))
    assert len(plan.classes) == len(known) + 1
    assert "4, 112" in str(plan)
    assert str(plan).splitlines()[0].endswith(f". Classes of shapes so far: {len(plan.classes)}.")


def test_shapes_that_a_plan_serves_are_not_remembered_without_end(
    planned: tuple[GPT, AdaptivePlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plan = copy.deepcopy(planned[0]), planned[1].within(planned[1].budget_bytes)
    monkeypatch.setattr(adaptive, "MOST_SHAPES", len(plan._known) + 2)
    with reactivate.apply(model, plan):
        for length in range(29, 19, -1):
            assert step_of(model, tokens(1, length)).recomputations == 0
    assert len(plan._known) <= adaptive.MOST_SHAPES


def test_a_batch_for_which_there_is_no_plan(applied: tuple[GPT, AdaptivePlan]) -> None:
    model, plan = applied
    with pytest.warns(UserWarning, match=r"No plan keeps a step with inputs of shape \(16, 128\)"):
        step_of(model, tokens(16, 128))
    assert plan.classes[-1].peak_bytes > plan.budget_bytes
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        counted = step_of(model, tokens(16, 128))
    assert counted.recomputations >= 4


def test_the_plan_of_one_batch(planned: tuple[GPT, AdaptivePlan]) -> None:
    model, plan = planned
    one = plan.of_batch(model, tokens(3, 128))
    assert one.predicted.peak_bytes <= one.budget_bytes == plan.budget_bytes < one.plain.peak_bytes
    found = one.measure()
    assert found.holds and abs(found.error) <= 0.01


# -- regions whose policy is another one when their backward comes -----------------------------------------------------

NESTED = Assignment({f"blocks.{index}": Candidate("nested", ("", "attn", "mlp")) for index in range(4)})
SAVING = Assignment({f"blocks.{index}": Candidate("saving", ("",), ("attn.qkv", "mlp.1")) for index in range(4)})
WHOLE = Assignment({f"blocks.{index}": FULL for index in range(4)})


@dataclass(frozen=True, repr=False)
class BySize(PerCall):
    """A policy for each size of a batch."""

    def of_call(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Policy | None:
        return {1: NESTED, 2: SAVING, 3: WHOLE, 4: None}[len(args[0])]

    def __repr__(self) -> str:
        return "BySize()"


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_a_region_is_recomputed_under_the_policy_of_its_own_call(order: tuple[int, ...]) -> None:
    model = GPT(layers=4)
    plain = copy.deepcopy(model)
    reactivate.apply(model, BySize())
    found = []
    for subject in (plain, model):
        torch.manual_seed(0)
        counted = Counted()
        with observed_by(counted):
            losses = [loss_of(subject(tokens(size, 24))) for size in (1, 2, 3, 4)]
            for index in order:
                losses[index].backward()
        found.append(counted.recomputations)
    assert found == [0, 4 * 3 + 4 + 4]
    for name, parameter in plain.named_parameters():
        assert_bitwise(parameter.grad, model.get_parameter(name).grad, name)


@dataclass(frozen=True, repr=False)
class MadeAnew(PerCall):
    """A policy that is made for each call."""

    made: list[weakref.ref[Policy]]

    def of_call(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Policy | None:
        policy = Assignment({f"blocks.{index}": FULL for index in range(4)})
        self.made.append(weakref.ref(policy))
        return policy

    def __repr__(self) -> str:
        return "MadeAnew()"


def test_policies_of_calls_are_not_kept_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(per_call, "_MOST_POLICIES", 3)
    model, made = GPT(layers=4), []
    plain = copy.deepcopy(model)
    torch.manual_seed(0)
    with reactivate.apply(model, MadeAnew(made)):
        for _ in range(8):
            losses = [loss_of(model(tokens(2, 8))) for _ in range(5)]  # more than are kept
            for loss in losses:
                loss.backward()
        gc.collect()
        assert len(made) == 40 and sum(policy() is not None for policy in made) <= 4
    torch.manual_seed(0)
    for _ in range(40):
        loss_of(plain(tokens(2, 8))).backward()
    for name, parameter in plain.named_parameters():
        assert_bitwise(parameter.grad, model.get_parameter(name).grad, name)


def test_copies_and_files_have_the_policy() -> None:
    model = GPT(layers=4)
    reactivate.apply(model, BySize())
    step_of(model, tokens(3, 8))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [step_of(other, tokens(size, 8)).recomputations for size in (4, 3, 1)] == [0, 4, 12]
        assert step_of(model, tokens(3, 8)).recomputations == 4


def test_a_copy_in_a_file_has_the_plans_so_far(applied: tuple[GPT, AdaptivePlan]) -> None:
    model, _ = applied
    expected = step_of(model, tokens(4, 128)).recomputations
    again = pickle.loads(pickle.dumps(model))
    assert step_of(again, tokens(4, 128)).recomputations == expected > 0
    with pytest.raises(UsageError, match=r"unpickled .* inputs of shape \(9, 9, 9\)"):
        again(tokens(9, 9, 9))


def test_the_policy_can_be_applied_twice_replaced_and_removed() -> None:
    model = GPT(layers=4)
    handle = reactivate.apply(model, BySize())
    step_of(model, tokens(3, 8))
    assert reactivate.apply(model, BySize()) is handle
    reactivate.apply(model, policies.full(), replace=True)
    assert step_of(model, tokens(4, 8)).recomputations == 4
    handle = reactivate.apply(model, BySize(), replace=True)
    assert [step_of(model, tokens(size, 8)).recomputations for size in (4, 3)] == [0, 4]
    handle.remove()
    assert step_of(model, tokens(3, 8)).regions == 0
    assert not any("forward" in vars(module) for module in model.modules())


def test_verify_takes_it(planned: tuple[GPT, AdaptivePlan]) -> None:
    model, plan = planned
    verdict = reactivate.verify(model, tokens(4, 128), policy=plan)
    assert verdict and verdict.regions > 0


class Calling(GPT):
    """Calls itself with half of its batch."""

    def forward(self, tokens: Tensor, depth: int = 1) -> Tensor:
        made = super().forward(tokens)
        return torch.cat([made, self(tokens[: len(tokens) // 2], depth - 1)]) if depth else made


def test_a_model_that_calls_itself_has_one_plan_for_all_of_that() -> None:
    model = Calling(layers=4)
    plan = reactivate.plan(model, tokens(4, 64), budget="60%", loss=loss_of, shapes="adaptive")
    plain = copy.deepcopy(model)
    reactivate.apply(model, plan)
    shapes = (4, 64), (4, 8), (4, 64)
    found = []
    for subject in (plain, model):
        torch.manual_seed(0)
        found.append([step_of(subject, tokens(*shape)).recomputations for shape in shapes])
    assert found[0] == [0, 0, 0] and found[1][0] == found[1][2] > found[1][1] == 0
    assert {one.shapes.sizes for one in plan.classes} == {((4, 64),), ((4, 8),)}  # and none of the calls inside
    for name, parameter in plain.named_parameters():
        assert_bitwise(model.get_parameter(name).grad, parameter.grad, name)


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_compiled_models_are_refused() -> None:
    model = GPT(layers=4)
    reactivate.apply(model, BySize())
    with pytest.raises(UnsupportedError, match=r"not supported under torch.compile.*of_batch"):
        torch.compile(model, backend="eager")(tokens(3, 8))


@each(
    ("options", "words"),
    [
        ({"shapes": "dynamic"}, r'takes "adaptive"'),
        ({"shapes": "adaptive", "step": lambda: None}, "not supported with step="),
        ({"shapes": "adaptive", "maximize": "batch"}, "not supported with maximize="),
        ({"shapes": "adaptive", "storage": reactivate.storage.Host()}, "not supported with storage="),
    ],
)
def test_what_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        reactivate.plan(GPT(layers=2), tokens(2, 8), budget="60%", loss=loss_of, **options)


def test_a_loss_with_targets_of_its_own() -> None:
    model, targets = GPT(layers=2), tokens(2, 16)

    def own(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    plan = reactivate.plan(model, targets, budget="60%", loss=own, shapes="adaptive")
    with reactivate.apply(model, plan), pytest.raises(UsageError, match="does not run with inputs of shape"):
        model(tokens(2, 8))
