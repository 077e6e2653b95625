"""A model with example arguments, as `plan`, `explain` and `verify` are given them, and refusals of what is neither."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn import Module
from torch.nn.parameter import is_lazy

from reactivate._text.words import described
from reactivate.errors import UsageError
from reactivate.policies._base import ReadyMade


def example_of(asked_by: str, model: Any, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and the keyword arguments of the example call of a model.

    Args:
        asked_by: the function that was given them.
        model: a module or a function.
        args: a tuple or a list of arguments; a mapping is taken for keyword arguments, anything else for one argument.
        kwargs: keyword arguments, or None.

    Raises:
        UsageError: `model` cannot be called, there is no batch in `args`, or `torch.inference_mode` is on.

    Examples:
        >>> from reactivate._inspect.arguments import example_of
        >>> example_of("plan", max, [1, 2], None), example_of("plan", print, {"end": ""}, None)
        (((1, 2), {}), ((), {'end': ''}))
    """
    check_callable(asked_by, model)
    if torch.is_inference_mode_enabled():
        raise UsageError(
            f"{asked_by} runs under torch.inference_mode(), where no tensor gets a gradient. Call it outside of that."
        )
    _check_batch(asked_by, args)
    if kwargs is not None and not isinstance(kwargs, Mapping):
        meant = f" Did you mean budget={kwargs!r}?" if asked_by == "plan" and isinstance(kwargs, (str, int)) else ""
        raise UsageError(
            f"{asked_by}: kwargs= takes a dict of keyword arguments; got {described(kwargs)}. Positional arguments are one "
            f"tuple: {asked_by}(model, (x, y), kwargs={{...}}).{meant}"
        )
    if isinstance(args, Mapping):
        if kwargs is not None:
            raise UsageError(
                f"{asked_by} was given two mappings of keyword arguments. Write {asked_by}(model, kwargs={{**args, "
                f"**kwargs}}); if the model takes the first one as an argument, {asked_by}(model, (args,), kwargs)."
            )
        found = (), dict(args)
        _check_binding(asked_by, model, found, "mapping", "its items are keyword arguments")
        return found
    if isinstance(args, list):
        found = tuple(args), dict(kwargs or {})
        _check_binding(asked_by, model, found, "list", "its items are positional arguments")
        return found
    return (args if isinstance(args, tuple) else (args,)), dict(kwargs or {})


def check_callable(asked_by: str, model: Any) -> None:
    """See to it that `model` is a module or a function.

    Raises:
        UsageError: it is neither, or a class of modules, or its first call makes its parameters.
    """
    if isinstance(model, type) and issubclass(model, Module):
        raise UsageError(
            f"{asked_by} takes a model, and {model.__name__} is its class: write {asked_by}({model.__name__}(...), ...)."
        )
    if not callable(model) or isinstance(model, ReadyMade):
        raise UsageError(
            f"{asked_by} takes a module or a function first; got {described(model)}. Write {asked_by}(model, args), with "
            "the arguments of one call."
        )
    _check_parameters(asked_by, model)


def _check_parameters(asked_by: str, model: Any) -> None:
    lazy = [name for name, item in model.named_parameters() if is_lazy(item)] if isinstance(model, Module) else []
    if lazy:
        raise UsageError(
            f"{asked_by}: the first call of the model makes its parameters; {lazy[0]} has no values yet. Call the model once "
            "before, on an example: model(*args)."
        )


def check_module(asked_by: str, model: Any) -> None:
    """See to it that `model` is a module.

    Raises:
        UsageError: it is something else, or its first call makes its parameters.
    """
    if not isinstance(model, Module):
        check_callable(asked_by, model)
        raise UsageError(f"{asked_by} takes a torch.nn.Module; got {described(model)}.")
    _check_parameters(asked_by, model)


def _check_batch(asked_by: str, args: Any) -> None:
    data: Any = sys.modules.get("torch.utils.data")
    name = type(args).__name__
    if data is not None and isinstance(args, data.DataLoader):
        found, batch = f"a {name}. Pass one batch", "next(iter(loader))"
    elif data is not None and isinstance(args, data.Dataset):
        found, batch = f"the dataset {name}. Pass one batch of it", "next(iter(DataLoader(dataset, batch_size=...)))"
    elif isinstance(args, Iterator):
        found, batch = f"an iterator ({name}). Pass one batch", "next(batches)"
    elif isinstance(args, (Module, ReadyMade)):
        raise UsageError(
            f"{asked_by} takes example arguments of the model after it; got {described(args)}. Write {asked_by}(model, x), "
            "or (x, y) for several arguments."
        )
    else:
        return
    raise UsageError(f"{asked_by} takes the arguments of one call; got {found}: {asked_by}(model, {batch}).")


def _check_binding(asked_by: str, model: Any, call: Any, kind: str, taken: str) -> None:
    reason, signature = why_not_called_with(model, *call)
    if reason:
        raise UsageError(
            f"{asked_by} was given a {kind}; {taken}, which {getattr(model, '__name__', type(model).__name__)}{signature} "
            f"does not take: {reason}. If the {kind} is one argument, write {asked_by}(model, (batch,)); otherwise pass "
            "the part of the batch that the model takes."
        )


def why_not_called_with(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, Any]:
    """Say why a function or a module cannot be called with these arguments, and return its signature.

    Nothing, and None, if it has no signature to tell by; nothing if it can be called so.
    """
    try:
        signature = inspect.signature(function.forward if isinstance(function, Module) else function)
    except (TypeError, ValueError):  # of a builtin
        return "", None
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return str(error), signature
    return "", signature
