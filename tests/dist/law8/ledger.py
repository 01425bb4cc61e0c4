"""What was wanted, what arrived, and how far the two and the residual may be apart."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

UNIT = 2.0**-24
"""Half a unit in the last place of float32, relative."""


class Ledger:
    """Sums in double precision, by parameter.

    The bound: a step adds a rank's value to its residual, takes what was sent from that, adds W values, divides, adds
    the second residual and takes what was sent from it; and a state is the mean of W numbers that are two residuals
    added. Inside of nodes there are four more: a rank adds a residual and takes what was sent from it, adds what is
    left to that of the sum, and takes the result from the sum. That is W + 12 operations a step, and each rounds by
    half a unit in the last place at most. What they round is a sum over ranks: no more than W times the largest
    gradient or residual.
    """

    def __init__(self) -> None:
        self.wanted: dict[str, Tensor] = {}
        self.arrived: dict[str, Tensor] = {}
        self.steps, self.world, self.largest = 0, 1, 0.0

    def count(self, name: str, wanted: Tensor, arrived: Tensor) -> None:
        """A step that the optimizer made."""
        nothing = torch.zeros_like(wanted)
        self.wanted[name] = self.wanted.get(name, nothing) + wanted
        self.arrived[name] = self.arrived.get(name, nothing) + arrived
        self.saw(wanted, self.wanted[name] - self.arrived[name])

    def saw(self, *tensors: Tensor) -> None:
        finite = (t[t.isfinite()] for t in tensors)
        self.largest = max([self.largest, *(float(t.abs().max()) for t in finite if t.numel())])

    @property
    def bound(self) -> float:
        return self.steps * (self.world + 12) * UNIT * self.largest * self.world

    def each(self, change: Callable[[str, Tensor], Tensor]) -> None:
        """Other tensors for the sums: a rank's parts, or the whole."""
        self.wanted, self.arrived = (
            {name: change(name, tensor) for name, tensor in sums.items()} for sums in (self.wanted, self.arrived)
        )

    def wrong(self, residuals: dict[str, Tensor]) -> dict[str, float]:
        """By how much the sums miss each other, where that is more than roundings explain."""
        found = {}
        for name, wanted in self.wanted.items():
            residual = residuals.get(name, torch.zeros(()))
            self.saw(residual.double())
            off = (wanted - self.arrived[name] - residual.double()).abs()
            off = off.nan_to_num(torch.inf, torch.inf)
            if off.numel() and float(off.max()) > self.bound:
                found[name] = float(off.max())
        return found
