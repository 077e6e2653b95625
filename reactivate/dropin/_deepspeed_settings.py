"""The configuration of DeepSpeed's activation checkpointing, and the storages that it stands for."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from reactivate._text.words import did_you_mean
from reactivate._types import DEVICE, Storage
from reactivate.errors import UnsupportedError, UsageError
from reactivate.storage import Host, Sharded

SECTION = "activation_checkpointing"


class OptionsError(UsageError, AssertionError):
    """Options of `configure` that do not go together. DeepSpeed asserts that they do (Rule 18)."""


@dataclass(frozen=True)
class DeepSpeedOptions:
    """The options that `configure` was told: those of DeepSpeed's configuration have the names that they have there.

    Attributes:
        partition_activations: whether inputs are sharded over the model-parallel group.
        contiguous_memory_optimization: whether in contiguous buffers.
        cpu_checkpointing: whether they go to the host.
        number_checkpoints: how many checkpoints there are, for contiguous buffers.
        synchronize_checkpoint_boundary: whether each boundary of a region waits for the device.
        profile: whether times are logged.
        group: the model-parallel group; None if there is none.
        is_configured: whether `configure` was called.
    """

    partition_activations: bool = False
    contiguous_memory_optimization: bool = False
    cpu_checkpointing: bool = False
    number_checkpoints: int | None = None
    synchronize_checkpoint_boundary: bool = False
    profile: bool = False
    group: Any = None
    is_configured: bool = False

    def storage(self) -> Storage:
        """Return where the inputs of regions wait."""
        own: Storage = Host(least_bytes=0) if self.cpu_checkpointing else DEVICE
        is_sharded = self.partition_activations and self.group is not None
        return Sharded(self.group, storage=own, least_bytes=0) if is_sharded else own

    def checked(self) -> DeepSpeedOptions:
        """Return these settings, if they mean something here.

        Raises:
            UsageError: they do not go together.
            UnsupportedError: one has no meaning here.
        """
        if not self.contiguous_memory_optimization:
            return self
        if not self.partition_activations or self.number_checkpoints is None:
            raise OptionsError(
                "contiguous_checkpointing=True goes with partition_activations=True and num_checkpoints, a number of layers "
                f"(got {self.partition_activations}, {self.number_checkpoints})."
            )
        raise UnsupportedError(
            "contiguous_checkpointing=True is not supported: what ranks keep is in blocks of torch's caching allocator, "
            "which are used again. Leave it out; against fragmentation set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
        )


_KEYS = [item.name for item in fields(DeepSpeedOptions) if item.name not in ("group", "is_configured")]


def configured(before: DeepSpeedOptions, mpu: Any, config: Any, **given: Any) -> DeepSpeedOptions:
    """Return the settings after a call of `configure`.

    Args:
        before: it, of which only the group stays if `mpu` is None.
        mpu: has `get_model_parallel_group` or `get_tensor_model_parallel_group`.
        config: a path of a JSON file, or its contents.
        given: fields of the settings; those that are not None go before the file's.

    Raises:
        UsageError: a key, a value or a file that there is not.
        UnsupportedError: an option without a meaning here.
    """
    options = {} if config is None else _from_file(config)
    options |= {name: value for name, value in given.items() if value is not None}
    group = before.group if mpu is None else _group_of(mpu)
    return replace(DeepSpeedOptions(), **options, group=group, is_configured=True).checked()


def _from_file(config: Any) -> dict[str, Any]:
    if isinstance(config, (str, os.PathLike)):
        path = Path(config)
        if not path.exists():
            raise UsageError(f"configure(deepspeed_config={str(path)!r}): there is no such file.")
        config = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(config, Mapping):
        raise UsageError(f"configure(deepspeed_config=...) takes a path or a dict; got {type(config).__name__}.")
    section = config.get(SECTION, {})
    for key in section:
        if key not in _KEYS:
            raise UsageError(
                f"{SECTION} has no option {key!r}. There are: {', '.join(_KEYS)}.{did_you_mean(key, _KEYS)}"
            )
    return dict(section)


def _group_of(mpu: Any) -> Any:
    for name in ("get_tensor_model_parallel_group", "get_model_parallel_group"):
        if hasattr(mpu, name):
            return getattr(mpu, name)()
    raise UsageError(
        f"configure(mpu_={mpu!r:.60}) takes an object with get_model_parallel_group() or get_tensor_model_parallel_group()."
    )
