"""Where stochastic rounding takes its bits: one value that travels with an encoding, never hidden state.

The bits of element i are those that Philox gives for the key `seed`, the `stream` and the index `offset + i`
(`kernels.reference.rounding`). Two encodings share noise only where seed and stream agree and their indices meet, so
whoever encodes several things derives a noise for each: errors that should average out would add up otherwise.
"""

from __future__ import annotations

from typing import NamedTuple

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15

ALIGNMENT = 16
"""`offset` is a multiple of this, as blocks are."""


def _mix(x: int) -> int:
    """The finaliser of splitmix64 (Steele et al. 2014): a permutation of 64-bit integers in which every bit spreads."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def derive(seed: int, *words: int) -> int:
    """A 64-bit seed for each path of integers, such as (step, site, call); `derive(seed)` is not `seed` itself."""
    state = _mix((seed + GOLDEN) & MASK)
    for word in words:
        # added, not xored with a mixed word: two equal numbers in a row would cancel
        state = _mix((state + word + GOLDEN) & MASK)
    return state


def as_signed(word: int) -> int:
    """64 bits as the signed integer that torch ops and GPU kernels take."""
    return word - 2**64 if word >= 2**63 else word


def as_unsigned(word: int) -> int:
    """The inverse."""
    return word % 2**64


class Noise(NamedTuple):
    """The random bits of one encoding."""

    seed: int = 0
    stream: int = 0
    offset: int = 0

    def derive(self, *path: int) -> Noise:
        """The noise of a part of what this one stands for, which no other path of integers has."""
        return Noise(self.seed, derive(self.stream, *path))

    def part(self, first: int) -> Noise:
        """The noise of those values of a tensor that begin at `first`; parts that do not overlap share nothing.

        Where a tensor is cut between blocks a value keeps its bits. A part that begins elsewhere cannot: it would have
        to begin at the next multiple of 16, where another part may be.
        """
        return Noise(self.seed, self.stream, first) if first % ALIGNMENT == 0 else self.derive(first)

    def after(self, count: int) -> Noise:
        """The noise of the values that come so many later in the same tensor; `count` is a multiple of 16."""
        return Noise(self.seed, self.stream, self.offset + count)


NO_NOISE = Noise()
"""Of whoever gives none."""
