"""Code that inductor compiled, shown as one op.

With inductor's option `wrap_inductor_compiled_regions` compiled code calls itself through the op `inductor_compiled_code`,
but only where torch notes that a dispatch mode is active. A region with a policy has a function mode, which costs less and
sees that op as well; so the note is set for as long as such a region runs. Nothing else in torch reads it.
"""

from __future__ import annotations

from threading import Lock
from typing import Any

from reactivate._torch.ways import fastest

COMPILED_CODE = "inductor_compiled_code"
_FLAG = "_is_in_torch_dispatch_mode"


def _reads_flag(is_active: Any) -> bool:
    names = is_active.__globals__
    before = names[_FLAG]
    try:
        names[_FLAG] = True
        is_on = is_active()
        names[_FLAG] = False
        return bool(is_on and not is_active())
    finally:
        names[_FLAG] = before


def _none() -> None:
    """An older torch has no such op."""


_is_active = fastest(
    "compiled code as one op",
    "torch.utils._python_dispatch.is_in_torch_dispatch_mode",
    probe=_reads_flag,
    without=_none,
    lost="policies that save compiled code: it is recomputed",
)


class _Shown:
    """The number of passes of regions that want compiled code shown, on whatever thread."""

    def __init__(self) -> None:
        self._names: dict[str, Any] = {} if _is_active is _none else _is_active.__globals__
        self._lock = Lock()
        self._users = 0
        self._before = False

    def begin(self) -> None:
        """Let compiled code be one op."""
        with self._lock:
            if not self._users:
                self._before = self._names.get(_FLAG, False)
                self._names[_FLAG] = True
            self._users += 1

    def end(self) -> None:
        """End what `begin` began."""
        with self._lock:
            self._users -= 1
            if not self._users:
                self._names[_FLAG] = self._before


compiled_code_is_shown = _Shown()
