"""Seeds of XLA: the running seed of a device, and the root that it was drawn from.

A draw moves the running seed on. A step marker (`torch_xla.sync`) derives the next step's seed from the *root*, however many
numbers were drawn. torch_xla tells the running seed alone, and to set it sets the root, too, so that the steps after it
would draw other numbers. A seed that is to be brought back is therefore read with its root, set to it, and drawn from until
it runs where it ran. Nothing reads these draws, so that no compiler sees them.

Source: `XLAGraphExecutor::DeviceContextArena` in xla_graph_executor.cpp of PyTorch/XLA 2.9, its last version.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from reactivate._torch.devices import xla_runtime
from reactivate._torch.modes import run_unseen
from reactivate.errors import UnsupportedError

_WRAP = 2**64
_DRAW = 214013, 2531011
_STEP = 7012063, 1012031
_STEP_BACK = pow(_STEP[0], -1, _WRAP)

FEW, MANY = 2**12, 2**22  # draws: of one region, and of one step


class Seed(int):
    """The running seed of a device; it knows the root.

    Args:
        running: the state of the random numbers.
        root: what the seed of the next step is derived from.
    """

    root: int

    def __new__(cls, running: int, root: int) -> Seed:
        made = super().__new__(cls, running)
        made.root = root
        return made

    def __getnewargs__(self) -> tuple[int, int]:  # type: ignore[override]
        return int(self), self.root


@dataclass(frozen=True)
class Seeds:
    """The state of the random numbers of all devices.

    Attributes:
        seeds: one a device.
        is_eager: whether ops run one by one (`torch_xla.experimental.eager_mode`): then one seed gives other numbers.
        markers: how many step markers this process had gone past, on all its devices.
    """

    seeds: tuple[int, ...]
    is_eager: bool
    markers: int = field(compare=False)

    @classmethod
    def of(cls, seeds: Iterable[int]) -> Seeds:
        """Return `seeds` as the present ones."""
        runtime = xla_runtime()
        return cls(tuple(seeds), runtime._get_use_eager_mode(), runtime._xla_counter_value("MarkStep") or 0)


def count_draws(first: int, last: int, limit: int) -> int | None:
    """Return how many draws lead from one running seed to another, None if more than `limit`."""
    seed = int(first)
    for count in range(limit + 1):
        if seed == last:
            return count
        seed = (_DRAW[0] * seed + _DRAW[1]) % _WRAP
    return None


def read_seed(device: str) -> int:
    """Return the running seed alone."""
    return int(xla_runtime()._xla_get_rng_seed(device))


def take_seed(device: str) -> Seed:
    """Return the seed with its root, and leave the device at the root."""
    running = read_seed(device)
    xla_runtime()._get_base_seed_as_tensor(device)
    return Seed(running, read_seed(device))


def read_whole_seed(device: str) -> Seed:
    """Return the seed with its root."""
    seed = take_seed(device)
    _draw(device, seed)
    return seed


def write_seed(device: str, seed: int) -> None:
    """Set the running seed; the root is that of a `Seed`, and otherwise the same."""
    if not isinstance(seed, Seed):
        xla_runtime()._xla_set_rng_seed(int(seed), device)
        return
    xla_runtime()._xla_set_rng_seed(seed.root, device)
    _draw(device, seed)


def rewind_seed(device: str, seed: int) -> None:
    """Set the running seed to one of the present step, and keep the root.

    Raises:
        UnsupportedError: the root was set since.
    """
    if isinstance(seed, Seed):
        write_seed(device, seed)
        return
    if read_seed(device) == seed:
        return
    root = take_seed(device).root
    if count_draws(root, seed, MANY) is None:
        xla_runtime()._xla_set_rng_seed(int(seed), device)
        raise UnsupportedError(
            f"The seed of {device} was {int(seed)} when a recomputation began, and the recomputation has set it: the seed "
            "of the next step cannot be brought back. Set seeds (torch_xla.manual_seed) outside of regions."
        )
    write_seed(device, Seed(seed, root))


def _draw(device: str, seed: Seed) -> None:
    """Draw from the root until the seed runs where it ran."""
    count = count_draws(seed.root, seed, MANY)
    if count is None:
        raise UnsupportedError(
            f"{device} has drawn more than {MANY} random numbers since the last step marker, or this torch_xla derives "
            "seeds in another way than 2.9. Call torch_xla.sync() once a step."
        )
    if count:
        with _recorded():
            run_unseen(_draw_unseen, device, count)


def _draw_unseen(device: str, count: int) -> None:
    with torch.no_grad():
        source = torch.empty((), device=device)
        for _ in range(count):
            torch.bernoulli(source)


@contextmanager
def _recorded() -> Iterator[None]:
    """Let draws be recorded and not run: one that is run moves the root on."""
    is_eager = xla_runtime()._get_use_eager_mode()
    set_eager(False)
    try:
        yield
    finally:
        set_eager(is_eager)


def set_eager(is_eager: bool) -> None:
    """Let ops run one by one, or be recorded."""
    xla_runtime()._set_use_eager_mode(is_eager)


def seed_of_forward(device: str, before: int, markers: int) -> int:
    """Return the seed that a recomputation begins with, after the forward of its region.

    Behind a step marker inside of the region, numbers depend on the root. It is computed back from the present one.

    Args:
        before: the running seed when the forward began.
        markers: how many step markers this process went past since.

    Raises:
        UnsupportedError: the root cannot be known.
    """
    if count_draws(before, read_seed(device), FEW) is not None:
        return before
    now = read_whole_seed(device)
    since = count_draws(before, now, count_draws(now.root, now, MANY) or 0)
    if since is not None or not markers:  # many draws, or a seed that the region itself sets
        return before
    root = now.root
    for _ in range(markers):
        root = (root - _STEP[1]) * _STEP_BACK % _WRAP
    if count_draws(root, before, MANY) is None:
        raise UnsupportedError(
            f"A region on {device} went past a step marker (torch_xla.sync, xm.mark_step) and sets a seed "
            "(torch_xla.manual_seed): the seed that it began with cannot be known for its recomputation. Mark steps or set "
            "seeds outside of regions."
        )
    return Seed(before, root)
