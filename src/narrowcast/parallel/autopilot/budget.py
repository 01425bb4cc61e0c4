"""What watching may cost, and whose turn it is to be looked at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SHARE = 0.002
"""Of the time: for looking at gradients, and once more for timing sums."""


class Budget:
    """Steps earn what looks and sums spend. Plain values alone, so that a checkpoint takes them as they are."""

    def __init__(self) -> None:
        self.credit = {"look": 0.0, "sums": 0.0}
        self.cost = {"look": 0.0, "sums": 0.0}
        self.turn, self.first, self.each = 0, 0, 0.0
        self.looks: dict[str, int] = {}
        """How often each tensor was looked at."""
        self.looked: list[str] = []
        """Those whose turn it is at the next beat."""

    def earn(self, spent: Mapping[str, float], seconds: float) -> None:
        """Of steps that took so long together."""
        for kind, cost in spent.items():
            self.credit[kind] += SHARE * seconds - cost
            # what a beat costs at the least, without looks or sums, is not what these cost
            self.cost[kind] = max(cost, self.cost[kind])
        if self.looked:
            self.each = spent["look"] / len(self.looked)

    def may_time_sums(self) -> bool:
        return self.credit["sums"] >= self.cost["sums"]

    def next_look(self, names: Sequence[str], beats: int | None, is_first: bool) -> None:
        """As many tensors as were earned, or all of them every so many beats; and all at first."""
        self.turn += 1
        self.looks |= {name: self.looks.get(name, 0) + 1 for name in self.looked}
        if beats is not None:
            self.looked = list(names) if is_first or self.turn % max(1, beats) == 0 else []
            return
        earned = int(max(0.0, self.credit["look"]) / max(self.each, 1e-9))
        count = len(names) if is_first else min(len(names), earned)
        self.looked = [*names, *names][self.first : self.first + count]
        self.first = (self.first + count) % max(1, len(names))
