"""Errors of an allocator that has no more memory: a note says what each region keeps."""

from __future__ import annotations

import gc
import sys

import pytest
import torch
from explain_cases import RNG_BYTES, made
from torch import Tensor, nn

import reactivate
from reactivate._region import accounts
from reactivate._region.accounts import in_words, note_shortage
from reactivate._region.region import Region
from reactivate.policies import first_match, recompute_modules, save_ops


def notes_of(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


SHORTAGES = {
    "device": torch.OutOfMemoryError("out of memory"),
    "host": RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes."),
}


class Short(nn.Module):
    """Runs out of memory in the forward pass or in the recomputation of the third layer."""

    def __init__(self, kind: str, is_in_recomputation: bool) -> None:
        super().__init__()
        self.kind = kind
        self.is_in_recomputation = is_in_recomputation
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if reactivate.is_recomputing() == self.is_in_recomputation:
            error = SHORTAGES[self.kind]
            raise type(error)(*error.args)
        return self.linear(x).sin()


@pytest.mark.parametrize("kind", SHORTAGES)
@pytest.mark.parametrize("is_in_recomputation", [False, True])
def test_out_of_memory_says_who_keeps_what(kind: str, is_in_recomputation: bool) -> None:
    gc.collect()  # what other tests left
    model = made("dropout")
    short = model.layers[2] = Short(kind, is_in_recomputation)
    reactivate.Handle.of(model).remove()
    reactivate.apply(model, first_match(save_ops("gelu"), recompute_modules("layers.*")))
    assert isinstance(model.layers[2], Short) and short is model.layers[2]
    with pytest.raises(RuntimeError) as caught:
        model(torch.randn(5, 4)).backward()
    text = notes_of(caught.value)
    assert text.count("Kept for the backward by regions") == 1
    assert "reactivate.explain" in text
    each = 5 * 8 * 4 + RNG_BYTES + 5 * 16 * 4  # the input, the state of the generator, the result of gelu
    assert f"\n  layers.0: {in_words(each)}\n  layers.1: {in_words(each)}\n" in text
    last = 5 * 8 * 4 + (RNG_BYTES if is_in_recomputation else 0)  # a state is kept when the forward has ended
    assert f"\n  layers.2: {in_words(last)}\n" in text


def test_out_of_memory_in_a_nested_region_is_noted_once_and_recomputes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(accounts, "_LINES", 10**6)  # tests before this one may have left regions
    gc.collect()
    recomputations: list[str] = []

    def inner(x: Tensor) -> Tensor:
        if reactivate.is_recomputing():
            recomputations.append("inner")
        return x.sin().cos()

    def last(x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("out of memory")

    def outer(x: Tensor) -> Tensor:
        y = reactivate.checkpoint(inner, name="inner")(x.exp())
        return reactivate.checkpoint(last, name="last")(y)

    with pytest.raises(torch.OutOfMemoryError) as caught:
        reactivate.checkpoint(outer, name="outer")(torch.randn(64, requires_grad=True) * 1)
    text = notes_of(caught.value)
    assert text.count("Kept for the backward by regions") == 1 and not recomputations
    assert "outer: 256 B" in text and f"inner: {in_words(RNG_BYTES)}" in text and "last: 0 B" in text


def test_before_python_311_the_account_is_in_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    error = torch.OutOfMemoryError("out of memory", "and more")
    monkeypatch.setattr(sys, "version_info", (3, 10, 0))
    for _ in range(2):
        note_shortage(error, Region)
    monkeypatch.undo()
    assert error.args[0].startswith("out of memory\nKept for the backward by regions") and error.args[1] == "and more"
    assert notes_of(error).count("Kept for the backward") == 1


def test_other_errors_have_no_note() -> None:
    def fn(x: Tensor) -> Tensor:
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError) as caught:
        reactivate.checkpoint(fn)(torch.ones(2, requires_grad=True))
    assert notes_of(caught.value) == "something else"
