"""Logits whose cast to another dtype, and whose cross-entropy, are computed by rows.

Somewhere behind its head a model casts its logits to float32 and calls `F.cross_entropy`: in its own forward, in a library,
in the training loop. So the head returns logits of this class. They are like the tensor that they stand for, but

- a cast makes nothing until something reads its numbers; a view of a cast is a cast of a view;
- `F.cross_entropy` of them is `cross_entropy_by_rows` of what was to be cast.

Whatever else reads them gets the tensor itself, made once. Functions that torch tells us of (`__torch_function__`) get it
with its graph; code below that (`__torch_dispatch__`) gets its numbers, and its gradient goes through the node `_Stand`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge
from torch.compiler import is_compiling
from torch.nn.functional import cross_entropy

from reactivate._loss.by_rows import Uses, cross_entropy_by_rows
from reactivate._loss.observed import tell
from reactivate._torch.asking import asking
from reactivate._torch.dynamo import is_jit_tracing, leave_out_of_graphs
from reactivate._torch.modes import FakeTensor
from reactivate._torch.modules import without_memory
from reactivate._torch.ops import flatten, unflatten
from reactivate.errors import UnsupportedError

_ASKED = ("shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "layout")
_ASKING = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in _ASKED),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__, Tensor.is_contiguous),
        *(Tensor.stride, Tensor.element_size),
    }
)
_SHAPING = frozenset(
    {
        *(Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten, Tensor.unflatten),
        *(Tensor.contiguous, Tensor.squeeze, Tensor.unsqueeze, Tensor.__getitem__, Tensor.narrow, Tensor.select),
    }
)
_GRAD_FN, *_SEEN = (getattr(Tensor, name).__get__ for name in ("grad_fn", "grad", "retains_grad"))
_OF_GRADIENTS = frozenset({*_SEEN, Tensor.register_hook, Tensor.retain_grad})
_SIGNATURE = inspect.signature(cross_entropy)


class Logits(Tensor):
    """Logits that stand for a tensor, or for a cast of it."""

    _place: str  # the path of the head
    _source: Tensor
    _source_version: int
    _made: Tensor | None
    _cast: Logits | None  # that this is a view of
    _view: Callable[[Tensor], Tensor] | None
    _uses: Uses  # of a cast and of its views

    @classmethod
    def of(
        cls,
        source: Tensor,
        dtype: torch.dtype,
        place: str,
        cast: Logits | None = None,
        view: Callable[[Tensor], Tensor] | None = None,
    ) -> Logits:
        """Return what stands for `source.to(dtype)`.

        Args:
            source, dtype: the tensor, and its own dtype or another.
            place: the path of the module that returned the logits.
            cast: what this is a view of.
            view: makes the view.
        """
        found = _Stand.apply(source, dtype) if cast is None else _ViewOfStand.apply(cast, [source], view)
        found._uses = Uses() if cast is None else cast._uses
        found._source, found._source_version, found._made = source, source._version, None
        found._place, found._cast, found._view = place, cast, view
        return found  # type: ignore[no-any-return]

    @property
    def _is_cast(self) -> bool:
        return self.dtype != self._source.dtype

    @property
    def _is_made(self) -> bool:
        return self._made is not None or (self._cast is not None and self._cast._is_made)

    def _edge(self) -> Any:
        if not self._is_cast:
            return self._source
        node = super().__torch_function__(_GRAD_FN, (), (self,))
        return GradientEdge(node, 0)

    def plain(self) -> Tensor:
        """Return the tensor that it stands for, with its graph."""
        if not self._is_cast:
            return self._source
        if self._made is None:
            if self._cast is not None and self._view is not None and self._cast._is_made:
                self._made = self._view(self._cast.plain())
            else:
                self._check()
                self._uses.count += 1
                with torch.enable_grad():
                    self._made = _Made.apply(self, [self._source])
        return self._made

    def _check(self) -> None:
        if self._is_cast and self._source._version != self._source_version:
            raise UnsupportedError(
                f"These logits were cast to {self.dtype}, and modified in place before the cast was read. With the loss by "
                "rows a cast is made when it is read. Modify a copy of the logits; or leave the loss as it is: plan(head="
                '"keep"), or a policy without loss_by_rows.'
            )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        func = asking(func, kwargs)
        if func in _ASKING:
            return super().__torch_function__(func, types, args, kwargs)
        first = args[0] if args else None
        if func is torch.autograd.grad:
            outputs, inputs = args  # as torch passes them, however they were given
            # With respect to a cast: all that reads it leads to its place in the graph.
            return func(_plainly(outputs), _with_each(Logits._edge, inputs), **_plainly(kwargs))
        if func in _OF_GRADIENTS and isinstance(first, Logits) and first._is_cast:
            first._uses.count += 2  # its gradient is looked at, and has to come
            return super().__torch_function__(func, types, args, kwargs)
        if isinstance(first, Logits) and not first._is_made:
            if func is cross_entropy:
                found = first._cross_entropy(_SIGNATURE.bind(*args, **kwargs))
            elif func in _SHAPING and _is_shaping(func, args):
                found = first._shaped(func, args[1:], kwargs)
            else:
                found = first._as_dtype(func, args[1:], kwargs)
            if found is not None:
                return found
        return func(*_plainly(args), **_plainly(kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        leaves, _ = flatten((args, kwargs or {}))
        if func._schema.is_mutable and any(isinstance(leaf, Logits) and leaf._is_cast for leaf in leaves):
            raise UnsupportedError(f"{func} may modify a cast of logits, which the loss by rows does not make.")
        return func(*_with_each(_numbers, args), **_with_each(_numbers, kwargs or {}))

    def _as_dtype(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Logits | None:
        """Return the cast that a call asks for; None if it asks for something else."""
        wanted = torch.float32 if func is Tensor.float else None
        if func is Tensor.to and not kwargs and len(args) == 1 and isinstance(args[0], torch.dtype):
            wanted = args[0]
        if wanted is None or not wanted.is_floating_point:
            return None
        if wanted == self.dtype:
            return self
        return None if self._is_cast else Logits.of(self._source, wanted, self._place)

    def _shaped(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Logits:
        source = func(self._source, *args, **kwargs)
        if not self._is_cast:
            return Logits.of(source, source.dtype, self._place)
        self._check()
        return Logits.of(source, self.dtype, self._place, self, lambda made: func(made, *args, **kwargs))

    def _cross_entropy(self, call: inspect.BoundArguments) -> Tensor | None:
        """Return the loss by rows; None where its bits would not be torch's."""
        call.apply_defaults()
        given = call.arguments
        targets = given["target"]
        if self.ndim != 2 or targets.ndim != 1 or targets.is_floating_point() or given["label_smoothing"]:
            return None
        if any(given[name] is not None for name in ("weight", "size_average", "reduce")):
            return None
        self._check()
        tell(self._place, self._source.nbytes)
        cast = (self, self._uses) if self._is_cast else None
        return cross_entropy_by_rows(self._source, self.dtype, targets, given["ignore_index"], given["reduction"], cast)


class _Stand(Function):
    """The cast in the graph, without its numbers: the gradients of its readers are added here, and cast back."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, dtype: torch.dtype) -> Logits:
        ctx.dtype = source.dtype
        ctx.set_materialize_grads(False)
        return without_memory(Logits, source, dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None if gradients[0] is None else gradients[0].to(ctx.dtype), None


class _ViewOfStand(Function):
    """A view of the cast, likewise. (What is in a list is no input of the node.)"""

    @staticmethod
    def forward(ctx: Any, cast: Logits, source: list[Tensor], view: Callable[[Tensor], Tensor]) -> Logits:
        ctx.shape, ctx.view = cast.shape, view
        ctx.set_materialize_grads(False)
        return without_memory(Logits, source[0], cast.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        if gradient is None:
            return None, None, None
        with torch.enable_grad():  # of one number, seen as many: the view tells where the gradient belongs
            base = gradient.detach().new_zeros(()).expand(ctx.shape).requires_grad_()
            viewed = ctx.view(base)
        found = torch.autograd.grad(viewed, base, gradient, create_graph=torch.is_grad_enabled())
        return found[0], None, None


class _Made(Function):
    """The numbers of a cast or of a view of it, made when they are read."""

    @staticmethod
    def forward(ctx: Any, stand: Logits, source: list[Tensor]) -> Tensor:
        return source[0].detach().to(stand.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


def call_by_rows(
    forward: Callable[[], Callable[..., Any]], place: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call the forward of the head at a path, and return what it returns so that its loss is computed by rows.

    Raises:
        UnsupportedError: torch.compile traces the call.
    """
    if is_compiling():
        _refuse_compilation()
    return by_rows(forward()(*args, **kwargs), place)


def _refuse_compilation() -> None:
    raise UnsupportedError(
        "apply: a loss by rows is not supported under torch.compile, which makes kernels of its own of the loss. Compile the "
        'model with a plan that leaves the loss as it is, plan(..., head="keep"), or with a policy without loss_by_rows.'
    )


leave_out_of_graphs(_refuse_compilation, "an error that is raised in a graph would only end the graph")


def by_rows(result: Any, place: str = "") -> Any:
    """Return what a module returned: logits whose loss is computed by rows, where a backward will follow; or as it is."""
    if not isinstance(result, Tensor) or type(result) not in (Tensor, FakeTensor) or is_jit_tracing():
        return result
    is_trained = result.requires_grad and result.is_floating_point() and torch.is_grad_enabled()
    return Logits.of(result, result.dtype, place) if is_trained else result


def _is_shaping(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether a call reads no numbers: an index may be a tensor of them."""
    if func is not Tensor.__getitem__:
        return True
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    return all(item is None or isinstance(item, (int, slice, EllipsisType)) for item in index)


def _plainly(value: Any) -> Any:
    return _with_each(Logits.plain, value)


def _with_each(replace: Callable[[Logits], Any], value: Any) -> Any:
    """Return a value with something else in the place of each of its logits."""
    leaves, structure = flatten(value)
    return unflatten([replace(leaf) if isinstance(leaf, Logits) else leaf for leaf in leaves], structure)


def _numbers(logits: Logits) -> Tensor:
    if logits._is_made or not logits._is_cast:
        return logits.plain().detach()
    return logits._source.detach().to(logits.dtype)
