"""The all-reduce algorithms of `narrowcast.collectives`, all workers at once, same bits.

A *place* is a rank of the cluster, `seats[place]` the worker that sits there: by other seats a study asks what another
order of the sum would give. Noise belongs to the worker, so that it does not change with the seat.
Shapes: W workers, n values, N blocks of B values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from narrowcast.collectives.algorithms.context import Reduction
from narrowcast.collectives.algorithms.native_sum import MAX_SHARED
from narrowcast.collectives.algorithms.one_shot import store
from narrowcast.collectives.algorithms.two_shot import FIRST, SECOND, chunks_of
from narrowcast.collectives.segments import Range, split
from narrowcast.kernels import TINY, Noise, blocks, plus
from narrowcast.simulate.world.residuals import Residuals
from narrowcast.simulate.world.sums import Sums
from narrowcast.simulate.world.wire import Scales, Wire

CACHED_VALUES = 1 << 16

Part = tuple[int, Range]
"""A worker and the range that it encodes."""


@dataclass
class Job:
    """One call: algorithms read `x_Wn` and write the result, which is the same for all workers, into `out`."""

    x_Wn: Tensor
    out: Tensor
    wire: Wire
    seats: Sequence[int]
    noise: Callable[[int, int], Noise]
    """Of a worker and a phase."""
    scales: list[Scales]
    """Of each worker's own values."""
    reduction: Reduction = field(default_factory=Reduction)
    sums: Sums = field(default_factory=Sums)
    residuals: Residuals | None = None
    nodes: Sequence[Sequence[int]] = ()
    inner: Wire | None = None
    low: bool = False
    """Whether a ring casts a worker's own values before it adds them."""

    @property
    def world(self) -> int:
        return len(self.seats)

    @property
    def whole(self) -> Range:
        return 0, self.x_Wn.shape[1]

    def shared(self, worker: int) -> Scales:
        """The scales that hold for sums too."""
        return self.scales[worker] if self.wire.is_agreed else None

    def shards(self) -> list[Range]:
        return split(self.whole, self.world, self.wire.coder.align)

    def new(self, part: Range) -> Tensor:
        return torch.empty(part[1] - part[0], device=self.x_Wn.device)

    def pieces(self, parts: Sequence[Range]) -> Sequence[Range]:
        """With residuals smaller ones, where that changes no bits: what lies between two passes stays in the cache."""
        if self.residuals is None or not self.wire.has_blocks or not self.x_Wn.is_cpu:
            return parts
        align = self.wire.coder.align
        return [p for low, high in parts for p in split((low, high), -(-(high - low) // CACHED_VALUES) or 1, align)]

    def repaid(self, values: Tensor, part: Range, noise: Noise, scales: Scales, owed: Tensor) -> Tensor:
        """What arrives of the values and what is owed; what is lost is owed from now on."""
        assert self.residuals is not None
        wanted, sent = self.residuals.wanted(values, owed), self.new(part)
        self.wire.through(wanted, part, noise, scales, sent)
        self.residuals.owe(owed, wanted, sent)
        return sent

    # ---- the first shot: every worker's own values -------------------------------------------------------------------

    def own(self, worker: int, parts: Sequence[Range], total: Tensor, accumulate: bool) -> None:
        """What arrives of a worker's values, written or added into `total`; what is lost goes into the residual."""
        noise, scales = self.noise(worker, FIRST), self.scales[worker]
        for part in self.pieces(parts):
            low, high = part
            values, place = self.x_Wn[worker, low:high], total[low:high]
            if self.residuals is None:
                self.wire.through(values, part, noise, scales, place, accumulate)
                continue
            sent = self.repaid(values, part, noise, scales, self.residuals.first_Wn[worker, low:high])
            place.copy_(plus(place, sent) if accumulate else sent)

    def sum_of_own(self, parts: Sequence[Range]) -> Tensor:
        """The sum over all workers, in the order of their seats."""
        total = self.new(self.whole)
        if self.sums.is_plain:
            for place, worker in enumerate(self.seats):
                self.own(worker, parts, total, accumulate=place > 0)
            return total
        running = self.sums.begin(self.whole)
        for worker in self.seats:
            self.own(worker, parts, total, accumulate=False)
            running.add(total)
        return running.result()

    # ---- the second shot: sums ---------------------------------------------------------------------------------------

    def publish(self, total: Tensor, parts: Sequence[Part]) -> None:
        """Finished sums through the wire of whoever owns them, into `out`."""
        for worker, wide in parts:
            noise, scales = self.noise(worker, SECOND), self.shared(worker)
            for part in self.pieces([wide]):
                low, high = part
                if self.residuals is None:
                    self.wire.through(total[low:high], part, noise, scales, self.out[low:high])
                    continue
                owed = self.residuals.second_n[low:high]
                sent = self.repaid(total[low:high], part, noise, scales, owed)
                store(self.out[low:high], sent)
                self.residuals.keep(owed, sent, self.out[low:high])

    def joined(self, parts: Sequence[Part]) -> Sequence[Part]:
        """Neighbouring parts that give the same bytes encoded in one go: blocks, where no noise tells who encoded."""
        return [(self.seats[0], self.whole)] if self.wire.has_blocks and not self.wire.codec.stochastic else parts


def one_shot(job: Job) -> None:
    """`narrowcast.collectives.algorithms.one_shot`."""
    total = job.reduction.finish(job.sum_of_own([job.whole]))
    store(job.out, total)
    if job.residuals is not None:
        job.residuals.keep(job.residuals.first_Wn, total, job.out, job.reduction.gain / job.world)


def two_shot(job: Job) -> None:
    """`narrowcast.collectives.algorithms.two_shot`."""
    shards = job.shards()
    chunks = chunks_of(shards, job.wire.coder)
    owned = [(worker, shard) for worker, shard in zip(job.seats, shards, strict=True)]
    if job.residuals is not None:
        job.residuals.hand_over(owned)
    if job.wire.has_blocks:
        # chunks change no bits here
        first, second = [job.whole], job.joined(owned)
    else:
        first = [chunk for shard in chunks for chunk in shard]
        second = [(worker, chunk) for (worker, _), shard in zip(owned, chunks, strict=True) for chunk in shard]
    job.publish(job.reduction.finish(job.sum_of_own(first)), second)


def ring(job: Job) -> None:
    """`narrowcast.collectives.algorithms.ring`: at each hop the sums of all shards move on by one place."""
    world, shards, rule = job.world, job.shards(), job.sums
    total, correction = job.new(job.whole), _Correction(rule, job.whole) if rule.kahan else None
    for hop in range(world):
        at = [(job.seats[(shard + 1 + hop) % world], part) for shard, part in enumerate(shards)]
        if correction is None:
            _take_own(job, at, total, add=hop > 0)
            total = rule.rounded(total, job.whole)
        else:
            own = torch.empty_like(total)
            _take_own(job, at, own, add=False)
            total = correction.add(own, total if hop else torch.zeros_like(total))
        if hop == world - 1:
            _send(job, job.reduction.finish(total), at, job.out, first=False)
            return
        _send(job, total, at, total, first=hop == 0)
        if correction is not None:
            correction.learn(total)


def _take_own(job: Job, at: Sequence[Part], total: Tensor, add: bool) -> None:
    """The values of the worker where each sum now is, put into `total` or added to what is there."""
    for worker, part in at:
        low, high = part
        own, place = job.x_Wn[worker, low:high], total[low:high]
        if job.low and add:
            cast = job.new(part)
            # noise of its own: the sum is rounded with the other one
            job.wire.through(own.float(), part, job.noise(worker, 1), job.scales[worker], cast)
            own = cast
        place.copy_(plus(own.float(), place) if add else own)


class _Correction:
    """Kahan's correction beside the sums of a ring: it travels with them, and knows what the wire lost.

    y = Q(own - c), t = P(Q(sum + y)) with P the wire, c = Q(Q(t - sum) - y), sum = t
    """

    def __init__(self, rule: Sums, part: Range) -> None:
        self._rule, self._part = rule, part
        self._lost: Tensor | None = None
        self._before = self._step = torch.empty(0)

    def add(self, own: Tensor, arrived: Tensor) -> Tensor:
        self._before, self._step = arrived, self._q(own if self._lost is None else own - self._lost)
        return self._q(plus(arrived, self._step))

    def learn(self, sent: Tensor) -> None:
        self._lost = self._q(self._q(sent - self._before) - self._step)

    def _q(self, x: Tensor) -> Tensor:
        return self._rule.rounded(x, self._part)


def _send(job: Job, values: Tensor, at: Sequence[Part], out: Tensor, first: bool) -> None:
    for worker, part in job.joined(at):
        low, high = part
        scales = job.scales[worker] if first else job.shared(worker)
        job.wire.through(values[low:high], part, job.noise(worker, 0), scales, out[low:high])


def tree(job: Job) -> None:
    """`narrowcast.collectives.algorithms.tree`: each place keeps the half of what it has that holds its own shard."""
    shards, rule = job.shards(), job.sums
    held = [(rule.rounded(job.x_Wn[worker].float(), job.whole), job.whole) for worker in job.seats]
    distance = job.world // 2
    while distance:
        first = distance == job.world // 2
        held = [_halved(job, held, place, distance, shards, first) for place in range(job.world)]
        distance //= 2
    total = torch.cat([job.reduction.finish(values) for values, _ in held])
    job.publish(total, job.joined([(worker, shard) for worker, shard in zip(job.seats, shards, strict=True)]))


def _halved(
    job: Job, held: list[tuple[Tensor, Range]], place: int, distance: int, shards: list[Range], first: bool
) -> tuple[Tensor, Range]:
    """What a place keeps of its sums, with the partner's added."""
    start = place // distance * distance
    low, high = shards[start][0], shards[start + distance - 1][1]
    partner = job.seats[place ^ distance]
    theirs, (begin, _) = held[place ^ distance]
    scales = job.scales[partner] if first else job.shared(partner)
    arrived = job.new((low, high))
    job.wire.through(theirs[low - begin : high - begin], (low, high), job.noise(partner, 0), scales, arrived)
    own, (begin, _) = held[place]
    return job.sums.rounded(plus(own[low - begin : high - begin], arrived), (low, high)), (low, high)


def hierarchical(job: Job) -> None:
    """`narrowcast.collectives.algorithms.hierarchical`: `job.inner` inside a node, `job.wire` between nodes."""
    inner, outer = job.inner, job.wire
    assert inner is not None
    members = len(job.nodes[0])
    parts = split(job.whole, members, math.lcm(inner.coder.align, outer.coder.align))
    for place, part in enumerate(parts):
        low, high = part
        if low == high:
            continue
        totals = torch.stack([_inside(job, inner, node, part) for node in job.nodes])
        column = [job.seats[node[place]] for node in job.nodes]
        total = _across(job, column, totals, part)
        # every node encodes the same sum, with the noise of the first node's member
        inner.through(total, part, job.noise(column[0], 1), None, job.out[low:high])


def _inside(job: Job, inner: Wire, node: Sequence[int], part: Range) -> Tensor:
    """The sum of one part inside a node, in the node's order."""
    total, running = job.new(part), job.sums.begin(part)
    for number, place in enumerate(node):
        worker = job.seats[place]
        values, plain = job.x_Wn[worker, part[0] : part[1]], job.sums.is_plain
        inner.through(values, part, job.noise(worker, 0), None, total, accumulate=plain and number > 0)
        if not plain:
            running.add(total)
    return total if job.sums.is_plain else running.result()


def _across(job: Job, column: Sequence[int], totals: Tensor, part: Range) -> Tensor:
    """two_shot between the nodes; each row of `totals` belongs to the worker of `column` in its place."""
    ranges = job.wire.coder.segments
    inside = [i for i, (low, high) in enumerate(ranges) if max(low, part[0]) < min(high, part[1])]
    lengths = [min(ranges[i][1], part[1]) - max(ranges[i][0], part[0]) for i in inside]
    scales: Scales = None
    if job.wire.is_agreed and (agreed := job.scales[0]):
        scales = [agreed[i] for i in inside]
    between = Job(
        totals,
        torch.empty_like(totals[0]),
        Wire(job.wire.codec, lengths, torch.float32, totals.device),
        seats=range(len(column)),
        noise=lambda row, phase: job.noise(column[row], 2 + phase),
        scales=[scales] * len(column),
        reduction=job.reduction,
        sums=job.sums.over(part),
    )
    two_shot(between)
    return between.out


def shared_scale(job: Job) -> None:
    """`narrowcast.collectives.algorithms.native_sum.shared_scale`: the sum of integers is exact, in any order."""
    levels, n = MAX_SHARED // job.world, job.whole[1]
    block = job.wire.codec.block
    top_N = torch.stack([blocks.as_blocks(row.float(), block).abs().amax(dim=1) for row in job.x_Wn])
    top_N = top_N.view(torch.int32).amax(dim=0).view(torch.float32)
    scale_N = torch.where(top_N >= TINY, top_N / torch.full_like(top_N, levels), 0.0)
    scale_N = torch.where(top_N.isfinite(), scale_N, torch.nan)
    inverse_N, lost_N = blocks.inverse(scale_N)[:, None], scale_N.isnan()[:, None]
    total_NB = torch.zeros(len(top_N), block, device=job.x_Wn.device)
    for row in job.x_Wn:
        t_NB = torch.where(lost_N, 0.0, blocks.as_blocks(row.float(), block) * inverse_N)
        total_NB += t_NB.round_().clamp_(-levels, levels)
    limit = torch.finfo(torch.float32).max
    value = (total_NB * scale_N[:, None]).flatten()[:n].clamp(-limit, limit)
    store(job.out, job.reduction.finish(value))


SIMULATED: dict[str, Callable[[Job], None]] = {
    "two_shot": two_shot,
    "one_shot": one_shot,
    "ring": ring,
    "tree": tree,
    "hierarchical": hierarchical,
    "shared_scale": shared_scale,
}
