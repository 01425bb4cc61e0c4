"""Float32 arithmetic in torch as every kernel does it: what is finite stays finite, and subnormal numbers are kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

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


def kept_finite(result: Tensor, *given: Tensor) -> Tensor:
    """`result`, but the largest number where it is too large for float32 and all that it was made of is finite."""
    # one cheap pass tells that nothing is; a device would have to be waited for
    if result.is_cpu and bool(result.sum().isfinite()):
        return result
    finite = torch.stack([x.isfinite() for x in given]).all(dim=0) if len(given) > 1 else given[0].isfinite()
    return torch.where(finite, result.clamp(-LARGEST, LARGEST), result)


@keeps_subnormals
def plus(a: Tensor, b: Tensor) -> Tensor:
    """The sum of two float32 tensors."""
    return kept_finite(a + b, a, b)


@keeps_subnormals
def with_owed(values: Tensor, residual: Tensor, unit: float) -> Tensor:
    """values + residual * unit, in float32: two roundings."""
    owed = residual if unit == 1.0 else kept_finite(residual * unit, residual)
    return plus(values.float(), owed)


@keeps_subnormals
def still_owed(wanted: Tensor, sent: Tensor, unit: float, residual: Tensor) -> Tensor:
    """What was wanted and not sent, in units; where that is not finite, what was owed before."""
    lost = wanted - sent
    lost = lost if unit == 1.0 else lost / unit
    return torch.where(lost.isfinite(), lost, residual)


@keeps_subnormals
def finished(total: Tensor, divide: float, multiply: float) -> Tensor:
    """A float32 sum, divided and multiplied as a reduction says."""
    if divide != 1.0:
        # by a tensor: a number would be inverted first on a GPU, which rounds twice
        total = kept_finite(total / torch.full((), divide, device=total.device), total)
    return kept_finite(total * multiply, total) if multiply != 1.0 else total
