"""Float32 arithmetic in torch as every kernel does it: what is finite stays finite, and subnormal numbers are kept.

Beside it, as values that travel through every layer, what error feedback adds to an encoding and what becomes of a sum.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

LARGEST = torch.finfo(torch.float32).max
_SUBNORMAL, _ONE = 5e-324, 1.0

P = ParamSpec("P")
T = TypeVar("T")


def keeps_subnormals(function: Callable[P, T]) -> Callable[P, T]:
    """The function, in a calling thread that does not flush subnormals (`torch.set_flush_denormal`), and in it alone:
    torch's other threads keep the mode in which they were started."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if _SUBNORMAL * _ONE != 0.0:
            return function(*args, **kwargs)
        threads = torch.get_num_threads()
        torch.set_flush_denormal(False)
        torch.set_num_threads(1)
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_num_threads(threads)
            torch.set_flush_denormal(True)

    return run


def clamp_overflow(result: Tensor, *operands: Tensor) -> Tensor:
    """`result`, but the largest number where it is too large for float32 and all that it comes from is finite."""
    # one cheap pass shows that nothing is; a device would have to be waited for
    if result.is_cpu and bool(result.sum().isfinite()):
        return result
    finite = torch.stack([x.isfinite() for x in operands]).all(dim=0) if len(operands) > 1 else operands[0].isfinite()
    return torch.where(finite, result.clamp(-LARGEST, LARGEST), result)


@keeps_subnormals
def plus(a: Tensor, b: Tensor) -> Tensor:
    """The sum of two float32 tensors."""
    return clamp_overflow(a + b, a, b)


class Feedback(NamedTuple):
    """Error feedback of one encoding: what earlier roundings removed is added, and then holds what this one removed."""

    residual: Tensor
    """One float32 for each value, in units of `unit`."""
    unit: float = 1.0

    def part(self, values: slice) -> Feedback:
        """The feedback of some of the values."""
        return Feedback(self.residual[values], self.unit)

    @keeps_subnormals
    def add_to(self, values: Tensor) -> Tensor:
        """values + residual * unit, in float32: two roundings."""
        residual = self.residual
        return plus(values.float(), residual if self.unit == 1.0 else clamp_overflow(residual * self.unit, residual))

    @keeps_subnormals
    def keep(self, expected: Tensor, sent: Tensor) -> None:
        """The residual becomes what was expected and not sent, in units; where that is not finite it stays."""
        lost = expected - sent
        lost = lost if self.unit == 1.0 else lost / self.unit
        self.residual.copy_(torch.where(lost.isfinite(), lost, self.residual))


class Finish(NamedTuple):
    """What becomes of a float32 sum: first divided, then multiplied."""

    divide: float = 1.0
    multiply: float = 1.0

    @keeps_subnormals
    def apply(self, total: Tensor) -> Tensor:
        if self.divide != 1.0:
            # by a tensor: a number would be inverted first on a GPU, which rounds twice
            total = clamp_overflow(total / torch.full((), self.divide, device=total.device), total)
        return clamp_overflow(total * self.multiply, total) if self.multiply != 1.0 else total


NO_FINISH = Finish()
"""The sum as it is."""
