"""`integrations.transformers`, with transformers' own Trainer."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor, nn
from trained import STEPS, Net, Trained, assert_same, samples, trained

import reactivate
from reactivate import policies
from reactivate.errors import UsageError

transformers = pytest.importorskip("transformers", reason="the tests of integrations.transformers need transformers")
pytest.importorskip("accelerate", reason="the Trainer of transformers needs accelerate")

from accelerate.state import AcceleratorState, DistributedType, PartialState  # noqa: E402

from reactivate.integrations.transformers import ActivationCheckpointing  # noqa: E402

VOCABULARY, LENGTH, BATCH, LAYERS = 61, 12, 4, 2


def model_of() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        attention_dropout=0.1,
        bos_token_id=0,
        eos_token_id=1,
    )
    return transformers.LlamaForCausalLM(config)


def texts() -> list[dict[str, Any]]:
    tokens = torch.randint(0, VOCABULARY, (STEPS * BATCH, LENGTH), generator=torch.Generator().manual_seed(5))
    return [{"input_ids": row, "labels": row} for row in tokens]


class WithLoss(Net):
    """A model that is not of transformers, as Trainer takes it: faster to plan."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        return {"logits": x} if labels is None else {"loss": super().forward(x)}


class Losses(transformers.TrainerCallback):  # type: ignore[misc]
    """Notes the loss of each step, and what is applied during it."""

    def __init__(self) -> None:
        self.losses: list[Any] = []
        self.handles: list[Any] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.losses.append(torch.tensor(logs["loss"]))

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.handles.append(reactivate.Handle.of(model))


def trainer_of(folder: Path, model: nn.Module, callbacks: list[Any], **options: Any) -> Any:
    arguments = {
        "output_dir": str(folder),
        "use_cpu": True,
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH,
        "learning_rate": 0.05,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "disable_tqdm": True,
        "report_to": [],
        "save_strategy": "no",
        "dataloader_pin_memory": False,
        **options,
    }
    arguments = transformers.TrainingArguments(**arguments)
    data = [{"x": row, "labels": row} for row in samples()] if isinstance(model, WithLoss) else texts()
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data, callbacks=callbacks)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def fitted(folder: Path, callbacks: list[Any], make: Any = model_of, **options: Any) -> tuple[Trained, Losses]:
    losses = Losses()

    def train() -> tuple[nn.Module, Any, list[Any]]:
        model = make()
        trainer = trainer_of(folder, model, [*callbacks, losses], **options)
        trainer.train()
        assert reactivate.Handle.of(model) is None
        assert not any("forward" in vars(inner) for path, inner in model.named_modules() if path)
        return model, trainer.optimizer.state_dict(), losses.losses

    return trained(train), losses


@pytest.mark.parametrize(
    ("options", "batches"),
    [
        ({}, STEPS),
        ({"bf16": True}, STEPS),
        ({"gradient_accumulation_steps": STEPS}, STEPS**2),
        ({"label_smoothing_factor": 0.1}, STEPS),  # the Trainer computes the loss, of a model without labels
    ],
)
def test_bitwise(tmp_path: Path, options: dict[str, Any], batches: int) -> None:
    plain, _ = fitted(tmp_path, [], **options)
    ours, seen = fitted(tmp_path, [ActivationCheckpointing("full()")], **options)
    assert_same(plain, ours, LAYERS * batches)
    assert [len(handle.regions) for handle in seen.handles] == [LAYERS] * STEPS


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return fitted(tmp_path_factory.mktemp("plain"), [])[0]


@pytest.mark.parametrize(
    ("asked", "regions"),
    [
        (policies.recompute_every(2), 1),
        ("first_match(save_ops('linear', 'scaled_dot_product_attention'), full())", 2),
    ],
)
def test_policies(tmp_path: Path, plain: Trained, asked: Any, regions: int) -> None:
    ours, _ = fitted(tmp_path, [ActivationCheckpointing(asked)])
    assert_same(plain, ours, regions * STEPS)


def test_a_budget_is_planned_for_at_the_first_batch(tmp_path: Path) -> None:
    plain, _ = fitted(tmp_path, [], WithLoss, per_device_train_batch_size=64)
    ours, seen = fitted(tmp_path, [ActivationCheckpointing(budget="75%")], WithLoss, per_device_train_batch_size=64)
    (handle,) = set(seen.handles)
    assert isinstance(handle.policy, reactivate.Plan) and handle.policy.budget == "75%"
    assert handle.policy.peak_bytes <= handle.policy.budget_bytes < handle.policy.plain.peak_bytes
    assert handle.policy.fixed.optimizer > 0
    assert ours.regions >= len(handle.regions) * STEPS > 0
    for name, value in plain.state.items():
        oracle.assert_bitwise(value, ours.state[name], name)


def test_a_budget_needs_the_loss_of_the_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no loss in what the model returns.*pass labels"):
        fitted(tmp_path, [ActivationCheckpointing(budget="75%")], label_smoothing_factor=0.1)


def test_checkpoints_have_the_same_names(tmp_path: Path) -> None:
    """A checkpoint saved with the callback is loaded without it, and the other way round."""
    made = {"plain": [], "ours": [ActivationCheckpointing("full()")]}
    for name, callbacks in made.items():
        oracle.seed_everything()
        trainer_of(tmp_path / name, model_of(), callbacks, save_strategy="steps", save_steps=STEPS).train()
    folders = {name: tmp_path / name / f"checkpoint-{STEPS}" for name in made}
    weights = [(folder / "model.safetensors").read_bytes() for folder in folders.values()]
    assert weights[0] == weights[1]
    for name, callbacks in {"plain": [ActivationCheckpointing("full()")], "ours": []}.items():
        trainer = trainer_of(tmp_path / "again", model_of(), callbacks, max_steps=2 * STEPS)
        trainer.train(resume_from_checkpoint=str(folders[name]))
        assert trainer.state.global_step == 2 * STEPS


def test_an_exception_and_another_training(tmp_path: Path) -> None:
    """Trainer calls no callback after an exception; the next training begins anew."""
    model, checkpointing = model_of(), ActivationCheckpointing("full()")
    trainer = trainer_of(tmp_path, model, [checkpointing])
    real, trainer.compute_loss = trainer.compute_loss, lambda *args, **kwargs: 1 / 0
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert checkpointing.handle is not None
    trainer.compute_loss = real
    trainer.train()
    assert checkpointing.handle is None and reactivate.Handle.of(model) is None


SWITCH = "activation_checkpointing"  # since transformers 5.23
if not hasattr(transformers.TrainingArguments, SWITCH):
    SWITCH = "gradient_checkpointing"


def test_checkpointing_of_transformers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=rf"Leave out TrainingArguments\({SWITCH}=True\), or call model.{SWITCH}_disable"
    ):
        fitted(tmp_path, [ActivationCheckpointing("full()")], **{SWITCH: True})


@pytest.mark.parametrize(
    ("kind", "given", "warns"), [("MULTI_CPU", None, 1), ("MULTI_GPU", False, 0), ("FSDP", None, 0), ("NO", None, 0)]
)
def test_a_search_for_unused_parameters_is_warned_of(
    kind: str, given: bool | None, warns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainer has DDP search for them where its own checkpointing is off, unless told."""
    trainer = trainer_of(tmp_path, model_of(), [], ddp_find_unused_parameters=given)
    asked = trainer._build_accelerator_args()["kwargs_handlers"][0]
    assert asked.find_unused_parameters is (given is None)
    monkeypatch.setattr(PartialState(), "distributed_type", DistributedType("MULTI_CPU" if kind == "FSDP" else kind))
    monkeypatch.setattr(AcceleratorState(), "fsdp_plugin", "a plugin" if kind == "FSDP" else None, raising=False)
    callback = ActivationCheckpointing("full()")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        callback.on_train_begin(trainer.args, trainer.state, trainer.control, model=trainer.model)
    callback.on_train_end(trainer.args, trainer.state, trainer.control)
    assert sum("ddp_find_unused_parameters=False" in str(item.message) for item in caught) == warns


def test_trainer_turns_the_cache_off_by_itself(tmp_path: Path) -> None:
    """So that nothing need be said about it; but for `use_cache=True` there is one warning."""
    for options, count in (({}, 0), ({"use_cache": True}, 1)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fitted(tmp_path, [ActivationCheckpointing("full()")], **options)
        assert len([it for it in caught if "use_cache is on" in str(it.message)]) == count
