"""What trains in the lab: small models of matrices, of convolutions and of attention, and whole ones for GPUs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from narrowcast.bench import training
from narrowcast.predict import profile
from narrowcast_research import models

BATCH = 16


def for_probe(name: str) -> list[str]:
    """What tells `probe` to calibrate with steps of a small model, too."""
    build, shape = SHAPES[name]
    return [f"model={__name__}:{build.__name__}", f"input={shape}"]


def mlp() -> nn.Module:
    """5.8 million parameters in three matrices: few operations for each of them."""
    return nn.Sequential(nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))


def cnn() -> nn.Module:
    """1.1 million parameters, most operations in convolutions, and batch norms with their small tensors."""
    layers: list[nn.Module] = []
    for into, out in ((3, 32), (32, 64), (64, 128), (128, 256)):
        layers += [nn.Conv2d(into, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256 * 4, 640), nn.ReLU(), nn.Linear(640, 100))


class Transformer(nn.Module):
    """3.7 million parameters: embeddings, whose gradient comes last, and four blocks."""

    def __init__(self, words: int = 2000, width: int = 256, blocks: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, blocks, enable_nested_tensor=False)
        self.head = nn.Linear(width, 100)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.words(x)))


class WithLoss(nn.Module):
    """A model whose forward pass ends with a loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return profile.default_loss(self.model(x))


def _task(build: Callable[[], nn.Module], shape: str, size: int = BATCH, bf16: bool = False) -> training.Task:
    """shape: of made data, as `narrowcast profile --input` takes it. size: of a batch."""

    def batch(rank: int) -> training.Batch:
        return (profile.example_batch(nn.Identity(), shape, size),)

    optimizer = partial(torch.optim.SGD, lr=0.0)
    return training.Task(build.__name__, lambda: WithLoss(build()), batch, optimizer, bf16)


SHAPES = {"mlp": (mlp, "784"), "cnn": (cnn, "3x32x32"), "transformer": (Transformer, "int:2000:32")}
SMALL = tuple(SHAPES)
"""Those that processors train."""
MODELS = {
    **{name: _task(*made) for name, made in SHAPES.items()},
    "gpt2": training.GPT2,
    "vgg19": _task(models.vgg19, "3x224x224", 32, bf16=True),
    "resnet50": _task(models.resnet50, "3x224x224", 32, bf16=True),
    "lstm": _task(models.speech_lstm, "100x120", 64),
}
