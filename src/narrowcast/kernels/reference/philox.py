"""The random bits: Philox4x32-7 (Salmon et al. 2011), a function of (seed, stream, element index) and nothing else.

Element i of a tensor takes 16 bits: with i = 128 g + 16 p + l (p < 8, l < 16), the counter is
(c lo, c hi, stream lo, stream hi) with c = 16 g + l, the key is (seed lo, seed hi), and the bits are the low
(p even) or high (p odd) half of output word p // 2. So 16 neighbours come from 16 neighbouring counters, which is what
a vector unit wants.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 7
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF

LANES = 16
PIECES = 8


def _mulhilo(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    # 32 x 32 bits in int64: the sum wraps modulo 2**64, which is what the two halves need
    product = word * multiplier
    return (product >> 32) & MASK, product & MASK


def philox(counters: Tensor, seed: int, stream: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four words of 32 random bits for each 64-bit counter (all held in int64)."""
    c0, c1 = counters & MASK, (counters >> 32) & MASK
    c2, c3 = torch.full_like(c0, stream & MASK), torch.full_like(c0, (stream >> 32) & MASK)
    k0, k1 = seed & MASK, (seed >> 32) & MASK
    for _ in range(ROUNDS):
        hi0, lo0 = _mulhilo(c0, MULTIPLIERS[0])
        hi1, lo1 = _mulhilo(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return c0, c1, c2, c3


def random_bits(n: int, seed: int, stream: int, offset: int = 0, device: torch.device | None = None) -> Tensor:
    """The 16 random bits (int64, 0 to 65535) of elements offset .. offset + n - 1."""
    span = LANES * PIECES
    first = offset // span
    groups = -(-(offset + n) // span) - first
    counters = LANES * first + torch.arange(LANES * groups, device=device)
    words = torch.stack(philox(counters, seed, stream))
    halves = torch.stack([words & 0xFFFF, words >> 16], dim=1).view(PIECES, groups, LANES)
    ordered = halves.permute(1, 0, 2).reshape(-1)
    skip = offset - first * span
    return ordered[skip : skip + n]
