"""Rotation: each block times random signs and a Hadamard matrix, so that no value of it stands out.

A block of B = 2**L values is made smaller by 2**-L, so that no sum overflows, given its signs, and mixed: of every two
values 1 apart the lower becomes their sum and the upper their difference, then of every two that lie 2 apart, 4 apart
and so on. What is decoded is mixed in the same order and given the same signs: that is the inverse, since mixing twice
multiplies by B.

A last block of fewer values falls into pieces whose sizes are powers of two, the largest first, and each is mixed by
itself. A piece of 2**k values is made smaller by 2**-ceil((L + k) / 2), so that what comes out is about as large as in
a whole block, whose step it shares; decoding multiplies by what is then missing.

Shapes: N pieces of S values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from narrowcast.kernels.arithmetic import clamp_overflow, plus
from narrowcast.kernels.plan import Transform
from narrowcast.kernels.reference.rounding import random_bits

MIN_ROTATED, MAX_ROTATED = 16, 4096
SIGN_SEED = int.from_bytes(b"rotation", "big")
"""Where signs come from. Nobody draws rounding noise from it but by choosing it."""


@cache
def signs(block: int) -> Tensor:
    """1 or -1 for each place of a block: the lowest of its random bits. The same in every block, so that a block means
    the same wherever a wire was cut."""
    return 1.0 - 2.0 * (random_bits(block, SIGN_SEED, 0) & 1).float()


def _pieces(n: int, block: int) -> Iterator[tuple[slice, int]]:
    """What is mixed by itself: all whole blocks at once, then the pieces of the rest; with the size of each."""
    begin = n // block * block
    if begin:
        yield slice(0, begin), block
    for k in reversed(range(block.bit_length() - 1)):
        if (n % block) >> k & 1:
            yield slice(begin, begin + 2**k), 2**k
            begin += 2**k


def _signs_of(piece: slice, size: int, block: int) -> Tensor:
    return signs(block)[piece.start % block :][:size]


def _exponent(size: int, block: int) -> int:
    """log2 of what a piece is divided by before it is mixed."""
    return (block.bit_length() + size.bit_length() - 1) // 2


def _mixed(x_NS: Tensor) -> Tensor:
    apart, shape = 1, x_NS.shape
    while apart < shape[1]:
        lower, upper = x_NS.view(len(x_NS), -1, 2, apart).unbind(dim=2)
        x_NS = torch.stack([plus(lower, upper), plus(lower, -upper)], dim=2).view(shape)
        apart *= 2
    return x_NS


@dataclass(frozen=True)
class Rotation(Transform):
    """Of blocks of `size` values, a power of two."""

    name: ClassVar[str] = "rot"
    keeps_places: ClassVar[bool] = True
    size: int

    @property
    def block(self) -> int:
        return self.size

    def count(self, n: int) -> int:
        return n

    def forward(self, x: Tensor, side: Tensor) -> Tensor:
        """A value that is not finite spreads to others of its block."""
        y = torch.empty_like(x)
        for piece, size in _pieces(len(x), self.size):
            factor_S = _signs_of(piece, size, self.size) * 2.0 ** -_exponent(size, self.size)
            y[piece] = _mixed(x[piece].view(-1, size) * factor_S).flatten()
        return y

    def inverse(self, kept: Tensor, side: Tensor, n: int) -> Tensor:
        """What is finite stays finite, at each of its sums."""
        x = torch.empty_like(kept)
        for piece, size in _pieces(n, self.size):
            y_NS = _mixed(kept[piece].view(-1, size))
            larger_NS = clamp_overflow(y_NS * (2.0 ** _exponent(size, self.size) / size), y_NS)
            x[piece] = (larger_NS * _signs_of(piece, size, self.size)).flatten()
        return x
