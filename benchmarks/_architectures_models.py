"""Models of kinds for which no package is asked for: vision, detection, graphs, recurrence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Made = tuple[nn.Module, tuple[Any, ...], Callable[[Any], Tensor]]


def _norm_act(channels: int) -> list[nn.Module]:
    return [nn.BatchNorm2d(channels), nn.SiLU()]


class _Inverted(nn.Module):
    """A layer of EfficientNets: wide, by channel, weighed, narrow."""

    def __init__(self, given: int, made: int, stride: int) -> None:
        super().__init__()
        wide = 4 * given
        self.wide = nn.Sequential(nn.Conv2d(given, wide, 1, bias=False), *_norm_act(wide))
        self.deep = nn.Sequential(nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), *_norm_act(wide))
        self.weigh = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide, wide // 4, 1), nn.SiLU(), nn.Conv2d(wide // 4, wide, 1)
        )
        self.narrow = nn.Sequential(nn.Conv2d(wide, made, 1, bias=False), nn.BatchNorm2d(made))
        self.is_residual = given == made

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of the next layer."""
        out = self.deep(self.wide(x))
        out = self.narrow(out * self.weigh(out).sigmoid())
        return functional.dropout(out, 0.1, self.training) + x if self.is_residual else out


def inverted_residuals() -> Made:
    """Return a small EfficientNet."""
    layers = [
        _Inverted(16, 16, 1),
        _Inverted(16, 24, 2),
        _Inverted(24, 24, 1),
        _Inverted(24, 40, 2),
        _Inverted(40, 40, 1),
    ]
    stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), *_norm_act(16))
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(40, 10))
    labels = torch.randint(10, (4,))
    return (
        nn.Sequential(stem, *layers, head),
        (torch.randn(4, 3, 64, 64),),
        lambda out: functional.cross_entropy(out, labels),
    )


class _Twice(nn.Sequential):
    def __init__(self, given: int, made: int) -> None:
        super().__init__(
            nn.Conv2d(given, made, 3, 1, 1), *_norm_act(made), nn.Conv2d(made, made, 3, 1, 1), *_norm_act(made)
        )


class UNet(nn.Module):
    """A U-Net: each stage on the way up sees the features of its twin on the way down.

    Args:
        widths: channels of each stage on the way down, and of the middle.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        *stages, middle = widths
        self.down = nn.ModuleList(_Twice(before, after) for before, after in zip([3, *stages], stages))
        self.middle = _Twice(stages[-1], middle)
        self.up = nn.ModuleList(_Twice(3 * width, width) for width in reversed(stages))
        self.last = nn.Conv2d(stages[0], 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the classes of pixels."""
        kept = []
        for layer in self.down:
            kept.append(layer(x))
            x = functional.max_pool2d(kept[-1], 2)
        x = self.middle(x)
        for layer in self.up:
            x = layer(torch.cat([functional.interpolate(x, scale_factor=2), kept.pop()], 1))
        return self.last(x)


def u_net() -> Made:
    """Return a U-Net for segmentation."""
    classes = torch.randint(4, (2, 64, 64))
    return UNet((8, 16, 32, 64)), (torch.randn(2, 3, 64, 64),), lambda out: functional.cross_entropy(out, classes)


class _Detector(nn.Module):
    """Predicts a class and a box for each cell, and learns from the cells whose boxes meet a target's."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([_Twice(3, 16), _Twice(16, 32), _Twice(32, 64)])
        self.classes, self.boxes = nn.Conv2d(64, 4, 1), nn.Conv2d(64, 4, 1)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the loss."""
        for stage in self.stages:
            x = functional.max_pool2d(stage(x), 2)
        classes, boxes = self.classes(x).flatten(2).mT, self.boxes(x).flatten(2).mT.sigmoid()
        far = (boxes[:, :, None, :2] - targets[:, None, :, 1:3]).square().sum(-1)
        near = far < far.quantile(0.3)
        batch, cell, target = near.nonzero(as_tuple=True)
        found = targets[batch, target]
        loss = functional.cross_entropy(classes[batch, cell], found[:, 0].long())
        if near.sum().item() > 0:
            loss = loss + functional.l1_loss(boxes[batch, cell], found[:, 1:])
        return loss


def dense_detector() -> Made:
    """Return a detector whose loss gathers the cells that match."""
    targets = torch.cat([torch.randint(4, (2, 3, 1)).float(), torch.rand(2, 3, 4)], -1)
    return _Detector(), (torch.randn(2, 3, 64, 64), targets), lambda loss: loss


def matched_loss(logits: Tensor, boxes: Tensor, classes: Tensor, targets: Tensor) -> Tensor:
    """Return a loss in which each target, in turn, takes the nearest box that is free.

    Args:
        logits, boxes: of each query, (batch, queries, classes) and (batch, queries, 4).
        classes, targets: of each target, (batch, targets) and (batch, targets, 4).
    """
    found: list[Tensor] = []
    for image, far in enumerate(torch.cdist(targets, boxes.detach(), p=1).tolist()):
        free = set(range(boxes.shape[1]))
        for target, row in enumerate(far):
            query = min(free, key=row.__getitem__)
            free.discard(query)
            found.append(functional.cross_entropy(logits[image, query], classes[image, target]))
            found.append(functional.l1_loss(boxes[image, query], targets[image, target]))
    return torch.stack(found).mean()


def _graph() -> tuple[Tensor, Tensor, Tensor]:
    """Features of nodes, edges, and the classes of nodes."""
    return torch.randn(200, 32), torch.randint(200, (2, 1200)), torch.randint(5, (200,))


class _Convolution(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.update = nn.Sequential(nn.Linear(2 * width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """Return the nodes with the mean of their neighbours."""
        source, target = edges
        around = torch.zeros_like(x).index_add(0, target, self.norm(x)[source])
        degree = torch.bincount(target, minlength=len(x)).clamp(min=1)[:, None]
        return x + self.update(torch.cat([x, around / degree], -1))


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.project, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.score = nn.Parameter(torch.randn(2, heads, width // heads) / 4)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """Return the nodes with what they attend to; an edge to itself is dropped."""
        source, target = edges[:, edges[0] != edges[1]]
        h = self.project(self.norm(x)).unflatten(-1, (self.heads, -1))
        parts = (h * self.score[:, None]).sum(-1)
        weight = functional.leaky_relu(parts[0, source] + parts[1, target], 0.2).exp()
        total = torch.zeros(len(x), self.heads).index_add(0, target, weight)
        weight = functional.dropout(weight / total[target].clamp(min=1e-6), 0.1, self.training)
        gathered = torch.zeros_like(h).index_add(0, target, h[source] * weight[..., None])
        return x + functional.elu(self.out(gathered.flatten(1)))


class _Graph(nn.Module):
    def __init__(self, layer: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Linear(32, 64)
        self.layers = nn.ModuleList(layer(64) for _ in range(4))
        self.head = nn.Linear(64, 5)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """Return the classes of nodes."""
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, edges)
        return self.head(x)


def graph_convolutions() -> Made:
    """Return a network of means over neighbours."""
    x, edges, classes = _graph()
    return _Graph(_Convolution), (x, edges), lambda out: functional.cross_entropy(out, classes)


def graph_attention() -> Made:
    """Return a network of attention over neighbours, whose edges depend on the data."""
    x, edges, classes = _graph()
    return _Graph(_Attention), (x, edges), lambda out: functional.cross_entropy(out, classes)


class _Recurrent(nn.Module):
    """Layers of one class without modules inside: torch's own LSTM or GRU."""

    def __init__(self, layer: type[nn.LSTM | nn.GRU]) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 64)
        self.layers = nn.ModuleList(layer(64, 64, batch_first=True) for _ in range(4))
        self.head = nn.Linear(64, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)[0]
        return self.head(x)


def _recurrent(layer: type[nn.LSTM | nn.GRU]) -> Made:
    tokens = torch.randint(64, (8, 48))
    return (
        _Recurrent(layer),
        (tokens,),
        lambda out: functional.cross_entropy(out[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()),
    )


def lstm() -> Made:
    """Return a language model of LSTMs."""
    return _recurrent(nn.LSTM)


def gru() -> Made:
    """Return a language model of GRUs."""
    return _recurrent(nn.GRU)
