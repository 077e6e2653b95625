"""A plan's promise beside what was found when its step ran."""

from __future__ import annotations

from dataclasses import dataclass

from reactivate._region.accounts import in_words


@dataclass(frozen=True)
class Measurement:
    """A promise beside its measurement.

    Attributes:
        budget_bytes: what was allowed.
        promised_bytes: the peak that the plan says, all included.
        measured_bytes: the peak that was found.
        activation_bytes: what of the promise the step allocates itself.
        promised_seconds: of forward and backward.
        measured_seconds: of the same.
        reserved_bytes: what an accelerator's allocator had taken from the device; None on a CPU.
        promised_reserved_bytes: what the plan says of that; None on a CPU, and of plans in older files.
        is_compiled: whether the model was compiled.
    """

    budget_bytes: int
    promised_bytes: int
    measured_bytes: int
    activation_bytes: int
    promised_seconds: float
    measured_seconds: float
    reserved_bytes: int | None = None
    promised_reserved_bytes: int | None = None
    is_compiled: bool = False

    @property
    def holds(self) -> bool:
        """Return whether the budget was kept."""
        return self.measured_bytes <= self.budget_bytes

    @property
    def error(self) -> float:
        """Return how far the measured peak is above the promise, as a part of the step's own peak; negative: below."""
        return (self.measured_bytes - self.promised_bytes) / max(self.activation_bytes, 1)

    def __str__(self) -> str:
        step = "Compiled step" if self.is_compiled else "Step"
        promised, reserved = map(_reserved, (self.promised_reserved_bytes, self.reserved_bytes))
        return (
            f"Peak: promised {in_words(self.promised_bytes)}{promised}, measured {in_words(self.measured_bytes)}{reserved}, "
            f"{self.error:+.2%} of the step's own; the budget of {in_words(self.budget_bytes)} "
            f"{'holds' if self.holds else 'does not hold'}. {step}: promised {self.promised_seconds:.3f} s, measured "
            f"{self.measured_seconds:.3f} s."
        )


def _reserved(size_bytes: int | None) -> str:
    return "" if size_bytes is None else f" ({in_words(size_bytes)} reserved)"
