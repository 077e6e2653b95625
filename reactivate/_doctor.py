"""`reactivate doctor`: what a bug report has to say about a machine. Needs torch and nothing else."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import torch

import reactivate
from reactivate._torch.private_api import ways

EXTRAS = ("click", "rich", "jinja2", "matplotlib", "numpy", "pydantic", "PyYAML", "transformers")
HOSTS = (
    *("deepspeed", "megatron-core", "transformer-engine", "torch-xla", "accelerate", "lightning"),
    *("pytorch-lightning", "torchtitan", "torchtune", "torchao", "torch-remat", "timm", "diffusers"),
)


def examine() -> dict[str, Any]:
    """Return what is installed here, as `reactivate doctor --json` prints it.

    Examples:
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
        "fast_ways": sum(way.is_fast for way in ways),
        "slow_ways": slow_ways(),
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
    lines += ["", f"{found['fast_ways']} private names and layouts do what reactivate relies on."]
    for way in found["slow_ways"]:
        effect = f"lost: {way['lost']}" if way["lost"] else "a public way takes its place, slower"
        lines.append(f"  not: {way['what']} ({', '.join(way['names']) or 'a layout in memory'}); {effect}")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Run the command. Returns 0: it is a report, whatever it says."""
    parser = argparse.ArgumentParser("reactivate doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON document, and nothing else")
    asked = parser.parse_args(list(arguments))
    found = examine()
    print(json.dumps(found, indent=1) if asked.json else text(found))
    return 0


def slow_ways() -> list[dict[str, Any]]:
    """Return what this torch has no private name for that does what `reactivate._torch` relies on.

    Of each `what` it is for, the `names`, and what is `lost`: nothing where there is a public way.
    """
    return [{"what": way.what, "names": list(way.names), "lost": way.lost} for way in ways if not way.is_fast]


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
