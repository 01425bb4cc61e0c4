"""How simulated partial sums are kept: in float32 as ranks do, or in low precision, with Kahan's correction, in pairs.

Q rounds to the accumulator's format as `round_to` does, in units of the scale that the workers agreed on where there is
one (`+aps`; powers of two, so that nothing else is rounded), else in units of 1. With "fp32" it does nothing.

    plain     sum = Q(v0);  sum = Q(sum + v)
    kahan     sum = Q(v0), c = 0;  y = Q(v - c), t = Q(sum + y), c = Q(Q(t - sum) - y), sum = t
    pairwise  neighbours are added, then the sums of neighbours; an odd one waits for the next round
    on a ring sum = P(Q(own + sum)) with P the wire; kahan: y = Q(own - c), t = P(Q(sum + y)), c = Q(Q(t - sum) - y)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from narrowcast.collectives.segments import Range
from narrowcast.formats import Format
from narrowcast.kernels import blocks, plus, round_to


@dataclass(frozen=True)
class SumRule:
    """The rule by which values are added. `unit_n`: what the numbers of the format are multiples of, value by value."""

    format: Format | None = None
    kahan: bool = False
    pairwise: bool = False
    unit_n: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether this is the float32 sum of the collectives, which a decoder adds to directly."""
        return self.format is None and not self.kahan and not self.pairwise

    def rounded(self, x: Tensor, part: Range) -> Tensor:
        """Q."""
        if self.format is None:
            return x
        if self.unit_n is None:
            return round_to(x, self.format)
        unit = self.unit_n[part[0] : part[1]]
        return round_to(x * blocks.inverse(unit), self.format) * unit

    def over(self, part: Range) -> SumRule:
        """The same rule for a tensor that is this part alone."""
        unit = None if self.unit_n is None else self.unit_n[part[0] : part[1]]
        return SumRule(self.format, self.kahan, self.pairwise, unit)

    def begin(self, part: Range) -> RunningSum:
        """A sum of one part to which values are added one after another."""
        return (_Pairs if self.pairwise else _Kahan if self.kahan else RunningSum)(self, part)


class RunningSum:
    """A sum of one part under way."""

    def __init__(self, rule: SumRule, part: Range) -> None:
        self._rule, self._part = rule, part
        self._total: Tensor | None = None

    def add(self, value: Tensor) -> None:
        """`value` may be used again by the caller."""
        total = value if self._total is None else plus(self._total, value)
        self._total = self._q(total.clone() if total is value else total)

    def result(self) -> Tensor:
        if self._total is None:
            raise RuntimeError("internal: nothing was added")
        return self._total

    def _q(self, x: Tensor) -> Tensor:
        return self._rule.rounded(x, self._part)


class _Kahan(RunningSum):
    def __init__(self, rule: SumRule, part: Range) -> None:
        super().__init__(rule, part)
        self._lost: Tensor | None = None

    def add(self, value: Tensor) -> None:
        if self._total is None:
            super().add(value)
            return
        step = self._q(value if self._lost is None else value - self._lost)
        total = self._q(plus(self._total, step))
        self._lost = self._q(self._q(total - self._total) - step)
        self._total = total


class _Pairs(RunningSum):
    """A binary counter of partial sums: log2(W) of them at most."""

    def __init__(self, rule: SumRule, part: Range) -> None:
        super().__init__(rule, part)
        self._open: list[tuple[int, Tensor]] = []

    def add(self, value: Tensor) -> None:
        self._open.append((1, self._q(value.clone())))
        while len(self._open) > 1 and self._open[-1][0] == self._open[-2][0]:
            self._merge()

    def result(self) -> Tensor:
        while len(self._open) > 1:
            self._merge()
        return self._open[0][1]

    def _merge(self) -> None:
        (count, right), (more, left) = self._open.pop(), self._open.pop()
        self._open.append((count + more, self._q(plus(left, right))))


class RingSum:
    """Sums of one part that travel: Kahan's correction travels with them, and knows what the wire lost."""

    def __init__(self, rule: SumRule, part: Range) -> None:
        self._rule, self._part = rule, part
        self._lost: Tensor | None = None
        self._before = self._step = torch.empty(0)

    def add(self, own: Tensor, arrived: Tensor | None) -> Tensor:
        """What is sent on; arrived: None where the way begins."""
        if not self._rule.kahan:
            return self._q(own if arrived is None else plus(own, arrived))
        self._before = torch.zeros_like(own) if arrived is None else arrived
        self._step = self._q(own if self._lost is None else own - self._lost)
        return self._q(plus(self._before, self._step))

    def learn(self, sent: Tensor) -> None:
        """What the wire made of it."""
        if self._rule.kahan:
            self._lost = self._q(self._q(sent - self._before) - self._step)

    def _q(self, x: Tensor) -> Tensor:
        return self._rule.rounded(x, self._part)
