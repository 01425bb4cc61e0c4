"""Tables that let a kernel find the code of a float in one look-up and one compare, exactly.

The top 16 bits of a float32 (sign, exponent, 7 bits of mantissa) choose a bin. Within a bin the index into the format's
grid changes at the few starts that fall there; mostly there is at most one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from narrowcast.formats import Format

BINS = 1 << 16
SIGN_BIN = BINS // 2
INF_BIN = 0x7F80
LOW = 0xFFFF


@dataclass(frozen=True)
class SearchTable:
    """What `nc_format` in csrc/narrowcast.h calls prefix and packed."""

    prefix: Tensor
    """uint16, 65537 entries: the grid index of every float of bin b lies between entries b and b + 1."""
    packed: Tensor | None
    """uint32, 65536 entries: threshold | code below << 16 | code above << 24; None if some bin holds two starts."""


def _pattern_of(x: Tensor) -> Tensor:
    return x.view(torch.int32).long() & 0xFFFFFFFF


def _index_at(fmt: Format, pattern: Tensor) -> Tensor:
    """Grid index of the float with this pattern; beyond infinity the index at the end."""
    last = len(fmt.grid) - 1
    signed = torch.where(pattern >= 2**31, pattern - 2**32, pattern).to(torch.int32)
    index = torch.bucketize(signed.view(torch.float32), fmt.starts, right=True)
    magnitude = pattern & 0x7FFFFFFF
    end = torch.where(pattern >= 2**31, 0, last)
    return torch.where(magnitude >= INF_BIN << 16, end, index)


def _changes(fmt: Format) -> tuple[Tensor, Tensor]:
    """Bin and low half of every pattern at which the index changes, in both halves of the patterns."""
    start = fmt.starts
    rising = _pattern_of(start[start > 0])
    # a negative float leaves index i + 1 just after the start itself; a start at zero counts for -0 too
    falling = _pattern_of(torch.where(start == 0, -0.0, start)[start <= 0]) + 1
    pattern = torch.cat([rising, falling])
    return pattern >> 16, pattern & LOW


def _codes(fmt: Format, index: Tensor, negative: Tensor) -> Tensor:
    code = fmt.grid_codes[index]
    if fmt.negative_zero_code is None:
        return code
    return torch.where(negative & (fmt.grid[index] == 0), fmt.negative_zero_code, code)


def build(fmt: Format) -> SearchTable:
    first = torch.arange(BINS) << 16
    prefix = torch.cat([_index_at(fmt, first), torch.zeros(1, dtype=torch.int64)]).to(torch.uint16)
    where, low = _changes(fmt)
    # a change at the first float of a bin is in the index at that float already
    where, low = where[low > 0], low[low > 0]
    if fmt.bits > 8 or len(where.unique()) < len(where):
        return SearchTable(prefix, None)
    threshold = torch.zeros(BINS, dtype=torch.int64)
    threshold[where] = low
    negative = torch.arange(BINS) >= SIGN_BIN
    below = _codes(fmt, _index_at(fmt, first), negative)
    above = _codes(fmt, _index_at(fmt, first | LOW), negative)
    return SearchTable(prefix, (threshold | below << 16 | above << 24).to(torch.uint32))
