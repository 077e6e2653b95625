"""YAML files, read so that nothing in them is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reactivate.errors import UsageError
from reactivate.integrations.recipe._base import needed


def read_yaml(path: Path) -> Any:
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
