"""The networks of the studies: in the shape of the paper's, at a size that trains on two processors."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from narrowcast import plugins
from narrowcast.predict import profile as profiling
from narrowcast.study.datasets import Examples, takes

T = TypeVar("T")

HIDDEN = 512
WIDE = 768
VGG_WIDTHS = ((16, 3), (32, 3), (64, 3), (64, 3))


def _convolutions(
    channels: int, widths: Sequence[tuple[int, int]], pool_after: Sequence[bool], norm: bool = False
) -> nn.Sequential:
    """Convolutions of (width, kernel), each with a ReLU and some with a pooling layer behind."""
    layers: list[nn.Module] = []
    for (width, kernel), pool in zip(widths, pool_after, strict=True):
        layers.append(nn.Conv2d(channels, width, kernel, padding=kernel // 2, bias=not norm))
        layers += [nn.BatchNorm2d(width)] if norm else []
        layers += [nn.ReLU(), nn.MaxPool2d(2)] if pool else [nn.ReLU()]
        channels = width
    return nn.Sequential(*layers, nn.Flatten())


def linear_layers(sizes: Sequence[int] = (784, 1024, 1024, 10), dropout: Sequence[float] = ()) -> nn.Module:
    """Linear layers with ReLU between; `dropout` before each layer, the input's first."""
    layers: list[nn.Module] = [nn.Flatten()]
    for position, (before, after) in enumerate(itertools.pairwise(sizes)):
        if position < len(dropout) and dropout[position]:
            layers.append(nn.Dropout(dropout[position]))
        layers.append(nn.Linear(before, after))
        layers += [nn.ReLU()] if position < len(sizes) - 2 else []
    return nn.Sequential(*layers)


@dataclass(frozen=True)
class Halves:
    """Convolutions, and the sizes of the fully connected layers behind them: what Dettmers' scheme cuts apart."""

    convolutions: nn.Module
    sizes: tuple[int, ...]

    def joined(self) -> nn.Module:
        return nn.Sequential(self.convolutions, linear_layers(self.sizes))

    @classmethod
    def of(cls, examples: Examples, convolutions: nn.Module, *hidden: int) -> Halves:
        with torch.no_grad():
            features = convolutions(torch.zeros(1, *examples.shape)).shape[1]
        return cls(convolutions, (features, *hidden, examples.classes))


def _stack(
    examples: Examples,
    widths: Sequence[tuple[int, int]] = (),
    pool_after: Sequence[bool] = (),
    hidden: Sequence[int] = (HIDDEN, HIDDEN),
    norm: bool = False,
) -> Halves:
    parts = _convolutions(examples.shape[0], widths, pool_after, norm)
    return Halves.of(examples, parts, *hidden)


class _Block(nn.Module):
    """ResNet's basic block with batch norm, its shortcut by a 1 x 1 convolution where the shape changes."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(after), nn.BatchNorm2d(after)])
        same = stride == 1 and before == after
        self.short = nn.Identity() if same else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(inner)) + self.short(x))


def resnet(examples: Examples) -> nn.Module:
    """As ResNet: batch norms, shortcuts, one small linear layer; much work for each parameter."""
    first = nn.Conv2d(examples.shape[0], 16, 3, padding=1, bias=False)
    layers: list[nn.Module] = [first, nn.BatchNorm2d(16), nn.ReLU()]
    for before, after, stride in ((16, 16, 2), (16, 32, 2), (32, 64, 2), (64, 64, 1)):
        layers.append(_Block(before, after, stride))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, examples.classes))


class CharacterLSTM(nn.Module):
    """Characters in (as numbers), scores of the character after each of them out: N x classes x length."""

    def __init__(self, classes: int, width: int = 256, embedding: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(classes, embedding)
        self.cells = nn.LSTM(embedding, width, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.cells(self.embed(x.long()))
        return self.head(hidden).transpose(1, 2)


@dataclass(frozen=True)
class Net:
    """A network by name: what makes it, and what goes in."""

    make: Callable[[Examples], nn.Module | Halves]
    takes: str = "pictures"
    splits: bool = False


NETS = {
    # three linear layers: many parameters for each operation
    "mlp": Net(partial(_stack, hidden=(WIDE, WIDE)), splits=True),
    # for what must train in seconds
    "cnn": Net(partial(_stack, widths=((32, 3), (64, 3)), pool_after=(True, True), hidden=(HIDDEN,)), splits=True),
    # a few large kernels, and nearly all parameters in fully connected layers
    "alexnet": Net(partial(_stack, widths=((16, 5), (32, 5), (64, 3)), pool_after=(True, True, True)), splits=True),
    # as VGG-11 with batch norm: 3 x 3 convolutions only, and large fully connected layers
    "vgg": Net(partial(_stack, widths=VGG_WIDTHS, pool_after=(True, True, False, True), norm=True), splits=True),
    "resnet": Net(resnet),
    "lstm": Net(lambda examples: CharacterLSTM(examples.classes), takes="text"),
}


def cannot_split(name: str) -> str | None:
    """Why Dettmers' scheme cannot take it apart here, or None where it can."""
    if "model" not in plugins.loaded().trainers:
        return str(plugins.research_needed('parallel = "model"'))
    able = [name for name, net in NETS.items() if net.splits]
    return None if name in able else f'parallel = "model" cuts apart {", ".join(able)}; got {name}'


def mismatch(name: str, data: str) -> str | None:
    """Why a network cannot learn from a data set, as far as names tell."""
    if name not in NETS or takes(data) in (None, NETS[name].takes):
        return None
    return f"{name} takes {NETS[name].takes}, and {data} is {takes(data)}; put them into grids of their own"


def seeded(make: Callable[[], T], seed: int) -> T:
    """A model whose first weights depend on `seed` alone, whatever was drawn before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def build(name: str, examples: Examples, seed: int = 0) -> nn.Module:
    """A built-in network, or the user's own: a function (of the examples, or of nothing), a class or a module."""
    if name in NETS:
        return seeded(lambda: _joined(NETS[name].make(examples)), seed)
    return seeded(lambda: _own(name, examples), seed)


def halves(name: str, examples: Examples, seed: int = 0) -> Halves:
    """The two parts of a network for Dettmers' scheme; both from the same seed on every rank."""
    parts = seeded(lambda: NETS[name].make(examples), seed)
    assert isinstance(parts, Halves)
    return parts


def _joined(made: nn.Module | Halves) -> nn.Module:
    return made.joined() if isinstance(made, Halves) else made


def _own(name: str, examples: Examples) -> nn.Module:
    make = profiling.find(name)
    if isinstance(make, nn.Module):
        return make
    try:
        made = make(examples) if _wants_one(make) else make()
    except Exception as error:
        raise profiling.ModelError(f"model: {name} failed: {type(error).__name__}: {error}") from error
    if not isinstance(made, nn.Module):
        raise profiling.ModelError(f"model: {name} gives a {type(made).__name__}; an nn.Module is wanted")
    return made


def _wants_one(function: Any) -> bool:
    """Whether a function has a parameter that must be given: it then gets the examples."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(needed) == 1


def parameters_of(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
