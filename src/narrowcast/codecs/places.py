"""Which k of m places of a block are taken, in bytes whose number follows from k and m.

| where | bytes |
|---|---|
| all are taken (k = m) | none |
| a bitmap is no larger than the next | bit i of the string is 1 where place i is taken: ceil(m / 8) |
| else Elias-Fano, l = floor(log2(m / k)) | ceil(k l / 8) and ceil((k + ((m - 1) >> l)) / 8) |

Elias-Fano: the lower l bits of each place in ascending order, as codes of l bits; then a string of bits in which bit
j + (place j >> l) is 1 for each j from 0 to k - 1. Both strings end on a byte, with zero bits; bit k of a string is bit
k mod 8 of byte k div 8. Bytes in which there are not k ascending places below m are nobody's: `read` tells.

Shapes: N blocks, K places, L bits of each below, U bits above.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class PlaceCode:
    """How k of m places are written; all of it follows from k and m."""

    k: int
    m: int
    low: int
    """Bits of a place that stand apart; 0 also where there is a bitmap."""
    bitmap: bool

    @property
    def low_bytes(self) -> int:
        return -(-self.k * self.low // 8)

    @property
    def high_bytes(self) -> int:
        if self.k == self.m:
            return 0
        return -(-(self.m if self.bitmap else self.k + ((self.m - 1) >> self.low)) // 8)

    @property
    def nbytes(self) -> int:
        return self.low_bytes + self.high_bytes

    def write(self, place_NK: Tensor) -> Tensor:
        """The bytes of each block, N x nbytes; places ascend."""
        if self.k == self.m:
            return torch.empty(len(place_NK), 0, dtype=torch.uint8)
        low_NKL = (place_NK[:, :, None] >> torch.arange(self.low)) & 1
        bit_NK = place_NK if self.bitmap else (place_NK >> self.low) + torch.arange(self.k)
        high_NU = torch.zeros(len(place_NK), 8 * self.high_bytes, dtype=torch.long).scatter_(1, bit_NK, 1)
        return torch.cat([as_bytes(low_NKL.flatten(1)), as_bytes(high_NU)], dim=1)

    def read(self, bytes_NB: Tensor) -> tuple[Tensor, Tensor]:
        """The places of each block, and whether its bytes hold any; where they do not, the first k are named."""
        first_K = torch.arange(self.k)
        if self.k == self.m:
            return first_K.expand(len(bytes_NB), -1), torch.ones(len(bytes_NB), dtype=torch.bool)
        low_NL, high_NU = as_bits(bytes_NB[:, : self.low_bytes]), as_bits(bytes_NB[:, self.low_bytes :])
        right_N = high_NU.sum(dim=1) == self.k
        some_U = (torch.arange(8 * self.high_bytes) < self.k).long()
        bit_NK = torch.where(right_N[:, None], high_NU, some_U).nonzero()[:, 1].view(-1, self.k)
        place_NK = bit_NK
        if not self.bitmap:
            low_NKL = low_NL[:, : self.k * self.low].view(-1, self.k, self.low)
            place_NK = ((bit_NK - first_K) << self.low) + (low_NKL << torch.arange(self.low)).sum(dim=2)
        right_N = right_N & (place_NK.diff(dim=1) > 0).all(dim=1) & (place_NK[:, -1] < self.m)
        return torch.where(right_N[:, None], place_NK, first_K), right_N


def place_code(k: int, m: int) -> PlaceCode:
    """The smaller way to write k of m places, 1 <= k <= m. A compiler's unknown sizes become known here."""
    return _place_code(int(k), int(m))


@cache
def _place_code(k: int, m: int) -> PlaceCode:
    code = PlaceCode(k, m, (m // k).bit_length() - 1, bitmap=False)
    bitmap = PlaceCode(k, m, 0, bitmap=True)
    return bitmap if k == m or bitmap.nbytes <= code.nbytes else code


def as_bytes(string_NU: Tensor) -> Tensor:
    """Bits, lowest first, as bytes."""
    filled_NU = torch.nn.functional.pad(string_NU, (0, -string_NU.shape[1] % 8))
    eight_NB8 = filled_NU.view(len(string_NU), filled_NU.shape[1] // 8, 8)
    return (eight_NB8 << torch.arange(8)).sum(dim=2).to(torch.uint8)


def as_bits(bytes_NB: Tensor) -> Tensor:
    return ((bytes_NB.long()[:, :, None] >> torch.arange(8)) & 1).flatten(1)
