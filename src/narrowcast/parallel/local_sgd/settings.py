"""How workers that train by themselves exchange: one object, that `LocalSGD` and the simulator take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from narrowcast.parallel.local_sgd.graph import ALL, KINDS

Outer = Callable[[list[Tensor]], Optimizer]
MERGE = 0.5
"""Of Streaming DiLoCo, where an exchange overlaps with steps."""
VARIANCE_EVERY = 10
"""Exchanges between two looks at the variance, where workers average with neighbours."""


def nesterov(anchors: list[Tensor]) -> Optimizer:
    """The outer optimizer of DiLoCo, with its learning rate and momentum."""
    return torch.optim.SGD(anchors, lr=0.7, momentum=0.9, nesterov=True)


@dataclass(frozen=True)
class LocalUpdates:
    """When what is exchanged, with whom, and what a worker makes of it. docs/local-sgd.md says when to use what.

    every: steps from one exchange of a parameter to its next. fragments: the model's layers in so many parts, exchanged
    in turn. delay: steps that go on while an exchange is under way. merge: the part of its own that a worker keeps when
    the result comes; by default 0, with a delay 0.5. mixing: "all", "ring", "exponential" or "pairs", or a mapping from
    rounds to these, as in {0: "all", 20: "ring"}. consensus: the part of the way to its neighbours that a worker goes;
    by default what the wire bears. variance_every: exchanges between two looks at how far the workers are apart; 0:
    none. outer: makes the outer optimizer of a list of tensors.
    """

    every: int
    fragments: int = 1
    delay: int = 0
    merge: float | None = None
    mixing: str | Mapping[int, str] = ALL
    consensus: float | None = None
    variance_every: int | None = None
    outer: Outer = nesterov

    def __post_init__(self) -> None:
        _at_least(1, "every", self.every, "the number of steps between exchanges")
        _at_least(1, "fragments", self.fragments, "into how many parts the model is cut")
        _at_least(0, "delay", self.delay, "the steps that go on during an exchange")
        _at_least(0, "variance_every", self.variance_every or 0, "the exchanges between two looks; 0 for none")
        if self.fragments > self.every:
            raise ValueError(
                f"LocalSGD: fragments={self.fragments} with every={self.every}; one fragment is exchanged at a step: "
                "take as many steps as fragments, or more"
            )
        if self.delay >= self.every:
            raise ValueError(
                f"LocalSGD: delay={self.delay} with every={self.every}; an exchange ends before the next of the same "
                "parameters begins: take a delay under every"
            )
        if not _is_number(self.own_part) or not 0.0 <= self.own_part <= 1.0:
            raise ValueError(f"LocalSGD: merge={self.merge}; give the part of its own that a worker keeps, 0 to 1")
        if self.consensus is not None and not (_is_number(self.consensus) and 0.0 < self.consensus <= 1.0):
            raise ValueError(f"LocalSGD: consensus={self.consensus}; give a part of the way, above 0 and at most 1")
        _check_rounds(self.mixing)
        _check_mixing(self.rounds)

    @property
    def own_part(self) -> float:
        """What `merge` comes to."""
        if self.merge is not None:
            return self.merge
        return MERGE if self.delay else 0.0

    @property
    def rounds(self) -> Mapping[int, str]:
        """`mixing` by its first round."""
        return {0: self.mixing} if isinstance(self.mixing, str) else dict(sorted(self.mixing.items()))

    @property
    def with_neighbours(self) -> bool:
        """Whether workers ever average with a few others only: then each has anchors of its own."""
        return set(self.rounds.values()) != {ALL}

    @property
    def looks_every(self) -> int:
        """What `variance_every` comes to."""
        if self.variance_every is not None:
            return self.variance_every
        return VARIANCE_EVERY if self.with_neighbours else 0

    @property
    def spelled(self) -> str:
        """What workers compare beside their policies; empty where all is as usual but `every`."""
        plain = {key: value for key, value in vars(self).items() if key != "outer"}
        # in whatever order it was written
        plain["mixing"] = self.mixing if isinstance(self.mixing, str) else self.rounds
        usual = {key: value for key, value in vars(LocalUpdates(1)).items() if key != "outer"}
        return "".join(f", {key}={value}" for key, value in plain.items() if value != usual[key])

    def kind_at(self, round_: int) -> str:
        """With whom a round averages."""
        return [kind for first, kind in self.rounds.items() if first <= round_][-1]

    @property
    def blocks(self) -> bool:
        """Whether exchanges are those of DiLoCo and local SGD: of the whole model, waited for, among all."""
        return self.fragments == 1 and not self.delay and not self.with_neighbours


def _at_least(least: int, name: str, value: object, what: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"LocalSGD: {name}={value}; give {what}, {least} or more")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _check_rounds(mixing: object) -> None:
    """No round is 1.5, nor "3", which would be sorted as text."""
    if isinstance(mixing, str):
        return
    if not isinstance(mixing, Mapping) or not all(type(first) is int for first in mixing):
        raise ValueError(f"LocalSGD: mixing={mixing!r}; take {', '.join(KINDS)}, or a mapping from rounds to these")


def _check_mixing(rounds: Mapping[int, str]) -> None:
    for kind in rounds.values():
        if kind not in KINDS:
            raise ValueError(f"LocalSGD: mixing={kind!r}; take {', '.join(KINDS)}, or a mapping from rounds to these")
    if next(iter(rounds), None) != 0:
        raise ValueError(f"LocalSGD: mixing={dict(rounds)}; the first round must be 0")
    kinds = list(rounds.values())
    if ALL in kinds[1:]:
        raise ValueError(
            f"LocalSGD: mixing={dict(rounds)}; 'all' comes first or not at all, since workers that averaged with a few "
            "have no place in common to count from: call exchange() where all are to meet"
        )
