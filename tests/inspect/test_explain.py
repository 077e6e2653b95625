"""Rule 20: `explain` lists what is kept, by site and source line, to the byte."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ref

import explain_cases
import pytest
import torch
from explain_cases import RNG_BYTES, Block, Model, every_model, made, prepared
from journal import Journal
from oracle import assert_bitwise, leaf, random_states
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import reactivate
from reactivate._inspect.explain import compare, explain
from reactivate._inspect.explanation import Entry, Explanation
from reactivate._passes.observing import observed_by
from reactivate._torch.modes import FakeTensorMode
from reactivate.errors import UnsupportedError
from reactivate.policies import first_match, full, save_modules, save_ops

REGIONS = {"plain": 0, "every second": 2, "nested": 8, "nested, saved": 8}


def regions_of(explanation: Explanation) -> list[Entry]:
    return [entry for entry in explanation.walk() if entry.kind == "region"]


# -- to the byte ------------------------------------------------------------------------------------------------------


class Held:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()


class Counted:
    """Return what is kept after a forward pass, counted another way: what outer hooks hold, and what guards have."""

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        self.held: list[ref[Held]] = []
        self.records: list[Any] = []
        with observed_by(self), saved_tensors_hooks(self.pack, lambda held: held.tensor):
            out = model(x)
        own = {item.data_ptr() for item in (*model.parameters(), *model.buffers())}
        tensors = [held.tensor for held in (reference() for reference in self.held) if held is not None]
        tensors += [tensor for record in self.records for tensor in self.snapshots(record)]
        kept = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        self.bytes = sum(size for address, size in kept.items() if address not in own)
        assert out.grad_fn is not None  # and so all of it is still there
        self.records.clear()

    def pack(self, tensor: Tensor) -> Held:
        held = Held(tensor)
        self.held.append(ref(held))
        return held

    def forward_done(self, record: Any) -> None:
        self.records.append(record)

    def recomputation_done(self, record: Any) -> None:
        raise AssertionError("nothing is recomputed in a forward pass")

    @staticmethod
    def snapshots(record: Any) -> Iterator[Tensor]:
        yield from record.moment.held()
        brought = [bring.args[0] for call in record.saved_calls for bring in call.streams if isinstance(bring, partial)]
        for snapshot in (*record.snapshots, *brought):
            for *_, state, _ in getattr(snapshot, "others", ()):  # of generators
                if isinstance(state, Tensor):
                    yield state


@every_model
def test_what_is_kept_is_what_is_reported(name: str) -> None:
    model, x = prepared(name)
    explanation = explain(model, x)
    assert len(regions_of(explanation)) == REGIONS.get(name, 4)
    model, x = prepared(name)
    counted = Counted(model, x)
    assert explanation.kept_bytes == counted.bytes
    assert (explanation.recomputed_bytes > 0) == (name != "plain")


@every_model
def test_fake_is_real_to_the_byte(name: str) -> None:
    model, x = prepared(name)
    real, fake = explain(model, x), explain(model, x, fake=True)
    assert fake.is_fake and not real.is_fake and fake.seconds is None
    if name != "batch norm":  # real vectors are copied into one tensor, fake ones into one each
        assert untimed(fake) == untimed(real)
    for one, other in zip(fake.walk(), real.walk(), strict=True):
        assert (one.path, one.kept_bytes, one.recomputed_bytes) == (
            other.path,
            other.kept_bytes,
            other.recomputed_bytes,
        )


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_fake_is_real_where_calls_save_views_and_casts_of_their_arguments(dtype: torch.dtype | None) -> None:
    model, x = made("save_ops"), torch.randn(2, 3, 4)
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        real, fake = explain(model, x), explain(model, x, fake=True)
    assert real.kept_bytes > 0 and real.recomputed_bytes > 0
    assert [entry.kept_bytes for entry in fake.walk()] == [entry.kept_bytes for entry in real.walk()]
    if (
        dtype is None
    ):  # in mixed precision torch declares the statistics of a layer norm smaller than its kernel makes them
        assert untimed(fake) == untimed(real)


def untimed(explanation: Explanation) -> Any:
    value = explanation.to_json()
    return [without_times(entry) for entry in (*value["regions"], *value["outside"])]


def without_times(entry: dict[str, Any]) -> dict[str, Any]:
    return {**entry, "seconds": None, "inside": [without_times(inner) for inner in entry["inside"]]}


@every_model
def test_plain_is_what_is_made_again_and_kept(name: str) -> None:
    """Against the plain model: whatever is not kept any more is recomputed."""
    model, x = prepared(name)
    ours = explain(model, x)
    handle = reactivate.Handle.of(model)
    if handle is not None:
        handle.remove()
    plain = explain(model, x)
    assert not regions_of(plain)
    bits = sum(
        entry.result_bytes
        for entry in ours.walk()
        if entry.name.lower().endswith("dropout") and entry.kind == "saved call"
    )
    assert ours.kept_bytes + ours.recomputed_bytes + 31 * bits >= plain.kept_bytes  # which has 32 for each of these
    if "dropout" not in name and name != "plain":  # the state of the generator is larger than these activations
        assert ours.kept_bytes < plain.kept_bytes + sum(entry.snapshot_bytes for entry in ours.walk())


def test_each_figure_of_a_block() -> None:
    model, x = prepared("save_modules")
    region = explain(model, x).regions[1]
    width = 5 * 4  # bytes for each feature of a batch of 5
    assert (region.path, region.name, region.action) == ("layers.1", "Block", "recompute")
    assert (region.input_bytes, region.snapshot_bytes, region.result_bytes) == (8 * width, 0, 0)
    calls = [
        (entry.path, entry.name, entry.kind, entry.result_bytes) for entry in region.inside if entry.action == "save"
    ]
    # Of layer norm its result, mean and deviation; its input is the region's. Of the linear its result.
    assert calls == [
        ("layers.1.norm", "LayerNorm", "saved call", 8 * width + 2 * width),
        ("layers.1.up", "Linear", "saved call", 16 * width),
    ]
    made_again = [(entry.tensors, entry.recomputed_bytes) for entry in region.inside if entry.kind == "recomputed"]
    assert made_again == [(1, 16 * width)]  # the result of gelu, which `down` saves
    assert region.recomputed_bytes == 16 * width


def test_guards_keep_states_and_buffers() -> None:
    model, x = prepared("dropout")
    assert [entry.snapshot_bytes for entry in explain(model, x).regions] == [RNG_BYTES] * 4
    model, x = prepared("batch norm")  # nothing draws, so one state is for all of them; it counts for the first
    statistics = 2 * 8 * 4 + 8
    assert [entry.snapshot_bytes for entry in explain(model, x).regions] == [RNG_BYTES + statistics, *[statistics] * 3]


def test_nested_regions_are_a_tree() -> None:
    model, x = prepared("nested")
    outer = explain(model, x).regions[0]
    inner = outer.inside[0]
    assert (outer.path, inner.path, inner.kind) == ("layers.0", "layers.0.first", "region")
    assert inner.input_bytes == 0 and inner.snapshot_bytes == RNG_BYTES
    assert outer.input_bytes == 5 * 8 * 4
    assert outer.recomputed_bytes > 0 and inner.recomputed_bytes > 0
    assert outer.seconds and inner.seconds and all(entry.seconds for entry in (outer, inner))


def test_what_two_keep_is_counted_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Block(8), Block(8)])

        def forward(self, x: Tensor) -> Tensor:
            return (self.layers[0](x) + self.layers[1](x)) * x

    model = Twice()
    reactivate.apply(model, full())
    explanation = explain(model, torch.randn(5, 8, requires_grad=True))
    assert [entry.input_bytes for entry in explanation.regions] == [160, 0]
    assert explanation.kept_bytes == 160 + 160 + RNG_BYTES  # and the sum, which is multiplied by x


def test_copies_of_statistics_count() -> None:
    def scaled(x: Tensor, scale: Tensor) -> Tensor:
        return (x * scale).sin()

    x, scale = torch.randn(3, 8, requires_grad=True), torch.ones(8)
    (region,) = explain(reactivate.checkpoint(scaled), (x, scale)).regions
    assert region.input_bytes == x.nbytes + scale.nbytes
    assert region.name.endswith("scaled")


def test_what_a_storage_takes_is_offloaded() -> None:
    class Shelf:
        def save(self, tensor: Tensor) -> Any:
            return ("shelf", tensor.clone())

        def load(self, handle: Any) -> Tensor:
            return handle[1]

    model = made("plain")
    reactivate.apply(model, first_match(save_ops("gelu", storage=Shelf()), full()))
    explanation = explain(model, torch.randn(5, 4))
    calls = [entry for entry in explanation.walk() if entry.kind == "saved call"]
    assert [(entry.storage, entry.result_bytes) for entry in calls] == [("Shelf", 5 * 16 * 4)] * 4
    assert explanation.offloaded_bytes == 4 * 5 * 16 * 4
    text = explanation.text(plain=True)
    assert "save to Shelf" in text and "1.25 KiB offloaded" in text


def test_a_step_that_needs_values_is_refused_on_fake_tensors_in_words() -> None:
    def chosen(x: Tensor) -> Tensor:
        h = x.sin()
        return h.tanh() if h.sum().item() > 0 else h.cos()

    with pytest.raises(UnsupportedError, match=r"explain: .*_local_scalar_dense.* without fake=True"):
        explain(chosen, leaf(4), fake=True)
    with pytest.raises(UnsupportedError, match=r"compare: "):
        compare(chosen, leaf(4), policy=full(), fake=True)
    assert explain(chosen, leaf(4)).kept_bytes


@pytest.mark.parametrize("fake", [False, True])
def test_what_a_disk_takes_counts_once(fake: bool, tmp_path: Path) -> None:
    model = made("plain")
    disk = reactivate.storage.Disk(tmp_path, least_bytes=0)
    with reactivate.apply(model, first_match(save_ops("gelu", storage=disk), full(inputs=disk))):
        found = explain(model, torch.randn(5, 4), fake=fake)
    with reactivate.apply(model, first_match(save_ops("gelu"), full())):
        plain = explain(model, torch.randn(5, 4), fake=fake)
    assert found.kept_bytes == plain.kept_bytes and plain.offloaded_bytes == 0
    waits = 0 if fake else 5 * 16 * 4  # the result that was taken in last; nothing moves on fake tensors
    assert found.offloaded_bytes == found.kept_bytes - found.outside_bytes - waits > 0
    assert fake or 2 * found.offloaded_bytes == disk.traffic.moved_bytes  # of two steps
    assert [entry.input_bytes for entry in found.regions] == [entry.input_bytes for entry in plain.regions]


def test_what_is_too_small_for_a_disk_is_not_offloaded(tmp_path: Path) -> None:
    model = made("plain")
    disk = reactivate.storage.Disk(tmp_path, last=0)
    policy = first_match(save_ops("gelu", storage=disk), full())
    with reactivate.apply(model, policy), pytest.warns(UserWarning, match="smaller than"):
        found = explain(model, torch.randn(5, 4))
    assert found.offloaded_bytes == 0 and "offloaded" not in found.title


# -- places and reasons -----------------------------------------------------------------------------------------------


def line_with(owner: Any, text: str) -> int:
    lines, first = inspect.getsourcelines(owner)
    return first + next(index for index, line in enumerate(lines) if text in line)


def test_source_lines() -> None:
    model, x = prepared("save_ops")
    explanation = explain(model, x)
    region, file = explanation.regions[0], explain_cases.__file__
    assert region.source == f"{file}:{line_with(Model, 'layer(x)')} in {name_of(Model.forward)}"
    up, down = (entry for entry in region.inside if entry.kind == "saved call")
    assert (up.path, up.name) == ("layers.0.up", "linear")
    assert up.source == f"{file}:{line_with(Block, 'F.gelu(self.up')} in {name_of(Block.forward)}"
    assert down.source is not None and f":{line_with(Block, 'self.dropout(self.down')} " in down.source
    again = {entry.source for entry in region.inside if entry.kind == "recomputed"}
    assert f"{file}:{line_with(Block, 'self.norm(x)')} in {name_of(Block.forward)}" in again
    outside = {entry.path: entry for entry in explanation.outside}
    assert outside.keys() == {"embed", "head", ""}
    assert outside["embed"].source == f"{file}:{line_with(Model, 'self.embed(x)')} in {name_of(Model.forward)}"


def name_of(function: Any) -> str:
    code = function.__code__
    return str(getattr(code, "co_qualname", code.co_name))


def test_a_region_is_named_by_its_class_also_where_that_is_torchs() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    reactivate.apply(model, first_match(save_modules("*.linear1"), full()))
    regions = explain(model, torch.randn(2, 3, 8)).regions
    assert [(entry.path, entry.name, entry.source) for entry in regions] == [
        ("layers.0", "TransformerEncoderLayer", None),
        ("layers.1", "TransformerEncoderLayer", None),
    ]
    calls = [(entry.path, entry.name) for entry in regions[0].inside if entry.kind == "saved call"]
    assert calls == [("layers.0.linear1", "Linear")]


def test_a_line_of_the_callers_is_no_line_of_the_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    assert {entry.source for entry in explain(model, torch.randn(2, 4)).outside} == {None}
    assert [entry.path for entry in explain(model, torch.randn(2, 4)).outside] == ["0", "1"]


def test_a_call_that_runs_again_says_why() -> None:
    def fn(x: Tensor) -> Tensor:
        return x.mul(2).add_(1).sin()

    call = reactivate.checkpoint(fn, policy=save_ops("mul"))
    explanation = explain(call, torch.randn(4, requires_grad=True))
    assert "again, as its result is written to afterwards" in explanation.text(plain=True)
    (region,) = explanation.regions
    (entry,) = [entry for entry in region.inside if entry.name == "mul"]
    assert (entry.kind, entry.action, entry.kept_bytes) == ("call run again", "recompute", 0)
    assert entry.reason == "its result is written to afterwards"


# -- nothing changes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fake", [False, True])
@every_model
def test_nothing_is_changed(name: str, fake: bool) -> None:
    model, x = prepared(name)
    parameters = dict(model.named_parameters())
    model(x).backward()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    grads = {key: (value.grad, None if value.grad is None else value.grad.clone()) for key, value in parameters.items()}
    random = random_states()
    explain(model, x, fake=fake)
    for key, value in random_states().items():
        assert_bitwise(random[key], value, key)
    assert all(dict(model.named_parameters())[key] is value for key, value in parameters.items())
    for key, value in model.state_dict().items():
        assert_bitwise(state[key], value, key)
    for key, (grad, content) in grads.items():
        assert parameters[key].grad is grad
        assert_bitwise(grad, content, key)
    assert not any(isinstance(value, Entry) for module in model.modules() for value in vars(module).values())


@pytest.mark.parametrize("name", ["dropout", "batch norm", "nested, saved"])
def test_training_goes_on_bitwise_after_a_fake_run(name: str) -> None:
    def step(is_explained: bool) -> list[Tensor]:
        model, x = prepared(name)
        if is_explained:
            explain(model, x, fake=True)
            explain(model, x)
        model(x).backward()
        return [*(item.grad for item in model.parameters() if item.grad is not None), *model.buffers()]

    for one, other in zip(step(False), step(True), strict=True):
        assert_bitwise(one, other, name)


def test_nothing_is_left_behind() -> None:
    """Without the garbage collector: also not a tensor that autograd keeps for the op that made it."""
    seen = Journal()  # of references: a list would be as it was before

    class Exp(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            y = x.exp()
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * ctx.saved_tensors[0]

    def fn(x: Tensor) -> Tensor:
        y = Exp.apply(x).exp()
        seen.append(ref(y))
        z: Tensor = reactivate.checkpoint(torch.sin)(y)
        seen.append(ref(z))
        return z.tanh()

    gc.disable()
    try:
        assert len(explain(fn, torch.randn(4, requires_grad=True)).regions) == 1
        assert seen and not any(reference() is not None for reference in seen)
    finally:
        gc.enable()


# -- fake tensors -----------------------------------------------------------------------------------------------------


def test_a_model_on_the_meta_device_is_explained_without_memory() -> None:
    with torch.device("meta"):
        large = nn.Sequential(*(nn.Sequential(nn.Linear(2**16, 2**16), nn.GELU()) for _ in range(3)))
        x = torch.randn(2**10, 2**16)
    reactivate.apply(large, full())
    explanation = explain(large, x)
    assert explanation.is_fake
    assert explanation.kept_bytes == 3 * 2**10 * 2**16 * 4 + RNG_BYTES
    assert all(item.is_meta and type(item) is nn.Parameter for item in large.parameters())


def test_fake_arguments_make_it_fake() -> None:
    model, x = prepared("full")
    fake = FakeTensorMode(allow_non_fake_inputs=True).from_tensor(x)
    assert explain(model, fake).kept_bytes == explain(model, x).kept_bytes


def test_a_model_larger_than_memory_is_explained_fake() -> None:
    model, _ = prepared("full")
    x = torch.zeros(1).expand(2**40, 4)
    explanation = explain(model, x, fake=True)
    assert explanation.kept_bytes > 2**40 * 4 * 8
    assert "TiB" in explanation.text(plain=True)


def test_a_model_without_memory_is_explained_where_its_arguments_are() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 16))
    tokens = torch.tensor([[1, 2, 3]])
    explanation = explain(model, tokens)
    assert explanation.is_fake and explanation.kept_bytes > 0
    assert all(item.is_meta for item in model.parameters())
