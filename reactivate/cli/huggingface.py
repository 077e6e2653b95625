"""Models of transformers from their configs: with random weights, inputs made to fit, and nothing downloaded."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module

from reactivate._region.accounts import in_words
from reactivate._text.words import did_you_mean
from reactivate.errors import UsageError
from reactivate.planner.target import available_bytes

_BATCH = 1
_LENGTH = 512
_IMAGE = 224  # pixels, of models that take any

# The name of a mapping from config classes to models in transformers, and of the class that makes one: the first that
# has the config, but that a config.json may name another.
_TASKS = (
    ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "AutoModelForSeq2SeqLM"),
    ("MODEL_FOR_MASKED_LM_MAPPING", "AutoModelForMaskedLM"),
    ("MODEL_FOR_CAUSAL_LM_MAPPING", "AutoModelForCausalLM"),
    ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING", "AutoModelForImageClassification"),
)


def config_of(target: str, settings: Mapping[str, Any]) -> Any:
    """The config that a target names, None if it is not one: the name of a class, a config.json or its folder.

    Raises:
        UsageError: there is no such class, the file is no config, or it has no such field.
    """
    if ":" in target and not Path(target).exists():
        return None
    if Path(target).exists() or "/" in target or target.endswith(".json"):
        kind, fields = _read(Path(target))
    elif target.isidentifier():
        kind, fields = _named(target), {}
    else:
        return None
    _check_settings(kind, settings)
    try:
        config = kind(**{**fields, **settings})
    except Exception as error:  # of the class, whichever it raises
        raise UsageError(f"{kind.__name__} refuses this: {' '.join(str(error).split())[:400]}") from None
    if "use_cache" not in settings:
        config.use_cache = False  # which a step of training has no use for
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0  # shifted labels begin with it
    return config


def made_of(
    config: Any, dtype: torch.dtype | None, *, batch: int | None, length: int | None, on_meta: bool
) -> tuple[Module, dict[str, Any]]:
    """The model of a config, to be trained, with its language or classification head; and what it is called with.

    Args:
        config: of transformers.
        dtype: of parameters and images; None: what the config says, float32 where it says nothing.
        batch: how many samples; None: 1.
        length: how many tokens; None: 512, or as many as it has positions.
        on_meta: whether the model is made without memory.

    Raises:
        UsageError: it has no such head, takes no tokens or not as many, or is larger than the memory that is free.
    """
    head = _head_of(config)
    with torch.device("meta"):
        sketch = head.from_config(config, torch_dtype=dtype).train()
    inputs = _inputs_of(sketch, _BATCH if batch is None else batch, length)
    if on_meta:
        return sketch, inputs
    _check_size(sketch)
    return head.from_config(config, torch_dtype=dtype).train(), inputs


def _head_of(config: Any) -> Any:
    """The class that makes its model."""
    transformers = _transformers()
    kind = type(config)
    heads = [(mapping[kind], maker) for name, maker in _TASKS if kind in (mapping := getattr(transformers, name))]
    named = [head for head in heads if head[0].__name__ in (config.architectures or ())]
    fitting = [head for head in heads if (head[1] == _TASKS[0][1]) == bool(config.is_encoder_decoder)]
    for model, maker in (*named, *fitting):
        if model.main_input_name in ("input_ids", "pixel_values"):
            return getattr(transformers, maker)
    raise UsageError(
        f"{kind.__name__}: inputs are made for language models and image classifiers, and it has neither. Write a function "
        "that returns (model, args, kwargs), and say `package.module:function`."
    )


def _check_size(sketch: Module) -> None:
    """Of a model on the meta device: the system ends a process that takes more than there is."""
    size = 2 * sum(item.nbytes for item in sketch.parameters())  # with gradients
    free = available_bytes(torch.device("cpu"))
    if size > free:
        raise UsageError(
            f"{type(sketch).__name__}: parameters and gradients take {in_words(size)}, and {in_words(free)} are free here. "
            "`reactivate plan` does without them with --meta, or --device and the name of one that is not here; `reactivate "
            "explain` with --fake. --set makes the model smaller."
        )


def _inputs_of(model: Any, batch: int, length: int | None) -> dict[str, Any]:
    """Labels are among them. They are on the CPU, where masks are made from them."""
    if model.main_input_name == "pixel_values":
        return _images(model, batch, length)
    config = model.config
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if length is not None and positions is not None and length > positions:
        raise UsageError(
            f"--length {length}: this {type(config).__name__} has {positions} positions. More are had with --set "
            f"{config.attribute_map.get('max_position_embeddings', 'max_position_embeddings')}={length}."
        )
    vocabulary = model.get_input_embeddings().num_embeddings
    tokens = torch.randint(vocabulary, (batch, length or min(_LENGTH, positions or _LENGTH)))
    return {"input_ids": tokens, "labels": tokens.clone()}


def _images(model: Any, batch: int, length: int | None) -> dict[str, Any]:
    config = model.config
    if length is not None:
        raise UsageError(
            f"--length {length}: {type(config).__name__} takes images, which --set image_size=... resizes."
        )
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None) or _IMAGE
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    parameter = next(model.parameters())
    pixels = torch.randn(batch, getattr(vision, "num_channels", 3), height, width, dtype=parameter.dtype)
    return {"pixel_values": pixels, "labels": torch.randint(config.num_labels, (batch,))}


def _read(path: Path) -> tuple[Any, dict[str, Any]]:
    """The class and the fields in a config.json."""
    path = path / "config.json" if path.is_dir() else path
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"TARGET {os.fspath(path)!r} cannot be read: {error.strerror}. Nothing is downloaded: it takes a config.json "
            "that is here."
        ) from None
    except ValueError as error:
        raise UsageError(f"TARGET {os.fspath(path)!r} is not JSON: {error}.") from None
    known = _transformers().CONFIG_MAPPING
    model_type = fields.pop("model_type", None) if isinstance(fields, dict) else None
    if not isinstance(model_type, str):
        raise UsageError(f"TARGET {os.fspath(path)!r} is no config of transformers: it has no `model_type`.")
    if model_type not in known:
        meant = did_you_mean(model_type, known)
        raise UsageError(f"TARGET {os.fspath(path)!r}: transformers knows no model_type {model_type!r}.{meant}")
    return known[model_type], fields


def _named(name: str) -> Any:
    transformers = _transformers()
    base = transformers.PretrainedConfig
    found = getattr(transformers, name, None)
    if not (isinstance(found, type) and issubclass(found, base) and found is not base):
        meant = did_you_mean(name, (item for item in dir(transformers) if item.endswith("Config")))
        raise UsageError(
            f"TARGET {name!r}: transformers {transformers.__version__} has no such config class.{meant} (A function of "
            "your own is `package.module:function`.)"
        )
    return found


def _check_settings(kind: Any, settings: Mapping[str, Any]) -> None:
    """transformers takes any field, misspelt ones too."""
    if not settings:
        return
    try:
        default = kind()
    except Exception:  # of the class: it needs fields, and says itself what is wrong with those that are given
        return
    known = {*vars(default), *default.attribute_map}
    for name in settings:
        if name not in known and not hasattr(default, name):
            fields = (item for item in known if not item.startswith("_"))
            raise UsageError(f"--set {name}: {kind.__name__} has no such field.{did_you_mean(name, fields)}")


def _transformers() -> Any:
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            "A config as TARGET needs transformers, which is not installed: pip install transformers."
        ) from error
    transformers.logging.set_verbosity_error()
    return transformers
