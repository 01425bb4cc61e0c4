"""Gradients of FSDP2 by low rank: before a reduce-scatter every rank has the whole gradient of a unit.

So its matrices are put together from their rows, their factors are summed over all ranks, and each rank takes its own
row of the result. Residuals are kept as all of them are here, by parameter and row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from narrowcast.codecs import Codec, KeptFactors, Matrix
from narrowcast.collectives import LowRankCall, LowRankReduce, Range, Reduction, Residuals, Times, Work, start_low_rank
from narrowcast.parallel.fsdp.layout import Sharded, Unit
from narrowcast.parallel.policy import GRADIENT
from narrowcast.parallel.residuals import check_factors
from narrowcast.parallel.stats import compressed_values

if TYPE_CHECKING:
    from narrowcast.parallel.fsdp.shards import FSDPState

Count = Callable[[int, int, Times, int], Callable[[Work], None]]
"""Of values, plain bytes, times and compressed values: begins to time a call."""


class Member(NamedTuple):
    """A tensor of a reduce-scatter, its codec, and where it lies in each row."""

    tensor: Sharded
    codec: Codec
    part: Range


@dataclass
class WholeMatrix:
    """One of them, put together from its rows."""

    tensor: Sharded
    part: Range
    values: Tensor
    rows: Residuals | None
    """What is kept, row by row."""
    residual: Tensor | None
    """Of the matrix: the same memory as `rows`, unless rows are columns of it."""

    @classmethod
    def of(cls, member: Member, x_WL: Tensor, rows: Residuals | None) -> WholeMatrix:
        tensor, world = member.tensor, len(x_WL)
        residual = None if rows is None else tensor.whole(rows.first.view(world, -1)).contiguous()
        values = tensor.whole(x_WL[:, slice(*member.part)]).contiguous()
        return cls(tensor, member.part, values, rows, residual)

    def call(self, kind: LowRankReduce, step: tuple[int, ...], factors: KeptFactors, times: Times) -> LowRankCall:
        kept = None
        if self.residual is not None and self.rows is not None:
            kept = Residuals(self.residual.view(-1), self.residual.new_zeros(0), self.rows.unit)
        return LowRankCall(kind, [self.values.view(-1)], step, (self.tensor.name,), factors, kept, times)

    def take_apart(self, total: Tensor, rank: int, world: int) -> None:
        """Write this rank's row of the result into `total`, and keep the residual where it came from."""
        total[slice(*self.part)] = self.tensor.rows(self.values, world)[rank]
        if self.tensor.dim and self.residual is not None and self.rows is not None:
            self.rows.first.copy_(self.tensor.rows(self.residual, world).view(-1))


def start_matrices(
    state: FSDPState,
    unit: Unit,
    seed: int,
    members: Sequence[Member],
    x: Tensor,
    reduction: Reduction,
    count: Count,
) -> Callable[[Tensor], None]:
    """Start the sums of all that go by low rank, a call for each wire. What is returned waits for them, and fills the
    row of this rank.
    """
    world, by_codec = state.channel.world, dict[Codec, list[WholeMatrix]]()
    for member in members:
        name, length, rows = member.tensor.name, member.part[1] - member.part[0], None
        if member.codec.feedback:
            rows = state.residuals(unit, [name], [length], x[: world * length])
        whole = WholeMatrix.of(member, x.view(world, -1), rows)
        state.sample(name, whole.values, member.codec)
        by_codec.setdefault(member.codec, []).append(whole)
    started: list[tuple[list[WholeMatrix], Work]] = []
    for number, (codec, wholes) in enumerate(by_codec.items()):
        times, step = Times(), (state.step, number)
        calls = [
            whole.call(
                LowRankReduce(codec, (Matrix.of(whole.tensor.shape),), world, reduction, seed=seed),
                *(step, state.factors, times),
            )
            for whole in wholes
        ]
        values = sum(whole.values.numel() for whole in wholes)
        plain, compressed = (
            (world - 1) * values * x.element_size() // world,
            compressed_values(codec, x.dtype, values, world),
        )
        counted = count(values, plain, times, compressed)
        work = start_low_rank(state.channel, calls)
        work.then(counted)
        started.append((wholes, work))

    def finish(total: Tensor) -> None:
        for wholes, work in started:
            work.wait()
            for whole in wholes:
                whole.take_apart(total, state.channel.rank, world)

    return finish


def refuse_replicas(state: FSDPState, name: str, codec: Codec) -> None:
    """With a 2-D mesh a gradient goes between replicas as a shard, which is no whole matrix."""
    if codec.rank and state.replicas is not None:
        raise ValueError(
            f"attach with FSDP2: {name} has {codec}, and the model has replicas: low rank sums whole matrices over all "
            f"ranks, and between replicas there are shards of them; shard over a 1-D mesh, or take {codec.factors}"
        )


def factors_of(state: FSDPState) -> dict[str, Tensor]:
    """The factors, the same on every rank; zeros for those of matrices that would go by low rank now."""
    places: dict[str, Tensor] = {}
    for unit in state.units:
        for tensor in (tensor for tensor in unit.tensors if tensor.trainable):
            codec = state.choice(unit, tensor, GRADIENT).codec
            if codec.rank:
                places |= KeptFactors.places(tensor.name, Matrix.of(tensor.shape), codec, tensor.private.device)
    return places | state.factors.state_dict()


def load_factors(state: FSDPState, factors: Mapping[str, Tensor]) -> None:
    """Go on from these."""
    every = [tensor for unit in state.units for tensor in unit.tensors]
    check_factors(factors, {t.name: Matrix.of(t.shape) for t in every if len(t.shape) > 1})
    state.factors.load(factors)
