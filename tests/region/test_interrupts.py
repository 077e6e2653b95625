"""Rule 13: an interrupt (Ctrl-C) at any moment of a step leaves nothing open, and the next step is right."""

from __future__ import annotations

import dis
import os
import sys
from typing import Any

import pytest
import torch
from oracle import assert_bitwise, seed_everything
from torch import Tensor, nn

import reactivate
from reactivate import policies
from reactivate._passes.logs import log_of_calls
from reactivate._snapshot.rewound_tensors import rewound_memory
from reactivate._snapshot.state_lock import STATE_LOCK
from reactivate._torch.autograd import innermost_pack_hook
from reactivate._torch.modes import dispatch_modes, function_modes

OURS = os.path.dirname(reactivate.__file__) + os.sep
POINTS = 120  # of those at which a step may be interrupted


class Interrupt:
    """Interrupts our code where Python looks for signals: at the beginning of a function, and after a call.

    Args:
        point: at which of these places; -1 for none.
    """

    def __init__(self, point: int) -> None:
        self.point, self.count = point, 0
        self._before: dict[Any, str] = {}

    def __enter__(self) -> Interrupt:
        self._tracer = sys.gettrace()
        sys.settrace(self._begin)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._tracer)
        self._before.clear()

    def _begin(self, frame: Any, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self._before[frame] = "CALL"
        return self._look

    def _look(self, frame: Any, event: str, argument: Any) -> Any:
        if event == "return":
            self._before.pop(frame, None)
        elif event == "opcode":
            name = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            if name == "RESUME":
                return self._look
            before, self._before[frame] = self._before.get(frame, ""), name
            # Python interrupts the call itself: what begins a `try` behind it is outside of the one that the call is in.
            if before.startswith("CALL") and name != "NOP":
                self.count += 1
                if self.count == self.point:
                    sys.settrace(None)
                    raise KeyboardInterrupt
        return self._look


class Model(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.1)) for _ in range(2)))
        self.blocks.register_forward_hook(lambda *given: None)
        self.regions = [reactivate.checkpoint(block, **options) for block in self.blocks] if options else self.blocks

    def forward(self, x: Tensor) -> Tensor:
        for region in self.regions:
            x = region(x)
        return x


def trained(model: nn.Module) -> list[Any]:
    """One step of training from a seed: the gradients."""
    seed_everything()
    model.zero_grad()
    model(torch.randn(4, 8, requires_grad=True)).sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def left_open(model: nn.Module) -> dict[str, Any]:
    """Whatever is still open of a step that is over."""
    placed = [module for module in model.modules() if "forward" in vars(module)]
    found = {
        "region": reactivate.current_region(),
        "hooks": innermost_pack_hook(),
        "function modes": function_modes(),
        "dispatch modes": dispatch_modes(),
        "log": log_of_calls.get(),
        "in the place of a forward": placed,
        "grad mode": not torch.is_grad_enabled(),
        "forward mode": not torch._C._is_fwd_grad_enabled(),
        "recomputation": reactivate.is_recomputing(),
        "state set back": [*STATE_LOCK.inside, *STATE_LOCK.writers, *STATE_LOCK.waiting],
        "memory set back": rewound_memory,
    }
    return {name: item for name, item in found.items() if item}


OPTIONS: dict[str, dict[str, Any]] = {
    "no policy": {"check": "first"},
    "ops": {"policy": policies.save_ops("linear")},
    "modules": {"policy": policies.save_modules("0", "1")},
    "every": {"policy": policies.save_ops("gelu"), "check": "every"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_interrupt_at_any_moment(name: str) -> None:
    seed_everything()
    plain = Model()
    model = Model(**OPTIONS[name])
    model.blocks.load_state_dict(plain.blocks.state_dict())
    expected = trained(plain)
    for _ in range(4):
        trained(model)
    with Interrupt(-1) as interrupt:
        trained(model)
    points = range(1, interrupt.count, max(1, interrupt.count // POINTS))
    raised = 0
    for point in points:
        is_interrupted = False
        with Interrupt(point) as interrupt:
            try:
                trained(model)
            except KeyboardInterrupt:
                is_interrupted = True
        # A step that compares state makes more calls than one that does not, which may be over before.
        assert is_interrupted == (interrupt.count == point), point
        raised += is_interrupted
        assert not left_open(model), point
    assert raised > 0.9 * len(points)
    for gradient, other in zip(expected, trained(model), strict=True):
        assert_bitwise(gradient, other, "gradient")
