"""What an optimizer does to a weight in one step: as one float32 expression, and as the difference alone.

The expressions are those of torch.optim, operation by operation, so that in float32 the bits are the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Line:
    """w - lr * direction: SGD, momentum, LARS."""

    direction: Tensor
    lr: float

    def moved(self, w: Tensor) -> Tensor:
        return w.add(self.direction, alpha=-self.lr)

    def difference(self, w: Tensor) -> Tensor:
        return self.direction.mul(-self.lr)


@dataclass(frozen=True)
class Quotient:
    """w * (1 - decay) - size * mean / denominator: Adam, AdamW."""

    mean: Tensor
    denominator: Tensor
    size: float
    decay: float

    def moved(self, w: Tensor) -> Tensor:
        start = w.mul(1 - self.decay) if self.decay else w
        return start.addcdiv(self.mean, self.denominator, value=-self.size)

    def difference(self, w: Tensor) -> Tensor:
        step = self.mean.div(self.denominator).mul(-self.size)
        return step.sub(w, alpha=self.decay) if self.decay else step


Move = Line | Quotient
