"""`dropin.megatron`: Megatron's signatures. What runs on several ranks is in `framework_cases`."""

from __future__ import annotations

import inspect
import sys
import weakref
from types import ModuleType
from typing import Any

import pytest
import torch
from framework_cases import CASES
from journal import Journal
from oracle import Watched, assert_bitwise
from ranks import errors_of, listed
from several import each
from torch import Tensor, nn
from tracker_of_megatron import CpuRngStatesTracker

import reactivate
from reactivate._passes.observing import observed_by
from reactivate.dropin import megatron
from reactivate.errors import UsageError
from reactivate.guards import TrackerGuard


@pytest.mark.parametrize("name", [item for item in listed(CASES) if item.values[0].startswith("megatron")])
def test_on_ranks(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    errors = errors_of("framework_cases", name, tmp_path_factory)
    assert not errors, "\n".join(errors)


def test_signature() -> None:
    parameters = [*inspect.signature(megatron.checkpoint).parameters.values()]
    assert [item.name for item in parameters] == ["function", "distribute_saved_activations", "args"]
    assert all(item.default is item.empty for item in parameters)


def dropped(tracker: Any) -> Any:
    def fn(x: Tensor, factor: float) -> tuple[Tensor, None]:
        with tracker.fork("a"):
            h = torch.nn.functional.dropout(x.sin(), 0.5)
        return (torch.nn.functional.dropout(h.exp(), 0.5) * factor).cos(), None

    return fn


def test_streams_of_the_tracker_and_what_it_returns() -> None:
    def once(call: Any) -> list[Tensor]:
        torch.manual_seed(0)
        tracker = CpuRngStatesTracker(notes_current=True)
        tracker.add("a", 3)
        x = torch.ones(32, requires_grad=True)
        with megatron.parallel(tracker=tracker):
            out, nothing = call(dropped(tracker), x, 2.0)
        assert nothing is None
        (gradient,) = torch.autograd.grad(out.sum(), x)  # Megatron refuses `autograd.grad`
        with tracker.fork("a"):
            return [gradient, torch.rand(3)]

    plain = once(lambda fn, *args: fn(*args))
    for function in (megatron.checkpoint, megatron.CheckpointFunction.apply):
        ours = once(lambda fn, *args: function(fn, False, *args))
        for one, other in zip(plain, ours, strict=True):
            assert_bitwise(one, other, "drawn")


def test_it_says_whether_a_region_runs() -> None:
    seen = Journal()

    def fn(x: Tensor) -> Tensor:
        seen.append(megatron.is_checkpointing())
        return x.sin().exp()

    def outer(x: Tensor) -> Tensor:
        out = megatron.checkpoint(fn, False, x)
        seen.append(megatron.is_checkpointing())
        return out.cos().exp()

    x = torch.ones(2, requires_grad=True)
    out = megatron.checkpoint(outer, False, x)
    assert [*seen] == [True, True] and not megatron.is_checkpointing()
    out.sum().backward()
    assert all(seen) and len(seen) == 5 and not megatron.is_checkpointing()
    with pytest.raises(ValueError, match="here"):
        megatron.checkpoint(failing, False, x)
    assert not megatron.is_checkpointing()


def failing(x: Tensor) -> Tensor:
    raise ValueError("here")


def test_nothing_to_distribute() -> None:
    with pytest.raises(UsageError, match=r"got no arguments"):
        megatron.checkpoint(torch.ones, True)
    with pytest.raises(UsageError, match=r"got int"):
        megatron.checkpoint(torch.ones, True, 3)
    with pytest.raises(UsageError, match=r"needs the tensor-parallel group"):
        megatron.checkpoint(torch.sin, True, torch.ones(2))


# -- policies ----------------------------------------------------------------------------------------------------------


class MoELayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.shared_experts = nn.Linear(4, 2), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.shared_experts(x).sin() * self.router(x).softmax(-1)[..., :1]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear_qkv, self.core_attention = nn.Linear(4, 4), nn.Sequential(nn.Softmax(-1), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return self.core_attention(self.linear_qkv(x))


class Layer(nn.Module):
    """Submodules with the names that Megatron gives them."""

    def __init__(self, is_moe: bool) -> None:
        super().__init__()
        self.self_attention = Attention()
        self.mlp = MoELayer() if is_moe else nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x + self.self_attention(x))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(index == 1) for index in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


LAYERS = ("layers.0", "layers.1", "layers.2")
REGIONS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({}, ()),
    ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}, LAYERS),
    ({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2}, LAYERS[:2]),
    ({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 9}, LAYERS),
    ({"recompute_granularity": "selective"}, tuple(f"{layer}.self_attention.core_attention" for layer in LAYERS)),
    ({"recompute_granularity": "selective", "recompute_modules": ["mlp"]}, ("layers.0.mlp", "layers.2.mlp")),
    ({"recompute_granularity": "selective", "recompute_modules": ["moe"]}, ("layers.1.mlp",)),
    (
        {"recompute_granularity": "selective", "recompute_modules": ["shared_experts", "mlp"]},
        ("layers.0.mlp", "layers.1.mlp.shared_experts", "layers.2.mlp"),
    ),
]


@each(("fields", "regions"), REGIONS, ids=[str(index) for index in range(len(REGIONS))])
def test_fields_of_the_configuration(fields: dict[str, Any], regions: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model, x = Decoder(), torch.randn(2, 4)

    def gradients() -> list[Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        model(x).sum().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    plain = gradients()
    handle = reactivate.apply(model, megatron.policy(**fields))
    assert handle.regions == regions
    for one, other in zip(plain, gradients(), strict=True):
        assert_bitwise(one, other, "gradient")


@each(
    ("fields", "message"),
    [
        ({"recompute_method": "block"}, "recompute_method='block' without recompute_granularity"),
        ({"recompute_granularity": "ful"}, "there are 'full', 'selective' and None"),
        ({"recompute_granularity": "full"}, "takes recompute_method='uniform' or 'block'; got None"),
        (
            {"recompute_granularity": "full", "recompute_method": "block"},
            "recompute_num_layers of at least 1; got None",
        ),
        (
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
            "one region around 2 layers",
        ),
        (
            {"recompute_granularity": "full", "recompute_modules": ["mlp"]},
            "goes with recompute_granularity='selective'",
        ),
        ({"recompute_granularity": "selective", "recompute_num_layers": 2}, "takes recompute_num_layers=None; got 2"),
        ({"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}, "CheckpointWithoutOutput"),
        ({"recompute_granularity": "selective", "recompute_modules": ["core_atn"]}, "Did you mean 'core_attn'"),
        ({"recompute_granularity": "selective", "recompute_modules": "mlp"}, "is a list of names"),
        ({"distribute_saved_activations": True}, "it goes with recompute_granularity='full', not None"),
        ({"distribute_saved_activations": True, "sequence_parallel": True}, "goes with sequence_parallel=False"),
    ],
)
def test_fields_that_mean_nothing(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        megatron.policy(**fields)


# -- in the place of the real one --------------------------------------------------------------------------------------


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module under the name of Megatron's, with the functions that it has."""
    random: Any = ModuleType("megatron.core.tensor_parallel.random")
    random.checkpoint = lambda function, distribute_saved_activations, *args: ("Megatron's", function(*args))
    random.is_checkpointing = lambda: False
    for name in ("CheckpointWithoutOutput", "MHCBlockRecomputeManager"):
        setattr(random, name, type(name, (), {}))
    random.BlockLevelCheckpointManager = random.MHCBlockRecomputeManager
    tracker = CpuRngStatesTracker(notes_current=True)
    tracker.add("a", 3)
    random.get_cuda_rng_tracker = lambda: tracker
    for name in ("megatron", "megatron.core", "megatron.core.tensor_parallel"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, random.__name__, random)
    return random  # type: ignore[no-any-return]


def test_install_and_remove(stand_in: Any, whole_heap: None) -> None:
    imported = [stand_in.checkpoint]
    x = torch.ones(4, requires_grad=True)
    with megatron.install() as installed:
        assert imported[0] is stand_in.checkpoint and "is_checkpointing" in repr(installed)
        out, _ = imported[0](dropped(stand_in.get_cuda_rng_tracker()), False, x, 1.0)
        out.sum().backward()
        assert megatron.install() is installed and installed.regions == 1
    assert x.grad is not None
    assert imported[0](torch.sin, False, x)[0] == "Megatron's"


def test_install_replaces_the_classes_of_discarded_outputs(stand_in: Any, whole_heap: None) -> None:
    theirs = stand_in.CheckpointWithoutOutput
    imported = {"CheckpointWithoutOutput": theirs}
    x, linear = torch.ones(4, 8, requires_grad=True), nn.Linear(8, 8)
    ran = Watched()
    with megatron.install(), observed_by(ran):
        manager = stand_in.BlockLevelCheckpointManager()
        assert type(manager) is stand_in.MHCBlockRecomputeManager
        ours = [imported["CheckpointWithoutOutput"](), stand_in.CheckpointWithoutOutput(ckpt_manager=manager)]
        for checkpoint in ours:
            out = linear(checkpoint.checkpoint(torch.exp, x))
            checkpoint.discard_output_and_register_recompute(out)
        manager.discard_all_outputs_and_register_unified_recompute(out)
        out.sum().backward()
        # The default guards do not know the tracker of the installed library.
        assert any(isinstance(guard, TrackerGuard) for guard in ours[0].guards())
    assert (ran.regions, ran.recomputations) == (2, 1)
    assert imported["CheckpointWithoutOutput"] is stand_in.CheckpointWithoutOutput is theirs
    assert stand_in.BlockLevelCheckpointManager is stand_in.MHCBlockRecomputeManager


def test_a_tracker_goes_with_its_users() -> None:
    tracker = CpuRngStatesTracker(notes_current=True)
    tracker.add("a", 3)
    x = torch.ones(32, requires_grad=True)
    with megatron.parallel(tracker=tracker):
        outs = [megatron.checkpoint(dropped(tracker), False, x, 2.0)[0].sum() for _ in range(2)]
    gone = weakref.ref(tracker)
    del tracker
    assert gone() is not None
    for out in outs:
        out.backward()
    del out, outs
    assert gone() is None


def test_install_without_it() -> None:
    with pytest.raises(UsageError, match=r"megatron\.core\.tensor_parallel\.random, which cannot be imported"):
        megatron.install()


def test_a_region_breaks_the_graph_of_torch_compile() -> None:
    """Run the region between compiled parts, with the same bits; with `fullgraph=True` torch raises its own error."""

    def once(call: Any, **options: Any) -> list[Tensor | None]:
        torch.manual_seed(0)
        torch._dynamo.reset()
        block = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 8))
        x = torch.ones(4, 8, requires_grad=True)
        out = torch.compile(lambda x: call(block, x.cos()).sin(), backend="aot_eager", **options)(x)
        out.square().sum().backward()
        return [out.detach(), x.grad, *(parameter.grad for parameter in block.parameters()), torch.get_rng_state()]

    def call(block: nn.Module, x: Tensor) -> Tensor:
        return megatron.checkpoint(block, False, x)  # type: ignore[no-any-return]

    plain = once(lambda block, x: block(x))
    with observed_by(ran := Watched()):
        for one, other in zip(plain, once(call), strict=True):
            assert_bitwise(one, other, "compiled")
    assert ran.regions == ran.recomputations == 1
    with pytest.raises(torch._dynamo.exc.Unsupported):
        once(call, fullgraph=True)
