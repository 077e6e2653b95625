"""A TARGET: what a command is about, as its user names it."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from reactivate._inspect.arguments import why_not_called_with
from reactivate._text.words import did_you_mean
from reactivate._torch.ops import flatten, unflatten
from reactivate.cli import huggingface
from reactivate.errors import UsageError


@dataclass(frozen=True)
class Request:
    """Options that say how a target is made.

    Attributes:
        target: `package.module:factory`, the name of a config class, or a config.json or its folder.
        settings: fields of a config, or keyword arguments of a factory.
        batch, length: sizes of the inputs; None: what the target takes by itself.
        dtype: of floating-point numbers; None: what the target has by itself.
        device: what it is moved to; None: it stays where it is made.
        on_meta: whether the model of a config is made without memory; its inputs have values all the same, of which
            masks are made.
        factory_on_meta: whether all that a factory makes is made without memory.
        mesh: the device mesh that a factory shards its model over; None: it is given none.
    """

    target: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    batch: int | None = None
    length: int | None = None
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    on_meta: bool = False
    factory_on_meta: bool = False
    mesh: Any = None


@dataclass(frozen=True)
class Subject:
    """A model and its arguments."""

    model: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def to(self, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Subject:
        """The model, itself, and its arguments on a device, floating-point numbers in a dtype; None: as they are."""
        if device is None and dtype is None:
            return self

        def move(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            moved = leaf.detach().to(device, dtype if leaf.is_floating_point() else None)
            return moved.requires_grad_(leaf.requires_grad)

        leaves, structure = flatten((self.args, self.kwargs))
        args, kwargs = unflatten([move(leaf) for leaf in leaves], structure)
        model = self.model.to(device, dtype) if isinstance(self.model, Module) else self.model
        return Subject(model, args, kwargs)


def subject_of(request: Request) -> Subject:
    """The model that a target names, with inputs. Its random numbers are those of seed 0.

    Raises:
        UsageError: there is no such target, or it cannot be made as the request says.
        Exception: whatever the target's own code raises.
    """
    torch.manual_seed(0)
    config = huggingface.config_of(request.target, request.settings)
    if config is not None and request.mesh is not None:
        raise UsageError(
            f"TARGET {request.target!r} is a config, and how its model is sharded is not in it. Write a function that takes "
            "`mesh`, shards the model and returns it, and name that: `package.module:factory`."
        )
    if config is not None:
        made, inputs = huggingface.made_of(
            config, request.dtype, batch=request.batch, length=request.length, on_meta=request.on_meta
        )
        subject = Subject(made, (), inputs)
    else:
        subject = _from_factory(request)
    return subject.to(request.device, request.dtype)


def _from_factory(request: Request) -> Subject:
    found = _found(request.target)
    factory = (lambda: found) if isinstance(found, Module) else found
    sizes = {name: size for name in ("batch", "length", "mesh") if (size := getattr(request, name)) is not None}
    keywords = {**request.settings, **sizes}
    _check_keywords(request.target, factory, keywords)
    here = torch.device("meta") if request.factory_on_meta else nullcontext()
    with here, _without_exit(request.target), _with_its_ranks(request):
        made = factory(**keywords)
    return _unpacked(request.target, made)


def _found(target: str) -> Callable[..., Any]:
    """Return what `package.module:name` names; modules of the current folder are found too."""
    name, separator, attribute = target.partition(":")
    if not (separator and name and attribute):
        raise UsageError(
            f"TARGET {target!r} is not one: it takes `package.module:factory`, the name of a config class of transformers "
            "(`LlamaConfig`), or a config.json or its folder."
        )
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        with _without_exit(target):
            found: Any = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there, and imports another that is not
        raise UsageError(f"TARGET {target!r}: there is no module {error.name!r}, here ({here}) or installed.") from None
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = [item for item in dir(found) if not item.startswith("_")]
            raise UsageError(f"TARGET {target!r}: {name} has no {part!r}.{did_you_mean(part, names)}")
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(f"TARGET {target!r} is a {type(found).__name__}. It takes a function that returns a model.")
    return found  # type: ignore[no-any-return]


@contextmanager
def _without_exit(target: str) -> Iterator[None]:
    """A target that exits, as a script does, would take the exit code of an answer."""
    try:
        yield
    except SystemExit as error:
        raise RuntimeError(
            f"{target} called sys.exit({error.code!r}). Is it a script, without `if __name__ ...`?"
        ) from error


@contextmanager
def _with_its_ranks(request: Request) -> Iterator[None]:
    """A factory that looks for ranks or dimensions of a mesh that are not there: say how to name them."""
    try:
        yield
    except ValueError as error:
        if "rendezvous" not in str(error):
            raise
        raise UsageError(
            f"TARGET {request.target!r} starts torch.distributed, and this process is not one of a job's ranks. Add "
            "--world 8, or --mesh dp=8 for a factory that takes `mesh`: `reactivate plan` then needs none of the others."
        ) from error
    except KeyError as error:
        if request.mesh is None or "mesh_dim_names" not in str(error):
            raise
        names = ", ".join(request.mesh.mesh_dim_names)
        raise UsageError(
            f"--mesh has the dimensions {names}, and TARGET {request.target!r} asks it for another: {error.args[0]} Name the "
            "dimensions as the factory does."
        ) from error


def _check_keywords(target: str, factory: Callable[..., Any], keywords: Mapping[str, Any]) -> None:
    reason, signature = why_not_called_with(factory, (), keywords)
    if reason:
        takes = ", ".join(signature.parameters) or "no arguments"
        raise UsageError(
            f"TARGET {target!r} cannot be called so: {reason}. It takes {takes}; --set NAME=VALUE, --batch, --length and "
            "--mesh are given to it by name."
        )


def _unpacked(target: str, made: Any) -> Subject:
    """(model, args, kwargs), from all that a factory may return."""
    parts = made if isinstance(made, tuple) else (made,)
    model = parts[0] if parts else None
    if not callable(model) or len(parts) > 3 or not (len(parts) < 3 or isinstance(parts[2], Mapping)):
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise UsageError(
            f"TARGET {target!r} returned ({kinds}). It takes a function that returns a model, (model, args) or (model, "
            "args, kwargs)."
        )
    args: Any = parts[1] if len(parts) > 1 else ()
    kwargs = dict(parts[2]) if len(parts) > 2 else {}
    if isinstance(args, Mapping) and len(parts) == 2:
        args, kwargs = (), dict(args)
    args = tuple(args) if isinstance(args, (tuple, list)) else (args,)
    subject = Subject(model, args, kwargs)
    _check_inputs(target, subject)
    return subject


def _check_inputs(target: str, subject: Subject) -> None:
    reason, _ = why_not_called_with(subject.model, subject.args, subject.kwargs)
    if reason:
        raise UsageError(
            f"TARGET {target!r}: the model cannot be called with what came with it: {reason}. Return (model, args) or "
            "(model, args, kwargs)."
        )
