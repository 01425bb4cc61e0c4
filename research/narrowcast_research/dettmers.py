"""Dettmers' scheme (2016): convolutions data parallel, fully connected layers model parallel in sub-batches.

Every rank runs the convolutions on its own part of the batch, a sub-batch. The fully connected layers are cut by
outputs: each rank has some columns of every layer and computes them for all sub-batches, one after another. So their
weights never travel; what travels, in 8 bits, are activations and error activations (the gradients of activations).
While one sub-batch is computed the next one is on the wire: the features of the convolutions, the activations between
layers, and the errors on their way back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn

from narrowcast.collectives import Work, api, channel_of
from narrowcast.parallel import tensor, wires

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass
class _Coming:
    """A tensor under way, and how to put it together when it is here."""

    work: wires.Sending | None
    finish: Callable[[], Tensor]

    def get(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.finish()


class SubBatchMLP(nn.Module):
    """Fully connected layers cut by outputs over the ranks of a group, with ReLU between them.

    sizes: features in, hidden sizes, outputs, of the whole layers. forward and backward: the specs of activations and
    of error activations. All ranks draw the initial weights of whole layers from torch's generator: seed it alike.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        forward: wires.Spec = "as-is",
        backward: wires.Spec | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        count = len(sizes) - 1
        if count < 1:
            raise ValueError(f"SubBatchMLP: sizes={list(sizes)}; give at least the features in and the outputs")
        names = ["features", *[f"layer {number}" for number in range(count)]]
        self.wires = [wires.Wires(forward, backward, group=group, name=name, seed=seed) for name in names]
        for place in self.wires:
            wires.remember(self, place)
        self.group, self.rank, self.world = self.wires[0].group, self.wires[0].rank, self.wires[0].world
        self.shards = [tensor.shard_sizes(size, self.world) for size in sizes[1:]]
        whole = [nn.Linear(inputs, outputs) for inputs, outputs in pairwise(sizes)]
        self.layers = nn.ModuleList(map(self._cut, whole, self.shards))

    def _cut(self, whole: nn.Linear, shards: list[int]) -> nn.Linear:
        """This rank's outputs of a layer."""
        low = sum(shards[: self.rank])
        own = nn.utils.skip_init(nn.Linear, whole.in_features, shards[self.rank])
        with torch.no_grad():
            own.weight.copy_(whole.weight[low : low + shards[self.rank]])
            own.bias.copy_(whole.bias[low : low + shards[self.rank]])
        return own

    def _computed(self, number: int, x: Tensor) -> Tensor:
        y = self.layers[number](x)
        return y.relu() if number < len(self.layers) - 1 else y

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """The outputs for inputs that all ranks have; for evaluation, no gradient goes back."""
        for number in range(len(self.layers)):
            x = self._gathered(number, self._computed(number, x)).get()
        return x

    def train_step(
        self, features: Tensor, labels: Tensor, loss: Loss, after_sub_batch: Callable[[], None] | None = None
    ) -> tuple[float, Tensor]:
        """Forward and backward of all sub-batches. features, labels: this rank's, as many rows on every rank.

        Returns the mean loss and the gradient of `features`; the layers' gradients are added to their parameters. All
        are those of the mean loss over the global batch, but the features' times the number of ranks: DDP, which has
        the convolutions, divides by it.

        after_sub_batch: called after the backward pass of each sub-batch, to update the layers K times a step, as the
        paper allows. The gradients are then those of the sub-batch's own mean loss, and only the features of the next
        sub-batches travel meanwhile. Without it all sub-batches go through a layer before any goes through the next.
        """
        tensor.check_activation(features)
        everyone = self._labels(labels)
        coming = [self._distributed(features, owner) for owner in range(self.world)]
        together = [list(range(self.world))] if after_sub_batch is None else [[owner] for owner in range(self.world)]
        total = 0.0
        found: dict[int, _Coming] = {}
        for owners in together:
            value, errors = self._passes(owners, coming, everyone, loss)
            total += value
            found |= errors
            if after_sub_batch is not None:
                after_sub_batch()
        gradient = found[self.rank].get()
        for owner, error in found.items():
            if owner != self.rank:
                error.get()
        return total / self.world, gradient if after_sub_batch is not None else gradient * self.world

    def _passes(
        self, owners: list[int], coming: list[_Coming], labels: list[Tensor], loss: Loss
    ) -> tuple[float, dict[int, _Coming]]:
        """Some sub-batches through all layers and back; the sum of their losses, and the errors of their features."""
        waiting = {owner: coming[owner] for owner in owners}
        tape: list[dict[int, tuple[Tensor, Tensor]]] = []
        for number in range(len(self.layers)):
            passed = {}
            for owner in owners:
                x = waiting[owner].get().requires_grad_()
                y = self._computed(number, x)
                passed[owner] = x, y
                waiting[owner] = self._gathered(number, y.detach())
            tape.append(passed)
        total, errors = 0.0, {}
        for owner in owners:
            value, errors[owner] = self._loss(waiting[owner].get(), labels[owner], loss, len(owners))
            total += value
        for number in reversed(range(len(self.layers))):
            for owner in owners:
                x, y = tape[number].pop(owner)
                y.backward(errors[owner].get())
                assert x.grad is not None
                errors[owner] = self._reduced(number, x.grad, owner)
        return total, errors

    def _loss(self, outputs: Tensor, labels: Tensor, loss: Loss, count: int) -> tuple[float, _Coming]:
        """All ranks have all outputs and compute the same loss; each goes back from its own outputs."""
        outputs.requires_grad_()
        value = loss(outputs, labels)
        (value / count).backward()
        if outputs.grad is None:
            raise ValueError("SubBatchMLP: the loss does not depend on the outputs; compute it from its first argument")
        error = outputs.grad.split(self.shards[-1], dim=1)[self.rank].contiguous()
        return float(value.detach()), _Coming(None, lambda: error)

    def _labels(self, labels: Tensor) -> list[Tensor]:
        """Everyone's labels, as they are."""
        everyones = channel_of(self.group).gather(labels.cpu(), "labels of sub-batches", rows=len(labels))
        return [theirs.to(labels.device) for theirs in everyones]

    def _distributed(self, features: Tensor, owner: int) -> _Coming:
        """The features of one rank to all of them."""
        x = features.detach().clone() if owner == self.rank else torch.empty_like(features)
        if self.world == 1:
            return _Coming(None, lambda: x)

        def call(turn: wires.Turn) -> Work | None:
            return api.broadcast(
                x, turn.codec, group=self.group, group_src=owner, async_op=True, step=turn.step, seed=turn.seed
            )

        sent = (self.world - 1) * x.numel() * x.element_size() if owner == self.rank else 0
        return _Coming(self.wires[0].start(wires.Direction.FORWARD, call, x.numel(), sent), lambda: x)

    def _gathered(self, number: int, y: Tensor) -> _Coming:
        """The outputs of a layer on every rank, put together."""
        if self.world == 1:
            return _Coming(None, lambda: y)
        own = y.contiguous()
        parts = [own.new_empty(len(own), size) for size in self.shards[number]]

        def call(turn: wires.Turn) -> Work | None:
            return api.all_gather(parts, own, turn.codec, self.group, async_op=True, step=turn.step, seed=turn.seed)

        sent = (self.world - 1) * own.numel() * own.element_size()
        work = self.wires[number + 1].start(wires.Direction.FORWARD, call, own.numel(), sent)
        return _Coming(work, lambda: torch.cat(parts, dim=1))

    def _reduced(self, number: int, error: Tensor, owner: int) -> _Coming:
        """The sum of all ranks' errors of a layer's input: each rank's own outputs of the layer before, or, of the
        features, all of it to the rank whose they are."""
        if self.world == 1:
            return _Coming(None, lambda: error)
        if number:
            parts = [part.contiguous() for part in error.split(self.shards[number - 1], dim=1)]
        else:
            parts = [error if rank == owner else error[:0] for rank in range(self.world)]
        own = torch.empty_like(parts[self.rank])

        def call(turn: wires.Turn) -> Work | None:
            sum_, group = dist.ReduceOp.SUM, self.group
            return api.reduce_scatter(
                own, parts, turn.codec, sum_, group, async_op=True, step=turn.step, seed=turn.seed
            )

        sent = (error.numel() - own.numel()) * error.element_size()
        work = self.wires[number].start(wires.Direction.BACKWARD, call, error.numel(), sent)
        return _Coming(work, lambda: own)
