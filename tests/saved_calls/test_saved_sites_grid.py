"""The grid: every kind of policy on models of every shape, dropout and autocast on and off, one or two backwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import assert_alike, random_states, seed_everything
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import reactivate
from reactivate import Recompute, Save, Site, policies
from reactivate._passes.observing import observed_by

WIDTH = 8


class Transformer(nn.Module):
    """One block: attention and a feed-forward network, with residuals."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.second, self.drop = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(dropout)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.first(x)).view(batch, length, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, dropout_p=self.drop.p)
        x = x + self.drop(self.out(heads.transpose(1, 2).reshape(batch, length, WIDTH)))
        return x + self.drop(self.down(F.relu(self.up(self.second(x)))))


class Convolutional(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Conv1d(4, 6, 3, padding=1), nn.BatchNorm1d(6), nn.Conv1d(6, 4, 1)
        self.drop = nn.Dropout1d(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.relu(self.norm(self.up(x)), inplace=True)))


class EncoderDecoder(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Transformer(dropout) for _ in range(2))
        self.decoder = nn.ModuleList(Crossed(dropout) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        memory = x
        for layer in self.encoder:
            memory = layer(memory)
        for layer in self.decoder:
            x = layer(x, memory=memory)
        return x


class Crossed(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.key, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, *, memory: Tensor) -> Tensor:
        weights = F.softmax(self.up(x) @ self.key(memory).transpose(1, 2), -1)
        return x + self.drop(self.down((weights @ memory).tanh()))


class Keyed(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.stages = nn.ModuleDict({name: Transformer(dropout) for name in ("early", "late")})

    def forward(self, x: Tensor) -> Tensor:
        return self.stages["late"](self.stages["early"](x).sin())


class Mixture(nn.Module):
    """Sends each token to the expert that its gate chooses."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.drop = nn.Linear(WIDTH, 3), nn.Dropout(dropout)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(3))
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        weights = F.softmax(self.up(tokens), -1)
        chosen = weights.argmax(-1)
        found = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen == number)[0]
            if rows.numel():
                result = expert(tokens[rows]) * weights[rows, number, None]
                found = found.index_add(0, rows, result.to(found.dtype))
        return x + self.drop(self.down(found.to(x.dtype))).view_as(x)


MODELS: dict[str, Callable[[float], nn.Module]] = {
    "transformer": lambda p: nn.Sequential(*(Transformer(p) for _ in range(2))),
    "convolutional": lambda p: nn.Sequential(*(Convolutional(p) for _ in range(2))),
    "encoder-decoder": EncoderDecoder,
    "dictionary": Keyed,
    "torch's encoder": lambda p: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(WIDTH, 2, 16, p, batch_first=True), 2, enable_nested_tensor=False
    ),
    "mixture": lambda p: nn.Sequential(*(Mixture(p) for _ in range(2))),
}

OPS = ("linear", "conv1d", "scaled_dot_product_attention", "matmul")
full, first_match = policies.full(), policies.first_match


def listed(policy: Any) -> Callable[[Site], Any]:
    """A list of ops for every model: that one of them has none of these is all right."""
    return lambda site: policy(site)


def own(site: Site) -> Save | Recompute | None:
    if site.block is not None:
        return Recompute()
    return Save() if site.op in ("linear", "conv1d", "relu", "dropout") and site.index % 2 == 0 else None


SAVED = listed(policies.save_ops(*OPS))
POLICIES: dict[str, Any] = {
    "none": policies.none(),
    "full": full,
    "recompute_every": policies.recompute_every(2, offset=1),
    "recompute_modules": policies.recompute_modules(lambda site: site.block == 0),
    "save_ops": first_match(SAVED, full),
    "save_modules": first_match(policies.save_modules(nn.Linear, nn.Conv1d), full),
    "save_names": first_match(listed(policies.save_names("up")), full),
    "every_nth": first_match(policies.every_nth(2, SAVED), full),
    "within": first_match(listed(policies.save_ops(*OPS, within=("*.up", "*.linear1"))), full),
    "exclude": first_match(policies.exclude(SAVED, listed(policies.save_ops("matmul"))), full),
    "union": policies.union(SAVED, listed(policies.save_ops("relu", "dropout")), full),
    "compute_intensive": first_match(policies.compute_intensive(), full),
    "own": own,
}
REGIONS = {"none": 0, "recompute_every": 1, "recompute_modules": 1}
KEEPS_NOTHING_INSIDE = ("none", "full", "recompute_every", "recompute_modules", "save_names")


class Ran:
    """Return what one step computes and keeps."""

    def __init__(self, model: nn.Module, x: Tensor, *, autocast: bool, backwards: int) -> None:
        self.regions, self.recomputations = 0, 0
        seed_everything()
        storages: dict[int, Tensor] = {}
        parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        with observed_by(self):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast), saved_tensors_hooks(pack(storages), keep):
                out = model(x)
            found = [tensor for memory, tensor in storages.items() if memory not in parameters]
            self.kept_bytes = sum(tensor.untyped_storage().nbytes() for tensor in found)
            storages.clear()
            inputs = [x, *model.parameters()]
            self.found: list[Any] = [out.detach().clone()]
            for number in range(backwards):
                loss = out.float().square().sum()
                self.found += torch.autograd.grad(loss, inputs, retain_graph=number + 1 < backwards, allow_unused=True)
        self.found += [buffer.clone() for buffer in model.buffers()]
        self.found += random_states().values()

    def forward_done(self, record: Any) -> None:
        self.regions += not reactivate.is_recomputing()

    def recomputation_done(self, record: Any) -> None:
        self.recomputations += 1


def pack(storages: dict[int, Tensor]) -> Callable[[Tensor], Tensor]:
    def packed(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    return packed


def keep(tensor: Tensor) -> Tensor:
    return tensor


def made(name: str, dropout: float) -> tuple[nn.Module, Tensor]:
    seed_everything()
    model = MODELS[name](dropout)
    return model, torch.randn(3, 4, WIDTH, requires_grad=True)


@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("autocast", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("name", MODELS)
def test_every_policy_is_bitwise_the_plain_model(name: str, dropout: float, autocast: bool, backwards: int) -> None:
    model, x = made(name, dropout)
    plain = Ran(model, x, autocast=autocast, backwards=backwards)
    kept: dict[str, int] = {}
    for policy, value in POLICIES.items():
        model, x = made(name, dropout)
        reactivate.apply(model, value)
        ours = Ran(model, x, autocast=autocast, backwards=backwards)
        assert_alike(plain.found, ours.found, f"{policy}: result")
        blocks = 4 if name == "encoder-decoder" else 2
        regions = {"recompute_every": blocks // 2}.get(policy, REGIONS.get(policy, blocks))
        assert ours.regions == regions, f"{policy}: regions"
        assert ours.recomputations == regions * backwards, f"{policy}: recomputations"
        kept[policy] = ours.kept_bytes
    assert kept["none"] == plain.kept_bytes
    for policy, found in kept.items():
        if policy != "none":
            # The last one keeps results that autograd would not: those of linear layers.
            assert kept["full"] <= found and (found < plain.kept_bytes or policy == "union"), f"{policy}: bytes"
        if policy not in KEEPS_NOTHING_INSIDE and policy != "compute_intensive":
            assert kept["full"] < found, f"{policy}: something is kept inside of regions"
