"""Names for the loss of a planned step, from which its backward begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from reactivate.planner.step import TrainingStep, default_loss


@contextmanager
def named_loss(step: TrainingStep) -> Iterator[Callable[[], str]]:
    """Watch a step run. Yields what names its loss afterwards."""
    names = ["step()" if step.whole is not None else "loss(output)"]
    if step.whole is not None or step.loss is not None:
        yield names.pop
        return

    def look(model: Any, args: Any, output: Any) -> None:
        names.append(default_loss(output)[0])

    handle = step.model.register_forward_hook(look)
    try:
        yield lambda: names[-1]
    finally:
        handle.remove()
