"""Recompute tags that the compilers of torch's own TPU and Trainium devices read, and their autoload entries.

`simulated_heirs` runs regions on the devices, simulated.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.utils.checkpoint
from functorch.compile import min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import CheckpointPolicy

import reactivate
from reactivate._compilers import graph
from reactivate.policies import first_match, full, save_modules, save_ops, union

pytestmark = pytest.mark.usefixtures("fresh_compiler")

RECOMPUTED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
BLOCKS = 3


class Tags:
    """A compiler that reads of each backward graph what torch_tpu's pass reads: the nodes to be recomputed.

    That pass puts an optimization barrier behind each of them that no other one of them uses, its ends.
    """

    def __init__(self) -> None:
        self.recomputed: Counter[str] = Counter()
        self.offloaded: Counter[str] = Counter()  # of the forward graph
        self.gradients: list[Tensor] = []
        self.ends = 0
        self.backward: Counter[str] = Counter()

    def read(self, module: torch.fx.GraphModule, inputs: Any) -> Any:
        nodes = {node for node in module.graph.nodes if node.meta.get("recompute") in RECOMPUTED}
        self.recomputed.update(str(node.target) for node in nodes)
        self.ends += sum(nodes.isdisjoint(node.users) for node in nodes)
        self.backward.update(str(node.target) for node in module.graph.nodes)
        return module

    def backend(self, partition: Any) -> Any:
        def forward(module: torch.fx.GraphModule, inputs: Any) -> Any:
            nodes = (node for node in module.graph.nodes if node.meta.get("recompute") == OFFLOAD is not None)
            self.offloaded.update(str(node.target) for node in nodes)
            return module

        options = {} if partition is None else {"partition_fn": partition}
        return aot_autograd(fw_compiler=forward, bw_compiler=self.read, **options)


class Model(nn.Module):
    def __init__(self, wrap: Callable[[Any], Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(BLOCKS)
        )
        self.wrap = wrap

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + self.wrap(block)(x)
        return x


def torchs(block: Any) -> Any:
    return lambda x: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)


def tags_of(wrap: Callable[[Any], Any], partition: Any, policy: Any = None) -> Tags:
    torch.manual_seed(0)
    model, found = Model(wrap), Tags()
    if policy is not None:
        reactivate.apply(model, policy)
    x = torch.randn(4, 8, requires_grad=True)
    torch.compile(model, backend=found.backend(partition))(x).square().sum().backward()
    found.gradients = [parameter.grad for parameter in model.parameters()]
    return found


# torch_tpu's partitioner, and the one of aot_autograd, which Neuron's backend leaves as it is
partitioners = pytest.mark.parametrize("partition", [min_cut_rematerialization_partition, None])


@partitioners
def test_a_region_has_the_tags_of_torchs_own_checkpoint(partition: Any) -> None:
    ours, theirs = tags_of(reactivate.checkpoint, partition), tags_of(torchs, partition)
    assert ours.recomputed == theirs.recomputed
    assert ours.ends == theirs.ends >= BLOCKS
    assert ours.recomputed["aten.tanh.default"] == BLOCKS
    assert ours.recomputed["aten.addmm.default"] == BLOCKS, "the second product of a block saves nothing that is needed"


@partitioners
def test_an_applied_model_has_them_too(partition: Any) -> None:
    assert tags_of(lambda block: block, partition, full()).recomputed["aten.tanh.default"] == BLOCKS


@partitioners
def test_what_a_policy_saves_is_not_recomputed(partition: Any) -> None:
    found = tags_of(lambda block: block, partition, first_match(save_ops("linear"), full()))
    assert found.recomputed["aten.tanh.default"] == BLOCKS
    assert found.backward["aten.addmm.default"] == 0


OFFLOAD = getattr(CheckpointPolicy, "MUST_CPU_OFFLOAD", None)
needs_the_tag = pytest.mark.skipif(OFFLOAD is None, reason="this torch has no tag for what is offloaded")


def offloading_linear(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    return OFFLOAD if op is torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE


def torchs_offloading(block: Any) -> Any:
    contexts = partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, offloading_linear)
    return lambda x: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=contexts)


@needs_the_tag
def test_what_a_policy_keeps_on_the_host_has_the_tag_of_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a TPU, where the compiler offloads it. (torch's default partitioner fails on the tag.)"""
    partition = min_cut_rematerialization_partition
    monkeypatch.setattr(graph, "offloads_in_graphs", lambda device_type: device_type == "cpu")
    host = reactivate.storage.Host()
    ours = tags_of(lambda block: block, partition, first_match(save_ops("linear", storage=host), full()))
    theirs = tags_of(torchs_offloading, partition)
    assert ours.offloaded == theirs.offloaded and ours.recomputed == theirs.recomputed
    assert ours.offloaded["aten.addmm.default"] == 2 * BLOCKS
    assert all(map(torch.equal, ours.gradients, theirs.gradients))
    both = union(save_ops("linear", storage=host), save_modules("blocks.*.1", "blocks.*.3"))
    assert not tags_of(lambda block: block, partition, first_match(both, full())).offloaded, "on the device as well"


def test_where_no_compiler_offloads_it_is_refused() -> None:
    policy = first_match(save_ops("linear", storage=reactivate.storage.Host()), full())
    with pytest.raises(Exception, match="keeps results in Host.*stays on the device"):
        tags_of(lambda block: block, None, policy)


def test_without_a_region_there_are_none() -> None:
    assert not tags_of(lambda block: block, min_cut_rematerialization_partition).recomputed


# -- an autoload entry --------------------------------------------------------------------------------------------------


@pytest.fixture
def device_that_aborts(tmp_path: Path) -> Path:
    """A package whose entry in "torch.backends" ends the process, as one does whose driver finds no device."""
    (tmp_path / "torch_absent.py").write_text("import os\n\ndef load():\n    os.abort()\n")
    facts = tmp_path / "torch_absent-1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_absent\nVersion: 1\n")
    (facts / "entry_points.txt").write_text("[torch.backends]\ntorch_absent = torch_absent:load\n")
    return tmp_path


@pytest.mark.parametrize("is_loaded", [True, False])
def test_a_device_that_aborts_is_left_out_by_torchs_variable(device_that_aborts: Path, is_loaded: bool) -> None:
    code = """
        import torch, reactivate
        x = torch.ones(3, requires_grad=True)
        reactivate.checkpoint(torch.sin)(x).sum().backward()
        assert torch.equal(x.grad, torch.ones(3).cos())
        print("ran")
    """
    path = os.pathsep.join([str(device_that_aborts), str(Path(__file__).parents[2])])
    environment = {**os.environ, "PYTHONPATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": str(int(is_loaded))}
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True, check=False
    )
    assert (ran.returncode == 0, ran.stdout.strip()) == ((False, "") if is_loaded else (True, "ran"))
