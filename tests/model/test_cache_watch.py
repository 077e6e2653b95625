"""A key-value cache that is left on in training: one warning with its bytes, and the same bits."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import oracle
import pytest
import torch
from memory import allocated_by
from torch import Tensor, nn

import reactivate
from reactivate import policies
from reactivate._region.accounts import in_words

transformers = pytest.importorskip("transformers", reason="the caches are those of transformers")

VOCABULARY, WIDTH, HEADS, LAYERS, BATCH, LENGTH = 61, 32, 4, 3, 2, 12
STATE_BYTES = BATCH * LENGTH * WIDTH * 4  # the keys of one layer, or its values


def gpt2(use_cache: bool = True) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, use_cache=use_cache
    )
    return transformers.GPT2LMHeadModel(config).train()


def t5(use_cache: bool = True) -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=WIDTH // HEADS,
        d_ff=2 * WIDTH,
        num_layers=LAYERS,
        num_heads=HEADS,
        decoder_start_token_id=0,
        use_cache=use_cache,
    )
    return transformers.T5ForConditionalGeneration(config).train()


class Wrapped(nn.Module):
    """A model of transformers that hands out nothing but the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = gpt2()

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.inner(input_ids=input_ids, labels=labels).loss


def batch() -> dict[str, Tensor]:
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(3))
    return {"input_ids": tokens, "labels": tokens}


def step(model: nn.Module) -> list[str]:
    """One step of training, and what is said about a cache."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        output = model(**batch())
        (output if isinstance(output, Tensor) else output.loss).backward()
    return [str(warning.message) for warning in caught if "use_cache" in str(warning.message)]


# Self-attention keeps two states a layer; the decoder of T5 keeps those of cross-attention too.
MADE = {"gpt2": (gpt2, 2 * LAYERS, 3), "t5": (t5, 4 * LAYERS, 6), "wrapped": (Wrapped, 2 * LAYERS, 3)}


@pytest.mark.parametrize("name", MADE)
def test_one_warning_says_the_bytes_and_what_to_write(name: str) -> None:
    make, states, regions = MADE[name]
    model = make()
    reactivate.apply(model, policies.full())
    with torch.no_grad():
        model(**batch())  # the regions are off: there is nothing to say yet
    (said,) = step(model)
    assert f"{LAYERS} of {regions} regions left {in_words(states * STATE_BYTES)} of keys" in said
    assert "model.config.use_cache = False" in said and "use_cache=False" in said
    twin = copy.deepcopy(model)
    assert step(model) + step(model) + step(twin) + step(twin) == []


def test_the_warning_names_the_line_that_called_the_model() -> None:
    model = gpt2()
    reactivate.apply(model, policies.full())
    with pytest.warns(UserWarning, match="use_cache") as caught:
        model(**batch())
    assert caught[0].filename == __file__


CALLS = {
    "plan": lambda model: reactivate.plan(model, batch(), budget="60%").measure(),
    "explain": lambda model: reactivate.explain(model, batch()),
    "verify": lambda model: reactivate.verify(model, batch(), policy=policies.full()),
}


@pytest.mark.parametrize("name", CALLS)
def test_one_warning_names_the_function_that_was_called(name: str) -> None:
    """However many policies a plan tries, and however often it runs the step."""
    model = gpt2()
    if name == "explain":
        reactivate.apply(model, policies.full())
    with pytest.warns(UserWarning, match="use_cache") as caught:
        CALLS[name](model)
    (warning,) = (warning for warning in caught if "use_cache" in str(warning.message))
    assert str(warning.message).startswith(f"{name}: use_cache is on. The first call of {LAYERS} of {LAYERS} regions")
    assert warning.filename == __file__


def test_regions_that_do_not_run_hold_nothing_up() -> None:
    """When a region is called again, a step has been measured."""
    model = Wrapped()
    model.spare = gpt2()
    reactivate.apply(model, policies.full())
    assert step(model) == []
    assert f"{LAYERS} of {2 * LAYERS} regions left {in_words(2 * LAYERS * STATE_BYTES)}" in step(model)[0]
    assert step(model) == []


def test_only_regions_count() -> None:
    """The layers that are no regions keep their keys and values for their own backward."""
    model = gpt2()
    reactivate.apply(model, policies.recompute_every(2))
    assert f"2 of 2 regions left {in_words(4 * STATE_BYTES)} of" in step(model)[0]


def test_nothing_is_said_without_a_cache() -> None:
    model = gpt2(use_cache=False)
    reactivate.apply(model, policies.full())
    assert step(model) == []
    model = gpt2()
    reactivate.apply(model, policies.full())
    model.config.use_cache = False  # what the warning says to write
    assert step(model) == []


def test_the_bytes_are_those_that_the_cache_costs() -> None:
    """Also where the loss is all that is kept of the output."""
    left = {}
    for use_cache in (True, False):
        model = gpt2(use_cache)
        reactivate.apply(model, policies.full())
        step(model)
        left[use_cache] = allocated_by(lambda model=model: model(**batch()).loss).left_bytes
    assert left[True] - left[False] == 2 * LAYERS * STATE_BYTES


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("use_cache", [True, False])
def test_bitwise(name: str, use_cache: bool) -> None:
    def make() -> oracle.Case:
        model: Any = MADE[name][0]()
        getattr(model, "inner", model).config.use_cache = use_cache
        return oracle.Case(model, (), batch())

    def applied(model: Any) -> Any:
        reactivate.apply(model, policies.full())
        return model

    plain, ours = oracle.run(make), oracle.run(make, applied)
    oracle.assert_same(plain, ours)
    assert ours.regions == ours.recomputations == MADE[name][2]
    assert ours.kept_bytes < plain.kept_bytes
