"""Results of ops on fake tensors that are reproduced are as the ops' own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import plan_models
import pytest
import torch
from several import each
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._python_dispatch import TorchDispatchMode

from reactivate._inspect.known_results import KnownResults
from reactivate._torch.modes import FakeTensor, FakeTensorMode, unset_fake_temporarily
from reactivate._torch.ops import DEVICE_QUERY, leaves_at_op
from reactivate.planner.candidates import FULL, Assignment
from reactivate.planner.cost.devices import find
from reactivate.planner.cost.op_costs import RooflineCosts
from reactivate.planner.simulator import simulate
from reactivate.planner.step import TrainingStep
from reactivate.planner.trace.records import Trace
from reactivate.planner.units import find_units

aten = torch.ops.aten


class Runs(TorchDispatchMode):
    """Counts the ops that run."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is not DEVICE_QUERY
        return func(*args, **(kwargs or {}))


def matrix(*, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(4, 6, device=device, dtype=dtype)


def real() -> Tensor:
    with unset_fake_temporarily():
        return torch.ones(4, 6)


REPRODUCED: dict[str, Callable[[], tuple[Any, ...]]] = {
    "of its own": lambda: (aten.mm.default, matrix(), matrix().t()),
    "with a number": lambda: (aten.mul.Tensor, matrix(), 2.5),
    "elsewhere": lambda: (aten.sin.default, matrix(device="meta")),
    "a view": lambda: (aten.transpose.int, matrix(), 0, 1),
    "a view of a part": lambda: (aten.slice.Tensor, matrix(), 1, 2, 4),
    "views": lambda: (aten.split.Tensor, matrix(), 3, 1),
    "detached": lambda: (aten.detach.default, matrix().requires_grad_()),
    "in place": lambda: (aten.add_.Tensor, matrix(), matrix()),
    "in place, of itself": lambda: (aten.add_.Tensor, *[matrix()] * 2),
    "several": lambda: (aten.native_layer_norm.default, matrix(), [6], None, None, 1e-5),
    "some of none": lambda: (
        aten.native_layer_norm_backward.default,
        *[matrix(), matrix(), [6], torch.empty(4, 1), torch.empty(4, 1), None, None],
        [True, False, False],
    ),
    "of a list": lambda: (aten.cat.default, [matrix(), matrix()], 1),
    "unsafe view": lambda: (aten._unsafe_view.default, matrix(), [24]),
    "beside one with values": lambda: (aten.mul.Tensor, matrix(), real()),
    "copied": lambda: (aten._to_copy.default, matrix()),
    "of a view": lambda: (aten.clone.default, matrix()[1:, ::2]),
    "expanded": lambda: (aten.expand.default, matrix()[:1], [4, 6]),
}
RUN_AGAIN: dict[str, Callable[[], tuple[Any, ...]]] = {
    "what depends on values": lambda: (aten.index.Tensor, matrix(), [torch.zeros(3, dtype=torch.long)]),
    "what changes its argument": lambda: (aten.t_.default, matrix()),
    "what changes its size": lambda: (aten.resize_.default, matrix(), [3]),
    "what changes the size of what it writes to": lambda: (aten.sin.out, matrix(), {"out": torch.empty(0)}),
    "one with values that is returned": lambda: (aten.view.default, real(), [24]),
}


def outcome(given: tuple[Any, ...], result: Any) -> list[Any]:
    """All that can be told of a result, and of what was given, without values."""
    tensors = [leaf for leaf in leaves_at_op(given) if isinstance(leaf, Tensor)]
    results = [leaf for leaf in leaves_at_op([result]) if isinstance(leaf, Tensor)]
    objects = [id(leaf) for leaf in (*tensors, *results)]
    memory = [id(leaf.untyped_storage()) for leaf in (*tensors, *results)]
    facts = [
        (
            *(type(leaf), leaf.shape, leaf.stride(), leaf.storage_offset(), leaf.untyped_storage().nbytes()),
            *(leaf.dtype, leaf.device, leaf.requires_grad, leaf.is_inference()),
            torch._C._dispatch_keys(leaf).raw_repr(),
        )
        for leaf in (*tensors, *results)
    ]
    return [
        type(result),
        [type(item) for item in result] if isinstance(result, (list, tuple)) else None,
        facts,
        list(map(objects.index, objects)),
        list(map(memory.index, memory)),
    ]


def call(case: Callable[[], tuple[Any, ...]]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return the op, its arguments, and those that come last and by name."""
    op, *args = case()
    return (op, tuple(args[:-1]), args[-1]) if isinstance(args[-1], dict) else (op, tuple(args), {})


def run(name: str, cases: dict[str, Callable[[], tuple[Any, ...]]]) -> list[bool]:
    """Compare the results of three equal calls with what torch's fake mode gives; return which of them have run."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    known, runs = KnownResults(mode), []
    for _ in range(3):
        with mode, torch.no_grad():
            op, args, kwargs = call(cases[name])
            wanted = outcome((args, kwargs), op(*args, **kwargs))
            op, args, kwargs = call(cases[name])
            with Runs() as counted:
                found = known.of(op, args, kwargs)
        runs.append(counted.count > 0)
        assert outcome((args, kwargs), found) == wanted
    return runs


@each("name", REPRODUCED)
def test_a_call_runs_once(name: str) -> None:
    assert run(name, REPRODUCED) == [True, False, False]


@each("name", RUN_AGAIN)
def test_a_call_runs_each_time(name: str) -> None:
    assert run(name, RUN_AGAIN) == [True] * 3


OTHERS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "shape": lambda: (torch.empty(6, 4),),
    "strides": lambda: (torch.empty(6, 4).t(),),
    "offset": lambda: (torch.empty(5, 6)[1:],),
    "no offset": lambda: (torch.empty(5, 6)[:4],),
    "dtype": lambda: (matrix(dtype=torch.float64),),
    "device": lambda: (matrix(device="meta"),),
    "trained": lambda: (matrix().requires_grad_(),),
    "a number": lambda: (matrix(), 1),
    "the same number of another type": lambda: (matrix(), 1.0),
    "the same as a truth": lambda: (matrix(), True),
    "twice the same": lambda: (*[matrix()] * 2,),
    "two": lambda: (matrix(), matrix()),
    "one memory": lambda: (lambda x: (x, x.view(4, 6)))(matrix()),
    "as a list": lambda: ([matrix(), matrix()],),
    "by name": lambda: ({"other": matrix()},),
}


def test_calls_that_differ_are_told_apart() -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    known = KnownResults(mode)
    with mode:
        keys = {name: known._key_of(aten.add.Tensor, made(), {}, []) for name, made in OTHERS.items()}
        double = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            keys["default dtype"] = known._key_of(aten.add.Tensor, (matrix(),), {}, [])
        finally:
            torch.set_default_dtype(double)
        keys["plain"] = known._key_of(aten.add.Tensor, (matrix(),), {}, [])
        keys["another op"] = known._key_of(aten.sub.Tensor, (matrix(),), {}, [])
    assert None not in keys.values() and len(set(keys.values())) == len(keys)


def test_another_modes_tensors_are_not_its_own() -> None:
    mode, other = FakeTensorMode(allow_non_fake_inputs=True), FakeTensorMode(allow_non_fake_inputs=True)
    with other:
        theirs = matrix()
    assert KnownResults(mode)._key_of(aten.sin.default, (theirs,), {}, []) is None


def test_symbols_are_no_sizes() -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    x = mode.from_tensor(real(), symbolic_context=StatelessSymbolicContext([DimDynamic.DYNAMIC] * 2))
    known = KnownResults(mode)
    for _ in range(2):
        with Runs() as counted:
            assert known.of(aten.sin.default, (x,), {}).shape == x.shape
        assert counted.count == 1


def test_a_reproduced_tensor_has_memory_of_its_own() -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    known = KnownResults(mode)
    with mode:
        x = matrix()
    results = [known.of(aten.sin.default, (x,), {}) for _ in range(3)]
    assert all(type(result) is FakeTensor and result.fake_mode is mode for result in results)
    assert len({id(result.untyped_storage()) for result in (x, *results)}) == 4


# -- whole steps ------------------------------------------------------------------------------------------------------


def traced(name: str) -> Trace:
    torch.manual_seed(0)
    case = getattr(plan_models, name)()
    units = find_units(case.model)
    step = TrainingStep(case.model, case.args, case.kwargs, case.loss)
    policy = Assignment(dict.fromkeys(list(units)[::2], FULL), {})
    return simulate(step, policy, units, RooflineCosts(find("H100-SXM"), 1), torch.device("cpu"), count_functions=True)


@pytest.mark.parametrize("name", ["gpt", "resnet", "unet", "vit"])
def test_a_step_is_as_if_each_op_ran(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    make = KnownResults._made
    monkeypatch.setattr(KnownResults, "_made", lambda *given: made.append(given[1]) or make(*given))
    found = traced(name)
    monkeypatch.setattr(KnownResults, "of", lambda self, op, args, kwargs: _run(self, op, args, kwargs))
    wanted = traced(name)
    assert len(made) > len(found.ops) / 4
    assert found == wanted


def _run(known: KnownResults, op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    with known._mode:
        return op(*args, **kwargs)
