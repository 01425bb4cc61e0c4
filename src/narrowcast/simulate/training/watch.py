"""Policies that watch, for all workers of a simulated world: the numbers that real ranks would add, in rank order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from narrowcast.parallel import policy
from narrowcast.parallel.watch import Watch


class WorldWatch:
    """One policy object that stands for those of all ranks, which decide alike."""

    def __init__(self, gradients: object, workers: int, min_values: int) -> None:
        self._gradients, self._workers = gradients, workers
        self._ranks = [Watch(gradients, min_values) for _ in range(workers)]
        self._together = Watch(gradients, min_values)
        self.active = self._together.active

    def local(self, info: policy.TensorInfo, rows: Sequence[Tensor], step: int) -> None:
        """Every worker's own gradient, before the exchange."""
        for rank, row in zip(self._ranks, rows, strict=True):
            rank.look(info, row, step, "local")

    def mean(self, info: policy.TensorInfo, mean: Tensor, step: int) -> None:
        """What came back: looked at once, and counted for every worker, since all see the same."""
        self._together.look(info, mean, step, "mean")

    def decide(self, step: int) -> None:
        """At the end of a step."""
        seen = [rank.taken() for rank in self._ranks]
        common = self._together.taken()
        everything = [{**own, **common} for own in seen]
        merged = Watch(self._gradients)
        merged.give(everything[0])
        merged.decide(step, lambda _: _in_rank_order([Watch.flat(own) for own in everything]), self._workers)

    def state_dict(self) -> list[dict[str, Any]]:
        return [watcher.state_dict() for watcher in policy.all_watchers(self._gradients)]

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        for watcher, state in zip(policy.all_watchers(self._gradients), states, strict=True):
            watcher.load_state_dict(state)


def _in_rank_order(rows: Sequence[Tensor]) -> Tensor:
    total = torch.zeros_like(rows[0])
    for row in rows:
        total = total + row
    return total
