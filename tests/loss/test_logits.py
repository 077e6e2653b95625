"""The policy `loss_by_rows`: the bits of the plain step, less memory, logits that are what they were to everybody else."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from memory import allocated_by
from oracle import assert_bitwise
from plan_models import GPT, llama
from several import each
from torch import Tensor, nn
from torch.nn import functional as F

import reactivate
from reactivate import policies
from reactivate._loss.logits import Logits, by_rows
from reactivate._loss.observed import LogitsRead, observed_logits
from reactivate.errors import UnsupportedError, UsageError

CLASSES = 37
Loss = Callable[[Tensor, Tensor], Tensor]


def flat(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def cast(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().view(-1, CLASSES), targets.view(-1), reduction="sum") / 7


def shifted(logits: Tensor, targets: Tensor) -> Tensor:
    logits = logits.to(torch.float32)[..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, CLASSES), targets[:, 1:].reshape(-1), ignore_index=3)


def module(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.CrossEntropyLoss(reduction="none")(logits.reshape(-1, CLASSES), targets.flatten()).square().mean()


def named(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(input=logits.flatten(0, 1), target=targets.flatten())


def smoothed(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), label_smoothing=0.1)


def weighted(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), weight=torch.arange(CLASSES).to(logits.dtype))


def by_dimension(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), targets)


def probabilities(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), F.one_hot(targets.flatten(), CLASSES).to(logits.dtype))


def capped(logits: Tensor, targets: Tensor) -> Tensor:
    return flat(3 * torch.tanh(logits.float() / 3), targets)


def written(logits: Tensor, targets: Tensor) -> Tensor:
    logits = logits.float()
    view = logits.view(-1, CLASSES)
    logits[:, 0] = 0.5  # which the view, made before, shows
    return F.cross_entropy(view, targets.flatten())


def masked(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float()[targets > 3], targets[targets > 3])


def twice(logits: Tensor, targets: Tensor) -> Tensor:
    return flat(logits, targets) + flat(logits.float(), targets) + 0.1 * logits.logsumexp(-1).square().mean()


BY_ROWS: list[Loss] = [flat, cast, shifted, module, named]
PLAIN: list[Loss] = [smoothed, weighted, by_dimension, probabilities, capped, written, masked]


class Custom(torch.autograd.Function):
    """A loss that a library wrote, which torch does not tell of."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.square().sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (logits,) = ctx.saved_tensors
        return 2 * logits * gradients[0], None


def custom(logits: Tensor, targets: Tensor) -> Tensor:
    return Custom.apply(logits.float(), targets)


def made(dtype: torch.dtype) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, CLASSES)).to(dtype)
    return model, torch.randn(4, 25, 8, dtype=dtype), torch.randint(CLASSES, (4, 25))


def step_of(model: nn.Module, x: Tensor, targets: Tensor, loss_of: Loss) -> list[Tensor]:
    model.zero_grad()
    loss = loss_of(model(x), targets)
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("loss_of", [*BY_ROWS, *PLAIN, twice, custom], ids=lambda loss_of: loss_of.__name__)
def test_every_loss_has_the_bits_of_the_plain_step(loss_of: Loss, dtype: torch.dtype) -> None:
    model, x, targets = made(dtype)
    plain = step_of(model, x, targets, loss_of)
    with reactivate.apply(model, policies.loss_by_rows("2")), observed_logits() as read:
        found = step_of(model, x, targets, loss_of)
    for one, other in zip(plain, found, strict=True):
        assert_bitwise(one, other, loss_of.__name__)
    is_view_of_all = loss_of is written and dtype == torch.float32  # without a cast it shows what is written
    assert bool(read) == (loss_of in (*BY_ROWS, twice) or is_view_of_all)
    assert all(item.place == "2" for item in read)


def test_it_is_told_which_logits_a_loss_reads() -> None:
    model, x, targets = made(torch.bfloat16)
    with reactivate.apply(model, policies.loss_by_rows("2")), observed_logits() as read:
        step_of(model, x, targets, cast)
    assert read == [LogitsRead("2", 4 * 25 * CLASSES * 2)]


@pytest.mark.parametrize(("dtype", "plain", "most"), [(torch.float32, 16, 9), (torch.bfloat16, 14, 6.5)], ids=str)
def test_the_step_takes_logits_and_their_gradient_and_little_else(dtype: torch.dtype, plain: int, most: float) -> None:
    torch.manual_seed(0)
    classes = 4000
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, classes)).to(dtype)
    x, targets = torch.randn(2, 256, 8, dtype=dtype), torch.randint(classes, (2, 256))

    def step() -> None:
        logits = model(x)  # in memory during the backward, as in most training loops
        F.cross_entropy(logits.float().view(-1, classes), targets.view(-1)).backward()

    step()
    assert allocated_by(step).peak_bytes >= plain * 512 * classes
    with reactivate.apply(model, policies.loss_by_rows("1")):
        step()
        assert allocated_by(step).peak_bytes <= most * 512 * classes


def test_it_goes_with_regions_and_finds_the_loss_inside_of_the_model() -> None:
    pytest.importorskip("transformers")
    case = llama()
    plain = allocated_by(case.step).peak_bytes
    one = [parameter.grad.clone() for parameter in case.model.parameters()]
    case.model.zero_grad()
    policy = policies.first_match(policies.full(), policies.loss_by_rows("lm_head"))
    with reactivate.apply(case.model, policy) as handle, observed_logits() as read:
        assert allocated_by(case.step).peak_bytes < plain
        assert "Loss by rows: lm_head." in str(handle)
    assert handle.heads == ("lm_head",) and len(handle.regions) == 4
    assert [item.place for item in read] == ["lm_head"]
    for first, other in zip(one, case.model.parameters()):
        assert_bitwise(first, other.grad, "gradient")


# -- what others see --------------------------------------------------------------------------------------------------


def logits_of(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    plain = torch.randn(3, 4, dtype=dtype, requires_grad=True) * 2
    return plain, by_rows(plain)


ASKED: dict[str, Callable[[Tensor], Any]] = {
    "shape": lambda x: x.shape,
    "dtype": lambda x: x.dtype,
    "size": lambda x: x.size(-1),
    "len": len,
    "float": lambda x: (x.float().dtype, x.float().shape),
    "list": lambda x: x.tolist(),
    "numbers": lambda x: x.detach().float().numpy().tolist(),
    "repr": repr,
    "best": lambda x: x.argmax(-1).tolist(),
    "rows": lambda x: [row.tolist() for row in x.float()],
    "saved": lambda x: pickle.loads(pickle.dumps(x.detach())).tolist(),
    "copied": lambda x: copy.deepcopy(x.detach()).tolist(),
    "grad": lambda x: x.requires_grad,
    "stacked": lambda x: torch.stack([x, x]).tolist(),
    "cast back": lambda x: x.float().to(torch.float64).tolist(),
    "in place": lambda x: x.float().mul_(2).tolist(),
}


@each("name", ASKED)
@each("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_they_answer_as_the_tensor_does(name: str, dtype: torch.dtype) -> None:
    (_, logits), (plain, _) = logits_of(dtype), logits_of(dtype)
    assert isinstance(logits, Logits)
    assert ASKED[name](logits) == ASKED[name](plain)


def test_a_gradient_given_to_them_goes_back_to_the_head() -> None:
    for make in (lambda x: x, lambda x: x.float(), lambda x: x.float().view(-1)):
        leaf = torch.randn(3, 4, dtype=torch.bfloat16, requires_grad=True)
        logits = make(by_rows(leaf * 2))
        assert isinstance(logits, Logits)
        torch.autograd.backward([logits], [torch.ones(logits.shape, dtype=logits.dtype)])
        assert_bitwise(torch.full_like(leaf, 2), leaf.grad, "gradient")


def test_hooks_on_them_run() -> None:
    for make in (lambda x: x, lambda x: x.float()):
        leaf, seen = torch.randn(32, 5, dtype=torch.bfloat16, requires_grad=True), []
        logits = make(by_rows(leaf * 2))
        logits.register_hook(lambda gradient, seen=seen: seen.append(gradient.dtype))
        F.cross_entropy(logits, torch.zeros(32, dtype=torch.long)).backward()
        assert seen == [logits.dtype]


def test_a_cast_of_logits_that_change_before_it_is_read_is_refused() -> None:
    logits = by_rows(torch.randn(32, 5, dtype=torch.bfloat16, requires_grad=True) * 2)
    numbers = logits.float()
    logits.mul_(2)
    with pytest.raises(UnsupportedError, match="modified in place before the cast was read"):
        F.cross_entropy(numbers, torch.zeros(32, dtype=torch.long))


def test_without_a_backward_nothing_is_different() -> None:
    model, x, _ = made(torch.float32)
    with reactivate.apply(model, policies.loss_by_rows("2")), torch.no_grad():
        assert type(model(x)) is Tensor


def test_copies_of_the_model_have_it_and_removal_ends_it() -> None:
    model, x, _ = made(torch.float32)
    handle = reactivate.apply(model, policies.loss_by_rows("2"))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model):
        assert isinstance(other(x), Logits)
    handle.remove()
    assert type(model(x)) is Tensor


def test_under_compilation_it_is_refused_in_words() -> None:
    model, x, _ = made(torch.float32)
    reactivate.apply(model, policies.loss_by_rows("2"))
    with pytest.raises(UnsupportedError, match='head="keep"'):
        torch.compile(model, backend="eager")(x)


def test_heads_that_are_not_there_or_inside_of_regions_are_refused() -> None:
    model = GPT(layers=2)
    with pytest.raises(UsageError, match="matches nothing"):
        reactivate.apply(model, policies.loss_by_rows("lm_head"))
    with pytest.raises(UsageError, match="matches nothing"):
        reactivate.apply(model, policies.first_match(policies.loss_by_rows("blocks.0.norm"), policies.full()))
