"""Plain casts: the tensor's own type, float32, bfloat16, float16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from narrowcast.codecs.base import Codec
from narrowcast.codecs.spec import Spec, write
from narrowcast.kernels import ops

DTYPES = {"as-is": None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Cast(Codec):
    """Wire: the values in the named type, little-endian. A finite value that is too large becomes the largest one."""

    name: str = "as-is"

    examples: ClassVar[tuple[str, ...]] = tuple(DTYPES)

    @classmethod
    def from_spec(cls, spec: Spec) -> Codec | None:
        if spec.head not in DTYPES:
            return None
        spec.allow({"ef"} if spec.head in ("bf16", "fp16") else (), block=False)
        return cls(feedback="ef" in spec.options, name=spec.head)

    def __str__(self) -> str:
        return write(self.name, None, None, ["ef"] if self.feedback else [])

    def stored(self, own: torch.dtype) -> torch.dtype:
        return DTYPES[self.name] or own

    @property
    def block(self) -> int:
        return 1

    def explain(self) -> list[ops.Choice]:
        return [ops.Choice(op, "cpu", "torch", "") for op in ("encode", "decode")]

    @property
    def lossless(self) -> bool:
        return self.name in ("as-is", "fp32")

    @property
    def bits_per_value(self) -> float:
        return 8.0 * self.stored(torch.float32).itemsize

    def nbytes(self, n: int, dtype: torch.dtype = torch.float32) -> int:
        return n * self.stored(dtype).itemsize

    def _encode(self, x: Tensor, wire: Tensor, seed: int, stream: int, offset: int, scale: Tensor | None) -> None:
        dtype = self.stored(x.dtype)
        aligned = wire if wire.data_ptr() % dtype.itemsize == 0 else torch.empty_like(wire)
        stored = aligned.view(dtype).copy_(x)
        # one cheap pass tells whether anything overflowed, or was not finite to begin with
        if dtype != x.dtype and not bool(stored.sum(dtype=torch.float32).isfinite()):
            stored.copy_(saturating(x, dtype))
        if aligned is not wire:
            wire.copy_(aligned)

    def _decode(self, wire: Tensor, n: int, out: Tensor, accumulate: bool) -> None:
        stored = self.stored(out.dtype)
        aligned = wire if wire.data_ptr() % stored.itemsize == 0 else wire.clone()
        value = aligned.view(stored)
        if accumulate and out.dtype == torch.float32:
            out.add_(value)
            return
        if accumulate:
            value = out.float() + value.float()
        out.copy_(value if value.dtype == out.dtype else saturating(value, out.dtype))


def saturating(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` with finite values cut to what `dtype` holds; Inf and NaN stay."""
    limit = torch.finfo(dtype).max
    if torch.finfo(x.dtype).max <= limit:
        return x
    # in float32: bfloat16 has no 65504, and the number next to it is Inf as float16
    cut = x.float().clamp(-limit, limit)
    return torch.where(x.isinf(), x.float(), cut)
