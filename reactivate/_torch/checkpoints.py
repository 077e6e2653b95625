"""Calls of torch's own checkpoint that an error went through."""

from __future__ import annotations

from types import GeneratorType

import torch.utils.checkpoint


def close_checkpoints_within(error: BaseException) -> None:
    """Close what calls of torch's checkpoint have opened that an error went through, the innermost first.

    torch 2.9 and 2.11 leave saved-tensor hooks and modes to a generator that nobody closes before the traceback is collected:
    until then the hooks stay, and then those go that are innermost by that time, whoever's they are.

    Args:
        error: as it arrives at a caller of ours. Calls outside of that caller are not in its traceback yet.
    """
    trace, frames = error.__traceback__, []
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    for frame in reversed(frames):
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            for value in frame.f_locals.values():
                if isinstance(value, GeneratorType):
                    value.close()
