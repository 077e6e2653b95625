"""`integrations.accelerate`, with accelerate's own Accelerator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from trained import BATCH, LAYERS, STEPS, Net, Trained, assert_same, plan_of_net, samples, trained

import reactivate
from reactivate import policies
from reactivate.errors import UsageError

accelerate = pytest.importorskip("accelerate", reason="the tests of integrations.accelerate need accelerate")

from reactivate.integrations.accelerate import prepare  # noqa: E402


@pytest.fixture(autouse=True)
def a_state_of_its_own() -> Iterator[None]:
    """Accelerators share one, with the first one's precision."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def objects_of(wrap: Any = None) -> tuple[Any, Any, Any]:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    return (net if wrap is None else wrap(net)), optimizer, DataLoader(samples(), batch_size=BATCH)  # type: ignore[arg-type]


def fitted(wrap: Any = None, folder: Path | None = None, mixed_precision: str = "no", **asked: Any) -> Trained:
    def train() -> tuple[nn.Module, Any, list[Any]]:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision=mixed_precision)
        if asked:
            model, optimizer, loader = prepare(accelerator, *objects_of(wrap), **asked)
        else:
            model, optimizer, loader = accelerator.prepare(*objects_of(wrap))
        losses = []
        for batch in loader:
            optimizer.zero_grad()
            loss = model(batch)
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.detach())
        if folder is not None:
            accelerator.save_state(folder)
        handle = reactivate.Handle.of(model)
        assert (handle is not None) == bool(asked)
        if handle is not None:
            assert not any(path.startswith("module.") for path in handle.regions)
            assert "budget" not in asked or handle.policy.fixed.optimizer > 0
            handle.remove()
            assert reactivate.Handle.of(model) is None
            inner = accelerator.unwrap_model(model)
            assert type(inner) is Net and not any("forward" in vars(it) for it in inner.layers.modules())
        return model, optimizer.state_dict(), losses

    return trained(train)


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_bitwise(mixed_precision: str) -> None:
    plain = fitted(mixed_precision=mixed_precision)
    assert_same(plain, fitted(mixed_precision=mixed_precision, policy="full()"))


@pytest.mark.parametrize(
    ("policy", "regions"),
    [
        (policies.recompute_modules("layers.1"), 1),
        ("first_match(save_ops('linear'), full())", 3),
        (policies.recompute_modules(Net), 1),  # the model itself, whose `forward` accelerate replaces
    ],
)
@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_policies(mixed_precision: str, policy: Any, regions: int) -> None:
    ours = fitted(mixed_precision=mixed_precision, policy=policy)
    assert_same(fitted(mixed_precision=mixed_precision), ours, regions * STEPS)


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_bitwise_in_a_wrapper(process_group: None) -> None:
    """The paths of the policy are those of the model inside."""
    ddp = nn.parallel.DistributedDataParallel
    ours = fitted(ddp, policy=policies.recompute_modules("layers.*"))
    assert_same(fitted(ddp), ours)


def test_a_budget_in_a_process_group_is_refused(process_group: None) -> None:
    with pytest.raises(UsageError, match="in a process group.*prepare\\(plan=path\\)"):
        fitted(budget="75%")


def test_a_budget_is_planned_for_at_the_first_batch() -> None:
    plain, ours = fitted(), fitted(budget="75%")
    assert ours.regions > 0
    for name, value in plain.state.items():
        oracle.assert_bitwise(value, ours.state[name], name)


def test_a_plan_from_a_file(tmp_path: Path) -> None:
    plan = plan_of_net()
    plan.save(tmp_path / "plan.json")
    regions = len(reactivate.apply(Net(), plan).regions)
    assert_same(fitted(), fitted(plan=tmp_path / "plan.json"), regions * STEPS)


def test_states_have_the_same_names(tmp_path: Path) -> None:
    """A checkpoint saved with a policy is the one saved without, and is loaded without."""
    fitted(folder=tmp_path / "plain"), fitted(folder=tmp_path / "ours", policy="full()")
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("plain", "ours")]
    assert files[0] == files[1]
    accelerator = accelerate.Accelerator(cpu=True)
    model, *_ = prepare(accelerator, *objects_of(), policy="full()")
    accelerator.load_state(tmp_path / "plain")
    assert len(reactivate.Handle.of(model).regions) == LAYERS
    other = accelerate.Accelerator(cpu=True)
    plain, *_ = other.prepare(*objects_of())
    other.load_state(tmp_path / "ours")
    for (name, one), two in zip(model.state_dict().items(), plain.state_dict().values()):
        oracle.assert_bitwise(one, two, name)


def test_one_model_alone() -> None:
    model = prepare(accelerate.Accelerator(cpu=True), Net(), policy=policies.full())
    assert isinstance(model, Net) and len(reactivate.Handle.of(model).regions) == LAYERS


@pytest.mark.parametrize(
    ("objects", "asked", "says"),
    [
        ((), {"policy": "full()"}, "no model among the objects"),
        ((Net(),), {}, "got none of them"),
        ((Net(),), {"policy": "full()", "budget": "60%"}, "got policy and budget"),
        ((Net(),), {"policy": "ful()"}, "prepare\\(policy=...\\): there is no policy 'ful'.*'full'"),
        ((Net(),), {"budget": "60%"}, "1 models and 0 optimizers"),
        ((Net(),), {"budget": "60"}, "has no unit"),
    ],
)
def test_refusals(objects: tuple[Any, ...], asked: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        prepare(accelerate.Accelerator(cpu=True), *objects, **asked)
    with pytest.raises(UsageError, match="takes an accelerate.Accelerator first; got a module of class Net"):
        prepare(Net(), Net(), policy="full()")
