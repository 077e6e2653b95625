"""`reactivate doctor`: what a bug report has to say about a machine. Needs torch and nothing else."""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import platform
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import Any

import torch

import reactivate
from reactivate import _compat
from reactivate._names import Missing, Names, is_missing

EXTRAS = ("click", "rich", "jinja2", "matplotlib", "numpy", "pydantic", "PyYAML", "transformers")
HOSTS = (
    *("deepspeed", "megatron-core", "transformer-engine", "torch-xla", "torchax", "accelerate", "lightning"),
    *("pytorch-lightning", "torchtitan", "torchtune", "torchao", "torch-remat", "timm", "diffusers"),
)


def examine() -> dict[str, Any]:
    """Return what is installed here, as `reactivate doctor --json` prints it.

    Example:
        >>> from reactivate._doctor import examine
        >>> examine()["torch"] == torch.__version__
        True
    """
    return {
        "reactivate": reactivate.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "devices": _devices(),
        "missing_names": missing_names(),
        "packages": _versions(EXTRAS),
        "hosts": {name: version for name, version in _versions(HOSTS).items() if version is not None},
    }


def text(found: dict[str, Any]) -> str:
    """Return what `examine` found, to be read."""
    lines = [f"{name:<11} {found[name]}" for name in ("reactivate", "torch", "python", "platform")]
    lines.append(f"{'devices':<11} {', '.join(found['devices'])}")
    packages = (f"{name} {version or 'not installed'}" for name, version in found["packages"].items())
    lines.append(f"{'packages':<11} {', '.join(packages)}")
    hosts = ", ".join(f"{name} {version}" for name, version in found["hosts"].items())
    lines.append(f"{'hosts':<11} {hosts or 'none'}")
    if not found["missing_names"]:
        return "\n".join([*lines, "", "This torch has every private name that reactivate uses."])
    lines += ["", "This torch does not have these names that reactivate uses:"]
    for item in found["missing_names"]:
        effect = "reactivate takes another way" if item["has_another_way"] else "what needs it raises UnsupportedError"
        lines.append(f"  {item['name']}: {effect}")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Run the command. Returns 0; 1 if a name is missing that reactivate cannot do without."""
    parser = argparse.ArgumentParser("reactivate doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON document, and nothing else")
    asked = parser.parse_args(list(arguments))
    found = examine()
    print(json.dumps(found, indent=1) if asked.json else text(found))
    return code_of(found)


def code_of(found: dict[str, Any]) -> int:
    """Return the exit code for what `examine` found."""
    return 0 if all(item["has_another_way"] for item in found["missing_names"]) else 1


def missing_names() -> list[dict[str, Any]]:
    """Return the names of torch that `reactivate._compat` looks up and this torch does not have.

    Each has a `name`, and says whether it `has_another_way`: whether the code beside it goes on without the name.
    """
    try:
        tree = ast.parse(inspect.getsource(_compat))
    except OSError:  # a package without its source
        return []
    found: dict[str, bool] = {}
    for chain, has_another_way in _chains(tree, False):
        root: Any = vars(_compat).get(chain[0])
        if isinstance(root, (Names, Missing)):
            for name in chain[1:]:
                root = getattr(root, name, None)
            if is_missing(root):
                path = str(vars(root)["_path"])
                found[path] = found.get(path, False) or has_another_way
    return [{"name": name, "has_another_way": way} for name, way in sorted(found.items())]


def _chains(node: ast.AST, has_another_way: bool) -> Iterator[tuple[list[str], bool]]:
    """Yield each `a.b.c` in the code, and whether it is an argument of `first_of` or `is_missing`."""
    if isinstance(node, ast.Attribute):
        chain = _chain_of(node)
        if chain is not None:
            yield chain, has_another_way
            return
    is_asked = isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("first_of", "is_missing")
    for child in ast.iter_child_nodes(node):
        yield from _chains(child, has_another_way or is_asked)


def _chain_of(node: ast.Attribute) -> list[str] | None:
    names: list[str] = []
    inner: ast.AST = node
    while isinstance(inner, ast.Attribute):
        names.insert(0, inner.attr)
        inner = inner.value
    return [inner.id, *names] if isinstance(inner, ast.Name) else None


def _devices() -> list[str]:
    found = ["cpu"]
    try:
        if torch.accelerator.is_available():
            kind = str(torch.accelerator.current_accelerator())
            name = getattr(torch.get_device_module(kind), "get_device_name", None)
            for index in range(torch.accelerator.device_count()):
                found.append(f"{kind}:{index}" + (f" ({name(index)})" if name is not None else ""))
    except Exception as error:  # a driver that does not answer is worth telling of
        found.append(f"an accelerator that fails: {type(error).__name__}: {error}")
    return found


def _versions(names: Sequence[str]) -> dict[str, str | None]:
    return {name: _version_of(name) for name in names}


def _version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
