"""Three small models that train in the lab: one of matrices, one of convolutions, one of attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

BATCH = 16


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


@dataclass(frozen=True)
class LabModel:
    build: Callable[[], nn.Module]
    shape: str
    """As `narrowcast profile --input` takes it."""


MODELS = {
    "mlp": LabModel(mlp, "784"),
    "cnn": LabModel(cnn, "3x32x32"),
    "transformer": LabModel(Transformer, "int:2000:32"),
}


def build(name: str) -> nn.Module:
    """The model, the same on every rank."""
    torch.manual_seed(0)
    return MODELS[name].build()
