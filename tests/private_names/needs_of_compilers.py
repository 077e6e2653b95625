"""Needs of `torch.compile`, TorchScript and AOTAutograd: what is traced, compiled and left out of graphs."""

from __future__ import annotations

import importlib
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from needs import needs, room
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode


@needs("compiled_call_of", "own_call_of", "called_through", "is_wrapped_by_compiler")
def the_call_of_a_module_is_replaced_for_a_time() -> None:
    module, x = nn.Linear(2, 2), torch.ones(1, 2)
    assert room.compiled_call_of(module) is None and not room.is_wrapped_by_compiler(module)
    own = room.own_call_of(module)
    with room.called_through({module: lambda x: own(x) + 1}):
        assert room.compiled_call_of(module) is not None
        assert torch.equal(module(x), own(x) + 1)
    assert room.compiled_call_of(module) is None and torch.equal(module(x), own(x))
    assert room.is_wrapped_by_compiler(torch.compile(module, backend="eager"))


@needs("compiled_function", "is_compiled_function")
def a_compiled_function_leads_to_the_function() -> None:
    def double(x: Tensor) -> Tensor:
        return x * 2

    compiled, disabled = torch.compile(double, backend="eager"), torch.compiler.disable(double)
    assert room.compiled_function(compiled) is room.compiled_function(disabled) is double
    assert room.is_compiled_function(compiled) and not room.is_compiled_function(disabled)
    assert room.compiled_function(double) is None and not room.is_compiled_function(double)


@needs("begin_of_compiled_call", "callback_of", "is_loaded")
def torch_says_when_compiled_code_begins() -> None:
    begin = room.begin_of_compiled_call()
    compiled = torch.compile(torch.sin, backend="eager")
    with mock.patch.object(importlib.import_module(begin.__module__), begin.__name__, side_effect=begin) as begun:
        compiled(torch.ones(2))
    assert room.is_loaded() and mock.call(room.callback_of(compiled)) in begun.mock_calls


@needs("with_many_graphs")
def more_graphs_of_a_function_are_made() -> None:
    config = importlib.import_module("torch._dynamo.config")
    before = config.recompile_limit
    with room.with_many_graphs(before + 8):
        assert config.recompile_limit == before + 8
    assert config.recompile_limit == before


@needs("has_budgets_in_graphs", "budget_in_graph")
def a_part_of_a_graph_has_a_budget() -> None:
    """Behaviour: `test_plan_compiled`."""
    if room.has_budgets_in_graphs:
        with pytest.raises(RuntimeError, match="inside a torch.compile region"), room.budget_in_graph(0.5):
            pass


@needs("last_script_graph", "count_of_profiled_runs", "is_profiling_graph", "is_compiled_script")
def torchscript_watches_one_call_and_compiles() -> None:
    assert room.count_of_profiled_runs() == 1
    scripted = torch.jit.CompilationUnit("def double_it(x):\n    return x * 2 + x\n").double_it
    before = room.last_script_graph()
    x = torch.ones(2, requires_grad=True)
    scripted(x)
    assert room.last_script_graph() is not before
    assert room.is_profiling_graph(room.last_script_graph())
    assert not room.is_compiled_script(scripted)
    scripted(x)
    assert not room.is_profiling_graph(room.last_script_graph())
    assert room.is_compiled_script(scripted)


@needs("leave_to_eager")
def frames_are_left_to_eager() -> None:
    traced: list[bool] = []

    def left(x: Tensor) -> Tensor:
        traced.append(torch.compiler.is_compiling())
        return x.sin()

    room.leave_to_eager(left.__code__)
    torch.compile(left, backend="eager")(torch.ones(2))
    assert traced == [False]


@needs("DispatchMode")
def modes_are_left_to_eager() -> None:
    """Neither the method of a mode nor what it calls is compiled, also where a compiled function leaves an op to eager."""
    traced: list[bool] = []

    def called(func: Any, args: Any, kwargs: Any) -> Any:
        traced.append(torch.compiler.is_compiling())
        return func(*args, **(kwargs or {}))

    class Own(room.DispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return called(func, args, kwargs)

    def left(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x.sin()

    with Own():
        torch.compile(left, backend="eager")(torch.ones(2))
        torch.compile(torch.Tensor.sin, backend="eager")(torch.ones(2))
    assert traced and not any(traced)


@needs("leave_out_of_graphs")
def a_function_is_called_and_not_traced() -> None:
    traced: list[bool] = []

    def left(x: Tensor) -> Tensor:
        traced.append(torch.compiler.is_compiling())
        return x.sin()

    room.leave_out_of_graphs(left)
    torch.compile(lambda x: left(x).cos(), backend="eager")(torch.ones(2))
    assert traced == [False]


@needs("prefer_version_used_last")
def versions_are_taken_in_order() -> None:
    """Behaviour: `test_compile.test_a_recomputation_runs_the_version_that_its_forward_pass_ran`."""
    assert callable(room.prefer_version_used_last)


@needs("checkpoint_in_graph", "NotTraced")
def dynamo_knows_torchs_checkpoint() -> None:
    found: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        found.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(
            lambda x: room.checkpoint_in_graph(torch.sin, (x,), {}), backend=backend, fullgraph=True
        )
        compiled(torch.ones(2, requires_grad=True))
    assert "tag_activation_checkpoint" in found
    with pytest.raises(room.NotTraced):
        room.checkpoint_in_graph(torch.sin, (torch.ones(2, requires_grad=True),), {})


@needs("runs_while_traced")
def a_function_is_called_while_it_is_traced() -> None:
    called: list[int] = []

    def note() -> bool:
        called.append(1)
        return True

    room.runs_while_traced(note)

    def traced(x: Tensor) -> Tensor:
        return x.sin() if note() else x

    compiled = torch.compile(traced, backend="eager", fullgraph=True)
    for _ in range(2):
        compiled(torch.ones(2))
    assert called == [1]


@needs("runs_as_traced", "warn_of_running_as_traced")
def the_inside_of_a_traced_region_is_known() -> None:
    assert not room.runs_as_traced(torch.sin)
    with pytest.warns(UserWarning, match="keeps its activations"):
        room.warn_of_running_as_traced()


@needs("is_jit_tracing")
def torchscript_tells_that_it_traces() -> None:
    seen = []

    def traced(x: Tensor) -> Tensor:
        seen.append(room.is_jit_tracing())
        return x.sin()

    torch.jit.trace(traced, (torch.ones(2),))
    assert seen[0] and not room.is_jit_tracing()


@needs("STAND_INS", "is_aot_tracing")
def what_aot_autograd_traces_with_is_known() -> None:
    seen = []

    def traced(x: Tensor) -> Tensor:
        seen.append((room.is_aot_tracing(), isinstance(x, room.STAND_INS)))
        return x.sin()

    from functorch.compile import aot_function, make_boxed_func

    aot_function(traced, fw_compiler=lambda module, _: make_boxed_func(module))(torch.ones(2, requires_grad=True))
    assert seen and all(item == (True, True) for item in seen)
    assert not room.is_aot_tracing()


@needs("named_in_graph", "names_reach_graphs", "node_being_traced", "SITE")
def a_traced_op_says_where_it_comes_from() -> None:
    """Behaviour: `test_policies_in_graph`."""
    assert room.named_in_graph("name", torch.sin, (torch.zeros(1),), {}) == 0
    assert not room.node_being_traced().get("custom")


@needs("COMPILED_CODE", "compiled_code_is_shown")
def torch_notes_that_compiled_code_is_shown() -> None:
    """Behaviour: `test_compute_intensive`."""
    shown = room.compiled_code_is_shown
    for _ in range(2):
        shown.begin()
        shown.begin()
        shown.end()
        assert is_in_torch_dispatch_mode()
        shown.end()
        assert not is_in_torch_dispatch_mode()
