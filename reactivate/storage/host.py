"""The memory of the host: for an accelerator whose own memory is the scarce one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from reactivate.storage.moved import Traffic
from reactivate.storage.staging import Staging, staging_of


@dataclass(frozen=True)
class Host:
    """Keep tensors in the memory of the host, and bring them back for the backward.

    Copies go on streams of their own, beside what computes, and the host waits for none of them. In the backward each
    tensor that is read starts the copy of the one that was taken in before it. The last tensors taken in stay on the
    device, since the backward needs these at once. Views of one memory are copied once. Tensors that are on the host
    already, parameters and other leaves stay where they are.

    Equal ones are one: they share the locked memory, its limit, and the order of what comes back.

    A tensor is kept as it is when it is taken in. What writes to it later and is not seen by its version counter (through
    `tensor.data`) is not seen here either.

    Args:
        limit: the most bytes of the host to lock; half of its memory by default. Over it, tensors stay on the device,
            and a warning says so once.
        least_bytes: smaller tensors stay on the device.
        last: how many tensors, of those taken in last, stay on the device.
        ahead: how many tensors are on their way back while another one is read.

    Example:
        >>> import reactivate
        >>> host = reactivate.storage.Host()
        >>> policy = reactivate.policies.save_ops("linear", storage=host)
    """

    limit: int | None = None
    least_bytes: int = 2**20
    last: int = 1
    ahead: int = 1
    exact = True
    shares_views = True
    _staging: Staging = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_staging", staging_of(self.limit, self.least_bytes, self.last, self.ahead))

    def save(self, tensor: Tensor) -> Any:
        return self._staging.save(tensor)

    def load(self, handle: Any) -> Tensor:
        return self._staging.load(handle)

    @property
    def traffic(self) -> Traffic:
        """Counts of the tensors that were moved so far, and of those that stayed, with the reasons."""
        return self._staging.traffic

    @property
    def allowed_bytes(self) -> int:
        """Return the most bytes of the host that may be locked."""
        return self._staging.limit

    @property
    def used_bytes(self) -> int:
        """Bytes of the host in which there are tensors now."""
        return self._staging.used_bytes

    @property
    def locked_bytes(self) -> int:
        """Bytes of the host that are locked now."""
        return self._staging.locked_bytes

    @contextmanager
    def group(self, key: Any) -> Iterator[None]:
        """Take what is kept inside of the context as one series, which a backward reads from its end to its beginning.

        For several forwards before the first backward, as in a pipeline: a group for each microbatch.

        Args:
            key: which group; anything that can be hashed.
        """
        before, self._staging.group = self._staging.group, key
        try:
            yield
        finally:
            self._staging.group = before

    def prefetch(self, key: Any) -> None:
        """Start to bring back what the backward of the group `key` reads first."""
        self._staging.prefetch_last(key)

    def clear(self) -> None:
        """Unlock the memory of the host that is not in use."""
        self._staging.clear()

    def __reduce__(self) -> Any:
        return Host, (self.limit, self.least_bytes, self.last, self.ahead)

    def __deepcopy__(self, memo: Any) -> Host:
        return Host(self.limit, self.least_bytes, self.last, self.ahead)
