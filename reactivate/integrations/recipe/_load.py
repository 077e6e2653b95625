"""From a mapping or a file to a recipe, and from there to a model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch.nn import Module

from reactivate._model.apply import apply as apply_policy
from reactivate._model.handle import Handle
from reactivate._text.words import did_you_mean
from reactivate.errors import UsageError
from reactivate.integrations.recipe._base import Example, Recipe, needed
from reactivate.integrations.recipe._grammar import listed
from reactivate.integrations.recipe._native import Native
from reactivate.integrations.recipe._torchtitan import Torchtitan
from reactivate.integrations.recipe._torchtitan_classes import TorchtitanClasses, fields_of, is_object
from reactivate.integrations.recipe._torchtune import Torchtune
from reactivate.integrations.recipe._validate import validated
from reactivate.planner.step import Loss

Source = Mapping[str, Any] | str | os.PathLike[str] | Any  # the last: an object of a dataclass

_KINDS: tuple[type[Recipe], ...] = (Torchtune, Torchtitan, TorchtitanClasses, Native)


def load(source: Source, *, section: str | None = None) -> Recipe:
    """Return the recipe in `source`, checked.

    Args:
        source: a mapping, or the path of a YAML file that holds one. Its keys are all torchtune's
            (`enable_activation_checkpointing`, `ac_mode`, ...), all torchtitan's (`mode`, `selective_ac_option`, ...) or
            all ours (`policy`, ...); see the page on recipes. Or a configuration object of torchtitan's, or what it dumps.
        section: the key in `source` under which the recipe is, if it is a part of something larger. None there means no
            checkpointing, as torchtitan writes it.

    Returns:
        A frozen value. Equal recipes are equal, and `Recipe.to_dict` gives back what was loaded.

    Raises:
        UsageError: a key is unknown, a value is not among those that are allowed, or two of them contradict each other;
            or pydantic, or for a file PyYAML, is not installed.

    Examples:
        >>> import reactivate
        >>> reactivate.integrations.recipe.load({"mode": "selective", "selective_ac_option": "2"})
        Torchtitan(mode='selective', selective_ac_option='2')
    """
    given = _mapping(source, section)
    kind = _kind_of(given)
    return validated(kind, kind.prepared(given))


def apply(
    model: Module,
    source: Source | Recipe,
    args: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    section: str | None = None,
    loss: Loss | None = None,
) -> Handle:
    """Let the modules of `model` save or recompute their activations as the recipe in `source` says.

    Args:
        model: changed in place, until `Handle.remove`.
        source: as for `load`; or what `load` returned.
        args: of one call of the model, as for `reactivate.plan`. A memory budget becomes a plan for this call; other recipes
            do not look at it.
        kwargs: of the same call.
        section: as for `load`.
        loss: of the same call, as for `reactivate.plan`.

    Returns:
        What was done, as `reactivate.apply` returns it; without regions if the recipe switches checkpointing off.

    Raises:
        UsageError: see `load` and `reactivate.apply`; or `model` has fewer layers than the recipe counts, or no module
            of a name that it lists; or the recipe is a memory budget, and there are no `args`.

    Examples:
        >>> import torch, reactivate
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 4)
        >>> reactivate.integrations.recipe.apply(model, {"ac_mode": "selective", "ac_option": 2}).regions
        ('layers.1', 'layers.3')
    """
    if not isinstance(model, Module):
        raise UsageError(f"recipe.apply takes a torch.nn.Module; got {type(model).__name__}.")
    recipe = source if isinstance(source, Recipe) else load(source, section=section)
    settings = recipe.settings()
    example = None if args is None and kwargs is None else Example(() if args is None else args, kwargs, loss)
    return apply_policy(
        model,
        recipe.policy_for(model, example),
        guards=settings.guards,
        early_stop=settings.early_stop,
        check=settings.check,
    )


def _mapping(source: Source, section: str | None) -> dict[str, Any]:
    given: Any = source
    if isinstance(source, (str, os.PathLike)):
        given = _read_yaml(Path(source))
    place = "the recipe"
    if section is not None and is_object(given):
        given = {item.name: getattr(given, item.name) for item in fields(given)}
    if section is not None and isinstance(given, Mapping):
        if section not in given:
            raise UsageError(f"recipe: there is no section {section!r}. There are: {listed(given)}.")
        given, place = given[section], f"section {section!r}"
        given = {"mode": "none"} if given is None else given
    if is_object(given):
        given = fields_of(given)
    if not isinstance(given, Mapping):
        raise UsageError(f"recipe: {place} is to be a mapping of fields or the path of a YAML file; got {given!r}.")
    return {key: _plain(value) for key, value in given.items()}


def _kind_of(given: Mapping[str, Any]) -> type[Recipe]:
    """Whose fields these are.

    Raises:
        UsageError: they are those of no recipe or of several, or there are none.
    """
    found = [kind for kind in _KINDS if kind.takes(given)]
    if len(found) == 1:
        return found[0]
    known = {kind: {item.name for item in fields(kind)} for kind in _KINDS}
    every = sorted(set().union(*known.values()))
    for name in given:
        if name not in every:
            meant = did_you_mean(str(name), every)
            raise UsageError(f"recipe: there is no field {name!r}.{meant} There are: {_fields_of(known)}.")
    if found:
        raise UsageError(
            f"recipe: {listed(given) or 'nothing at all'} does not say what to recompute. Add a mode, 'ac_mode' or "
            f"'mode', or a 'policy'. Fields are: {_fields_of(known)}."
        )
    whose = {kind.whose: listed(name for name in given if name in names) for kind, names in known.items()}
    mixed = "; ".join(f"{names} of {peer}" for peer, names in whose.items() if names)
    raise UsageError(f"recipe: fields of several at once: {mixed}. Keep to one.")


def _fields_of(known: Mapping[type[Recipe], Iterable[str]]) -> str:
    return "; ".join(f"{kind.whose}: {', '.join(item.name for item in fields(kind))}" for kind in known)


def _plain(value: Any) -> Any:
    """`value` in mappings and lists of Python's own, whatever a reader of configurations made of them."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value


def _read_yaml(path: Path) -> Any:
    """Return the contents of the file at `path`.

    Raises:
        UsageError: there is no such file, it is no YAML, or a key in it stands twice; or PyYAML is not installed.
    """
    yaml = needed("yaml", "reading a YAML file")
    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        root = loader.get_single_node()
        _refuse_repeated_keys(root, path)
        return loader.construct_document(root) if root is not None else None
    except OSError as error:
        raise UsageError(f"recipe: {path} cannot be read: {error.strerror}.") from error
    except yaml.YAMLError as error:
        raise UsageError(f"recipe: {path} is no YAML: {error}") from error


def _refuse_repeated_keys(node: Any, path: Path) -> None:
    """YAML's own reader takes the last of several values for a key."""
    children = node.value if isinstance(getattr(node, "value", None), list) else []
    keys = [child[0].value for child in children if isinstance(child, tuple)]
    for child in children:
        key, value = child if isinstance(child, tuple) else (None, child)
        if key is not None and keys.count(key.value) > 1:
            raise UsageError(f"recipe: {path}, line {key.start_mark.line + 1}: {key.value!r} stands twice. Keep one.")
        _refuse_repeated_keys(value, path)
