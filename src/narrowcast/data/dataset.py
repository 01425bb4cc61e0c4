"""What a data set is: pictures as bytes, labels, and how to turn them into what a network sees."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Dataset:
    """Training and test examples: pictures N x C x H x W (uint8 as stored, float32 once normalised), labels int64."""

    name: str
    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: int

    def __post_init__(self) -> None:
        for part, x, y in (("train", self.x_train, self.y_train), ("test", self.x_test, self.y_test)):
            if len(x) != len(y):
                raise ValueError(f"{self.name}: {len(x)} pictures but {len(y)} labels in the {part} part")

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each channel over the training pictures, as shares of 255."""
        x = self.x_train.transpose(0, 1).flatten(1)
        means = [channel.double().mean() / 255 for channel in x]
        deviations = [channel.double().std(unbiased=False) / 255 for channel in x]
        return torch.stack(means).float(), torch.stack(deviations).float()

    def normalised(self, device: str | torch.device = "cpu") -> Dataset:
        """Float32 pictures with mean 0 and deviation 1 for each channel of the training part, on `device`."""
        mean, deviation = (v.view(1, -1, 1, 1).to(device) for v in self.statistics())
        x_train, x_test = ((x.to(device).float() / 255 - mean) / deviation for x in (self.x_train, self.x_test))
        return replace(
            self, x_train=x_train, x_test=x_test, y_train=self.y_train.to(device), y_test=self.y_test.to(device)
        )

    def head(self, train: int, test: int | None = None) -> Dataset:
        """The first so many examples of each part."""
        test = test or max(train // 5, 1)
        return replace(
            self,
            x_train=self.x_train[:train],
            y_train=self.y_train[:train],
            x_test=self.x_test[:test],
            y_test=self.y_test[:test],
        )

    def digest(self) -> str:
        """A checksum of the stored bytes, whatever package they came from."""
        digest = hashlib.sha256()
        for x in (self.x_train, self.x_test, self.y_train.to(torch.uint8), self.y_test.to(torch.uint8)):
            digest.update(x.contiguous().view(-1).numpy().data)
        return digest.hexdigest()

    def tensors(self) -> dict[str, Tensor]:
        return {key: getattr(self, key) for key in ("x_train", "y_train", "x_test", "y_test")}
