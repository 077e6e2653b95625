"""The memory of the host: for an accelerator whose own memory is the scarce one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from reactivate.storage.moving import Moving
from reactivate.storage.staging import Staging


@dataclass(frozen=True)
class Host(Moving):
    """Keep tensors in the memory of the host, and bring them back for the backward.

    Copies go on streams of their own, beside what computes, and the host waits for none of them. In the backward each
    tensor that is read starts the copy of the one that was taken in before it. The last tensors taken in stay on the
    device, since the backward needs these at once. Views of one memory are copied once. Tensors that are on the host
    already, parameters and other leaves stay where they are.

    Equal `Host`s share one pool of locked memory, its limit, and the order in which tensors come back.

    A tensor is kept as it is when it is taken in. A modification before it is copied raises an error in the backward, if a
    version counter sees it: one through `tensor.data` is not noticed. A tensor that is taken in again, by the next region
    say, is compared with what was taken in before by checksum, for which the host waits; if they differ, it is copied too.

    Args:
        limit: the most bytes of the host to lock, as an int or a text ("32GiB"); half of its memory by default. Over it,
            tensors stay on the device, and a warning says so once.
        least_bytes: smaller tensors stay on the device; an int or a text as well.
        last: how many tensors, of those taken in last, stay on the device.
        ahead: how many tensors are on their way back while another one is read.

    Raises:
        UsageError: an argument is none of these.

    Examples:
        >>> import reactivate
        >>> host = reactivate.storage.Host()
        >>> policy = reactivate.policies.save_ops("linear", storage=host)
    """

    limit: int | str | None = None
    least_bytes: int | str = 2**20
    last: int = 1
    ahead: int = 1
    is_on_host: ClassVar[bool] = True
    _mover: Staging = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_mover", Staging.of(*self._checked()))

    @property
    def allowed_bytes(self) -> int:
        """Return the most bytes of the host that may be locked."""
        return self._mover.limit

    @property
    def used_bytes(self) -> int:
        """Return the bytes of locked memory that tensors occupy now."""
        return sum(slabs.used_bytes for slabs in self._mover.slabs.values())

    @property
    def locked_bytes(self) -> int:
        """Return the bytes of the host that are locked now, in use or not."""
        return sum(slabs.locked_bytes for slabs in self._mover.slabs.values())

    def clear(self) -> None:
        """Unlock the memory of the host that is not in use."""
        for slabs in self._mover.slabs.values():
            slabs.clear()
