"""Error feedback across ranks: what each rank's own rounding removed, and what the owner of a shard removed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from narrowcast.collectives.segments import Range, take
from narrowcast.kernels import Feedback


@dataclass
class Residuals:
    """What rounding has removed so far, for one flat tensor. `first` covers all of it, `second` this rank's shard and
    is zero elsewhere.

    `first` counts like a value of this rank, `second` like the result. Both are in units of `unit`: a loss scale, so
    that a residual keeps its meaning when the scale changes.
    """

    first: Tensor
    second: Tensor
    unit: float = 1.0

    @classmethod
    def zeros(cls, numel: int, shots: int = 2, device: torch.device | str | None = None) -> Residuals:
        """Nothing removed yet. A call with one shot (a reduce-scatter) needs no `second`. device: of the values."""
        first = torch.zeros(numel, dtype=torch.float32, device=device)
        return cls(first, first.new_zeros(numel if shots == 2 else 0))

    def over(self, part: Range) -> Residuals:
        """Those of a part, as the whole of a tensor that is this part alone."""
        return Residuals(take(self.first, part), take(self.second, part), self.unit)

    def of(self, shot: int, part: Range) -> Feedback:
        """The residual of a part, which its encoding takes in and renews."""
        return Feedback(take(self.first if shot == 0 else self.second, part), self.unit)

    def added_to(self, values: Tensor, shot: int, part: Range, decay: float = 1.0) -> Tensor:
        """The values of `part` and their residual, in float32: what the encoding should send. decay: the codec's."""
        return values.float() + self.of(shot, part).residual * (self.unit * decay)

    def fold(self, gain: float) -> None:
        """Move `second` into `first`, for calls without a second encoding. gain: values to results."""
        # most often there is nothing to move, and to look is cheaper; a device would have to be waited for
        if self.second.numel() and (self.second.is_cuda or any(map(bool, self.second.aminmax()))):
            # where there is none not even the sign of a zero changes
            self.first.copy_(torch.where(self.second == 0, self.first, self.first + self.second * gain))
            self.second.zero_()

    def empty_into(self, total: Tensor, shot: int) -> Tensor:
        """The float32 `total` with the whole residual, which is zero then, but where the sum is not finite."""
        residual = self.first if shot == 0 else self.second
        return empty_into(total, residual, self.unit) if residual.numel() else total

    def keep(self, exact: Tensor, stored: Tensor, shot: int, part: Range, gain: float = 1.0) -> None:
        """Add what a result of 16 bits does not hold of the float32 one. gain: values to results, over who keeps it."""
        keep_lost(self.of(shot, part)[0], exact, stored, gain, self.unit)


def empty_into(total: Tensor, residual: Tensor, unit: float) -> Tensor:
    """`Residuals.empty_into` on the residual itself."""
    total = torch.where(residual == 0, total, total + residual * unit)
    residual.copy_(torch.where(total.isfinite(), 0.0, residual))
    return total


def keep_lost(residual: Tensor, exact: Tensor, stored: Tensor, gain: float, unit: float) -> None:
    """`Residuals.keep` on the residual itself: of one rank, or of many in rows."""
    if stored.dtype != torch.float32:
        add_lost(residual, exact, stored, gain, unit)


def add_lost(residual: Tensor, exact: Tensor, stored: Tensor, gain: float, unit: float) -> None:
    """Add what `stored` does not hold of `exact`, in units; where that is not finite the residual stays."""
    lost = (exact - stored.float()) * gain / unit
    residual.copy_(torch.where(lost.isfinite(), residual + lost, residual))
