"""How much a codec loses on a tensor: error_report."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from narrowcast.codecs.base import Codec
from narrowcast.codecs.factors import Matrix, factor_bytes, once_warm
from narrowcast.codecs.registry import codec as codec_named
from narrowcast.kernels import Noise, check_floats

SLACK = 2.0**-20
"""Scales are rounded: the largest value of a block may lie this much beyond what comes back."""


@dataclass(frozen=True)
class ErrorReport:
    """What came back of a tensor. Shares are of all values; errors are over values finite before and after."""

    codec: str
    values: int
    nbytes: int
    bias: float
    """Mean of (decoded - original), in units of the original's root mean square."""
    snr_db: float
    """10 log10 of signal power over error power."""
    relative_error: float
    """L2 norm of the error over L2 norm of the original."""
    mean_absolute_error: float
    mean_squared_error: float
    mean_relative_error: float
    """Mean of |error / original| over non-zero originals."""
    flushed: float
    """Share of values that were not zero and came back as zero."""
    saturated: float
    """Share of finite values beyond the largest that the scale of their block can bring back."""
    nonfinite_in: float
    nonfinite_out: float

    def __str__(self) -> str:
        return (
            f"{self.codec}: {8 * self.nbytes / max(self.values, 1):.3f} bits/value, SNR {self.snr_db:.1f} dB, "
            f"relative error {self.relative_error:.3g}, bias {self.bias:+.2g}, flushed {self.flushed:.2%}, "
            f"saturated {self.saturated:.2%}, non-finite {self.nonfinite_in:.2%} -> {self.nonfinite_out:.2%}"
        )

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def _share(mask: Tensor) -> float:
    return float(mask.double().mean()) if mask.numel() else 0.0


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else (0.0 if part == 0 else math.inf)


def _beyond(x: Tensor, limits: tuple[Tensor, Tensor] | None) -> Tensor:
    """Values beyond what could come back in their place, by more than the roundings of a scale."""
    if limits is None:
        return torch.zeros_like(x, dtype=torch.bool)
    low, high = (limit.double() for limit in limits)
    beyond = (x > high + high.abs() * SLACK) | (x < low - low.abs() * SLACK)
    return x.isfinite() & beyond


def _by_low_rank(x: Tensor, codec: Codec, noise: Noise) -> tuple[Tensor, int]:
    """What comes back, and the bytes of the factors."""
    fit, why = codec.for_shape(x.shape)
    if not fit.rank:
        problem = f"low rank is for matrices, and what has shape {tuple(x.shape)} {why}"
        raise ValueError(f"error_report with {codec}: {problem}; take {fit}, as attach does, or a larger matrix")
    check_floats("error_report", x)
    matrix = Matrix.of(x.shape)
    return once_warm(x.reshape(matrix), codec, noise), factor_bytes(codec, [matrix])


def error_report(x: Tensor, codec: str | Codec, *, seed: int = 0, stream: int = 0) -> ErrorReport:
    """Send `x` through `codec` and say what came back. By low rank: a matrix, that was sent some times before."""
    codec = codec_named(codec)
    if codec.rank:
        came_back, nbytes, limits = *_by_low_rank(x, codec, Noise(seed, stream)), None
    else:
        wire = codec.encode(x, seed=seed, stream=stream)
        came_back, nbytes = codec.decode(wire, x.numel(), dtype=x.dtype), wire.numel()
        limits = codec.limits(wire, x.numel())
    x, y = x.detach().reshape(-1).double(), came_back.double()
    both = x.isfinite() & y.isfinite()
    kept, error = x[both], (y - x)[both]
    signal, noise = float(kept.square().sum()), float(error.square().sum())
    nonzero = kept != 0
    n = max(len(kept), 1)
    return ErrorReport(
        codec=str(codec),
        values=x.numel(),
        nbytes=nbytes,
        bias=_ratio(float(error.sum()) / n, math.sqrt(signal / n)),
        snr_db=10 * math.log10(signal / noise) if signal and noise else (math.inf if not noise else -math.inf),
        relative_error=_ratio(math.sqrt(noise), math.sqrt(signal)),
        mean_absolute_error=float(error.abs().sum()) / n,
        mean_squared_error=noise / n,
        mean_relative_error=float((error[nonzero] / kept[nonzero]).abs().mean()) if bool(nonzero.any()) else 0.0,
        flushed=_share((x != 0) & (y == 0)),
        saturated=_share(_beyond(x, limits)),
        nonfinite_in=_share(~x.isfinite()),
        nonfinite_out=_share(~y.isfinite()),
    )
