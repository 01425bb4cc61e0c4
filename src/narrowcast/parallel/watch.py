"""What runs a watching policy: collects what each rank saw, adds it over the ranks, lets the policy decide."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from narrowcast.parallel import policy
from narrowcast.parallel.policy import TensorInfo, Watching

Sum = Callable[[Tensor], Tensor]
"""Adds a small float32 vector over the ranks, in rank order: the same bits on every rank."""


Seen = dict[str, tuple[Watching, tuple[float, ...]]]
"""By tensor: who looked, and what it saw."""


class Watch:
    """One rank's view. `look` may be called from any thread; `decide` before the next step's first choice."""

    def __init__(self, gradients: object, min_values: int = policy.MIN_VALUES) -> None:
        self._policy, self._min_values = gradients, min_values
        self.active = bool(policy.all_watchers(gradients))
        self._seen: Seen = {}
        self._lock = threading.Lock()

    def look(self, info: TensorInfo, gradient: Tensor, step: int, at: str) -> None:
        """Show a gradient to whoever decides on it, where that one looks at this stage (`local` or `mean`)."""
        watcher = policy.watcher_of(self._policy, info, step)
        if watcher is None or watcher.looks_at != at or not watcher.due(step):
            return
        if info.numel < self._min_values:
            return  # too small to be compressed, so nothing is decided on it
        numbers = watcher.look(info, gradient)
        with self._lock:
            self._seen[info.name] = watcher, numbers

    def decide(self, step: int, add: Sum, world: int) -> None:
        """Let every policy that saw something draw its conclusions from the sums over all ranks. Collective."""
        seen = self.taken()
        if not seen:
            return
        sums, agreed = add(self.flat(seen)).tolist(), dict[str, tuple[float, ...]]()
        for name in sorted(seen):
            count = len(seen[name][1])
            agreed[name], sums = tuple(sums[:count]), sums[count:]
        for watcher in _once(seen[name][0] for name in sorted(seen)):
            watcher.decide(step, {n: agreed[n] for n in agreed if seen[n][0] is watcher}, world)

    def taken(self) -> Seen:
        """What was seen since the last time, handed over."""
        seen, self._seen = self._seen, {}
        return seen

    def give(self, seen: Seen) -> None:
        self._seen = seen

    @staticmethod
    def flat(seen: Seen) -> Tensor:
        """All numbers in one vector, in the order of the tensors' names."""
        return torch.tensor([number for name in sorted(seen) for number in seen[name][1]], dtype=torch.float32)

    @staticmethod
    def guarded(act: Callable[[], None]) -> BaseException | None:
        """For callers that must not raise: what went wrong in a policy, or None."""
        try:
            act()
        except Exception as error:  # noqa: BLE001  a policy may be anyone's; the error is handed on, not swallowed
            return error
        return None


def _once(watchers: Iterable[Watching]) -> list[Watching]:
    """Each policy object once, in the order of the first tensor that it decides on."""
    return list({id(watcher): watcher for watcher in watchers}.values())
