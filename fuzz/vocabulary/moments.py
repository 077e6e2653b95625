"""Conditions under which a construct acts: always, every few steps or calls, from some step on."""

WHEN = (
    "True",
    "self.step % 2 == 1",
    "self.step >= 2",
    "self.step == 0",
    "self.calls$n % 2 == 1",
    "self.calls$n % 3 == 2",
    "self.calls$n >= 3",
    "self.training",
    "not torch.is_grad_enabled() or self.step % 2 == 0",
)
"""`self.step` is set by the training loop; `self.calls$n` counts in `COUNTER` and `COUNTED`."""

COUNTER = "self.calls$n = 0"
COUNTED = "self.calls$n += 1"
