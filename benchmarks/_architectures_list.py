"""Forty architectures that people train, small: each by its class, its configuration and its arguments."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import _architectures_models as by_hand
import torch
from torch import Tensor, nn
from torch.nn import functional

TOKENS, LENGTH, BATCH = 128, 48, 4
SIZES: dict[str, Any] = {
    "vocab_size": TOKENS,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED: dict[str, Any] = {"num_key_value_heads": 2}
NO_CACHE: dict[str, Any] = {"use_cache": False}


@dataclass
class Case:
    """A model with what it is called with.

    Attributes:
        model: the model, in training mode.
        args, kwargs: of one call.
        loss: from what it returns to a scalar; None: it returns its loss.
    """

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    loss: Callable[[Any], Tensor] | None = None

    def step(self) -> None:
        """Run forward and backward, with the output alive until the end."""
        output = self.model(*self.args, **self.kwargs)
        (output["loss"] if self.loss is None else self.loss(output)).backward()


@dataclass(frozen=True)
class Architecture:
    """A row of the list.

    Attributes:
        family: decoder, encoder and so on.
        source: the package and the class.
        make: makes it.
        needs: the packages without which it cannot be made.
    """

    family: str
    source: str
    make: Callable[[], Case]
    needs: tuple[str, ...] = ()


def _text() -> dict[str, Any]:
    tokens = torch.randint(3, TOKENS, (BATCH, LENGTH))
    return {"input_ids": tokens, "labels": tokens}


def _classes() -> dict[str, Any]:
    return {"input_ids": torch.randint(3, TOKENS, (BATCH, LENGTH)), "labels": torch.randint(2, (BATCH,))}


def _image(size: int = 32, labels: int = 10) -> Callable[[], dict[str, Any]]:
    return lambda: {"pixel_values": torch.randn(BATCH, 3, size, size), "labels": torch.randint(labels, (BATCH,))}


def _speech(length: int = 3200) -> Callable[[], dict[str, Any]]:
    return lambda: {"input_values": torch.randn(2, length), "labels": torch.randint(3, 20, (2, 4))}


def _whisper() -> dict[str, Any]:
    return {"input_features": torch.randn(2, 16, 100), "labels": torch.randint(3, TOKENS, (2, 12))}


def _pairs() -> dict[str, Any]:
    images = torch.randn(BATCH, 3, 32, 32)
    return {"input_ids": torch.randint(3, TOKENS, (BATCH, 16)), "pixel_values": images, "return_loss": True}


def _hub(
    family: str, name: str, config: Mapping[str, Any], inputs: Callable[[], dict[str, Any]], config_name: str = ""
) -> Architecture:
    """Return a class of transformers with random weights."""

    def make() -> Case:
        package = importlib.import_module("transformers")
        kind = getattr(
            package, config_name or f"{name.partition('For')[0].removesuffix('Model').removesuffix('LMHead')}Config"
        )
        model = getattr(package, name)(kind(**config))
        return Case(model.train(), kwargs=inputs())

    return Architecture(family, f"transformers.{name}", make, ("transformers",))


def _clip() -> Case:
    package = importlib.import_module("transformers")
    text = {**SIZES, "max_position_embeddings": 16}
    vision = {
        key: SIZES[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    }
    config = package.CLIPConfig(text_config=text, vision_config={**vision, "image_size": 32, "patch_size": 8})
    return Case(package.CLIPModel(config).train(), kwargs=_pairs())


def _detr() -> Case:
    package = importlib.import_module("transformers")
    backbone = package.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2], layer_type="basic", out_features=["stage2"]
    )
    config = package.DetrConfig(
        use_timm_backbone=False,
        backbone=None,
        use_pretrained_backbone=False,
        backbone_config=backbone,
        d_model=32,
        encoder_layers=3,
        decoder_layers=3,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        num_queries=8,
        num_labels=4,
    )
    classes, boxes = torch.randint(4, (2, 3)), torch.rand(2, 3, 4)

    def loss(out: Any) -> Tensor:
        return by_hand.matched_loss(out.logits, out.pred_boxes, classes, boxes)

    return Case(package.DetrForObjectDetection(config).train(), (torch.randn(2, 3, 64, 64),), loss=loss)


def _lora() -> Case:
    package, peft = importlib.import_module("transformers"), importlib.import_module("peft")
    base = package.LlamaForCausalLM(package.LlamaConfig(**SIZES, **GROUPED, **NO_CACHE))
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], lora_dropout=0.1)
    return Case(peft.get_peft_model(base, config).train(), kwargs=_text())


def _torchtune() -> Case:
    model = importlib.import_module("torchtune.models.llama3").llama3(
        vocab_size=TOKENS,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        embed_dim=64,
        max_seq_len=64,
        intermediate_dim=128,
    )
    tokens = torch.randint(TOKENS, (BATCH, LENGTH))
    return Case(
        model.train(), (tokens,), loss=lambda out: functional.cross_entropy(out.flatten(0, 1), tokens.flatten())
    )


def _diffusion_unet() -> Case:
    package = importlib.import_module("diffusers")
    model = package.UNet2DModel(
        sample_size=16,
        layers_per_block=2,
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )
    noisy, noise = torch.randn(BATCH, 3, 16, 16), torch.randn(BATCH, 3, 16, 16)
    return Case(
        model.train(), (noisy, torch.randint(1000, (BATCH,))), loss=lambda out: functional.mse_loss(out.sample, noise)
    )


def _diffusion_transformer() -> Case:
    package = importlib.import_module("diffusers")
    model = package.DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=16, in_channels=4, out_channels=4, num_layers=4, sample_size=16
    )
    noisy, noise = torch.randn(BATCH, 4, 16, 16), torch.randn(BATCH, 4, 16, 16)
    times, classes = torch.randint(1000, (BATCH,)), torch.randint(10, (BATCH,))
    kwargs = {"timestep": times, "class_labels": classes}
    return Case(model.train(), (noisy,), kwargs, lambda out: functional.mse_loss(out.sample, noise))


def _autoencoder() -> Case:
    package = importlib.import_module("diffusers")
    model = package.AutoencoderKL(
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=8,
        layers_per_block=2,
    )
    image = torch.randn(2, 3, 32, 32)
    return Case(model.train(), (image,), loss=lambda out: functional.mse_loss(out.sample, image))


def _made(family: str, make: Callable[[], tuple[nn.Module, tuple[Any, ...], Callable[[Any], Tensor]]]) -> Architecture:
    """Return a model that is written beside this list."""

    def case() -> Case:
        model, args, loss = make()
        return Case(model.train(), args, loss=loss)

    return Architecture(family, f"torch: {make.__name__}", case)


_T5 = {
    "vocab_size": TOKENS,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 3,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    **NO_CACHE,
}
_BART = {
    "vocab_size": TOKENS,
    "d_model": 64,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
    **NO_CACHE,
}
_DEEPSEEK = {
    **SIZES,
    **NO_CACHE,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
_VISION = {"image_size": 32, "patch_size": 4, "num_labels": 10}
_SPEECH = {
    **SIZES,
    "conv_dim": (16, 16, 16),
    "conv_stride": (5, 4, 2),
    "conv_kernel": (10, 8, 4),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_length": 2,
    "mask_time_prob": 0.2,
}
_WHISPER = {
    **_BART,
    "num_mel_bins": 16,
    "max_source_positions": 50,
    "max_target_positions": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": _hub("decoder", "LlamaForCausalLM", {**SIZES, **GROUPED, **NO_CACHE}, _text),
    "llama of torchtune": Architecture("decoder", "torchtune.models.llama3", _torchtune, ("torchtune",)),
    "gpt2": _hub(
        "decoder", "GPT2LMHeadModel", {"vocab_size": TOKENS, "n_embd": 64, "n_layer": 4, "n_head": 4, **NO_CACHE}, _text
    ),
    "qwen3": _hub(
        "decoder",
        "Qwen3ForCausalLM",
        {**SIZES, **GROUPED, **NO_CACHE, "head_dim": 16, "output_hidden_states": True},
        _text,
    ),
    "gemma2": _hub("decoder", "Gemma2ForCausalLM", {**SIZES, **GROUPED, **NO_CACHE, "head_dim": 16}, _text),
    "gpt_neox": _hub("decoder", "GPTNeoXForCausalLM", {**SIZES, **NO_CACHE}, _text),
    "opt": _hub("decoder", "OPTForCausalLM", {**SIZES, **NO_CACHE, "ffn_dim": 128, "word_embed_proj_dim": 64}, _text),
    "bert": _hub("encoder", "BertForMaskedLM", SIZES, _text),
    "modernbert": _hub("encoder", "ModernBertForMaskedLM", SIZES, _text),
    "deberta": _hub("encoder", "DebertaV2ForSequenceClassification", SIZES, _classes),
    "albert": _hub("encoder", "AlbertForMaskedLM", {**SIZES, "embedding_size": 32}, _text),
    "t5": _hub("encoder-decoder", "T5ForConditionalGeneration", _T5, _text),
    "bart": _hub("encoder-decoder", "BartForConditionalGeneration", _BART, _text),
    "mixtral": _hub("MoE", "MixtralForCausalLM", {**SIZES, **GROUPED, **NO_CACHE, "num_local_experts": 4}, _text),
    "qwen3_moe": _hub("MoE", "Qwen3MoeForCausalLM", {**SIZES, **GROUPED, **NO_CACHE, **_EXPERTS}, _text),
    "deepseek_v3": _hub("MoE", "DeepseekV3ForCausalLM", _DEEPSEEK, _text),
    "olmoe": _hub("MoE", "OlmoeForCausalLM", {**SIZES, **GROUPED, **NO_CACHE, **_EXPERTS}, _text),
    "gpt_oss": _hub(
        "MoE", "GptOssForCausalLM", {**SIZES, **GROUPED, **NO_CACHE, "num_local_experts": 4, "head_dim": 16}, _text
    ),
    "mamba": _hub("SSM", "MambaForCausalLM", {**SIZES, **NO_CACHE, "state_size": 8}, _text),
    "mamba2": _hub(
        "SSM",
        "Mamba2ForCausalLM",
        {**SIZES, **NO_CACHE, "num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 16},
        _text,
    ),
    "rwkv": _hub("SSM", "RwkvForCausalLM", {**SIZES, **NO_CACHE, "attention_hidden_size": 64}, _text),
    "vit": _hub("vision", "ViTForImageClassification", {**SIZES, **_VISION}, _image()),
    "swin": _hub(
        "vision",
        "SwinForImageClassification",
        {**_VISION, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
        _image(),
    ),
    "convnext": _hub(
        "vision",
        "ConvNextForImageClassification",
        {"hidden_sizes": [16, 32, 64], "depths": [2, 2, 2], "num_stages": 3, "num_labels": 10},
        _image(64),
    ),
    "resnet": _hub(
        "vision",
        "ResNetForImageClassification",
        {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [2, 2], "num_labels": 10},
        _image(64),
    ),
    "clip": Architecture("vision", "transformers.CLIPModel", _clip, ("transformers",)),
    "efficient net": _made("vision", by_hand.inverted_residuals),
    "u-net": _made("vision", by_hand.u_net),
    "detr": Architecture("detection", "transformers.DetrForObjectDetection", _detr, ("transformers",)),
    "boxes": _made("detection", by_hand.dense_detector),
    "unet2d": Architecture("diffusion", "diffusers.UNet2DModel", _diffusion_unet, ("diffusers",)),
    "dit": Architecture("diffusion", "diffusers.DiTTransformer2DModel", _diffusion_transformer, ("diffusers",)),
    "autoencoder": Architecture("diffusion", "diffusers.AutoencoderKL", _autoencoder, ("diffusers",)),
    "wav2vec2": _hub("speech", "Wav2Vec2ForCTC", _SPEECH, _speech()),
    "whisper": _hub("speech", "WhisperForConditionalGeneration", _WHISPER, _whisper),
    "graph convolutions": _made("graph", by_hand.graph_convolutions),
    "graph attention": _made("graph", by_hand.graph_attention),
    "lstm": _made("recurrent", by_hand.lstm),
    "gru": _made("recurrent", by_hand.gru),
    "lora": Architecture("LoRA", "peft.LoraModel of LlamaForCausalLM", _lora, ("transformers", "peft")),
}
