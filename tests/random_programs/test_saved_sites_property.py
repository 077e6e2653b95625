"""Random programs under random policies: whatever a policy saves, the bits are those of the plain program.

The programs, and what is right, are those of `test_property`. On top of it each op is a site, and so is each call of a
module, and each region inside of a region; a policy drawn for the program says which of these calls are saved.

`REACTIVATE_EXAMPLES=20000 pytest tests/random_programs/test_saved_sites_property.py` runs as many, other ones each time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import interpreter
import pytest
from hypothesis import HealthCheck, given, note, settings, strategies as st
from interpreter import Wrap
from programs import Program
from test_property import compare, programs
from torch import Tensor, nn

import reactivate
from reactivate import Save, Site

EXAMPLES = os.environ.get("REACTIVATE_EXAMPLES")


@dataclass
class Some:
    """Saves `parts` of 4 calls, the same ones in each run."""

    parts: int
    seed: int
    saved: int = 0

    def __call__(self, site: Site) -> Save | None:
        is_saved = crc32(repr((self.seed, site.op, site.name, site.index)).encode()) % 4 < self.parts
        self.saved += is_saved
        return Save() if is_saved else None


class Named(nn.Module):
    """A module whose calls are sites."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return reactivate.site(self.inner, name="module")(x)


def named(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Named(make())


def checkpointed(policy: Some, **options: Any) -> Wrap:
    def wrap(fn: Callable[..., Any], values: Sequence[Tensor]) -> Callable[..., Any]:
        return reactivate.site(reactivate.checkpoint(fn, policy=policy, **options), name="region")

    return wrap


def check(program: Program, policy: Some, **options: Any) -> None:
    """Plain and checkpointed are the same, as the docstring of `test_property` says."""
    found = compare(program, checkpointed(policy, **options))
    if found is None:
        return
    copies, counts = found
    # A region around another one may be asked twice for what it kept.
    if len(copies.read) == 1 and not copies.reads_again:
        assert counts.recomputations() <= len(copies.read[0]), "no more recomputations than without a policy"


@pytest.mark.slow
@settings(
    max_examples=int(EXAMPLES or 300),
    derandomize=EXAMPLES is None,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)
@given(
    programs(),
    st.builds(Some, st.integers(1, 4), st.integers(0, 99)),
    st.booleans(),
    st.sampled_from(["metadata", "metadata", "metadata", "every", "none"]),
)
def test_random_programs_with_policies(
    monkeypatch: pytest.MonkeyPatch, program: Program, policy: Some, early_stop: bool, determinism: str
) -> None:
    monkeypatch.setattr(interpreter, "MODULES", {name: named(make) for name, make in MODULES.items()})
    note(f"{program}\n{policy}\nagain: python -m pytest --all tests/random_programs/test_saved_sites_property.py")
    check(program, policy, early_stop=early_stop, check=determinism)


MODULES = dict(interpreter.MODULES)
