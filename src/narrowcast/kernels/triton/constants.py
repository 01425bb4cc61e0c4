"""Recipes and jobs as the compiler wants them: every field a compile-time constant, also inside a tuple of sizes."""

from __future__ import annotations

from functools import lru_cache

import triton.language as tl

from narrowcast.kernels.triton import bits
from narrowcast.kernels.triton.recipe import Named

INTERPRETED: bool = bits.INTERPRETED.value


class Constants:
    """The fields of `of`, wrapped."""

    def __init__(self, of: Named) -> None:
        self._of = of

    def __getattr__(self, name: str) -> tl.constexpr:
        value = getattr(self._of, name)
        return tl.constexpr(constants(value) if isinstance(value, Named) else value)

    def __repr__(self) -> str:
        return self._of.name

    def __hash__(self) -> int:
        return hash(self._of)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constants) and other._of == self._of


@lru_cache(maxsize=4096)
def constants(of: Named) -> Constants | Named:
    """What to pass to a kernel. The interpreter wants plain numbers."""
    return of if INTERPRETED else Constants(of)
