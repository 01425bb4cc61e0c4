"""One all-reduce with all workers in one process: what an algorithm's `simulate` works on.

A *place* is a rank of the cluster, `seats[place]` the worker that sits there: by other seats a study asks what another
order of the sum would give. Noise belongs to the worker, so that it does not change with the seat.
Shapes: W workers, n values (the segments of a call one after another).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from narrowcast.collectives.algorithms.context import Reduction
from narrowcast.collectives.algorithms.sums import SumRule
from narrowcast.collectives.residuals import Residuals, keep_lost
from narrowcast.collectives.segments import Coder, Range, Scales, store, take
from narrowcast.kernels import Feedback, Noise, aligned_rows

FIRST, SECOND = 0, 1
"""Phases of the noise, and shots of residuals: of a worker's own values, and of sums."""

Part = tuple[int, Range]
"""A worker and the range that it encodes."""


@dataclass
class StackedResiduals:
    """`Residuals` of all workers: what rounding removed of each one's own values, and of the sums of each owner's part.

    `second_n` holds the part of each owner. Where owners change (another codec, another cut) what the old ones have
    stays with them in `stray_Wn`, since on a cluster it does.
    """

    first_Wn: Tensor
    second_n: Tensor
    owners: list[Part] = field(default_factory=list)
    stray_Wn: Tensor | None = None
    unit: float = 1.0

    @classmethod
    def zeros(cls, world: int, numel: int, device: torch.device) -> StackedResiduals:
        first_Wn = torch.zeros(world, numel, dtype=torch.float32, device=device)
        return cls(first_Wn, first_Wn.new_zeros(numel))

    def of_one(self) -> Residuals:
        """In a world of one."""
        return Residuals(self.first_Wn[0], self.second_n, self.unit)

    def first(self, worker: int, part: Range) -> Feedback:
        return Feedback(take(self.first_Wn[worker], part), self.unit)

    def second(self, part: Range) -> Feedback:
        return Feedback(take(self.second_n, part), self.unit)

    def added_to(self, x_Wn: Tensor, decay: float = 1.0) -> Tensor:
        """The values and their residuals, in float32: what first encodings should send. decay: the codec's."""
        return Feedback(self.first_Wn, self.unit, decay).add_to(x_Wn)

    def keep(self, residual: Tensor, exact: Tensor, stored: Tensor, gain: float = 1.0) -> None:
        """Add what a result of 16 bits does not hold of the float32 one."""
        keep_lost(residual, exact, stored, gain, self.unit)

    def hand_over(self, owners: list[Part]) -> None:
        """From now on these own the sums."""
        if owners == self.owners:
            return
        if self.owners:
            self.stray_Wn = torch.zeros_like(self.first_Wn) if self.stray_Wn is None else self.stray_Wn
            self._spill(self.stray_Wn)
        self.owners = owners
        if self.stray_Wn is not None:
            for worker, (low, high) in owners:
                self.second_n[low:high] = self.stray_Wn[worker, low:high]
                self.stray_Wn[worker, low:high] = 0.0

    def over(self, part: Range, workers: Sequence[int], owners: list[Part]) -> StackedResiduals:
        """Those of some workers and a part, as of a call between them alone; `put_back` ends it."""
        low, high = part
        return StackedResiduals(self.first_Wn[list(workers), low:high], self.second_n[low:high], owners, unit=self.unit)

    def put_back(self, part: Range, workers: Sequence[int], theirs: StackedResiduals) -> None:
        self.first_Wn[list(workers), part[0] : part[1]] = theirs.first_Wn

    def _spill(self, rows_Wn: Tensor) -> None:
        for worker, (low, high) in self.owners:
            rows_Wn[worker, low:high] = self.second_n[low:high]

    def fold(self, gain: float) -> None:
        """`Residuals.fold`, for every worker."""
        if self.owners:
            second_Wn = self._second()
            self.first_Wn = torch.where(second_Wn == 0, self.first_Wn, self.first_Wn + second_Wn * gain)
            self.second_n.zero_()
            self.stray_Wn = None

    def _second(self) -> Tensor:
        """What rounding removed of each worker's sums, now and before."""
        second_Wn = torch.zeros_like(self.first_Wn) if self.stray_Wn is None else self.stray_Wn.clone()
        self._spill(second_Wn)
        return second_Wn

    def by_worker(self) -> Tensor:
        """All of each worker's; an owner's part counts for all workers, hence times W."""
        return self.first_Wn + self._second() * len(self.first_Wn)


@dataclass
class Workers:
    """One call: `simulate` reads `x_Wn` and writes the result, which is the same for all workers, into `out`."""

    x_Wn: Tensor
    out: Tensor
    coder: Coder
    seats: Sequence[int]
    noise: Callable[[int, int], Noise]
    """Of a worker and a phase."""
    scales: Sequence[Scales]
    """Of each worker's own values."""
    reduction: Reduction = field(default_factory=Reduction)
    sums: SumRule = field(default_factory=SumRule)
    residuals: StackedResiduals | None = None
    nodes: Sequence[Sequence[int]] = ()
    inner: Coder | None = None
    low: bool = False
    """Whether a ring casts a worker's own values before it adds them."""

    @property
    def world(self) -> int:
        return len(self.seats)

    @property
    def whole(self) -> Range:
        return 0, self.x_Wn.shape[1]

    def owned_shards(self) -> list[Part]:
        """The worker at each rank and the shard that it owns."""
        return list(zip(self.seats, self.coder.shards(self.world), strict=True))

    def new(self, part: Range) -> Tensor:
        return torch.empty(part[1] - part[0], dtype=torch.float32, device=self.x_Wn.device)

    def sum_scales(self, worker: int) -> Scales:
        """The scales that hold for sums too."""
        return self.scales[worker] if self.coder.shares_scales else None

    def passage(self, values: Tensor, encoder: Part, phase: int, scales: Scales, out: Tensor) -> None:
        """What arrives of `values`, which a worker encodes with its noise of a phase."""
        worker, part = encoder
        self.coder.passage(values, part, self.noise(worker, phase), scales, out)

    def sum_of_own(self, parts: Sequence[Range]) -> Tensor:
        """The sum of what arrives of every worker's values, part by part, in the order of their seats."""
        total = self.new(self.whole)
        if self.sums.is_plain:
            for place, worker in enumerate(self.seats):
                self._own_passage(worker, parts, total, accumulate=place > 0)
            return total
        running = self.sums.begin(self.whole)
        for worker in self.seats:
            self._own_passage(worker, parts, total, accumulate=False)
            running.add(total)
        return running.result()

    def _own_passage(self, worker: int, parts: Sequence[Range], total: Tensor, accumulate: bool) -> None:
        """What arrives of a worker's values, written or added into `total`; what is lost goes into its residual."""
        noise, scales, own = self.noise(worker, FIRST), self.scales[worker], self.x_Wn[worker]
        for part in parts:
            residual = self.residuals.first(worker, part) if self.residuals else None
            self.coder.passage(take(own, part), part, noise, scales, take(total, part), accumulate, residual)

    @property
    def adds_messages(self) -> bool:
        """Whether messages are worth to be kept until they are added: not where they are as large as the values, nor
        where blocks with noise of their own are better encoded in one go than for each owner.
        """
        apart = self.coder.whole_segments or not self.coder.codec.stochastic
        return self.sums.is_plain and apart and not self.coder.is_identity(self.x_Wn.dtype)

    def reduce_messages(self, owner: Part) -> None:
        """Add every worker's message of a part, in the order of their seats, and publish the sum as its owner does."""
        worker, part = owner
        rows = aligned_rows(self.world + 1, self.coder.nbytes(part), self.x_Wn.device)
        for row, sender in zip(rows[1:], self.seats, strict=True):
            values, noise = take(self.x_Wn[sender], part), self.noise(sender, FIRST)
            residual = self.residuals.first(sender, part) if self.residuals else None
            self.coder.encode(values, part, row, noise, self.scales[sender], residual)
        noise, scales, out = self.noise(worker, SECOND), self.sum_scales(worker), take(self.out, part)
        residual = self.residuals.second(part) if self.residuals else None
        sent = out if residual is None else self.new(part)
        self.coder.reduce(rows[1:], part, rows[0], noise, scales, residual, self.reduction, sent)
        if residual is not None and self.residuals:
            store(out, sent)
            self.residuals.keep(residual.residual, sent, out)

    def publish(self, total: Tensor, parts: Sequence[Part]) -> None:
        """What arrives of finished sums, encoded by whoever owns them, into `out`."""
        for worker, part in parts:
            noise, scales, out = self.noise(worker, SECOND), self.sum_scales(worker), take(self.out, part)
            if self.residuals is None:
                self.coder.passage(take(total, part), part, noise, scales, out)
                continue
            sent, residual = self.new(part), self.residuals.second(part)
            self.coder.passage(take(total, part), part, noise, scales, sent, feedback=residual)
            store(out, sent)
            self.residuals.keep(residual.residual, sent, out)

    def joined(self, parts: Sequence[Part]) -> Sequence[Part]:
        """Neighbouring parts that give the same bytes encoded in one go: blocks, or one segment with a scale that all
        share, where no noise tells who encoded."""
        one = self.coder.shares_scales and len(self.coder.segments) == 1
        apart = (self.coder.whole_segments and not one) or self.coder.codec.stochastic
        return parts if apart else [(self.seats[0], self.whole)]

    def agreed_unit(self) -> Tensor | None:
        """The scale of each value, where all workers share one for each of several segments of float32; else None."""
        several = len(self.coder.segments) > 1 and self.coder.shares_scales and not self.coder.codec.stochastic
        if not several or self.residuals is not None or self.x_Wn.dtype != torch.float32:
            return None
        lengths = torch.tensor([high - low for low, high in self.coder.segments], device=self.x_Wn.device)
        scales = torch.cat([scale for scale in self.scales[0] or () if scale is not None])
        return scales.repeat_interleave(lengths, output_size=self.coder.numel)

    def in_units_of(self, unit_n: Tensor) -> Workers:
        """The same call of values that are multiples of powers of two: one segment, and a scale of 1."""
        # where the scale is 0 all values become zeros, with their signs
        x_Wn, one = self.x_Wn / unit_n.where(unit_n != 0, 1.0), torch.ones_like(unit_n[:1])
        coder = Coder(self.coder.codec, [len(unit_n)], torch.float32)
        sums = self.sums if self.sums.unit_n is None else replace(self.sums, unit_n=None)
        return replace(
            self, x_Wn=x_Wn, out=torch.empty_like(self.out), coder=coder, scales=[[one]] * len(self.scales), sums=sums
        )
