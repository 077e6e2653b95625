"""The memory of the host: for an accelerator whose own memory is the scarce one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Host:
    """Kept tensors go to the memory of the host, and come back for the backward.

    The copies are made on the device's current stream, in order with what computes on it. A tensor that is on the host
    already stays as it is.

    Args:
        pin: copy into page-locked memory, which the device reads and writes at full speed.

    Example:
        >>> import reactivate
        >>> policy = reactivate.policies.save_ops("linear", storage=reactivate.storage.Host())
    """

    pin: bool = True
    exact = True

    def save(self, tensor: Tensor) -> Any:
        if tensor.device.type in ("cpu", "meta"):
            return tensor
        kept = torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu", pin_memory=self.pin
        )
        return tensor.device, kept.copy_(tensor)

    def load(self, handle: Any) -> Tensor:
        if isinstance(handle, Tensor):
            return handle
        device, kept = handle
        return kept.to(device)  # type: ignore[no-any-return]
