"""Models of transformers and torchtune, unedited, with their own checkpointing switched on, on the drop-in.

Their weights are small and random and their configurations are written here, so that nothing is downloaded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from memory import allocated_by
from oracle import Case, Watched, assert_bitwise, assert_same, run, seed_everything
from torch import Tensor, nn
from torchtune.models.llama2 import llama2
from torchtune.modules import TransformerSelfAttentionLayer
from torchtune.training import activations, set_activation_checkpointing
from torchtune.training.activations import apply_selective_activation_checkpointing
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

import reactivate
from reactivate import dropin, policies
from reactivate._passes.observing import observed_by

pytestmark = pytest.mark.usefixtures("whole_heap")

VOCABULARY, WIDTH, HEADS, LAYERS, BATCH, LENGTH = 61, 32, 4, 3, 2, 12
DROPOUT = 0.15


def tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH))


def text(model: PreTrainedModel) -> Case:
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[0, LENGTH - 3 :] = 0
    return Case(model.train(), (), {"input_ids": tokens(), "attention_mask": mask, "labels": tokens()})


def llama() -> Case:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        attention_dropout=DROPOUT,
        use_cache=False,
    )
    return text(LlamaForCausalLM(config))


def gpt2() -> Case:
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        resid_pdrop=DROPOUT,
        embd_pdrop=DROPOUT,
        attn_pdrop=DROPOUT,
        use_cache=False,
    )
    return text(GPT2LMHeadModel(config))


def bert() -> Case:
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=DROPOUT,
        attention_probs_dropout_prob=DROPOUT,
    )
    return text(BertForMaskedLM(config))


def t5() -> Case:
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=WIDTH // HEADS,
        d_ff=2 * WIDTH,
        num_layers=LAYERS,
        num_heads=HEADS,
        dropout_rate=DROPOUT,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return text(T5ForConditionalGeneration(config))


def vit() -> Case:
    config = ViTConfig(
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        image_size=16,
        patch_size=4,
        num_labels=5,
        hidden_dropout_prob=DROPOUT,
        attention_probs_dropout_prob=DROPOUT,
    )
    inputs = {"pixel_values": torch.randn(BATCH, 3, 16, 16), "labels": torch.randint(0, 5, (BATCH,))}
    return Case(ViTForImageClassification(config).train(), (), inputs)


def mixture_of_experts() -> Case:
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        num_local_experts=4,
        num_experts_per_tok=2,
        attention_dropout=DROPOUT,
        router_jitter_noise=DROPOUT,
        output_router_logits=True,
        use_cache=False,
    )
    return text(MixtralForCausalLM(config))


ARCHITECTURES: dict[Callable[[], Case], int] = {  # the number of layers that are regions
    llama: LAYERS,
    gpt2: LAYERS,
    bert: LAYERS,
    t5: 2 * LAYERS,
    vit: LAYERS,
    mixture_of_experts: LAYERS,
}


def torchtune_llama(dropout: float = DROPOUT) -> Case:
    model = llama2(
        vocab_size=VOCABULARY,
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=HEADS // 2,
        embed_dim=WIDTH,
        max_seq_len=LENGTH,
        attn_dropout=dropout,
    )
    # Its parts one by one: a wrapper around them would be in their names.
    return Case(model.train(), (tokens(),), modules=[model.tok_embeddings, *model.layers, model.norm, model.output])


def check_switched_on(make: Callable[[], Case], switch: Callable[[nn.Module], Any], regions: int) -> None:
    """The model with its own switch on does on the drop-in what it does with the switch off."""

    def switched(model: nn.Module) -> nn.Module:
        switch(model)
        return model

    plain = run(make)
    with dropin.install():
        ours = run(make, switched)
    assert_same(plain, ours)
    assert any(gradient is not None and gradient.any() for gradient in plain.gradients.values())
    assert ours.regions == regions
    assert ours.recomputations == regions
    assert ours.kept_bytes < plain.kept_bytes


def draws_random_numbers(case: Case) -> bool:
    seed_everything()
    before = torch.get_rng_state()
    case.fn(*case.args, **case.kwargs)
    return not torch.equal(before, torch.get_rng_state())


def enable(model: Any, use_reentrant: bool) -> None:
    """Switch checkpointing on by its name since transformers 5.23, or its older one."""
    switch = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    switch({"use_reentrant": use_reentrant})


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("make", ARCHITECTURES, ids=lambda make: make.__name__)
def test_transformers(make: Callable[[], Case], use_reentrant: bool) -> None:
    """Loss, logits, every gradient, buffer and RNG stream are those of the model without gradient checkpointing."""

    def switch(model: PreTrainedModel) -> None:
        enable(model, use_reentrant)

    check_switched_on(make, switch, ARCHITECTURES[make])


MANY_LAYERS = 12
CAPTURED = {
    "router logits of Mixtral": (MixtralForCausalLM, MixtralConfig, "router_logits"),
    "router logits of Qwen3-MoE": (Qwen3MoeForCausalLM, Qwen3MoeConfig, "router_logits"),
    "hidden states": (LlamaForCausalLM, LlamaConfig, "hidden_states"),
    "attention weights": (LlamaForCausalLM, LlamaConfig, "attentions"),
}


def capturing(name: str) -> tuple[PreTrainedModel, Callable[[], Tensor]]:
    """A model, and a step that differentiates what hooks of the library append to lists behind a context variable."""
    kind, config, key = CAPTURED[name]
    seed_everything()
    experts = (
        {"num_local_experts": 4} if config is MixtralConfig else {"num_experts": 4, "moe_intermediate_size": WIDTH}
    )
    options = {} if config is LlamaConfig else {"num_experts_per_tok": 2, **experts}
    settings = config(
        vocab_size=VOCABULARY,
        hidden_size=2 * WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=MANY_LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        head_dim=WIDTH // 2,
        use_cache=False,
        **options,
    )
    settings._attn_implementation = "eager"
    model = kind(settings).train()
    batch = torch.randint(0, VOCABULARY, (BATCH, 4 * LENGTH))

    def step() -> Tensor:
        out = model(input_ids=batch, labels=batch, **{f"output_{key}": True})
        assert len(out[key]) - MANY_LAYERS == (key == "hidden_states")
        loss = out.loss + sum(item.float().square().mean() for item in out[key])
        loss.backward()
        assert len(out[key]) - MANY_LAYERS == (key == "hidden_states")
        return loss.detach()  # type: ignore[no-any-return]

    return model, step


@pytest.mark.unfenced(reason="a fence's copies are bytes as well")
@pytest.mark.parametrize("name", CAPTURED)
def test_what_transformers_captures_takes_no_more_memory_than_with_torchs_checkpoint(name: str) -> None:
    model, step = capturing(name)
    expected = step(), [parameter.grad for parameter in model.parameters()]
    upstream, step = capturing(name)
    upstream.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    step()
    theirs = allocated_by(step)
    model, step = capturing(name)
    reactivate.apply(model, policies.full())
    watched = Watched()
    with observed_by(watched):
        found = step()
    assert watched.regions == watched.recomputations == MANY_LAYERS
    assert_bitwise(expected[0], found, "the loss")
    for one, other in zip(expected[1], (parameter.grad for parameter in model.parameters()), strict=True):
        assert one is other is None or torch.equal(one, other)
    for _ in range(3):
        step()
    ours = allocated_by(step)  # the fifth call, of which no checksums are taken
    assert ours.peak_bytes <= theirs.peak_bytes
    assert ours.left_bytes <= theirs.left_bytes


@pytest.mark.unfenced(reason="a fence's copies are ops as well")
def test_transformers_layers_are_compared_ever_more_rarely() -> None:
    """transformers makes a partial for each call of a layer. Steps without comparisons run the ops of torch's."""

    def ops_of_steps(steps: int) -> list[int]:
        case = llama()
        enable(case.fn, use_reentrant=False)
        found = []
        for _ in range(steps):
            with torch.profiler.profile() as profile:
                case.fn(**case.kwargs).loss.backward()
            found.append(sum(event.name.startswith("aten::") for event in profile.events()))
        return found

    theirs = ops_of_steps(3)[-1]
    with dropin.install():
        ours = ops_of_steps(9)
    assert [step for step, count in enumerate(ours, 1) if count > 1.01 * theirs] == [1, 2, 4, 8]


@pytest.mark.parametrize("make", [*ARCHITECTURES, torchtune_llama], ids=lambda make: make.__name__)
def test_dropout_is_on(make: Callable[[], Case]) -> None:
    """Every dropout that the model has drops something, so that the tests here would see a shifted RNG stream."""
    case = make()
    model = case.modules[0]
    rates = [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
    config = model.config.to_dict() if isinstance(model, PreTrainedModel) else {}
    rates += [rate for name, rate in config.items() if "drop" in name and name != "classifier_dropout"]
    assert all(rate > 0 for rate in rates if rate is not None), rates
    assert draws_random_numbers(case)


def test_torchtune_every_layer() -> None:
    """torchtune's switch for layers of one class, which goes through torch's checkpoint wrapper."""
    switch = functools.partial(set_activation_checkpointing, auto_wrap_policy={TransformerSelfAttentionLayer})
    check_switched_on(torchtune_llama, switch, LAYERS)


@pytest.mark.parametrize(("mode", "option", "regions"), [("full", None, 3), ("selective", 1, 3), ("selective", 2, 1)])
def test_torchtune_selective(mode: str, option: int | None, regions: int, from_first_layer: None) -> None:
    """torchtune's switch for every k-th layer; it passes `preserve_rng_state=False`, so nothing is dropped here."""
    switch = functools.partial(apply_selective_activation_checkpointing, ac_mode=mode, ac_option=option)
    check_switched_on(functools.partial(torchtune_llama, dropout=0.0), switch, regions)


def test_torchtune_selective_with_dropout(from_first_layer: None) -> None:
    """There the masks of a recomputation are new ones, as torchtune asks for: the very ones that they are with torch."""

    def switched(model: nn.Module) -> nn.Module:
        apply_selective_activation_checkpointing(model, ac_mode="selective", ac_option=1)
        return model

    upstream = run(torchtune_llama, switched)
    with dropin.install():
        ours = run(torchtune_llama, switched)
    assert_same(upstream, ours)
    assert (upstream.regions, ours.regions, ours.recomputations) == (0, LAYERS, LAYERS)


@pytest.fixture
def from_first_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchtune counts the layers of all models of a process in one counter."""
    monkeypatch.setattr(activations.checkpoint_wrapper, "_count", 0, raising=False)
