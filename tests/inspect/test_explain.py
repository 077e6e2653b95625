"""Rule 20: `explain` lists what is kept, by site and source line, to the byte."""

from __future__ import annotations

import gc
import inspect
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from oracle import assert_bitwise, random_states, seed_everything
from several import each
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

import reactivate
from reactivate._inspect.comparison import Comparison
from reactivate._inspect.explain import explain
from reactivate._inspect.explanation import Entry, Explanation
from reactivate._passes.observing import observed_by
from reactivate._region import accounts
from reactivate._region.accounts import in_words, note_shortage
from reactivate._region.region import Region
from reactivate._torch.modes import FakeTensorMode
from reactivate.errors import UsageError
from reactivate.policies import first_match, full, recompute_every, recompute_modules, save_modules, save_ops

RNG_BYTES = 0  # the state of a generator is bytes, and no tensor


class Block(nn.Module):
    def __init__(self, size: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.up = nn.Linear(size, 2 * size)
        self.down = nn.Linear(2 * size, size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        hidden = F.gelu(self.up(hidden))
        hidden = self.dropout(self.down(hidden))
        return x + hidden


class Normed(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        self.norm = nn.BatchNorm1d(size)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.linear(x)))


class Model(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.layers = nn.ModuleList(make() for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).tanh().sum()


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(8, 0.2), Block(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).sin()).cos()


def blocks(dropout: float = 0.0) -> Callable[[], Model]:
    return lambda: Model(lambda: Block(8, dropout))


def recomputed(policy: Any, make: Callable[[], Model]) -> Callable[[], Model]:
    def made() -> Model:
        model = make()
        reactivate.apply(model, policy)
        return model

    return made


NESTED = recompute_modules("layers.*", "layers.*.first")
MODELS: dict[str, Callable[[], Model]] = {
    "plain": blocks(),
    "full": recomputed(full(), blocks()),
    "every second": recomputed(recompute_every(2), blocks()),
    "save_ops": recomputed(first_match(save_ops("linear"), full()), blocks()),
    "save_modules": recomputed(first_match(save_modules("*.up", "*.norm"), full()), blocks()),
    "dropout": recomputed(full(), blocks(0.2)),
    "dropout, saved": recomputed(first_match(save_modules("*.dropout"), full()), blocks(0.2)),
    "batch norm": recomputed(full(), lambda: Model(lambda: Normed(8))),
    "nested": recomputed(NESTED, lambda: Model(Outer)),
    "nested, saved": recomputed(first_match(save_ops("gelu"), NESTED), lambda: Model(Outer)),
}
REGIONS = {"plain": 0, "every second": 2, "nested": 8, "nested, saved": 8}
every_model = each("name", MODELS)


def made(name: str) -> Model:
    seed_everything()
    return MODELS[name]()


def prepared(name: str) -> tuple[Model, Tensor]:
    return made(name), torch.randn(5, 4)


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
    region = explanation.regions[0]
    assert region.source == f"{__file__}:{line_with(Model, 'layer(x)')} in {name_of(Model.forward)}"
    up, down = (entry for entry in region.inside if entry.kind == "saved call")
    assert (up.path, up.name) == ("layers.0.up", "linear")
    assert up.source == f"{__file__}:{line_with(Block, 'F.gelu(self.up')} in {name_of(Block.forward)}"
    assert down.source is not None and f":{line_with(Block, 'self.dropout(self.down')} " in down.source
    again = {entry.source for entry in region.inside if entry.kind == "recomputed"}
    assert f"{__file__}:{line_with(Block, 'self.norm(x)')} in {name_of(Block.forward)}" in again
    outside = {entry.path: entry for entry in explanation.outside}
    assert outside.keys() == {"embed", "head", ""}
    assert outside["embed"].source == f"{__file__}:{line_with(Model, 'self.embed(x)')} in {name_of(Model.forward)}"


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
    seen: list[ref[Tensor]] = []

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


# -- text and JSON ----------------------------------------------------------------------------------------------------


@every_model
def test_json_round_trip(name: str) -> None:
    explanation = explain(*prepared(name))
    text = json.dumps(explanation.to_json())
    assert Explanation.from_json(json.loads(text)) == explanation


@each(
    ("value", "words"),
    [
        ({"version": 99}, "version 99"),
        (
            '{"version": 1}',
            r"from_json takes what \w+\.to_json returned, a dict; got '.*'. Read text with json.loads first",
        ),
        (None, "got None"),
        ({"version": 1}, r"This is no (explanation|comparison) as `\w+\.save` writes it: the field '\w+' is missing"),
    ],
)
def test_what_is_no_json_of_it_is_refused(value: Any, words: str) -> None:
    for kind in (Explanation, Comparison):
        with pytest.raises(UsageError, match=words):
            kind.from_json(value)


def test_the_table() -> None:
    model, x = prepared("save_ops")
    text = str(explain(model, x))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 120
    title = "Kept for the backward: 2.17 KiB, of which 300 B outside of regions. Recomputed: 2.03 KiB."
    assert lines[0].startswith(title) and explain(model, x).title == title
    assert any("layers.0…layers.3 (4 alike) Block" in line and "640 B" in line for line in lines)
    assert any(line.strip().startswith("up linear") and "test_explain.py:" in line for line in lines)
    assert lines[-1].split()[0] == "all"


def test_a_notebook_and_a_debugger_show_it() -> None:
    explanation = explain(*prepared("save_ops"))
    assert re.fullmatch(
        r"Explanation\(2.17 KiB kept, 2.03 KiB recomputed: 4 regions and \d+ sites? outside\)", repr(explanation)
    )
    compared = reactivate.compare(*prepared("plain"), policy=full())
    assert repr(compared).startswith("Comparison(before=Explanation(") and len(repr(compared)) < 200
    for shown, rows in ((explanation, str(explanation).splitlines()), (compared, compared.table().rows)):
        page = ElementTree.fromstring(f"<div>{shown._repr_html_()}</div>")
        assert page.findtext("p") == str(shown).splitlines()[0]
        assert 3 < len(page.findall("table/tbody/tr")) <= len(rows)


def test_the_table_is_as_wide_as_asked() -> None:
    explanation = explain(*prepared("save_ops"))
    assert max(map(len, explanation.text(width=100).splitlines())) <= 100
    assert "layers.0…layers.3 (4 alike) Block" in explanation.text(plain=True)


def test_layers_that_keep_alike_share_their_rows_with_their_sums() -> None:
    """Of a model without a policy too."""
    explanation = explain(*prepared("plain"))
    lines = explanation.text(plain=True).splitlines()
    (folded,) = (number for number, line in enumerate(lines) if "alike" in line)
    inside = [entry for entry in explanation.outside if entry.path.startswith("layers.")]
    assert lines[folded].startswith("layers.0…layers.3 (4 alike) Block")
    assert lines[folded].endswith(in_words(sum(entry.kept_bytes for entry in inside)))
    up = [entry for entry in inside if entry.path.endswith(".up")]
    (line,) = (line for line in lines if line.startswith("  up: 4 tensors "))
    assert in_words(sum(entry.kept_bytes for entry in up)) in line
    assert len(lines) == folded + 8  # four places in a layer; the head, the loss and the total


def test_folded_rows_are_sums_at_any_depth() -> None:
    """Of regions in regions too."""
    explanation = explain(*prepared("nested"))
    inner = [entry for entry in explanation.walk() if entry.path == "layers.0.first" and entry.kind == "recomputed"]
    assert inner
    text = explanation.text(plain=True)
    for entry in inner:
        assert f"    {4 * entry.tensors} tensors" in text and in_words(4 * entry.recomputed_bytes) in text


def test_only_layers_that_are_alike_share_rows() -> None:
    model, x = prepared("plain")
    model.layers[2] = Normed(8)
    text = explain(model, x).text(plain=True)
    for row in ("layers.0…layers.1 (2 alike) Block ", "\nlayers.2 Normed ", "\nlayers.3 Block "):
        assert text.count(row) == 1


def test_the_sums_of_layers_are_values_too() -> None:
    explanation = explain(*prepared("every second"))
    layers = [entry for entry in explanation.outside_by_layer if entry.kind == "layer"]
    assert [(entry.path, entry.name) for entry in layers] == [("layers.1", "Block"), ("layers.3", "Block")]
    for layer in layers:
        inside = [entry for entry in explanation.outside if entry.path.startswith(layer.path)]
        assert list(layer.inside) == inside and len(inside) > 2
        assert layer.kept_bytes == sum(entry.kept_bytes for entry in inside) > 0
    others = [entry for entry in explanation.outside_by_layer if entry.kind != "layer"]
    assert [entry.path for entry in others] == [entry.path for entry in explanation.outside if "." not in entry.path]


def test_torch_alone_is_enough_to_print() -> None:
    """Each once, and nothing beside it: neither the profiler's log nor a warning."""
    code = (
        "import sys\n"
        "for name in ('rich', 'matplotlib', 'jinja2', 'click', 'pydantic', 'yaml'): sys.modules[name] = None\n"
        "import torch, reactivate\n"
        "layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)\n"
        "model, x = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.ones(2, 4, 8)\n"
        "print(reactivate.explain(model, x))\n"
        "plan = reactivate.plan(model, x, budget='100%')\n"
        "print(plan)\n"
        "print(plan.measure())\n"
        "print(reactivate.verify(model, x))\n"
        "print(reactivate.apply(model, plan))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for said in ("Kept for the backward", "fits into", "Peak: predicted", "The same, bit for bit", "Plan("):
        assert done.stdout.count(said) == 1, said
    assert all(line.startswith("plan: ") for line in done.stderr.splitlines())  # its progress, on a slow machine


def test_nothing_to_explain_is_refused() -> None:
    with pytest.raises(UsageError, match="requires a gradient"):
        explain(lambda x: x * 2, torch.ones(2))
    model, x = prepared("plain")
    with pytest.raises(UsageError, match=r"no backward .* Write model.requires_grad_\(\)"):
        explain(model.requires_grad_(False), x)
    with pytest.raises(UsageError, match=r"although args\[0\] does: the model detaches it"):
        explain(lambda x: x.detach(), torch.ones(2, requires_grad=True))


# -- out of memory ----------------------------------------------------------------------------------------------------


def notes_of(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


SHORTAGES = {
    "device": torch.OutOfMemoryError("out of memory"),
    "host": RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes."),
}


class Short(nn.Module):
    """Runs out of memory in the forward pass or in the recomputation of the third layer."""

    def __init__(self, kind: str, is_in_recomputation: bool) -> None:
        super().__init__()
        self.kind = kind
        self.is_in_recomputation = is_in_recomputation
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if reactivate.is_recomputing() == self.is_in_recomputation:
            error = SHORTAGES[self.kind]
            raise type(error)(*error.args)
        return self.linear(x).sin()


@pytest.mark.parametrize("kind", SHORTAGES)
@pytest.mark.parametrize("is_in_recomputation", [False, True])
def test_out_of_memory_says_who_keeps_what(kind: str, is_in_recomputation: bool) -> None:
    gc.collect()  # what other tests left
    model = made("dropout")
    short = model.layers[2] = Short(kind, is_in_recomputation)
    reactivate.Handle.of(model).remove()
    reactivate.apply(model, first_match(save_ops("gelu"), recompute_modules("layers.*")))
    assert isinstance(model.layers[2], Short) and short is model.layers[2]
    with pytest.raises(RuntimeError) as caught:
        model(torch.randn(5, 4)).backward()
    text = notes_of(caught.value)
    assert text.count("Kept for the backward by regions") == 1
    assert "reactivate.explain" in text
    each = 5 * 8 * 4 + RNG_BYTES + 5 * 16 * 4  # the input, the state of the generator, the result of gelu
    assert f"\n  layers.0: {in_words(each)}\n  layers.1: {in_words(each)}\n" in text
    last = 5 * 8 * 4 + (RNG_BYTES if is_in_recomputation else 0)  # a state is kept when the forward has ended
    assert f"\n  layers.2: {in_words(last)}\n" in text


def test_out_of_memory_in_a_nested_region_is_noted_once_and_recomputes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(accounts, "_LINES", 10**6)  # tests before this one may have left regions
    gc.collect()
    recomputations: list[str] = []

    def inner(x: Tensor) -> Tensor:
        if reactivate.is_recomputing():
            recomputations.append("inner")
        return x.sin().cos()

    def last(x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("out of memory")

    def outer(x: Tensor) -> Tensor:
        y = reactivate.checkpoint(inner, name="inner")(x.exp())
        return reactivate.checkpoint(last, name="last")(y)

    with pytest.raises(torch.OutOfMemoryError) as caught:
        reactivate.checkpoint(outer, name="outer")(torch.randn(64, requires_grad=True) * 1)
    text = notes_of(caught.value)
    assert text.count("Kept for the backward by regions") == 1 and not recomputations
    assert "outer: 256 B" in text and f"inner: {in_words(RNG_BYTES)}" in text and "last: 0 B" in text


def test_before_python_311_the_account_is_in_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    error = torch.OutOfMemoryError("out of memory", "and more")
    monkeypatch.setattr(sys, "version_info", (3, 10, 0))
    for _ in range(2):
        note_shortage(error, Region)
    monkeypatch.undo()
    assert error.args[0].startswith("out of memory\nKept for the backward by regions") and error.args[1] == "and more"
    assert notes_of(error).count("Kept for the backward") == 1


def test_other_errors_have_no_note() -> None:
    def fn(x: Tensor) -> Tensor:
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError) as caught:
        reactivate.checkpoint(fn)(torch.ones(2, requires_grad=True))
    assert notes_of(caught.value) == "something else"


def test_a_model_without_memory_is_explained_where_its_arguments_are() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 16))
    tokens = torch.tensor([[1, 2, 3]])
    explanation = explain(model, tokens)
    assert explanation.is_fake and explanation.kept_bytes > 0
    assert all(item.is_meta for item in model.parameters())
