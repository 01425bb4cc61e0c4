"""Formats given by a list of values: the maps of bitsandbytes, nf4, and any table of a user's."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from narrowcast.formats.base import MAX_BITS, Format, as_float32
from narrowcast.formats.registry import register


@dataclass(frozen=True)
class TableFormat(Format):
    """A table of values, `table[code]`. A tie goes to the even code, or down where `ties_down`."""

    table: tuple[float, ...] = field(repr=False)
    ties_down: bool = False

    @property
    def bits(self) -> int:
        return max(1, (len(self.table) - 1).bit_length())

    @cached_property
    def values(self) -> Tensor:
        # a table that does not fill its code space repeats its last value; only the first is ever produced
        missing = 2**self.bits - len(self.table)
        return as_float32(torch.tensor(self.table + self.table[-1:] * missing, dtype=torch.float64))

    def tie_goes_up(self) -> Tensor:
        up = super().tie_goes_up()
        return torch.zeros_like(up) if self.ties_down else up


def Codebook(values: Sequence[float] | Tensor, name: str | None = None) -> TableFormat:
    """A format from any list of up to 65536 finite values; code i stands for `values[i]`.

    It can be used in specs by its `name`, as in `nc.codec("mine/64")`; without one it is named after its content, so
    that `str(codec)` stays readable by `nc.codec` wherever the same table was given.
    """
    table = tuple(torch.as_tensor(values, dtype=torch.float64).flatten().tolist())
    if not 2 <= len(table) <= 2**MAX_BITS:
        raise ValueError(f"Codebook: got {len(table)} values; give 2 to {2**MAX_BITS}")
    if any(not math.isfinite(v) or abs(v) > torch.finfo(torch.float32).max for v in table):
        raise ValueError("Codebook: every value must be a finite float32 number; drop NaN, Inf and larger ones")
    if all(v <= 0 for v in table):
        raise ValueError("Codebook: needs a value above zero, since a block is scaled by its largest magnitude")
    fmt = TableFormat(name or f"codebook{zlib.crc32(repr(table).encode()):08x}", table)
    if len(fmt.grid) < 2:
        raise ValueError("Codebook: all values are equal as float32; give at least two different ones")
    return register(fmt)


def f32(value: float) -> float:
    """The nearest float32. Scalar on purpose: vector code may fuse operations and give other last bits elsewhere."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def _bin_centres(low: float, high: float, bins: int) -> list[float]:
    """Centres of equal bins, with the roundings of torch.linspace on the machines where bitsandbytes makes its map."""
    step = f32((high - low) / bins)
    half = (bins + 1) // 2
    edges = [f32(f32(low) + step * i) if i < half else f32(f32(high) - step * (bins - i)) for i in range(bins + 1)]
    return [f32(f32(a + b) / 2) for a, b in pairwise(edges)]


def dynamic_map(signed: bool, exponent_bits: int = 7, total_bits: int = 8) -> tuple[float, ...]:
    """The dynamic tree map of bitsandbytes: for each decade bin centres of [0.1, 1], twice as many per decade up."""
    positive: list[float] = []
    for i in range(exponent_bits):
        decade = f32(10.0 ** (i - exponent_bits + 1))
        positive += [f32(decade * centre) for centre in _bin_centres(0.1, 1.0, 2**i if signed else 2 ** (i + 1))]
    negative = [-v for v in positive] if signed else []
    table = sorted([*negative, *positive, 0.0, 1.0])
    if len(table) != 2**total_bits:
        raise ValueError(f"dynamic_map: {exponent_bits} exponent bits make {len(table)} values, not 2**{total_bits}")
    return tuple(table)


NF4_TABLE = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""NormalFloat-4 (Dettmers et al. 2023): quantiles of a normal distribution, with an exact zero."""

# bitsandbytes breaks ties downwards; we keep to that here so that codes can be compared one for one
DYNAMIC8 = register(TableFormat("dynamic8", dynamic_map(signed=True), ties_down=True))
UDYNAMIC8 = register(TableFormat("udynamic8", dynamic_map(signed=False), ties_down=True))
NF4 = register(TableFormat("nf4", NF4_TABLE))
