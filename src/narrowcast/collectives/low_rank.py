"""Sums of matrices by low rank: the calls over ranks. `codecs.factors` has what a rank computes in them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from narrowcast.codecs import (
    Codec,
    KeptFactors,
    Matrix,
    MatrixPart,
    exchanged_factors,
    factor_bytes,
    following,
    parts_of,
)
from narrowcast.codecs import codec as codec_named
from narrowcast.collectives.algorithms import record
from narrowcast.collectives.algorithms.context import Flat, Reduction
from narrowcast.collectives.algorithms.record import Nodes
from narrowcast.collectives.prepared import AllReduce, prepared
from narrowcast.collectives.residuals import Residuals
from narrowcast.collectives.runtime import agreement
from narrowcast.collectives.runtime.channel import Channel
from narrowcast.collectives.runtime.messages import Exchange
from narrowcast.collectives.segments import Times, host_waits, segment_ranges
from narrowcast.collectives.work import Work


@dataclass(frozen=True)
class LowRankReduce:
    """A low-rank all-reduce that was looked at: what the calls of one kind have in common."""

    codec: Codec
    matrices: tuple[Matrix, ...]
    world: int
    reduction: Reduction
    algorithm: str = "auto"
    seed: int = 0
    nodes: Nodes | None = None
    inner: Codec | str = "as-is"

    def __post_init__(self) -> None:
        for on_left in (True, False):  # raises where it cannot be done
            self.factor_call((on_left,) * len(self.matrices))

    def factor_call(self, on_left: Sequence[bool]) -> AllReduce:
        """The all-reduce of factors of these sides."""
        sides = zip(self.matrices, on_left, strict=True)
        lengths = tuple(self.codec.rank * matrix.length(is_left) for matrix, is_left in sides)
        # what is lost inside of a node is in the residual of the whole
        inner = replace(codec_named(self.inner), feedback=False)
        how: dict[str, Any] = {"algorithm": self.algorithm, "seed": self.seed, "nodes": self.nodes, "inner": inner}
        return prepared(self.codec.factors, lengths, torch.float32, self.world, self.reduction, **how)

    @staticmethod
    def share_of(reduction: Reduction, world: int) -> float:
        """Of a result that is one rank's: what its residual is less by."""
        return reduction.gain / world

    def wire_bytes(self) -> int:
        """Of all factors that a call sends, about."""
        return factor_bytes(self.codec, self.matrices)

    def text(self, on_left: Sequence[bool], origin: str) -> str:
        """The signature: that of its last sum, and which matrices they are factors of. origin: of kept factors."""
        signature = {**agreement.read(self.factor_call(on_left).text), "call": "all_reduce by low rank"}
        matrices = [list(matrix) for matrix in self.matrices]
        return agreement.to_text(signature | {"spec": str(self.codec), "matrices": matrices, "factors": origin})


@dataclass
class LowRankCall:
    """A call to be started, by itself or together with others of its codec. xs: contiguous, of the kind's matrices."""

    kind: LowRankReduce
    xs: list[Tensor]
    step: tuple[int, ...]
    names: tuple[str, ...]
    factors: KeptFactors
    residuals: Residuals | None = None
    times: Times = field(default_factory=Times)

    def parts(self) -> list[MatrixPart]:
        """Each matrix with what is kept of it."""
        whole = None if self.residuals is None else self.residuals.of(0, (0, sum(x.numel() for x in self.xs)))
        return parts_of(self.xs, self.kind.matrices, self.names, self.kind.codec, self.factors, whole)

    def alone(self) -> None:
        """In a world of one nothing is rounded."""
        ranges = segment_ranges([matrix.numel for matrix in self.kind.matrices])
        for x, part in zip(self.xs, ranges, strict=True):
            residuals = None if self.residuals is None else self.residuals.over(part)
            record.reduce_alone(x.view(-1), x.view(-1), self.kind.reduction, residuals)

    @property
    def device(self) -> torch.device:
        return self.xs[0].device

    @property
    def memory(self) -> list[Tensor]:
        return self.xs if self.residuals is None else [*self.xs, self.residuals.first, self.residuals.second]


def joined(kinds: Sequence[LowRankReduce]) -> LowRankReduce:
    """The kind of calls that travel as one."""
    first = kinds[0]
    options = first.world, first.reduction, first.algorithm, first.seed, first.nodes, first.inner
    return first if len(kinds) == 1 else LowRankReduce(first.codec, sum((k.matrices for k in kinds), ()), *options)


def start_low_rank(channel: Channel, calls: Sequence[LowRankCall]) -> Work:
    """Submit calls of one codec, type and device: their factors travel together, in one sum or two."""
    kind, parts = joined([call.kind for call in calls]), [part for call in calls for part in call.parts()]
    # a call that is new is agreed on by this: the sides of the last factors that it sends
    ends_left = tuple(part.kept.on_left != kind.codec.sends_one_factor for part in parts)
    memory = [tensor for call in calls for tensor in call.memory] + [part.kept.vectors for part in parts]
    first = kind.factor_call(ends_left)
    waits = record.ALGORITHMS[first.algorithm].host_waits
    waits = waits or host_waits((kind.codec.factors, first.inner), parts[0].x_nm.device, torch.float32)
    text = kind.text(ends_left, calls[0].factors.origin)
    return channel.submit(text, partial(_run, kind, calls, parts), memory, waits=waits)


def _run(kind: LowRankReduce, calls: Sequence[LowRankCall], parts: Sequence[MatrixPart], exchange: Exchange) -> None:
    if exchange.world == 1:
        for call in calls:
            call.alone()
        return
    for call in calls:
        if call.residuals is not None:
            call.residuals.fold(kind.reduction.gain)
    times, began = calls[0].times, time.perf_counter()
    sums = 1 if kind.codec.sends_one_factor else 2
    steps = exchanged_factors(parts, kind.codec, kind.share_of(kind.reduction, kind.world))
    sent = next(steps)
    for number in range(sums):
        is_last = number + 1 == sums
        way = exchange if is_last else exchange.before_the_last()
        times.encode += time.perf_counter() - began
        one = kind.factor_call(sent.on_left)
        noise = one.noise_of((*calls[0].step, number))
        record.run(one.algorithm, one.call(Flat([sent.values]), noise, None, times, way))
        if not is_last:
            exchange.sent_bytes += way.sent_bytes
        began = time.perf_counter()
        sent = following(steps, sent.values) or sent
    times.decode += time.perf_counter() - began
