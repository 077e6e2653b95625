"""Seeds of XLA: the running seed of a device, and the root that it was drawn from.

A draw moves the running seed on. A step marker (`torch_xla.sync`) derives the next step's seed from the *root*, however many
numbers were drawn. torch_xla tells the running seed alone, and to set it sets the root, too, so that the steps after it
would draw other numbers. A seed that is to be brought back is therefore read with its root, set to it, and drawn from until
it runs where it ran. Nothing reads these draws, so that no compiler sees them.

These are as many draws as the step has made: to make them after each recomputation would take time that is quadratic in the
number of regions. So until the backward ends a *stand-in* has the place of the root, one draw away from the running seed
(`lend_root`). It tells whether the root is still in its place: after a step marker or `torch_xla.manual_seed` another one is.

Source: `XLAGraphExecutor::DeviceContextArena` in xla_graph_executor.cpp of PyTorch/XLA 2.9, its last version.
"""

from __future__ import annotations

from collections.abc import Iterable
from threading import RLock
from typing import NamedTuple

import torch

from reactivate._torch.modes import run_unseen
from reactivate._torch.rng import xla_runtime
from reactivate.errors import UnsupportedError

RUNTIME = xla_runtime()
_WRAP = 2**64
_DRAW = 214013, 2531011
_DRAW_BACK = pow(_DRAW[0], -1, _WRAP)
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


class Seeds(NamedTuple):
    """The state of the random numbers of all devices.

    Attributes:
        seeds: one a device.
        is_eager: whether ops run one by one (`torch_xla.experimental.eager_mode`): then one seed gives other numbers.
        markers: how many step markers this process had gone past, on all its devices.
    """

    seeds: tuple[int, ...]
    is_eager: bool
    markers: int

    @classmethod
    def of(cls, seeds: Iterable[int]) -> Seeds:
        """Return `seeds` as the present ones."""
        return cls(tuple(seeds), RUNTIME._get_use_eager_mode(), count_markers())


def read_seed(device: str) -> int:
    """Return the running seed alone."""
    return int(RUNTIME._xla_get_rng_seed(device))


def count_markers() -> int:
    """Return how many step markers this process has gone past."""
    return RUNTIME._xla_counter_value("MarkStep") or 0


class _Loan(NamedTuple):
    """A root whose place a stand-in has."""

    root: int
    stand_in: int
    markers: int  # that there were before
    backward: int  # the number of the one that lasts as long


_loans: dict[str, _Loan] = {}  # by device
_lock = RLock()  # a backward may end on another thread than the next one begins on


def count_draws(first: int, last: int, limit: int, law: tuple[int, int] = _DRAW) -> int | None:
    """Return how many draws, or steps, lead from one seed to another, None if more than `limit`."""
    seed = int(first)
    for count in range(limit + 1):
        if seed == last:
            return count
        seed = (law[0] * seed + law[1]) % _WRAP
    return None


def take_seed(device: str) -> Seed:
    """Return the seed with its root, and leave the device at another one: it is to be written next.

    Raises:
        UnsupportedError: numbers were drawn behind a step marker that found a stand-in in the place of the root.
    """
    with _lock:
        running = read_seed(device)
        run_unseen(RUNTIME._get_base_seed_as_tensor, device)
        base = read_seed(device)
        loan = _loans.pop(device, None)
    if loan is None:
        return Seed(running, base)
    if base == loan.stand_in:
        return Seed(running if running != base else loan.root, loan.root)
    steps = count_draws(loan.stand_in, base, count_markers() - loan.markers, _STEP)
    if steps is None:  # a seed was set
        return Seed(running, base)
    root = loan.root
    for _ in range(steps):
        root = (_STEP[0] * root + _STEP[1]) % _WRAP
    if running == base:
        return Seed(root, root)
    write_seed(device, Seed(running, base))
    raise UnsupportedError(
        "Between the recomputations of a backward, code went past a step marker (torch_xla.sync, xm.mark_step) and drew "
        f"random numbers on {device}: they are not those of a step without regions. Mark the step behind the backward."
    )


def read_whole_seed(device: str) -> Seed:
    """Return the seed with its root."""
    seed = take_seed(device)
    write_seed(device, seed)
    return seed


def lend_root(device: str, seed: Seed, backward: int) -> bool:
    """Set the running seed, with a stand-in in the place of its root until this backward ends. Ops have to be recorded.

    Returns:
        whether there is anything to settle then.
    """
    if seed == seed.root:
        RUNTIME._xla_set_rng_seed(seed.root, device)
        return False
    stand_in = (seed - _DRAW[1]) * _DRAW_BACK % _WRAP
    with _lock:
        RUNTIME._xla_set_rng_seed(stand_in, device)
        run_unseen(_draw_unseen, device, 1)
        _loans[device] = _Loan(seed.root, stand_in, count_markers(), backward)
    return True


def settle_root(device: str, backward: int) -> None:
    """Put the root back, if it was lent until this backward ends. Raises as `take_seed`."""
    with _lock:
        loan = _loans.get(device)
        if loan is not None and loan.backward == backward:
            write_seed(device, take_seed(device))


def write_seed(device: str, seed: int) -> None:
    """Set the running seed; the root is that of a `Seed`, and otherwise the same."""
    if not isinstance(seed, Seed):
        RUNTIME._xla_set_rng_seed(int(seed), device)
        return
    RUNTIME._xla_set_rng_seed(seed.root, device)
    count = count_draws(seed.root, seed, MANY)
    if count is None:
        raise UnsupportedError(
            f"{device} has drawn more than {MANY} random numbers since the last step marker, or this torch_xla derives "
            "seeds in another way than 2.9. Call torch_xla.sync() once a step."
        )
    if not count:
        return
    is_eager = RUNTIME._get_use_eager_mode()
    RUNTIME._set_use_eager_mode(False)  # draws are to be recorded: one that is run moves the root on
    try:
        run_unseen(_draw_unseen, device, count)
    finally:
        RUNTIME._set_use_eager_mode(is_eager)


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
        RUNTIME._xla_set_rng_seed(int(seed), device)
        raise UnsupportedError(
            f"The seed of {device} was {int(seed)} when a recomputation began, and the recomputation has set it: the seed "
            "of the next step cannot be brought back. Set seeds (torch_xla.manual_seed) outside of regions."
        )
    write_seed(device, Seed(seed, root))


def _draw_unseen(device: str, count: int) -> None:
    with torch.no_grad():
        source = torch.empty((), device=device)
        for _ in range(count):
            torch.bernoulli(source)


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
