"""A flat tensor of W equal rows, one a rank, every row cut alike into tensors that each have a codec of their own.

That is what FSDP2 hands over: row r holds, one after another, the r-th part of every tensor of a module. All that goes
to one rank travels in one message: neighbours with one codec as one run, nothing copied or padded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from narrowcast.codecs import Codec, largest_finite
from narrowcast.collectives import (
    ALL_GATHER,
    REDUCE_SCATTER,
    Coder,
    Exchange,
    Range,
    Reduction,
    Residuals,
    Times,
    exponents,
    gather,
    scales_of,
    scatter,
    segment_ranges,
)
from narrowcast.kernels import NO_NOISE, Finish, Noise
from narrowcast.parallel.fsdp.last_gathered import LastGathered

Scales = list[Tensor | None]


@dataclass
class Rows:
    """How W rows of `lengths` values, with a codec for each length, become messages."""

    world: int
    lengths: Sequence[int]
    codecs: Sequence[Codec]
    dtype: torch.dtype
    noise: Noise = NO_NOISE
    times: Times = field(default_factory=Times)

    def __post_init__(self) -> None:
        whole = tuple(self.lengths) * self.world
        distinct = dict.fromkeys(self.codecs)
        self._coders = {codec: Coder.of(codec, whole, self.dtype, self.times) for codec in distinct}
        self.runs = list(runs(self.lengths, self.codecs))
        self.length = sum(self.lengths)

    def range(self, row: int, run: Range = (0, 0)) -> Range:
        """Where a run of a row lies in the flat whole."""
        return row * self.length + run[0], row * self.length + run[1]

    def nbytes(self, row: int) -> int:
        return sum(self._coders[codec].nbytes(self.range(row, run)) for codec, run in self.runs)

    @property
    def sizes(self) -> list[int]:
        """Bytes of each row."""
        return [self.nbytes(0)] * self.world

    def places(self) -> Iterator[tuple[Codec, Coder, Range, slice]]:
        """The runs of a row: where each lies among its values, and where in its message."""
        at = 0
        for codec, run in self.runs:
            coder = self._coders[codec]
            size = coder.nbytes(self.range(0, run))
            yield codec, coder, run, slice(at, at + size)
            at += size

    def of_all(self, run: Range) -> list[Range]:
        """Where a run of each row lies in the flat whole."""
        return [self.range(row, run) for row in range(self.world)]

    def encode(
        self,
        values: Tensor,
        row: int,
        wire: Tensor,
        noise: Noise,
        scales: Scales | None = None,
        residuals: Residuals | None = None,
        last: LastGathered | None = None,
    ) -> None:
        """Write the message of a row; `values` holds that row alone. last: what differences are taken to."""
        for codec, coder, run, place in self.places():
            part, own = self.range(row, run), values[slice(*run)]
            kept = residuals.of(0, part) if residuals is not None and codec.feedback else None
            if last is not None and codec.differences:
                own = last.difference(own, row, run)
            coder.encode(own, part, wire[place], noise, scales if codec.agrees_on_scales else None, kept)

    def encode_all(
        self, x: Tensor, wires: Tensor, noise: Noise, scales: Scales | None, residuals: Residuals | None
    ) -> None:
        """Write the messages of all rows of x, one a row: run by run, so that a GPU has as few launches as possible."""
        for codec, coder, run, place in self.places():
            kept = residuals.of(0, (0, x.numel())) if residuals is not None and codec.feedback else None
            agreed = scales if codec.agrees_on_scales else None
            coder.encode_parts(x, self.of_all(run), wires[:, place], noise, agreed, kept)

    def decode(self, wire: Tensor, row: int, out: Tensor, last: LastGathered | None = None) -> None:
        """Read the message of a row into `out`, which holds that row alone. last: what differences are added to."""
        for codec, coder, run, place in self.places():
            part, target = self.range(row, run), out[slice(*run)]
            if last is None or not codec.differences:
                coder.decode(wire[place], part, target)
                continue
            last.begin(target, row, run)
            coder.decode(wire[place], part, target, accumulate=True)
            last.keep(target, row, run)

    def decode_all(self, wires: Tensor, out: Tensor) -> None:
        """Read the messages of all rows, one a row."""
        for _, coder, run, place in self.places():
            coder.decode_parts(wires[:, place], self.of_all(run), out)

    def sum(self, wires: Tensor, row: int, finish: Finish, out: Tensor) -> None:
        """Add the messages of one row from all ranks, one a row, into `out`, which holds that row alone."""
        for _, coder, run, place in self.places():
            coder.sum(wires[:, place], self.range(row, run), finish, out[slice(*run)])

    def agreed_scales(self, exchange: Exchange, x: Tensor, residuals: Residuals | None) -> Scales | None:
        """For APS: one scale for each whole tensor, agreed by all ranks. Bytes sent a rank: 4 (W-1) a tensor."""
        agreed = {j: codec for j, codec in enumerate(self.codecs) if codec.agrees_on_scales}
        if not agreed:
            return None
        decay = max(codec.decay for codec in agreed.values())
        sum_WL = (x if residuals is None else residuals.added_to(x, 0, (0, x.numel()), decay)).view(self.world, -1)
        ranges = segment_ranges(self.lengths)
        tops_J = torch.stack([largest_finite(sum_WL[:, slice(*ranges[j])]) for j in agreed])
        largest_J = exponents(tops_J, exchange.world)
        exchange.max_(largest_J)
        scales: Scales = [None] * len(self.codecs)
        for (j, codec), largest in zip(agreed.items(), largest_J.view(-1, 1).unbind(), strict=True):
            scales[j] = scales_of(codec, largest)
        return scales * self.world


def runs(lengths: Sequence[int], codecs: Sequence[Codec]) -> Iterator[tuple[Codec, Range]]:
    """Neighbours with one codec, together: the codec, and where the run lies in a row."""
    ranges = segment_ranges(lengths)
    for codec, group in groupby(zip(codecs, ranges, strict=True), key=lambda pair: pair[0]):
        members = [part for _, part in group]
        if members[0][0] < members[-1][1]:
            yield codec, (members[0][0], members[-1][1])


def reduce_scatter(
    rows: Rows, exchange: Exchange, x: Tensor, reduction: Reduction, residuals: Residuals | None = None
) -> Tensor:
    """Row p of `x` goes to rank p, encoded once; returns the float32 sum of our row, added in rank order."""
    mine, noise = exchange.rank, rows.noise.derive(exchange.rank, 0)
    wires = scatter(exchange, rows.sizes, REDUCE_SCATTER)
    scales = rows.agreed_scales(exchange, x, residuals)
    if wires.rows is not None:
        rows.encode_all(x, wires.rows, noise, scales, residuals)
        wires.send_all()
    else:
        for rank in [*exchange.others(), mine]:
            values = x[slice(*rows.range(rank, (0, rows.length)))]
            rows.encode(values, rank, wires.leaving(rank), noise, scales, residuals)
            wires.send(rank)
    total = exchange.floats(rows.length)
    rows.sum(wires.arrived(), mine, reduction, total)
    exchange.finish()
    return total


def keep(rows: Rows, rank: int, total: Tensor, stored: Tensor, reduction: Reduction, residuals: Residuals) -> None:
    """After `reduce_scatter`: what 16 bits do not hold of the sum is a residual of whoever has the row."""
    for codec, run in rows.runs:
        if codec.feedback:
            low, high = run
            residuals.keep(total[low:high], stored[low:high], 0, rows.range(rank, run), reduction.gain)


def all_gather(rows: Rows, exchange: Exchange, own: Tensor, out: Tensor, last: LastGathered | None = None) -> None:
    """Every rank gets every rank's row; all of them, the sender too, decode the same bytes. `own` may lie in `out`."""
    mine = exchange.rank
    wires = gather(exchange, rows.sizes, ALL_GATHER)
    rows.encode(own, mine, wires.own, rows.noise.derive(mine, 1), last=last)
    wires.send()
    everyones = wires.rows()
    if everyones is not None and last is None:
        rows.decode_all(everyones, out)
    else:
        for rank in [mine, *exchange.others()]:
            rows.decode(wires.arrived(rank), rank, out[slice(*rows.range(rank, (0, rows.length)))], last)
    exchange.finish()
