"""Words of messages: a name that may have been meant, a short description of a value, a number of things."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Module

LONGEST = 80  # characters of a description


MOST = 3  # names that are offered for one that is unknown


def nearest(name: str, known: Iterable[str], plainly: Callable[[str], str] = str.lower) -> list[str]:
    """Return the known names that begin with `name`; if none does, those that are similar to it.

    Args:
        name: an unknown one.
        known: those that there are.
        plainly: makes a name what is compared of it.

    Examples:
        >>> from reactivate._text.words import nearest
        >>> nearest("conv", ["conv1d", "conv2d", "convert"]), nearest("Linaer", ["linear", "line"])
        (['conv1d', 'conv2d', 'convert'], ['linear', 'line'])
    """
    names = {plainly(item): item for item in known}
    asked = plainly(name)
    beginning = [item for item in names if item.startswith(asked)] if len(asked) > 1 else []
    return [names[item] for item in beginning[:MOST] or difflib.get_close_matches(asked, names, n=MOST, cutoff=0.7)]


RENAMED = {
    "AdaptivePlan": "planner.adaptive.AdaptivePlan",
    "Comparison": "report.Comparison",
    "Explanation": "report.Explanation",
    "ReactivateError": "errors.ReactivateError",
    "Verdict": "report.Verdict",
    "chunked_cross_entropy": "loss.chunked_cross_entropy",
    "determinism": "check",
    "guard_memory": "retry_on_oom",
    "recipe": "integrations.recipe",
}
"""Names before the first release, and those of today: errors say them."""


def did_you_mean(name: str, known: Iterable[str], plainly: Callable[[str], str] = str.lower) -> str:
    """Return the nearest of the known names, as a question behind a space; empty if none is near.

    Examples:
        >>> from reactivate._text.words import did_you_mean
        >>> did_you_mean("LamaConfig", ["LlamaConfig", "ResNet"])
        " Did you mean 'LlamaConfig'?"
    """
    known = list(known)
    if (now := RENAMED.get(name)) is not None and (now in known or "." in now):
        return f" It is called {now!r} now."
    close = nearest(name, known, plainly)
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""


def described(value: Any) -> str:
    """Return a description of a value, short enough for a message.

    Examples:
        >>> from reactivate._text.words import described
        >>> described(torch.ones(2, 3)), described(torch.nn.Linear), described("full")
        ('a Tensor of shape (2, 3)', 'the class Linear', "'full'")
    """
    if isinstance(value, Tensor):
        return f"a {type(value).__name__} of shape {tuple(value.shape)}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, Module):
        return f"a module of class {type(value).__name__}"
    if isinstance(value, (list, tuple, dict)):
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value)
    return text if len(text) <= LONGEST else f"an object of class {type(value).__name__}"


def counted(number: int, thing: str) -> str:
    """Return a number of things.

    Examples:
        >>> from reactivate._text.words import counted
        >>> counted(1, "region"), counted(2, "region")
        ('1 region', '2 regions')
    """
    return f"{number} {thing}{'' if number == 1 else 's'}"


def alike(paths: Sequence[str]) -> str:
    """Return the paths of modules that are alike, by the first and the last.

    Examples:
        >>> from reactivate._text.words import alike
        >>> alike(["layers.0", "layers.1", "layers.2"]), alike(["head"])
        ('layers.0…layers.2 (3 alike)', 'head')
    """
    return paths[0] if len(paths) == 1 else f"{paths[0]}…{paths[-1]} ({len(paths)} alike)"


def in_one_line(error: BaseException) -> str:
    """Return the class of an error and the first line of what it says."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def name_of(value: Any) -> str:
    """Return what a call of a function or of a module is written with: "f", "Block(...)"."""
    if isinstance(value, Module):
        return f"{type(value).__name__}(...)"
    name = getattr(value, "__name__", None)
    return name if isinstance(name, str) and name.isidentifier() else "f"
