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
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

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
    ops,
    plus,
    runs_over_host,
)

MAX_KEPT = 1 << 17
"""Segments of all coders that are kept: some 30 MB."""
MAX_PARTS = 1 << 12
"""Whose sizes a coder remembers."""
MAX_ROUNDS = 16
"""Whose parts that go together it does."""
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


def _cut(x: Tensor, begin: int, end: int) -> Tensor:
    """x from `begin` to `end` in its last dimension; x itself where that is all of it, since a view takes a while."""
    return x if begin == 0 and end == x.shape[-1] else x[..., begin:end]


def _some_of(rows: Tensor, first: int, last: int) -> Tensor:
    """The same for rows."""
    return rows if first == 0 and last == rows.shape[0] else rows[first:last]


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

    values: Range
    bytes: Range
    noise: Noise
    scale: Tensor | None
    feedback: Feedback | None


class _Run(NamedTuple):
    """Parts that go together: their numbers, their values; the length and bytes of each, and how far to the next."""

    first: int
    last: int
    values: Range
    length: int
    nbytes: int
    pitch: int


class Coder:
    """One codec on one flat tensor of `numel` values of type `dtype`, cut into `segments`.

    What it is given was looked at when the call was made (`checks`), and wires are memory of the call's own, so that it
    calls kernels without a further look: flat contiguous memory on one device.
    """

    _kept_segments: ClassVar[int] = 0

    def __init__(self, codec: Codec, segments: Sequence[int], dtype: torch.dtype, times: Times | None = None) -> None:
        self.times = times or Times()
        self._given = codec
        self.codec, self.dtype = concrete(codec, dtype), dtype
        self.segments = segment_ranges(segments)
        self.numel = sum(segments)
        self.whole_segments = codec.block == 0
        # blocks of 1 (plain casts) are cut at the same places as others, for whole vectors
        self.align = max(codec.block, ALIGNMENT)
        self.shares_scales = self.codec.agrees_on_scales
        """Whether all ranks encode with the same scales, so that sums may use them too (APS)."""
        self._plan = self.codec.plan_for(dtype)
        self._draws, self._decay, self._takes_scale = self.codec.stochastic, codec.decay, self.codec.takes_scale
        self._sizes: dict[int, int] = {}
        self._part_sizes: dict[Range, int] = {}
        self._kept_runs: dict[tuple[Range, ...], list[_Run]] = {}
        self._message = torch.empty(0, dtype=torch.uint8)
        self.kept: dict[object, Any] = {}
        """What whoever uses it has found out from it, for the next call of its kind."""

    @classmethod
    def of(cls, codec: Codec, segments: tuple[int, ...], dtype: torch.dtype, times: Times) -> Coder:
        """For one call; what follows from the arguments is kept, since such calls come in every step."""
        # by spec: a codec takes long to hash. Another codec may have that spec: one that was registered anew
        key = codec.spec, segments, dtype
        known = _CODERS.get(key)
        if known is None or not (known._given is codec or known._given == codec):
            # counted as they come: calls whose sizes change each time never find theirs, and must not go over all
            cls._kept_segments += len(segments)
            if cls._kept_segments > MAX_KEPT:
                _CODERS.clear()
                cls._kept_segments = len(segments)
            known = _CODERS[key] = cls(codec, segments, dtype)
        one = object.__new__(cls)
        one.__dict__ |= known.__dict__  # as copy.copy does, in a third of the time
        one.times = times
        return one

    def segments_in(self, part: Range) -> Iterator[tuple[int, Range]]:
        """The parts of segments inside a range, each with its segment's number."""
        for number, (first, last) in enumerate(self.segments):
            low, high = max(part[0], first), min(part[1], last)
            if low < high:
                yield number, (low, high)

    def pieces(self, part: Range) -> Sequence[tuple[int, Range]]:
        """What is encoded by itself: the parts of segments; the range as it is for block codecs."""
        if self.whole_segments:
            return list(self.segments_in(part))
        return ((0, part),) if part[0] < part[1] else ()

    def nbytes(self, part: Range) -> int:
        size = self._part_sizes.get(part)
        if size is None:
            if len(self._part_sizes) >= MAX_PARTS:
                self._part_sizes.clear()
            size = self._part_sizes[part] = sum(self._size(high - low) for _, (low, high) in self.pieces(part))
        return size

    def _size(self, numel: int) -> int:
        if numel not in self._sizes:
            self._sizes[numel] = self.codec.nbytes(numel)
        return self._sizes[numel]

    def places(self, parts: Iterable[Range], wire: Tensor) -> Iterator[tuple[Range, Tensor]]:
        """Parts that lie one after another in a wire, or in each row of several: each with its own bytes."""
        at = 0
        for part in parts:
            size = self.nbytes(part)
            yield part, _cut(wire, at, at + size)
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
        kept = feedback and self._decayed(feedback)
        if self.whole_segments:
            for piece in self._places(part, noise, scales, kept):
                out = _cut(wire, *piece.bytes)
                ops.encode(self._plan, _cut(values, *piece.values), out, piece.noise, piece.scale, piece.feedback)
        elif part[0] < part[1]:
            drawn = noise.part(part[0]) if self._draws else NO_NOISE
            ops.encode(self._plan, values, _cut(wire, 0, self.nbytes(part)), drawn, None, kept)
        self.times.encode += time.perf_counter() - start

    def _decayed(self, feedback: Feedback) -> Feedback:
        """As kernels take it; autograd hears that the residual is renewed."""
        increment_version(feedback.residual)
        return feedback if self._decay == 1.0 else Feedback(feedback.residual, feedback.unit, self._decay)

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
        kept = feedback and self._decayed(feedback)
        if out is not None:
            increment_version(out)
        if self.whole_segments:
            for piece in self._places(part, noise, scales, kept):
                (low, high), place = piece.values, piece.bytes
                rows, target, values = _cut(wires, *place), _cut(wire, *place), None if out is None else out[low:high]
                given = piece.noise, piece.scale, piece.feedback
                ops.reduce(self._plan, rows, high - low, target, *given, finish, values)
        elif part[0] < part[1]:
            size, drawn = self.nbytes(part), noise.part(part[0]) if self._draws else NO_NOISE
            rows, target = _cut(wires, 0, size), _cut(wire, 0, size)
            ops.reduce(self._plan, rows, part[1] - part[0], target, drawn, None, kept, finish, out)
        self.times.decode += time.perf_counter() - start

    def encode_parts(
        self,
        values: Tensor,
        parts: Sequence[Range],
        rows: Tensor,
        noise: Noise,
        scales: Scales = None,
        feedback: Feedback | None = None,
    ) -> None:
        """Write the message of each part to where its row begins; `values` and `feedback` hold the whole tensor.

        Parts of equal length that begin equally far apart are one launch on a GPU, for codecs with blocks.
        """
        for first, last, (low, high), length, size, pitch in self._runs(parts):
            some, kept = _cut(values, low, high), None if feedback is None else feedback.part(slice(low, high))
            if last == first + 1:
                self.encode(some, parts[first], rows[first], noise, scales, kept)
                continue
            start = time.perf_counter()
            drawn, kept = noise.part(low) if self._draws else NO_NOISE, kept and self._decayed(kept)
            ops.encode_rows(self._plan, some, length, _cut(_some_of(rows, first, last), 0, size), drawn, kept, pitch)
            self.times.encode += time.perf_counter() - start

    def decode_parts(self, rows: Tensor, parts: Sequence[Range], out: Tensor) -> None:
        """Read the messages of all parts, one a row, into `out`, which holds the whole tensor; as `encode_parts`."""
        for first, last, (low, high), length, size, pitch in self._runs(parts):
            some = _cut(out, low, high)
            if last == first + 1:
                self.decode(rows[first], parts[first], some)
                continue
            start = time.perf_counter()
            ops.decode_rows(self._plan, _cut(_some_of(rows, first, last), 0, size), length, some, pitch)
            increment_version(some)
            self.times.decode += time.perf_counter() - start

    def _runs(self, parts: Sequence[Range]) -> list[_Run]:
        """The parts that may go together: of one length, equally far apart, each where random bits begin."""
        key = tuple(parts)
        runs = self._kept_runs.get(key)
        if runs is None:
            if len(self._kept_runs) >= MAX_ROUNDS:
                self._kept_runs.clear()
            runs = self._kept_runs[key] = [self._run(key, *one) for one in self._find_runs(key)]
        return runs

    def _run(self, parts: tuple[Range, ...], first: int, last: int) -> _Run:
        low, end = parts[first]
        pitch = parts[first + 1][0] - low if last > first + 1 else 0
        return _Run(first, last, (low, parts[last - 1][1]), end - low, self.nbytes(parts[first]), pitch)

    def _find_runs(self, parts: tuple[Range, ...]) -> Iterator[Range]:
        first, pitch = 0, 0
        for number in range(1, len(parts)):
            step = parts[number][0] - parts[number - 1][0]
            if (pitch and step != pitch) or not self._go_together(parts[number - 1], parts[number]):
                yield first, number
                first, pitch = number, 0
            else:
                pitch = step
        if parts:
            yield first, len(parts)

    def _go_together(self, one: Range, other: Range) -> bool:
        length, step = one[1] - one[0], other[0] - one[0]
        alike = 0 < length == other[1] - other[0] and length <= step
        lie_well = not self._draws or one[0] % ALIGNMENT == step % ALIGNMENT == 0
        return alike and lie_well and not self.whole_segments

    def sum(self, wires: Tensor, part: Range, finish: Finish, out: Tensor) -> None:
        """Add the messages of all ranks, one a row, in their order, into float32 `out`, which holds that part alone."""
        at, start = 0, time.perf_counter()
        for _, (low, high) in self.pieces(part):
            size = self._size(high - low)
            target = _cut(out, low - part[0], high - part[0])
            ops.sum_wires(self._plan, _cut(wires, at, at + size), high - low, target, finish)
            at += size
        increment_version(out)
        self.times.decode += time.perf_counter() - start

    def _places(self, part: Range, noise: Noise, scales: Scales, feedback: Feedback | None) -> Iterator[_Piece]:
        at = 0
        for number, (low, high) in self.pieces(part):
            size, values = self._size(high - low), (low - part[0], high - part[0])
            drawn = noise.part(low) if self._draws else NO_NOISE
            kept = feedback
            if feedback is not None and (low, high) != part:
                kept = feedback.part(slice(*values))
            yield _Piece(values, (at, at + size), drawn, scales[number] if scales else None, kept)
            at += size

    def decode(self, wire: Tensor, part: Range, out: Tensor, accumulate: bool = False) -> None:
        """Read a message of `part` into `out`, which holds that part alone."""
        at, start = 0, time.perf_counter()
        for _, (low, high) in self.pieces(part):
            size = self._size(high - low)
            target = _cut(out, low - part[0], high - part[0])
            ops.decode(self._plan, _cut(wire, at, at + size), high - low, target, accumulate)
            at += size
        increment_version(out)
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
        if not self._takes_scale:
            return None
        return [self.codec.tensor_scale(x[low:high]) for low, high in self.segments]


_CODERS: dict[tuple[str, tuple[int, ...], torch.dtype], Coder] = {}
