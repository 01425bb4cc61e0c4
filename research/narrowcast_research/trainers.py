"""What a study with `parallel = "model"` trains with."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from narrowcast.parallel import attach, wires
from narrowcast.study import LR, PLAIN, Counted, Examples, Share, counted_of, message_share, models, plain_bytes
from narrowcast_research.dettmers import SubBatchMLP


class ModelParallel:
    """Dettmers' scheme: convolutions by DDP, fully connected layers cut by outputs; activations take the wire."""

    def __init__(self, name: str, examples: Examples, wire: str, algorithm: str) -> None:
        parts = models.halves(name, examples)
        self._trained = any(True for _ in parts.convolutions.parameters())
        self.features: nn.Module = parts.convolutions
        if self._trained:
            self.features = DistributedDataParallel(parts.convolutions)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layers = SubBatchMLP(parts.sizes, wire)
        lossless = wire == PLAIN or not self._trained
        # as the paper: the gradients of the convolutions, small as they are, in the same type
        self._handle = None if lossless else attach(self.features, wire, algorithm=algorithm, min_values=1)
        self._values, self._steps = models.parameters_of(parts.convolutions), 0
        self._wire = wire
        self.optimizer = torch.optim.SGD([*self.features.parameters(), *self.layers.parameters()], lr=LR)

    def step(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        features = self.features(x)
        _, error = self.layers.train_step(features.detach(), y, cross_entropy)
        if self._trained:
            features.backward(error)
        self.optimizer.step()
        self._steps += 1

    def counted(self) -> Counted:
        found = wires.stats(self.layers)
        total = Counted(
            sum(found[f"{way}_sent_bytes"] for way in ("forward", "backward")),
            sum(found[f"{way}_plain_bytes"] for way in ("forward", "backward")),
        )
        if self._handle is not None:
            own = counted_of(self._handle.stats())
            return Counted(total.sent + own.sent, total.plain + own.plain, own.encode, own.decode)
        gradients = self._steps * plain_bytes(self._values)
        return Counted(total.sent + gradients, total.plain + gradients)

    def compressed(self) -> Share:
        """Every activation and every gradient takes the wire, however small."""
        return message_share(self._wire)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.detach()
