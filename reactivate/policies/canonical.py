"""One name for each op: that by which users call it.

`torch.matmul`, `Tensor.matmul`, `a @ b`, `torch.ops.aten.matmul` and its overloads are "matmul"; `F.linear` and
`torch._C._nn.linear` are "linear". What lives in a namespace keeps it: "linalg.norm", "special.expm1", "fft.rfft". Ops of
a library are "library.op". In-place ops keep their underscore: "relu_".
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional

from reactivate._text.words import nearest
from reactivate._torch.ops import HigherOrderOperator, OpOverload, OpOverloadPacket, builtin_functions, qualified_name
from reactivate.errors import UsageError

_NAMESPACES = ("linalg", "special", "fft")
_PLACES = (torch.nn.functional, torch, torch.Tensor, builtin_functions)
# Functions of Python's syntax, where the method has another name.
_SYNTAX = {"__matmul__": "matmul", "__rmatmul__": "matmul", "__getitem__": "getitem", "__setitem__": "setitem_"}

# Names that users try, and that no function has.
_ATTENTION = "sdpa attention self_attention attn flash flash_attn flash_attention scaled_dot_product"
_OTHER_NAMES = {
    **dict.fromkeys(_ATTENTION.split(), "scaled_dot_product_attention"),
    **dict.fromkeys(("mha", "multiheadattention", "multi_head_attention"), "multi_head_attention_forward"),
    **dict.fromkeys(("@", "gemm"), "matmul"),
    **dict.fromkeys(("fc", "dense"), "linear"),
}
_PREFIX = re.compile(r"(torch\.|ops\.|nn\.|functional\.|f\.|tensor\.|aten(\.|::))+")
_OVERLOAD = re.compile(r"(?<=\w)\.(default|tensor|scalar|out)$|(?<=[a-z])_$")


@functools.cache
def name_of(function: Any) -> str:
    """The name of an op, as a `TorchFunctionMode` sees it.

    Examples:
        >>> name_of(torch.Tensor.matmul), name_of(torch.ops.aten.mm.default), name_of(torch.linalg.norm)
        ('matmul', 'mm', 'linalg.norm')
    """
    if isinstance(function, OpOverload):
        function = function.overloadpacket
    if isinstance(function, OpOverloadPacket):
        library, _, op = qualified_name(function).partition("::")
        return op if library == "aten" else f"{library}.{op}"
    if isinstance(function, HigherOrderOperator):
        return str(function.name())
    name: str = getattr(function, "__name__", type(function).__name__)
    if name in _SYNTAX:
        return _SYNTAX[name]
    if name.startswith("__"):
        return name.strip("_")
    namespace, _, rest = name.partition("_")
    return f"{namespace}.{rest}" if namespace in _NAMESPACES and rest else name


def check(name: str, asked_by: str, kinds: Iterable[str] = ()) -> None:
    """See to it that `name` is that of an op.

    Args:
        asked_by: the function that was given it.
        kinds: the kinds of calls that this function takes as well.

    Raises:
        UsageError: it is not; says what may have been meant.
    """
    if _is_known(name):
        return
    meant = tuple(nearest(name, kinds)) or _meant(name)
    hint = f" Did you mean {' or '.join(map(repr, meant))}?" if meant else ""
    if meant == ("scaled_dot_product_attention",):
        hint += " 'attention'" if kinds else " policies.save('attention')"
        hint += " saves attention by whatever op."
    raise UsageError(
        f"{asked_by} knows no op {name!r}.{hint} Ops go by the name that users call: 'linear', 'matmul' (also for @), "
        "'scaled_dot_product_attention', 'linalg.norm', 'my_library.my_op'; or pass the function itself."
    )


def _is_known(name: str) -> bool:
    namespace, _, rest = name.partition(".")
    if rest:
        place: Any = getattr(torch, namespace) if namespace in _NAMESPACES else getattr(torch.ops, namespace, None)
        return namespace != "aten" and callable(getattr(place, rest, None))  # torch's own ops have no namespace
    if name in _SYNTAX.values():
        return True
    is_op = hasattr(torch.ops.aten, name) or hasattr(torch.ops.higher_order, name)
    return is_op or any(callable(getattr(place, name, None)) for place in _PLACES)


def _meant(name: str) -> tuple[str, ...]:
    plain = name.strip().lower()
    plain = _OTHER_NAMES.get(plain) or _OVERLOAD.sub("", _PREFIX.sub("", plain))
    plain = _OTHER_NAMES.get(plain, plain)
    if plain and _is_known(plain):
        return (plain,)
    return tuple(nearest(plain, _known_names()))


@functools.cache
def _known_names() -> list[str]:
    return sorted({name for place in _PLACES for name in dir(place) if not name.startswith("_") and name[-1] != "_"})
