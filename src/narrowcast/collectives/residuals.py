"""Error feedback across ranks: what each rank's own rounding removed, and what the owner of a shard removed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from narrowcast.collectives.segments import Range
from narrowcast.kernels import Feedback


@dataclass
class Residuals:
    """What is still owed, for one flat tensor. `first` covers all of it, `second` is zero but in this rank's shard.

    Both are in units of `unit`: a loss scale, so that what is owed keeps its meaning when the scale changes.
    """

    first: Tensor
    second: Tensor
    unit: float = 1.0

    @classmethod
    def zeros(cls, numel: int, shots: int = 2, device: torch.device | str | None = None) -> Residuals:
        """Nothing owed. A call with one shot (a reduce-scatter) needs no `second`. device: that of the values."""
        return cls(torch.zeros(numel, device=device), torch.zeros(numel if shots == 2 else 0, device=device))

    def fold(self, gain: float) -> None:
        """Let `first` owe what `second` does, for calls without a second encoding. gain: values to results."""
        if self.second.numel():
            # where nothing is owed not even the sign of a zero changes
            self.first.copy_(torch.where(self.second == 0, self.first, self.first + self.second * gain))
            self.second.zero_()

    def pay(self, total: Tensor, shot: int) -> Tensor:
        """The float32 `total` and all that is owed to it; nothing is, then, but where that is not finite."""
        owed = self.first if shot == 0 else self.second
        if owed.numel():
            total = torch.where(owed == 0, total, total + owed * self.unit)
            owed.copy_(torch.where(total.isfinite(), 0.0, owed))
        return total

    def keep(self, exact: Tensor, stored: Tensor, shot: int, part: Range, gain: float = 1.0) -> None:
        """Owe what a result of 16 bits does not hold of the float32 one. gain: values to results, over who owes it."""
        if stored.dtype != torch.float32:
            owed = self._owed(shot, part)
            lost = (exact - stored.float()) * gain / self.unit
            owed.copy_(torch.where(lost.isfinite(), owed + lost, owed))

    def owed(self, shot: int, part: Range) -> Feedback:
        """What a part's encoding takes in and renews."""
        return Feedback(self._owed(shot, part), self.unit)

    def wanted(self, values: Tensor, shot: int, part: Range) -> Tensor:
        """What should be sent: the values of `part` and what is owed there, in float32."""
        return values.float() + self._owed(shot, part) * self.unit

    def _owed(self, shot: int, part: Range) -> Tensor:
        return (self.first if shot == 0 else self.second)[part[0] : part[1]]
