"""Ranges of one flat tensor <-> messages, whatever the codec.

A codec with blocks runs over the flat whole and may be cut between blocks. A codec with one scale for a tensor runs
over each segment (parameter tensor) by itself: in the first shot with the scale of the whole segment, later with the
scale of the piece at hand, or with the scale that all ranks agreed on (APS).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.codecs import codec as codec_named
from narrowcast.kernels import (
    ALIGNMENT,
    NO_FINISH,
    NO_NOISE,
    Feedback,
    Finish,
    Noise,
    keeps_subnormals,
    plus,
    runs_over_host,
)

Range = tuple[int, int]
Scales = Sequence[Tensor | None] | None
"""One scale for each segment, for codecs with one scale for a tensor; None: each piece finds its own."""


@dataclass
class Times:
    """Seconds spent encoding and decoding, and of the bytes that were sent those that stayed inside a node."""

    encode: float = 0.0
    decode: float = 0.0
    inside_bytes: int = 0


def segment_ranges(lengths: Sequence[int]) -> list[Range]:
    return list(pairwise(accumulate(lengths, initial=0)))


def split(whole: Range, parts: int, align: int) -> list[Range]:
    """`parts` ranges of nearly equal length, cut at multiples of `align` from the start; late ones may be empty."""
    begin, end = whole
    units = -(-(end - begin) // align)
    cuts = [min(begin + units * part // parts * align, end) for part in range(parts + 1)]
    return list(pairwise(cuts))


def take(x: Tensor, part: Range) -> Tensor:
    return x[part[0] : part[1]]


@keeps_subnormals
def store(x: Tensor, total: Tensor) -> None:
    """Write a float32 sum into x; a finite one stays finite in 16 bits."""
    limit = torch.finfo(x.dtype).max
    x.copy_(total if x.dtype == torch.float32 else torch.where(total.isinf(), total, total.clamp(-limit, limit)))


def concrete(codec: Codec, dtype: torch.dtype) -> Codec:
    """`as-is` spelled out: sums are float32, so a message must say which type it carries."""
    if not codec.is_identity:
        return codec
    return codec_named({torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype])


def host_waits(codecs: Iterable[Codec], device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a call through these makes the host wait for the device, and so for other ranks: not for the caller."""
    return device.type == "cuda" and any(runs_over_host(codec.plan_for(dtype)) for codec in codecs)


class _Piece(NamedTuple):
    """Where a piece lies among the values and bytes of its message, and how it is encoded."""

    values: slice
    bytes: slice
    noise: Noise
    scale: Tensor | None
    feedback: Feedback | None


class Coder:
    """One codec on one flat tensor of `numel` values of type `dtype`, cut into `segments`."""

    def __init__(self, codec: Codec, segments: Sequence[int], dtype: torch.dtype, times: Times | None = None) -> None:
        self.times = times or Times()
        self.codec, self.dtype = concrete(codec, dtype), dtype
        self.segments = segment_ranges(segments)
        self.numel = sum(segments)
        self.whole_segments = codec.block == 0
        # blocks of 1 (plain casts) are cut at the same places as others, for whole vectors
        self.align = max(codec.block, ALIGNMENT)
        self.shares_scales = self.codec.agrees_on_scales
        """Whether all ranks encode with the same scales, so that sums may use them too (APS)."""
        self._draws = self.codec.stochastic
        self._sizes: dict[int, int] = {}
        self._message = torch.empty(0, dtype=torch.uint8)

    def segments_in(self, part: Range) -> Iterator[tuple[int, Range]]:
        """The parts of segments inside a range, each with its segment's number."""
        for number, (first, last) in enumerate(self.segments):
            low, high = max(part[0], first), min(part[1], last)
            if low < high:
                yield number, (low, high)

    def pieces(self, part: Range) -> Iterator[tuple[int, Range]]:
        """What is encoded by itself: the parts of segments; the range as it is for block codecs."""
        if self.whole_segments:
            yield from self.segments_in(part)
        elif part[0] < part[1]:
            yield 0, part

    def nbytes(self, part: Range) -> int:
        return sum(self._size(high - low) for _, (low, high) in self.pieces(part))

    def _size(self, numel: int) -> int:
        if numel not in self._sizes:
            self._sizes[numel] = self.codec.nbytes(numel)
        return self._sizes[numel]

    @property
    def over_host(self) -> bool:
        """Whether values of a CUDA device are encoded on the host."""
        return runs_over_host(self.codec.plan_for(self.dtype))

    def places(self, parts: Iterable[Range], wire: Tensor) -> Iterator[tuple[Range, Tensor]]:
        """Parts that lie one after another in a wire, or in each row of several: each with its own bytes."""
        at = 0
        for part in parts:
            size = self.nbytes(part)
            yield part, wire[..., at : at + size]
            at += size

    def shards(self, parts: int) -> list[Range]:
        """The whole tensor in one part a rank, cut where the codec allows it."""
        return split((0, self.numel), parts, self.align)

    def encode(
        self,
        values: Tensor,
        part: Range,
        wire: Tensor,
        noise: Noise,
        scales: Scales = None,
        feedback: Feedback | None = None,
    ) -> None:
        """Write the message of `part`; `values` and `feedback` hold that part alone.

        noise: that of the whole tensor in this phase. scales: one for each segment.
        """
        start = time.perf_counter()
        for piece in self._places(part, noise, scales, feedback):
            self.codec.encode_with(
                values[piece.values], piece.noise, piece.scale, piece.feedback, out=wire[piece.bytes]
            )
        self.times.encode += time.perf_counter() - start

    def reduce(
        self,
        wires: Tensor,
        part: Range,
        wire: Tensor,
        noise: Noise,
        scales: Scales = None,
        feedback: Feedback | None = None,
        finish: Finish = NO_FINISH,
        out: Tensor | None = None,
    ) -> None:
        """Add the messages of all ranks, one a row, in their order, and write that of the sum. out: its values."""
        start = time.perf_counter()
        for piece in self._places(part, noise, scales, feedback):
            self.codec.reduce_with(
                wires[:, piece.bytes],
                piece.values.stop - piece.values.start,
                piece.noise,
                piece.scale,
                piece.feedback,
                finish,
                out=wire[piece.bytes],
                decoded=None if out is None else out[piece.values],
            )
        self.times.decode += time.perf_counter() - start

    def _places(self, part: Range, noise: Noise, scales: Scales, feedback: Feedback | None) -> Iterator[_Piece]:
        at = 0
        for number, (low, high) in self.pieces(part):
            size, values = self._size(high - low), slice(low - part[0], high - part[0])
            drawn = noise.part(low) if self._draws else NO_NOISE
            kept = None if feedback is None else feedback.part(values)
            yield _Piece(values, slice(at, at + size), drawn, scales[number] if scales else None, kept)
            at += size

    def decode(self, wire: Tensor, part: Range, out: Tensor, accumulate: bool = False) -> None:
        """Read a message of `part` into `out`, which holds that part alone."""
        at, start = 0, time.perf_counter()
        for _, (low, high) in self.pieces(part):
            size = self._size(high - low)
            target = out[low - part[0] : high - part[0]]
            self.codec.decode(wire[at : at + size], high - low, out=target, accumulate=accumulate)
            at += size
        self.times.decode += time.perf_counter() - start

    def is_identity(self, dtype: torch.dtype) -> bool:
        """Whether values of a type travel as they are."""
        return self.codec.stored_dtype(dtype) == dtype

    def passage(
        self,
        values: Tensor,
        part: Range,
        noise: Noise,
        scales: Scales,
        out: Tensor,
        accumulate: bool = False,
        feedback: Feedback | None = None,
    ) -> None:
        """What the other side gets to see, with nothing sent: encode and decode `values`, into `out` or added to it."""
        if feedback is None and self.is_identity(values.dtype):
            out.copy_(plus(out, values.float()) if accumulate else values)
            return
        size = self.nbytes(part)
        if self._message.numel() < size or self._message.device != values.device:
            self._message = torch.empty(size, dtype=torch.uint8, device=values.device)
        wire = self._message[:size]
        self.encode(values, part, wire, noise, scales, feedback)
        self.decode(wire, part, out, accumulate)

    def scales(self, x: Tensor) -> list[Tensor | None] | None:
        """The scale of each segment of x, for codecs with one scale for a tensor; None for others."""
        if not self.codec.takes_scale:
            return None
        return [self.codec.tensor_scale(x[low:high]) for low, high in self.segments]
