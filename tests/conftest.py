"""Fixtures that every test starts from."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextvars import copy_context
from pathlib import Path

import oracle
import pytest
import torch
from forked import Forks
from tiers import is_left_out, is_named, second_tier

import reactivate

pytest.register_assert_rewrite("plan_checks")  # so that it says which sizes it compared


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    oracle.seed_everything()
    flags = (
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    )
    yield
    assert flags == (
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    ), "the test left a flag of torch's changed"
    assert torch.is_grad_enabled()
    assert torch._C._len_torch_function_stack() == 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs CUDA")
    config.addinivalue_line(
        "markers", "slow: a benchmark or a search as a whole, other packages, four processes: of the second tier"
    )
    config.addinivalue_line("markers", "second: all of the second tier (tiers.py), which runs with --all")
    config.addinivalue_line("markers", "table: takes more samples of torch's tables with --all")
    config.addinivalue_line("markers", "fast_ways(reason): what it looks at costs more with public names of torch only")
    config.addinivalue_line("markers", "unfenced(reason): what it looks at is different behind a fence, and may be")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="both tiers, and of each row in torch's tables every sample")
    parser.addoption("--wide", action="store_true", help="both tiers, but for the tests marked slow")
    parser.addoption("--device", default="cpu", help="where the tensors of torch's tables are (default: cpu)")
    parser.addoption("--fenced", action="store_true", help="as if the CPU were a device whose compiler needs a fence")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    is_wide = config.getoption("--all") or config.getoption("--wide")
    return (not is_wide and is_left_out(collection_path, config.args)) or None


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    second = dict.fromkeys(second_tier(items))
    for item in second:
        item.add_marker("second")
    if config.getoption("--all"):
        return
    left = {item for item in second if item.get_closest_marker("slow") or not config.getoption("--wide")}
    left = {item for item in left if not is_named(item, config.args)}
    config.hook.pytest_deselected(items=list(left))
    items[:] = [item for item in items if item not in left]


def pytest_collection_finish() -> None:
    """Hide the imported modules from the collector: `gc.collect()` in a test takes half a second for them otherwise."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def frozen() -> Iterator[None]:
    """Hide what tests of other files have imported too, and what tests of this file have shown with `gc.unfreeze()`."""
    gc.collect()
    gc.freeze()
    yield
    gc.freeze()


@pytest.fixture(scope="module")
def whole_heap(frozen: None) -> None:
    """Show the whole heap to the collector: `dropin.install` finds references with it."""
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
    """Run each test among context variables of its own: a compiler leaves its settings in them, for each region to see."""
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    copy_context().run(pyfuncitem.obj, **given)
    return True


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Run programs that begin with `import torch, reactivate` in new processes."""
    made = Forks()
    yield made
    made.close()


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Let torch.compile know nothing of other tests."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def samples(request: pytest.FixtureRequest) -> slice:
    """Which samples of a row in torch's tables are taken."""
    return slice(None if request.config.getoption("--all") else 1)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """The device of the tensors of torch's tables; on all but a CPU without kernels that give other bits each time."""
    found = request.config.getoption("--device")
    if found != "cpu":
        torch.use_deterministic_algorithms(True, warn_only=True)
    yield found
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def fenced(request: pytest.FixtureRequest) -> Iterator[None]:
    if not request.config.getoption("--fenced") or request.node.get_closest_marker("unfenced"):
        yield
        return
    reactivate.integrations.register_fence("cpu", lambda tensors: [tensor.detach().clone() for tensor in tensors])
    yield
    reactivate.integrations.register_fence("cpu", None)
