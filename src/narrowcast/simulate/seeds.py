"""Seeds from seeds: noise is a function of numbers that the caller knows, never of hidden state.

`derive(seed, step, site, call)` names one draw. Two draws share noise only where all numbers agree.
"""

from __future__ import annotations

MASK = 2**64 - 1
LOWERED, MASTER, OPTIMIZER = 2**40, 2**40 + 1, 2**40 + 2
"""The first word of who draws, so that all may be given one seed."""


def _mixed(x: int) -> int:
    """The finaliser of splitmix64 (Steele et al. 2014): a permutation of 64-bit integers in which every bit spreads."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def derive(seed: int, *words: int) -> int:
    """A 64-bit seed for each path of integers; `derive(seed)` is not `seed` itself."""
    state = _mixed((seed + 0x9E3779B97F4A7C15) & MASK)
    for word in words:
        # added, not xored with a mixed word: two equal numbers in a row would cancel
        state = _mixed((state + word + 0x9E3779B97F4A7C15) & MASK)
    return state
