"""One run of a program: plain, checkpointed by reactivate, or checkpointed by torch."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import (
    _allowed_determinism_checks_to_fns as determinism_checks,
    checkpoint as torch_checkpoint,
)

import reactivate
from fuzz.snapshot import Freezer, Frozen, bits_of, random_streams
from reactivate import policies
from reactivate._passes.observing import observed_by
from reactivate._types import DEVICE, Storage

Wrap = Callable[..., Any]
NAME = "fuzz_program"
_PRELUDE_FILE = Path(__file__).with_name("prelude.py")
_PRELUDE = compile(_PRELUDE_FILE.read_text(), str(_PRELUDE_FILE), "exec")


def _without_frames(error: BaseException) -> BaseException:
    """Let an error and its causes hold no frame: a region knows the context of its forward, and with it the trace."""
    found: BaseException | None = error
    while found is not None:
        found = found.with_traceback(None).__context__
    return error


@dataclass(frozen=True)
class Arm:
    """A way to run the regions of a program.

    Attributes:
        checkpoint: wraps the function of a region, with the program's options.
        recompute: makes regions of the modules at some paths of a model.
    """

    checkpoint: Wrap
    recompute: Callable[..., None]


def _plain(fn: Wrap, **options: Any) -> Wrap:
    return fn


def _nothing(model: nn.Module, paths: Sequence[str], **options: Any) -> None:
    return None


def _bits(tensor: Tensor) -> dict[str, Any]:
    """Return what torch compares of a saved tensor; an op may fill one without a graph after it had it saved."""
    return {"bits": bits_of(tensor) if tensor.requires_grad else None}


@contextmanager
def _knowing_bits() -> Iterator[None]:
    """Let torch's checkpoint know the determinism check "bits": it looks checks up when it is called."""
    determinism_checks["bits"] = _bits
    try:
        yield
    finally:
        determinism_checks.pop("bits", None)


def torchs(determinism: str = "default") -> Arm:
    """Return the arm of torch's checkpoint with one of its determinism checks; "bits" compares contents."""

    def checkpoint(fn: Wrap, **options: Any) -> Wrap:
        def checkpointed(*args: Any, **kwargs: Any) -> Any:
            with _knowing_bits():
                return torch_checkpoint(fn, *args, use_reentrant=False, determinism_check=determinism, **kwargs)

        return checkpointed

    return Arm(checkpoint, _wrapping(checkpoint))


def _wrapping(wrap: Wrap) -> Callable[..., None]:
    """Return what wraps the forwards of the modules at some paths."""

    def recompute(model: nn.Module, paths: Sequence[str], **options: Any) -> None:
        for path in paths:
            module = model.get_submodule(path)
            module.forward = wrap(module.forward)

    return recompute


def _hooked(fn: Wrap, **options: Any) -> Wrap:
    def call(*args: Any, **kwargs: Any) -> Any:
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            return fn(*args, **kwargs)

    return call


def checked(**fixed: Any) -> Arm:
    """Return the arm under test, with options that hold for all regions."""

    def checkpoint(fn: Wrap, **options: Any) -> Wrap:
        return reactivate.checkpoint(fn, **{**options, **fixed})

    def recompute(
        model: nn.Module, paths: Sequence[str], save: Any = None, inputs: Storage = DEVICE, **options: Any
    ) -> None:
        regions = policies.recompute_modules(*paths, inputs=inputs)
        reactivate.apply(
            model, regions if save is None else policies.first_match(save, regions), **{**options, **fixed}
        )

    return Arm(checkpoint, recompute)


PLAIN = Arm(_plain, _nothing)
HOOKED = Arm(_hooked, _wrapping(_hooked))
"""Plain, with saved-tensor hooks around regions that do nothing: torch itself gives a few programs other bits then."""
TORCH, STRICT_TORCH = torchs(), torchs("bits")
OURS = checked()


@dataclass
class Trace:
    """The observations of one run, in order, up to the first error."""

    notes: list[tuple[str, Frozen]] = field(default_factory=list)
    error: BaseException | None = None
    regions: int = 0
    recomputations: int = 0

    def forward_done(self, record: Any) -> None:
        """Count a region; the engine calls this."""
        self.regions += 1

    def recomputation_done(self, record: Any) -> None:
        """Count a recomputation; the engine calls this."""
        self.recomputations += 1

    def note(self, name: str, *values: Any) -> None:
        """Freeze values under a name, with the states of the random streams."""
        freezer = Freezer()
        self.notes.append((name, tuple(freezer.freeze(value) for value in values)))
        self.notes.append(("random", random_streams()))


def compiled(source: str) -> CodeType:
    """Return the code of a program's source."""
    return compile(source, "<program>", "exec")


def run(code: CodeType, arm: Arm, seed: int) -> Trace:
    """Run a program from fresh state and return the observations."""
    trace = Trace()
    copy_context().run(_run, code, arm, seed, trace)
    return trace


def _run(code: CodeType, arm: Arm, seed: int, trace: Trace) -> None:
    module = sys.modules[NAME] = ModuleType(NAME)  # dataclasses look themselves up there
    names = vars(module)
    names.update(checkpoint=arm.checkpoint, recompute=arm.recompute)
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    with warnings.catch_warnings(), observed_by(trace):
        warnings.simplefilter("ignore")
        try:
            exec(_PRELUDE, names)
            exec(code, names)
            names["train"](trace.note)
            trace.note("globals", *(names[name] for name in ("COUNTS", "SHARED", "G", "R", "A")), names["SCALE"].get())
            trace.note("classes", *(names[name].calls for name in names if name.startswith("Block")))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # an internal signal of the engine that escapes is one
            trace.error = _without_frames(error)
    if not torch.is_grad_enabled():
        torch.set_grad_enabled(True)


def kept_bytes(code: CodeType, arm: Arm, seed: int) -> int:
    """Return the bytes of the tensors that autograd saves during a whole run, parameters left out."""
    kept: dict[int, Tensor] = {}

    def count(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(count, lambda tensor: tensor):
        run(code, arm, seed)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
