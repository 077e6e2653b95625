"""Results that modules store in attributes: those of the forward stay, and recomputations read their own."""

from __future__ import annotations

from typing import Any

import torch
from state_programs import Holding, Programs, Wrap, backward, curve, gradients, inputs, leaf, state_of, train
from torch import Tensor, nn
from torch.func import functional_call

PROGRAMS = Programs()
test_program = PROGRAMS.test()
right, right_with = PROGRAMS.right, PROGRAMS.right_with


class Experts(nn.Module):
    """A layer that stores a loss of its own, as mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.aux: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.softmax(self.linear(x), -1)
        self.aux = gate.square().sum() * 0.1
        return curve(x, gate)


@right
def loss_in_an_attribute_joins_the_total(wrap: Wrap) -> Any:
    module = Experts()
    checkpointed = wrap(module)
    found = []
    for x in inputs():
        out = checkpointed(x)
        aux = module.aux
        (out.square().sum() + aux).backward()
        found += [x.grad, module.aux is aux, aux, module.aux.grad_fn is not None]
    return [found, gradients(module)]


@right
def losses_of_several_layers_join_the_total(wrap: Wrap) -> Any:
    layers = nn.ModuleList([Experts() for _ in range(4)])
    regions = [wrap(layer) for layer in layers]
    found = []
    for x in inputs():
        h = x
        for region in regions:
            h = region(h)
        stored = [layer.aux for layer in layers]
        (h.square().sum() + sum(stored)).backward()
        found += [x.grad, [layer.aux is aux for layer, aux in zip(layers, stored, strict=True)]]
    return [found, gradients(layers)]


@right
def loss_in_an_attribute_has_its_own_backward(wrap: Wrap) -> Any:
    module = Experts()
    checkpointed = wrap(module)
    found = []
    for x in inputs():
        out = checkpointed(x)
        module.aux.backward(retain_graph=True)
        backward(out)
        found += [x.grad, module.aux]
    return [found, gradients(module)]


@right
def loss_in_an_attribute_is_dropped_before_the_backwards(wrap: Wrap) -> Any:
    """The second forward found the loss of the first, which is gone by then: nothing is not what is gone."""
    module = Experts()
    checkpointed = wrap(module)
    xs = inputs(2)
    totals = []
    for x in xs:
        out = checkpointed(x)
        totals.append(out.square().sum() + module.aux)
    module.aux = None
    found: list[Any] = []
    while totals:
        totals.pop().backward()
        found.append(module.aux)
    return [found, [x.grad for x in xs], gradients(module)]


@right
def losses_are_appended_to_a_list(wrap: Wrap) -> Any:
    class Model(Holding):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = curve(layer(x), 2)
                self.losses.append(x.mean())
            return x

    module = Model(layers=nn.ModuleList([nn.Linear(4, 4) for _ in range(3)]), losses=[])
    checkpointed = wrap(module)
    found = []
    for x in inputs():
        out = checkpointed(x)
        stored = list(module.losses)
        (out.square().sum() + sum(stored)).backward()
        found += [x.grad, [one is other for one, other in zip(stored, module.losses, strict=True)]]
        module.losses.clear()
    return [found, gradients(module)]


@right
def attention_map_is_stored_and_read_after_backward(wrap: Wrap) -> Any:
    class Attention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            weights = torch.softmax(x @ x.T, -1)
            self.last = weights
            self.detached = weights.detach()
            return curve(weights @ x, 2)

    module = Attention()
    checkpointed = wrap(module)
    found = []
    for x in inputs():
        out = checkpointed(x)
        before = (module.last, module.detached)
        backward(out)
        found += [x.grad, module.last is before[0], module.detached is before[1], module.last, module.detached]
    return found


@right
def stored_result_has_another_shape_than_the_one_before(wrap: Wrap) -> Any:
    """Early stop ends the recomputation before it stores its own."""

    class Features(Holding):
        def forward(self, x: Tensor) -> Tensor:
            self.feat = x.tanh()
            return self.feat

    module = Features(feat=torch.zeros(6, 4))
    checkpointed = wrap(module)
    found = []
    for rows in (4, 6, 4, 2, 2):
        x = leaf(rows, 4)
        out = checkpointed(x)
        backward(out)
        found += [x.grad, module.feat is out, module.feat]
    return found


@right
def state_is_restarted_at_another_batch_size(wrap: Wrap) -> Any:
    """A recurrent cell that keeps its state, and trains on the next batch from where the backward left it."""

    class Cell(Holding):
        def forward(self, x: Tensor) -> Tensor:
            if len(self.hidden) != len(x):
                self.hidden = torch.zeros(len(x), 4)
            self.hidden = self.cell(x, self.hidden.detach())
            return self.hidden

    module = Cell(cell=nn.GRUCell(4, 4), hidden=torch.zeros(6, 4))
    checkpointed = wrap(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    losses = []
    for rows in (6, 6, 4, 4, 4, 6, 6):
        loss = checkpointed(leaf(rows, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss, module.hidden]
    return [losses, state_of(module)]


@right_with(recomputations=6)
def memory_grows_with_each_of_several_calls(wrap: Wrap) -> Any:
    """Each recomputation reads the memory of its own call, which has another shape."""

    class Memory(Holding):
        def forward(self, x: Tensor) -> Tensor:
            out = curve(self.layer(x), self.memory.sum(0))
            self.memory = torch.cat([self.memory, out[:2]])
            return out

    module = Memory(layer=nn.Linear(4, 4), memory=torch.zeros(1, 4))
    checkpointed, xs = wrap(module, check="metadata"), inputs(6)
    for calls in (xs[:3], xs[3:]):
        backward(*map(checkpointed, calls))
        module.memory = module.memory.detach()
    return [[x.grad for x in xs], module.memory, state_of(module)]


@right
def weight_of_another_shape_stands_in_for_the_forward(wrap: Wrap) -> Any:
    layer, wide = nn.Linear(4, 4), leaf(8, 4)

    def step(x: Tensor) -> Tensor:
        weights = {"weight": wide * 2, "bias": torch.zeros(8)}
        return functional_call(layer, weights, (x,)).sin()

    layer.forward = wrap(layer.forward)  # type: ignore[method-assign]
    return [train(step, inputs()), wide.grad, state_of(layer)]
