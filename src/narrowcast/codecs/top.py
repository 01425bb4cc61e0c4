"""`FORMAT/BLOCK+topK`: of each block only the K values of largest magnitude, encoded by FORMAT, and where they were.

Everything else comes back as zero. Wire: that of the inner codec for the K values of each block in their order (one
scale for those K), padded to a multiple of 4 bytes, then the places of each block as `places.py` has them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from narrowcast.codecs.base import Codec
from narrowcast.codecs.cast import Cast
from narrowcast.codecs.places import place_code
from narrowcast.codecs.planned import NvFp4
from narrowcast.codecs.scaled import Scaled
from narrowcast.codecs.spec import BLOCK_MULTIPLE, Spec, declare
from narrowcast.codecs.transformed import Transformed, wishes_of
from narrowcast.kernels import Transform

BLOCKLESS = (*Cast.heads, *Scaled.heads, *NvFp4.heads)
"""What takes no /BLOCK of its own."""
MAX_SIZE = 1 << 16
MAGNITUDE, INFINITE = 0x7FFFFFFF, 0x7F800000


@dataclass(frozen=True)
class TopK(Transform):
    """Of each `size` values the `kept` largest magnitudes; of a last, shorter block as many, or all that there are.

    What is not finite counts as the largest, NaN and Inf alike; of equal ones the first are taken. Where all that was
    kept is not finite more of the block may have been, so all else in the block is NaN; where its side plane is no list
    of places, all of the block is.
    """

    name: ClassVar[str] = "top"

    size: int
    kept: int

    @property
    def block(self) -> int:
        return self.size

    def count(self, n: int) -> int:
        return n // self.size * self.kept + min(self.kept, n % self.size)

    def side_bytes(self, n: int) -> int:
        rest = n % self.size
        whole = n // self.size * place_code(self.kept, self.size).nbytes
        return whole + (place_code(min(self.kept, rest), rest).nbytes if rest else 0)

    def written(self, m: int) -> tuple[int, ...]:
        if not m:
            return 0, 0, 0, 0, 0
        code = place_code(min(self.kept, m), m)
        return code.k, code.low, int(code.bitmap), code.low_bytes, code.high_bytes

    def forward(self, x: Tensor, side: Tensor) -> Tensor:
        whole = len(x) // self.size
        code = place_code(self.kept, self.size)
        cut, last = whole * self.size, whole * code.nbytes
        kept = [take_out(x[:cut].view(whole, -1), self.kept, side[:last])] if whole else []
        if cut < len(x):
            kept.append(take_out(x[cut:].view(1, -1), min(self.kept, len(x) - cut), side[last:]))
        return torch.cat(kept)

    def inverse(self, kept: Tensor, side: Tensor, n: int) -> Tensor:
        whole, rest = divmod(n, self.size)
        code = place_code(self.kept, self.size)
        cut, last = whole * code.nbytes, whole * self.kept
        values = [put_back(kept[:last].view(whole, -1), side[:cut].view(whole, -1), self.size)] if whole else []
        if rest:
            values.append(put_back(kept[last:].view(1, -1), side[cut:].view(1, -1), rest))
        return torch.cat(values)


def largest_places(x_NB: Tensor, k: int) -> Tensor:
    """Where the k largest magnitudes of each block are, ascending; of equal ones the first."""
    # the patterns of magnitudes have their order; what a NaN holds besides differs between machines
    magnitude_NB = (x_NB.contiguous().view(torch.int32) & MAGNITUDE).clamp(max=INFINITE)
    # no two are equal, so that the choice is one
    ranked_NB = (magnitude_NB.long() << 32) + torch.arange(x_NB.shape[1], 0, -1)
    return ranked_NB.topk(k, dim=1).indices.sort(dim=1).values


def take_out(x_NB: Tensor, k: int, side: Tensor) -> Tensor:
    """The k largest of each block, flat; their places into the side plane."""
    place_NK = largest_places(x_NB, k)
    side.copy_(place_code(k, x_NB.shape[1]).write(place_NK).flatten())
    return x_NB.gather(1, place_NK).flatten()


def put_back(kept_NK: Tensor, side_NB: Tensor, size: int) -> Tensor:
    """The values of blocks of `size`, flat."""
    place_NK, right_N = place_code(kept_NK.shape[1], size).read(side_NB)
    lost_N = ~kept_NK.isfinite().any(dim=1)
    rest_N = torch.where(lost_N, math.nan, torch.zeros_like(kept_NK[:, 0]))
    x_NB = rest_N[:, None].repeat(1, size).scatter(1, place_NK, kept_NK)
    return torch.where(right_N[:, None], x_NB, math.nan).flatten()


def _multiple(spec: Spec, of: int, why: str, given: int) -> str:
    return f"with {spec.head} K is a multiple of {of}, {why}; got {given}"


def _example(spec: Spec, option: str) -> str:
    """A spec that is right, as near to this one as it gets."""
    from narrowcast.codecs.registry import codec  # it knows this file, and has all codecs only when it is loaded

    for head in (spec.head, "int2"):
        for kept in (spec.numbers[option], 64):
            try:
                return str(codec(f"{head}/4096+{option}{kept}"))
            except ValueError:
                continue
    raise ValueError(f"internal: int2/4096+{option}64 is no codec")


@dataclass(frozen=True)
class Top(Transformed):
    """The K largest of each block."""

    size: int = 4096
    kept: int = 64

    option: ClassVar[str] = declare(
        "top", "of each block the largest values only", range(1, MAX_SIZE), example=64, transforms=True
    )
    examples: ClassVar[tuple[str, ...]] = (
        *("int2/4096+top64", "int2/4096+top64+ef95", "bf16/4096+top64", "fp32/4096+top41", "int8/256+top16+sr"),
        *("fp16/64+top32", "e4m3fn/1024+top48+sbf16", "e2m1fn/512+top32+se8m0"),
    )

    @classmethod
    def inner_spec(cls, spec: Spec) -> Spec:
        kept = spec.numbers[cls.option]
        if spec.scale is not None or "aps" in spec.options:
            problem = f"+{cls.option} has a scale for each block; write /BLOCK instead of @SCALE and +aps"
            raise spec.error(f"{problem}, for example {_example(spec, cls.option)}")
        if spec.block is None:
            raise spec.error(f"+{cls.option} needs a block size, for example {_example(spec, cls.option)}")
        size = spec.block
        if size > MAX_SIZE:
            raise spec.error(f"+{cls.option} takes a BLOCK of up to {MAX_SIZE}, got {size}")
        if kept >= size:
            problem = f"+{cls.option}{kept} keeps less than the block; give a number below {size}"
            raise spec.error(f"{problem}, or a larger block, for example {_example(spec, cls.option)}")
        rest = super().inner_spec(spec)
        if spec.head in BLOCKLESS:
            return replace(rest, block=None)
        if kept % BLOCK_MULTIPLE:
            raise spec.error(_multiple(spec, BLOCK_MULTIPLE, "so that each block ends on a byte", kept))
        return replace(rest, block=kept)

    @classmethod
    def from_inner(cls, spec: Spec, inner: Codec) -> Transformed:
        kept = spec.numbers[cls.option]
        if inner.is_identity or not inner.block:
            raise spec.error(
                f"+{cls.option} does not go with {spec.head}; take fp32, bf16, fp16 or a format with blocks, for "
                f"example int4/4096+{cls.option}64"
            )
        if kept % inner.block:
            raise spec.error(_multiple(spec, inner.block, "which share a scale", kept))
        return cls(**wishes_of(spec), inner=inner, size=spec.need_block(), kept=kept)

    @property
    def sends_all(self) -> bool:
        return False

    @property
    def option_text(self) -> str:
        return f"{self.option}{self.kept}"

    @property
    def written_block(self) -> int:
        return self.size

    @property
    def transform(self) -> Transform:
        return TopK(self.size, self.kept)
