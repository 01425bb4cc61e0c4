"""The names and arguments of CPD, QPyTorch (qtorch) and mptorch, on our rounding.

What differs from those libraries is what they get wrong: `x` is never changed, nearest ties go to even, subnormals are
kept, NaN and Inf survive, and noise follows from `seed`. CPD's own corner cases are there with `rules="cpd"`. qtorch
gives formats no Inf: its e5m2 reaches 114688; write `FloatingPoint(5, 2, finite=True)` for the finite-only variant.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from narrowcast.formats import Format
from narrowcast.formats import format as format_named
from narrowcast.simulate.precision.casts import Caster, Quantizer, cast, caster


def _float_name(exp: int, man: int, finite: bool = False) -> str:
    if (exp, man) == (8, 23):
        return "fp32"
    suffix = ("f" if 1 + exp + man >= 8 else "fn") if finite else ""
    return f"e{exp}m{man}{suffix}"


@dataclass(frozen=True)
class FloatingPoint:
    """qtorch's number: `exp` exponent and `man` mantissa bits."""

    exp: int
    man: int
    finite: bool = False

    @property
    def caster(self) -> Caster:
        return caster(_float_name(self.exp, self.man, self.finite))


@dataclass(frozen=True)
class FixedPoint:
    """qtorch's number: `wl` bits in all, `fl` of them binary places, saturating."""

    wl: int
    fl: int

    @property
    def caster(self) -> Caster:
        return Caster(fixed_format(self.wl, self.fl))


@dataclass(frozen=True)
class BlockFloatingPoint:
    """qtorch's number: `wl` bits (sign included) under one power of two for the tensor, or each slice along `dim`."""

    wl: int
    dim: int = -1


Number = FloatingPoint | FixedPoint | BlockFloatingPoint


def fixed_format(wl: int, fl: int) -> Format:
    """Two's complement with `wl` bits, `fl` of them after the point."""
    return format_named(f"fixed{wl - fl}.{fl}")


def float_quantize(
    x: Tensor, exp: int, man: int, rounding: str = "nearest", *, seed: int | None = None, rules: str = "ieee"
) -> Tensor:
    """CPD's and qtorch's cast to a float with `exp` and `man` bits; the gradient passes straight through."""
    return cast(x, _float_name(exp, man), rounding=rounding, seed=seed, rules=rules)


def fixed_point_quantize(x: Tensor, wl: int, fl: int, rounding: str = "nearest", *, seed: int | None = None) -> Tensor:
    """qtorch's cast to fixed point; the gradient passes straight through."""
    return cast(x, fixed_format(wl, fl), rounding=rounding, seed=seed)


def block_quantize(x: Tensor, wl: int, dim: int = -1, rounding: str = "nearest", *, seed: int | None = None) -> Tensor:
    """qtorch's block floating point: the largest magnitude of the tensor (or slice along `dim`) sets the exponent.

    Every value becomes a multiple of 2**(e - wl + 2), e being that exponent, clamped to `wl` bits.
    """
    if not 2 <= wl <= 16:
        raise ValueError(f"block_quantize: wl counts bits, from 2 to 16, got {wl}")
    others = [d for d in range(x.dim()) if d != dim % x.dim()] if dim != -1 and x.dim() else []
    size = x.detach().abs()
    largest = size.amax(dim=others, keepdim=True) if dim != -1 else size.amax()
    exponent = torch.frexp(torch.where(largest > 0, largest, 1.0))[1] - 1
    scale = torch.ldexp(torch.ones_like(largest), exponent)
    return cast(x / scale, fixed_format(wl, wl - 2), rounding=rounding, seed=seed) * scale


def quantizer(
    forward_number: Number | None = None,
    backward_number: Number | None = None,
    forward_rounding: str = "stochastic",
    backward_rounding: str = "stochastic",
    *,
    seed: int = 0,
) -> Quantizer:
    """qtorch's factory: a module that casts activations forward and gradients backward. Block numbers are refused."""
    formats: list[Format | None] = []
    for number in (forward_number, backward_number):
        if isinstance(number, BlockFloatingPoint):
            raise NotImplementedError("quantizer: for block floating point give a codec to Quantizer, as 'int8/256'")
        formats.append(None if number is None else number.caster.format)
    roundings = {"forward_rounding": forward_rounding if forward_number else None}
    roundings |= {"backward_rounding": backward_rounding if backward_number else None}
    return Quantizer(*formats, **roundings, seed=seed)
