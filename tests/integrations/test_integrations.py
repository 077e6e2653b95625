"""Parts that the integrations share: no host is needed to import them, and a budget is planned for in training."""

from __future__ import annotations

import pickle
import subprocess
import sys

import oracle
import pytest
import torch
from torch import nn
from trained import BATCH, Net, samples

import reactivate
from reactivate import policies
from reactivate.errors import UsageError
from reactivate.integrations._training import Training

WITHOUT_HOSTS = """
import sys

for name in ("lightning", "pytorch_lightning", "transformers", "accelerate"):
    sys.modules[name] = None

import reactivate
from reactivate.integrations import accelerate, lightning, transformers

for asked in (
    lambda: lightning.ActivationCheckpointing("full()"),
    lambda: transformers.ActivationCheckpointing("full()"),
    lambda: accelerate.prepare(None, None, policy="full()"),
):
    try:
        asked()
    except reactivate.errors.UsageError as error:
        print(error)
"""


def test_a_host_that_is_missing_is_named_when_it_is_needed() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_HOSTS], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "integrations.lightning.ActivationCheckpointing needs a package that is not installed: pip install lightning.",
        "integrations.transformers.ActivationCheckpointing needs a package that is not installed: "
        "pip install transformers accelerate.",
        "integrations.accelerate.prepare needs a package that is not installed: pip install accelerate.",
    ]


def with_budget(budget: int | str = "75%") -> Training:
    return Training("Asked", None, None, budget)


def test_a_budget_waits_for_a_training_call() -> None:
    model, training = Net(), with_budget()
    training.begin(model)
    with torch.no_grad():
        model(samples())
    model.eval()(samples())
    assert training.handle is None and reactivate.Handle.of(model) is None
    model.train()(samples())
    assert training.handle is reactivate.Handle.of(model) is not None
    training.end()
    training.end()
    assert training.handle is reactivate.Handle.of(model) is None
    assert not model._forward_pre_hooks and model(samples()).requires_grad


def test_the_end_before_the_first_call() -> None:
    model, training = Net(), with_budget()
    training.begin(model)
    training.end()
    model(samples())
    assert reactivate.Handle.of(model) is None


def test_a_loss_outside_of_the_model_is_refused() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)))
    training = with_budget()
    training.begin(model)
    with pytest.raises(UsageError, match="no loss in what the model returns"):
        model(samples())


def test_wrappers_are_looked_into() -> None:
    model = Net()
    training = Training("Asked", policies.recompute_modules("layers.*"), None, None)
    training.begin(torch.compile(model))
    assert reactivate.Handle.of(model).regions == ("layers.0", "layers.1", "layers.2")
    training.begin(model)  # again: what was applied before goes first
    assert pickle.loads(pickle.dumps(training)).handle is None
    training.end()
    assert reactivate.Handle.of(model) is None


def test_a_budget_under_autocast_is_bitwise() -> None:
    """Planning runs in the midst of it, and its cache holds what planning cast."""
    gradients = []
    for training in (None, with_budget("85%")):
        torch.manual_seed(0)
        model = Net()
        if training is not None:
            training.begin(model)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(samples()[:BATCH])
        loss.backward()
        gradients.append([loss.detach(), *(parameter.grad for parameter in model.parameters()), torch.get_rng_state()])
    assert reactivate.Handle.of(model).regions
    for plain, ours in zip(*gradients):
        oracle.assert_bitwise(plain, ours, "gradient")
