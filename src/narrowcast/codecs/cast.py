"""Plain casts: the tensor's own type, float32, bfloat16, float16."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch

from narrowcast.codecs.base import Codec
from narrowcast.codecs.spec import Spec, write
from narrowcast.kernels import AnyPlan, CastPlan, check_count

DTYPES = {"as-is": None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Cast(Codec):
    """Wire: the values in the named type, little-endian. A finite value that is too large becomes the largest one."""

    name: str = "as-is"

    examples: ClassVar[tuple[str, ...]] = tuple(DTYPES)
    heads: ClassVar[tuple[str, ...]] = tuple(DTYPES)

    @classmethod
    def from_spec(cls, spec: Spec) -> Codec | None:
        if spec.head not in cls.heads:
            return None
        # with fp32 nothing is lost, and what another wire left is sent
        spec.allow({"ef"} if spec.head != "as-is" else (), block=False)
        return cls(name=spec.head, **spec.wishes)

    def __str__(self) -> str:
        return write(self.name, None, None, self.wishes)

    def stored_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return DTYPES[self.name] or dtype

    @property
    def is_identity(self) -> bool:
        return self.name == "as-is"

    @property
    def largest_value(self) -> float:
        return torch.finfo(self.stored_dtype(torch.float32)).max

    @property
    def block(self) -> int:
        return 1

    @property
    def lossless(self) -> bool:
        return self.name in ("as-is", "fp32")

    @property
    def bits_per_value(self) -> float:
        return 8.0 * self.stored_dtype(torch.float32).itemsize

    def nbytes(self, n: int, dtype: torch.dtype = torch.float32) -> int:
        return (n if type(n) is int and n >= 0 else check_count(self, n)) * self.stored_dtype(dtype).itemsize

    def planes(self, n: int, dtype: torch.dtype = torch.float32) -> tuple[tuple[int, int], ...] | None:
        return ((0, self.nbytes(n, dtype)),)

    def plan_for(self, dtype: torch.dtype) -> AnyPlan:
        return _plan(self.stored_dtype(dtype))


@lru_cache
def _plan(dtype: torch.dtype) -> CastPlan:
    """One for each type: kernels keep what they derive on it."""
    return CastPlan(dtype)
