"""`integrations.lightning`, with Lightning's own Trainer and command line."""

from __future__ import annotations

import importlib.util
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from trained import BATCH, LAYERS, STEPS, Net, Trained, assert_same, plan_of_net, samples, trained

import reactivate
from reactivate import policies
from reactivate.errors import UsageError

pytest.importorskip("lightning", reason="the tests of integrations.lightning need lightning")

from reactivate.integrations.lightning import ActivationCheckpointing

PACKAGES = [
    "lightning.pytorch",
    pytest.param(
        "pytorch_lightning",
        marks=pytest.mark.skipif(
            importlib.util.find_spec("pytorch_lightning") is None, reason="pytorch_lightning is not installed"
        ),
    ),
]
REGIONS = tuple(f"model.layers.{index}" for index in range(LAYERS))
QUIET = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
    "devices": 1,
    "max_epochs": 1,
    "num_sanity_val_steps": 0,
}


@pytest.fixture(autouse=True)
def an_environment_of_its_own() -> Iterator[None]:
    """Lightning leaves the ranks of its process group in the environment."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def module_of(package: str = "lightning.pytorch", in_configure_model: Any = None) -> Any:
    """A LightningModule."""

    class Lit(importlib.import_module(package).LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = Net()
            self.losses: list[Tensor] = []
            self.handles: list[Any] = []

        def configure_model(self) -> None:
            if in_configure_model is not None:
                self.handles.append(in_configure_model(self))

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            loss = self.model(batch)
            self.losses.append(loss.detach())
            return loss

        def validation_step(self, batch: Tensor, index: int) -> None:
            self.log("loss", self.model(batch))

        test_step = validation_step

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.05)

    return Lit()


def loader() -> DataLoader[Tensor]:
    return DataLoader(samples(), batch_size=BATCH)  # type: ignore[arg-type]


def trainer_of(package: str = "lightning.pytorch", **options: Any) -> Any:
    return importlib.import_module(package).Trainer(**{**QUIET, "enable_checkpointing": False, **options})


def fitted(package: str, callbacks: list[Any], **options: Any) -> Trained:
    def train() -> tuple[nn.Module, Any, list[Tensor]]:
        module = module_of(package)
        trainer = trainer_of(package, callbacks=callbacks, **options)
        trainer.fit(module, loader(), loader())
        assert reactivate.Handle.of(module) is None
        assert not any("forward" in vars(inner) for inner in module.model.modules())
        return module, trainer.optimizers[0].state_dict(), module.losses

    return trained(train)


@pytest.mark.parametrize("package", PACKAGES)
def test_bitwise(package: str) -> None:
    assert_same(fitted(package, []), fitted(package, [ActivationCheckpointing("full()")]))


@pytest.mark.parametrize(
    ("asked", "regions"),
    [
        (policies.recompute_every(2), 2),
        ("first_match(save_ops('linear'), full())", 3),
        (policies.first_match(policies.save_modules("layers.*.down"), policies.recompute_modules("layers.*")), 3),
    ],
)
def test_policies(asked: Any, regions: int) -> None:
    """Paths are those in the module that is named."""
    ours = fitted("lightning.pytorch", [ActivationCheckpointing(asked, module="model")])
    assert_same(fitted("lightning.pytorch", []), ours, regions * STEPS)


@pytest.mark.parametrize(
    "options",
    [{"precision": "bf16-mixed"}, {"accumulate_grad_batches": 2}, {"strategy": "ddp"}],
    ids=lambda it: next(iter(it)),
)
def test_bitwise_with_what_the_trainer_adds(options: dict[str, Any]) -> None:
    try:
        plain = fitted("lightning.pytorch", [], **options)
        ours = fitted("lightning.pytorch", [ActivationCheckpointing(policies.full())], **options)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert_same(plain, ours)


def test_a_plan_from_a_file(tmp_path: Path) -> None:
    plan = plan_of_net()
    plan.save(tmp_path / "plan.json")
    ours = fitted("lightning.pytorch", [ActivationCheckpointing(plan=tmp_path / "plan.json", module="model")])
    regions = len(reactivate.apply(Net(), plan).regions)
    assert_same(fitted("lightning.pytorch", []), ours, regions * STEPS)


class Handles(importlib.import_module("lightning.pytorch").Callback):  # type: ignore[misc]
    """Looks at what is applied after each batch."""

    def __init__(self, checkpointing: ActivationCheckpointing) -> None:
        self.checkpointing = checkpointing
        self.seen: list[Any] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append(self.checkpointing.handle)


def test_a_budget_is_planned_for_at_the_first_batch() -> None:
    checkpointing = ActivationCheckpointing(budget="75%", module="model")
    handles = Handles(checkpointing)
    plain, ours = fitted("lightning.pytorch", []), fitted("lightning.pytorch", [checkpointing, handles])
    (handle,) = set(handles.seen)
    assert isinstance(handle.policy, reactivate.Plan) and handle.policy.budget == "75%"
    assert handle.policy.peak_bytes <= handle.policy.budget_bytes < handle.policy.plain.peak_bytes
    assert handle.policy.fixed.optimizer > 0
    for name, value in plain.state.items():
        oracle.assert_bitwise(value, ours.state[name], name)
    assert ours.regions > 0 and checkpointing.handle is None


def test_a_budget_for_what_is_not_called_is_refused() -> None:
    with pytest.raises(UsageError, match="did not call the LightningModule.*module='model'"):
        fitted("lightning.pytorch", [ActivationCheckpointing(budget="75%")])


def test_checkpoints_have_the_same_names(tmp_path: Path) -> None:
    """A checkpoint saved with the callback is loaded without it, and the other way round."""
    saved = {}
    for name, callbacks in {"plain": [], "ours": [ActivationCheckpointing("full()")]}.items():
        oracle.seed_everything()
        trainer = trainer_of(callbacks=callbacks, default_root_dir=tmp_path / name, enable_checkpointing=True)
        trainer.fit(module_of(), loader())
        (file,) = (tmp_path / name).rglob("*.ckpt")
        saved[name] = file, torch.load(file, weights_only=False)["state_dict"]
    assert list(saved["plain"][1]) == list(saved["ours"][1])
    for name, value in saved["plain"][1].items():
        oracle.assert_bitwise(value, saved["ours"][1][name], name)
    for name, callbacks in {"plain": [ActivationCheckpointing("full()")], "ours": []}.items():
        module = module_of()
        trainer_of(callbacks=callbacks, max_epochs=2).fit(
            module, loader(), ckpt_path=saved[name][0], weights_only=False
        )
        assert len(module.losses) == STEPS


def test_the_policy_goes_after_an_exception() -> None:
    module = module_of()
    module.training_step = lambda *args: 1 / 0
    with pytest.raises(ZeroDivisionError):
        trainer_of(callbacks=[ActivationCheckpointing("full()")]).fit(module, loader())
    assert reactivate.Handle.of(module) is None


def test_a_policy_that_was_there_before_stays() -> None:
    module = module_of()
    handle = reactivate.apply(module, policies.full())
    trainer_of(callbacks=[ActivationCheckpointing("full()")]).fit(module, loader())
    assert reactivate.Handle.of(module) is handle


def test_the_callback_is_pickled() -> None:
    checkpointing = pickle.loads(pickle.dumps(ActivationCheckpointing("recompute_every(2)")))
    assert_same(fitted("lightning.pytorch", []), fitted("lightning.pytorch", [checkpointing]), 2 * STEPS)


def callback_in(yaml: str, package: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ActivationCheckpointing:
    """The callback that `LightningCLI` makes of these arguments."""
    pytest.importorskip("jsonargparse", reason="LightningCLI needs jsonargparse")
    config = folder / "config.yaml"
    config.write_text(f"""
trainer:
  callbacks:
    - class_path: reactivate.integrations.lightning.ActivationCheckpointing
      init_args:
        {yaml}
""")
    monkeypatch.setattr(sys, "argv", ["fit"])
    cli_class = importlib.import_module(f"{package}.cli").LightningCLI
    cli = cli_class(type(module_of(package)), run=False, args=["--config", str(config)], save_config_callback=None)
    (callback,) = [it for it in cli.trainer.callbacks if isinstance(it, ActivationCheckpointing)]
    return callback


@pytest.mark.parametrize(
    "yaml",
    ["policy: full()", "policy: first_match(save_ops('linear'), recompute_modules('layers.*'))\n        module: model"],
)
@pytest.mark.parametrize("package", PACKAGES)
def test_in_the_yaml_of_the_command_line(
    package: str, yaml: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = fitted(package, [callback_in(yaml, package, tmp_path, monkeypatch)])
    assert ran.regions == ran.recomputations == LAYERS * STEPS


@pytest.mark.parametrize("budget", ["75%", "8GiB", "8589934592"])
def test_a_budget_in_yaml(budget: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    callback = callback_in(f"budget: {budget}", "lightning.pytorch", tmp_path, monkeypatch)
    assert callback._training._budget == (budget if budget != "8589934592" else "8589934592B")


@pytest.mark.parametrize("path", ["", "model"])
def test_apply_in_configure_model(path: str) -> None:
    """Lightning calls it for `fit`, `validate` and `test`: the model has one policy, with one handle."""
    module = module_of(in_configure_model=lambda it: reactivate.apply(it.get_submodule(path), policies.full()))
    trainer, ran = trainer_of(), oracle.Watched()
    with oracle.observed_by(ran):
        trainer.fit(module, loader(), loader())
        trainer.validate(module, loader(), verbose=False)
        trainer.test(module, loader(), verbose=False)
    assert len(module.handles) == 3 and len(set(module.handles)) == 1
    assert (ran.regions, ran.recomputations) == (LAYERS * STEPS, LAYERS * STEPS)
    module.handles[0].remove()
    assert reactivate.Handle.of(module) is None


def test_another_policy_in_configure_model_is_refused() -> None:
    made = iter([policies.full(), policies.recompute_every(2)])
    module = module_of(in_configure_model=lambda it: reactivate.apply(it, next(made)))
    trainer = trainer_of()
    trainer.fit(module, loader())
    with pytest.raises(UsageError, match="replace=True"):
        trainer.validate(module, loader(), verbose=False)


def test_no_such_module() -> None:
    with pytest.raises(UsageError, match="module='modle'"):
        trainer_of(callbacks=[ActivationCheckpointing("full()", module="modle")]).fit(module_of(), loader())


def test_several_optimizers_have_no_budget() -> None:
    module = module_of()
    module.automatic_optimization = False
    module.configure_optimizers = lambda: [torch.optim.SGD(module.parameters(), lr=0.1) for _ in range(2)]
    with pytest.raises(UsageError, match="one optimizer; configure_optimizers gave 2"):
        trainer_of(callbacks=[ActivationCheckpointing(budget="75%", module="model")]).fit(module, loader())
