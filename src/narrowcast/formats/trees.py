"""The 8-bit types of Dettmers, "8-Bit Approximations for Parallelism in Deep Learning" (2016), base ten and all.

Bit 7 is the sign. The tables of the paper's code are met to float32 rounding. (`linear8`, the fourth type, is evenly
spaced and lives with the integers.)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from narrowcast.formats.base import Format, as_float32
from narrowcast.formats.registry import register

SIGN_BIT = 128


@dataclass(frozen=True)
class TreeFormat(Format):
    """Seven bits of magnitude under a sign bit."""

    magnitudes: tuple[float, ...]

    bits: ClassVar[int] = 8  # every type of the paper has 8

    @cached_property
    def values(self) -> Tensor:
        positive = torch.tensor(self.magnitudes, dtype=torch.float64)
        return as_float32(torch.cat([positive, -positive]))

    def tie_goes_up(self) -> Tensor:
        # by magnitude, so that -x rounds to minus what x rounds to; between two even or two odd codes, towards zero
        even = self.grid_codes % SIGN_BIT % 2 == 0
        return torch.where(even[1:] == even[:-1], self.boundaries() < 0, even[1:])


def dynamic_tree(code: int) -> float:
    """As the paper's Figure 1 draws it: n zeros, a flag bit, then 6 - n tree bits.

    The two patterns without a tree bit, which the figure gives no value, are zero (code 0, so a wire of zeros is a wire
    of zero bytes) and the largest magnitude (code 1, which must come back exactly; `dynamic8` has a seventh decade
    there instead). The author's kernels number the 126 tree values from 0, then zero and the largest: the number there
    is (code - 2) mod 128, with the same sign bit. They send all below 1.5e-6 to zero; here the nearest value counts.
    """
    if code < 2:
        return float(code)
    tree_bits = code.bit_length() - 1
    decade = 6 - tree_bits
    upper, path = divmod(code - 2**tree_bits, 2 ** (tree_bits - 1))
    centre = (path + 0.5) / 2 ** (tree_bits - 1)
    # the first split of (0.1, 1) is at 0.45, the later ones are even
    return (0.45 + 0.55 * centre if upper else 0.10 + 0.35 * centre) * 10.0**-decade


def static_tree(code: int) -> float:
    """Three exponent bits (10**-5 to 10**2) and four tree bits; the first entry is zero."""
    exponent, leaf = divmod(code, 16)
    root = 0.1 + 0.04375 * leaf if leaf < 8 else 0.45 + 0.0675 * (leaf - 8)
    return root * 10.0 ** (exponent - 5) if code else 0.0


def mantissa(code: int) -> float:
    """Three exponent bits (10**-6 to 10**1) and a mantissa of 0 to 15; many values have several codes."""
    exponent, digit = divmod(code, 16)
    return digit * 10.0 ** (exponent - 6)


DTREE8 = register(TreeFormat("dtree8", tuple(map(dynamic_tree, range(SIGN_BIT)))))
STREE8 = register(TreeFormat("stree8", tuple(map(static_tree, range(SIGN_BIT)))))
MANTISSA8 = register(TreeFormat("mantissa8", tuple(map(mantissa, range(SIGN_BIT)))))
