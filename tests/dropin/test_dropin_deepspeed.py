"""`dropin.deepspeed`: DeepSpeed's signatures. What runs on several ranks is in `framework_cases`."""

from __future__ import annotations

import inspect
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from framework_cases import CASES
from oracle import Watched, assert_bitwise, observed_by
from ranks import errors_of, listed
from torch import Tensor

from reactivate.dropin import deepspeed
from reactivate.dropin._deepspeed_settings import DeepSpeedOptions
from reactivate.errors import UnsupportedError, UsageError
from reactivate.storage import Device, Host


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before, deepspeed.settings = deepspeed.settings, DeepSpeedOptions()
    yield
    deepspeed.settings = before
    deepspeed.get_cuda_rng_tracker.cache_clear()  # which every region after this would know


@pytest.mark.parametrize("name", [item for item in listed(CASES) if item.values[0].startswith("deepspeed")])
def test_on_ranks(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    errors = errors_of("framework_cases", name, tmp_path_factory)
    assert not errors, "\n".join(errors)


def test_signatures() -> None:
    assert str(inspect.signature(deepspeed.checkpoint)).startswith("(function:")
    parameters = inspect.signature(deepspeed.configure).parameters
    assert [*parameters] == [
        *("mpu_", "deepspeed_config", "partition_activations", "contiguous_checkpointing", "num_checkpoints"),
        *("checkpoint_in_cpu", "synchronize", "profile"),
    ]
    assert all(item.default is None for name, item in parameters.items() if name != "mpu_")


@pytest.mark.parametrize("leaf", [True, False], ids=["leaf", "computed"])
@pytest.mark.parametrize("function", [deepspeed.checkpoint, deepspeed.non_reentrant_checkpoint])
@pytest.mark.parametrize("options", [{}, {"checkpoint_in_cpu": True}, {"synchronize": True}, {"profile": True}])
def test_gradients(options: dict[str, bool], function: Any, leaf: bool) -> None:
    deepspeed.configure(None, **options)
    weight = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def block(x: Tensor, scale: float, mask: Tensor) -> Tensor:
        return torch.nn.functional.dropout((x @ weight).sin() * scale * mask, 0.3)

    def once(call: Any) -> list[Tensor]:
        torch.manual_seed(0)
        weight.grad = None
        x = torch.ones(4, 4, requires_grad=True)
        call(block, x if leaf else x * 2, 2.0, torch.ones(4) > 0).sum().backward()
        assert x.grad is not None and weight.grad is not None
        return [x.grad, weight.grad, torch.rand(2)]

    with pytest.warns(UserWarning, match="has moved nothing") if options == {"checkpoint_in_cpu": True} else _nothing():
        ours = once(function)
    for one, other in zip(once(lambda fn, *args: fn(*args)), ours, strict=True):
        assert_bitwise(one, other, "gradient")


class _nothing:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


def test_a_storage_ends_the_graph_of_torch_compile() -> None:
    deepspeed.configure(None, checkpoint_in_cpu=True)
    weight = torch.randn(4, 4).requires_grad_()

    def once(call: Any) -> list[Tensor]:
        x = torch.ones(2, 4, requires_grad=True)
        out = torch.compile(lambda x: call(lambda y: (y @ weight).sin(), x.cos()).exp(), backend="aot_eager")(x)
        return [out.detach(), *torch.autograd.grad(out.sum(), [x, weight])]

    plain = once(lambda fn, x: fn(x))
    with observed_by(ran := Watched()), pytest.warns(UserWarning, match="has moved nothing"):
        ours = once(deepspeed.checkpoint)
    for one, other in zip(plain, ours, strict=True):
        assert_bitwise(one, other, "compiled")
    assert ran.regions == ran.recomputations == 1


def test_keywords_and_what_comes_out() -> None:
    x = torch.ones(2, requires_grad=True)
    assert torch.equal(deepspeed.checkpoint(lambda x, *, by: x * by, x, by=3.0), x * 3)
    assert torch.equal(deepspeed.checkpoint(lambda x: (x * 3,), x), x * 3)
    found = deepspeed.checkpoint(lambda x: [x * 3, x * 2], x)
    assert type(found) is tuple and len(found) == 2
    outputs: list[Any] = []
    deepspeed.CheckpointFunction.apply(lambda x: (x * 3, x * 2), outputs, x)
    assert len(outputs) == 2


def test_profile_logs_both_passes(caplog: pytest.LogCaptureFixture) -> None:
    deepspeed.configure(None, profile=True)
    with caplog.at_level(logging.INFO, "reactivate.dropin.deepspeed"):
        deepspeed.checkpoint(lambda x: x.sin().exp(), torch.ones(2, requires_grad=True)).sum().backward()
    assert [record.args[0] for record in caplog.records] == ["forward", "recomputation"]  # type: ignore[index]


def test_configuration() -> None:
    assert not deepspeed.is_configured()
    deepspeed.configure(None)
    assert deepspeed.is_configured()
    assert deepspeed.settings.storage() == Device()
    deepspeed.configure(None, checkpoint_in_cpu=True)
    assert deepspeed.settings.storage() == Host(least_bytes=0)
    deepspeed.reset()
    assert deepspeed.is_configured()
    deepspeed.configure(None, partition_activations=True)  # a group of one rank, as without an mpu_
    assert deepspeed.settings.storage() == Device()
    deepspeed.set_num_layers(3)
    deepspeed.partition_activations_in_checkpoint(False)
    assert (deepspeed.settings.number_checkpoints, deepspeed.settings.partition_activations) == (3, False)
    deepspeed.configure(None)
    assert deepspeed.settings == DeepSpeedOptions(is_configured=True)


def test_file(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"activation_checkpointing": {"cpu_checkpointing": True, "number_checkpoints": 4}}))
    deepspeed.configure(None, str(path))
    assert (deepspeed.settings.cpu_checkpointing, deepspeed.settings.number_checkpoints) == (True, 4)
    deepspeed.configure(None, path, checkpoint_in_cpu=False)  # what is given goes before the file
    assert (deepspeed.settings.cpu_checkpointing, deepspeed.settings.number_checkpoints) == (False, 4)
    deepspeed.configure(None, {"train_batch_size": 8})
    assert deepspeed.settings == DeepSpeedOptions(is_configured=True)


def test_refusals() -> None:
    with pytest.raises(UnsupportedError, match="contiguous_checkpointing=True is not supported"):
        deepspeed.configure(None, partition_activations=True, contiguous_checkpointing=True, num_checkpoints=4)
    for kind in (UsageError, AssertionError):  # DeepSpeed's own type as well
        with pytest.raises(kind, match="goes with partition_activations=True and num_checkpoints"):
            deepspeed.configure(None, contiguous_checkpointing=True)
    with pytest.raises(UsageError, match="no such file"):
        deepspeed.configure(None, "nowhere.json")
    with pytest.raises(UsageError, match="takes a path or a dict; got int"):
        deepspeed.configure(None, 3)
    with pytest.raises(UsageError, match="Did you mean 'partition_activations'"):
        deepspeed.configure(None, {"activation_checkpointing": {"partitioned_activations": True}})
    with pytest.raises(UsageError, match="get_model_parallel_group"):
        deepspeed.configure(object())
    assert not deepspeed.is_configured()


def test_the_tracker_and_its_seeds() -> None:
    """The streams that DeepSpeed defines, which the recomputation draws from as the forward did."""
    tracker = deepspeed.get_cuda_rng_tracker()
    assert tracker is deepspeed.get_cuda_rng_tracker() and isinstance(tracker, deepspeed.CudaRNGStatesTracker)
    tracker.reset()
    with pytest.raises(UsageError, match=r"Call model_parallel_cuda_manual_seed\(seed\) first"):
        deepspeed.model_parallel_reconfigure_tp_seed(9)

    def drawn(seed: int) -> Tensor:
        return torch.rand(8, generator=torch.Generator().manual_seed(seed))

    def block(x: Tensor) -> Tensor:
        with tracker.fork():
            return x * torch.rand(8) * x

    deepspeed.model_parallel_cuda_manual_seed(1234)
    x = torch.ones(8, requires_grad=True)
    deepspeed.checkpoint(block, x).sum().backward()
    assert_bitwise(x.grad, drawn(1234 + 2718) * 2, "gradient")
    assert_bitwise(torch.rand(8), drawn(1234), "the generator of torch")
    deepspeed.model_parallel_reconfigure_tp_seed(9)
    with tracker.fork():
        assert_bitwise(torch.rand(8), drawn(9 + 2718), "the stream, begun anew")
    deepspeed.model_parallel_cuda_manual_seed(1234)  # a second time
    with tracker.fork("model-parallel-rng"):
        assert_bitwise(torch.rand(8), drawn(1234 + 2718), "the stream")


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module under the name of DeepSpeed's, with the attributes that it has."""
    path = "deepspeed.runtime.activation_checkpointing.checkpointing"
    module: Any = ModuleType(path)
    vars(module).update(dict.fromkeys(("PARTITION_ACTIVATIONS", "CPU_CHECKPOINT", "SYNCHRONIZE"), False))
    vars(module).update(CONTIGUOUS_CHECKPOINTING=False, PROFILE_TIME=True, num_layers=2, mp_group=None)
    module.checkpoint = lambda function, *args: ("DeepSpeed's", function(*args))
    module.configure = lambda *args: None
    module.is_configured = lambda: True
    module.get_cuda_rng_tracker = lambda: None
    module.model_parallel_cuda_manual_seed = lambda seed: "DeepSpeed's"
    for name in ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.activation_checkpointing"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, path, module)
    return module


def test_install_takes_the_configuration_over(
    stand_in: Any, whole_heap: None, caplog: pytest.LogCaptureFixture
) -> None:
    imported = [stand_in.checkpoint, stand_in.configure]
    x = torch.ones(4, requires_grad=True)
    with deepspeed.install() as installed, caplog.at_level(logging.INFO, "reactivate.dropin.deepspeed"):
        stand_in.PROFILE_TIME = False
        assert deepspeed.install() is installed  # as it is configured
        imported[0](lambda x: x.sin().exp(), x).sum().backward()
        assert len(caplog.records) == 2  # PROFILE_TIME
        assert stand_in.model_parallel_cuda_manual_seed(3) == "DeepSpeed's"  # of its own tracker
        imported[1](None, checkpoint_in_cpu=True)
        assert stand_in.is_configured() and not deepspeed.is_configured()  # its own, not those of this module
        assert installed.regions == 1
    assert x.grad is not None
    assert imported[0](torch.sin, x)[0] == "DeepSpeed's"
    stand_in.CONTIGUOUS_CHECKPOINTING = stand_in.PARTITION_ACTIVATIONS = True
    with pytest.raises(UnsupportedError, match="contiguous"):
        deepspeed.install()
    assert imported[0](torch.sin, x)[0] == "DeepSpeed's"


def test_install_without_it() -> None:
    with pytest.raises(UsageError, match="checkpointing, which cannot be imported"):
        deepspeed.install()
