"""Parameters cut over ranks: FSDP over all of them, HSDP over those of a node with replicas between nodes.

Shapes as in step.py: D versions, U units of the model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from narrowcast.codecs import codec as codec_named
from narrowcast.collectives import choose
from narrowcast.parallel import BUCKET_BYTES
from narrowcast.predict import costs, low_rank
from narrowcast.predict.costs import Costs
from narrowcast.predict.model import Bucket, CallPlan, PlannedSum, Profile, TensorTime, ddp_buckets, wire_sizes
from narrowcast.predict.scheme import Scheme
from narrowcast.predict.step import Setup, Timeline, timeline

BLOCK = re.compile(r"^(.*?\b\d+)\.")
"""The name of a tensor in a numbered block: `layers.3.` of `layers.3.attention.weight`."""


def block_of(name: str) -> str:
    """What `fully_shard` is usually called on; empty for what the root keeps."""
    found = BLOCK.match(name)
    return found[1] if found else ""


def units_of(tensors: tuple[TensorTime, ...]) -> tuple[Bucket, ...]:
    """Numbered blocks, and the rest as the root's; where names have no blocks, neighbours of 25 MiB together."""
    names = [block_of(tensor.name) for tensor in tensors]
    if not any(names):
        return ddp_buckets(tensors, first_bytes=BUCKET_BYTES, min_values=0)
    groups: dict[str, list[TensorTime]] = {}
    for name, tensor in zip(names, tensors, strict=True):
        groups.setdefault(name, []).append(tensor)
    made = (Bucket(sum(t.numel for t in held), max(t.ready for t in held), 0, tuple(held)) for held in groups.values())
    return tuple(sorted(made, key=lambda unit: unit.ready))


def _one_ahead(start_D: Tensor, gather_DU: Tensor, work_DU: Tensor, scatter_DU: Tensor) -> Tensor:
    """When units end whose parameters come while the unit before computes, and whose gradients leave after it, [D].

    All of it takes turns on one link.
    """
    link_D = start_D + gather_DU[:, 0]
    here_D, compute_D, last = link_D, start_D, gather_DU.shape[1] - 1
    for unit in range(last + 1):
        begin_D = torch.maximum(compute_D, here_D)
        if unit < last:
            link_D = here_D = torch.maximum(link_D, begin_D) + gather_DU[:, unit + 1]
        compute_D = begin_D + work_DU[:, unit]
        # nothing waits for the compute where nothing leaves
        sent_D = torch.maximum(link_D, compute_D) + scatter_DU[:, unit]
        link_D = torch.where(scatter_DU[:, unit] > 0, sent_D, link_D)
    return torch.maximum(link_D, compute_D)


class Fsdp(Scheme):
    """Unit by unit, as FSDP2 wraps them: parameters are gathered before forward and again before backward, one unit
    ahead of compute, and gradients reduced and scattered while the backward pass goes on.

    The wire is that of gradients; parameters travel as `parameters` says.
    """

    name = "fsdp"
    sums_gradients = True

    def __init__(self, profile: Profile, made: Costs, parameters: str = "bf16") -> None:
        super().__init__(profile, made)
        self.parameters = parameters

    def _units(self) -> tuple[Bucket, ...]:
        """As the backward pass meets them."""
        return units_of(self.profile.tensors)

    def _span(self, setup: Setup, factor_D: Tensor) -> tuple[Timeline, Tensor, Tensor]:
        profile, units = self.profile, self._units()
        ends = torch.tensor([unit.ready for unit in units], dtype=torch.float64)
        slices = torch.diff(ends, prepend=torch.zeros(1, dtype=torch.float64))
        backward_DU = slices * factor_D[:, None]
        forward_DU = (slices.flip(0) / ends[-1] * profile.forward) * factor_D[:, None]
        gather, coding = self._collective("all_gather", self.parameters, self._shards(setup), [u.values for u in units])
        scatter, more = self._reduced(setup, units)
        nothing, start_D = torch.zeros_like(gather), torch.zeros(len(gather), dtype=torch.float64)
        forward_D = _one_ahead(start_D, gather.flip(-1), forward_DU, nothing)
        end_D = _one_ahead(forward_D, gather, backward_DU, scatter)
        update_D = profile.update / self._shards(setup) * factor_D
        work_D = (profile.forward + profile.backward) * factor_D
        seconds = torch.cat([gather, gather, scatter], dim=-1)
        codec = torch.cat([coding, coding, more], dim=-1)
        total_D = seconds.sum(-1)
        least_D, most_D = torch.maximum(work_D, total_D) + update_D, work_D + total_D + update_D
        return timeline(end_D + update_D, profile.compute * factor_D, total_D, least_D, most_D), seconds, codec

    def _shards(self, setup: Setup) -> int:
        """Ranks that parameters are cut for."""
        return setup.world

    def _reduced(self, setup: Setup, units: Sequence[Bucket]) -> tuple[Tensor, Tensor]:
        """Seconds of each unit's gradients, and of the codec in them, [D, U]."""
        if not codec_named(setup.wire).rank:
            return self._collective("reduce_scatter", setup.wire, setup.world, [unit.values for unit in units])
        seconds, coding = torch.zeros(2, self.costs.draws + 1, len(units), dtype=torch.float64)
        for place, unit in enumerate(units):
            for call in low_rank.low_rank_calls([unit], setup.wire, setup.min_values):
                took, coded = self._low_rank_call(setup, call)
                seconds[:, place] += took
                coding[:, place] += coded
        return seconds, coding

    def _low_rank_call(self, setup: Setup, call: CallPlan) -> tuple[Tensor, Tensor]:
        """All matrices of a unit together, or a reduce-scatter of the rest."""
        if not call.matrices:
            seconds, coding = self._collective("reduce_scatter", call.wire, setup.world, [call.values])
            return seconds[:, 0], coding[:, 0]
        total = low_rank.product_seconds(self.costs, call.wire, call.matrices)
        coded = total
        for one in call.sums:
            size = torch.tensor([float(one.values)], dtype=torch.float64)
            seconds, coding = self.costs.seconds(self._way(setup, one), one.wire, size, setup.world)
            total, coded = total + one.often * seconds[:, 0], coded + one.often * coding[:, 0]
        return total, coded

    def _way(self, setup: Setup, one: PlannedSum) -> str:
        return choose("auto", codec_named(one.wire), one.values, setup.world, False)

    def _sent_bytes(self, setup: Setup) -> float:
        share, units = costs.volume("all_gather", setup.world), self._units()
        values = tuple(unit.values for unit in units)
        weights = 2 * share * sum(wire_sizes(self.parameters, values))
        if not codec_named(setup.wire).rank:
            return weights + share * sum(wire_sizes(setup.wire, values))
        calls = [call for unit in units for call in low_rank.low_rank_calls([unit], setup.wire, setup.min_values)]
        return weights + sum(self._sum_bytes(setup, call, one) for call in calls for one in call.sums)

    def _sum_bytes(self, setup: Setup, call: CallPlan, one: PlannedSum) -> float:
        """Of factors, which all ranks get, or of what is scattered."""
        share = costs.volume("reduce_scatter", setup.world)
        if call.matrices:
            stages = self.costs.plan(self._way(setup, one), setup.world).stages
            share = sum(stage.own for stage in stages)
        return share * one.often * wire_sizes(one.wire, (one.values,))[0]


class Hsdp(Fsdp):
    """Sharded inside a node, replicated between nodes: each rank adds its part of the gradients up with its likes of
    the other nodes, by the same wire.
    """

    name = "hsdp"

    def _shards(self, setup: Setup) -> int:
        return self.cluster.shape(setup.world)[0]

    def _span(self, setup: Setup, factor_D: Tensor) -> tuple[Timeline, Tensor, Tensor]:
        if self.cluster.node == 1:
            raise ValueError(
                f"--parallel hsdp: cluster {self.cluster.name} has one device a node; it shards inside nodes, so give "
                "a cluster with two levels of links, or take fsdp"
            )
        if codec_named(setup.wire).rank:
            raise ValueError(
                f"--parallel hsdp with {setup.wire}: low rank is for 1-D meshes; take fsdp, or another wire"
            )
        return super()._span(setup, factor_D)

    def _reduced(self, setup: Setup, units: Sequence[Bucket]) -> tuple[Tensor, Tensor]:
        values, inside = [unit.values for unit in units], self._shards(setup)
        seconds, coding = self._collective("reduce_scatter", setup.wire, inside, values)
        if setup.world > inside:
            between = costs.between_nodes(self._sum(setup), self.cluster, setup.world)
            took, coded = self._call(between, setup.wire, values)
            seconds, coding = seconds + took, coding + coded
        return seconds, coding

    def _sum(self, setup: Setup) -> str:
        return "native" if costs.is_summed_by_backend(setup.wire) else "two_shot"

    def roundings(self, setup: Setup) -> int:
        return super().roundings(setup) * (1 if setup.world <= self._shards(setup) else 3)

    def _sent_bytes(self, setup: Setup) -> float:
        inside = self._shards(setup)
        own = super()._sent_bytes(Setup(inside, setup.wire, min_values=setup.min_values)) if inside > 1 else 0.0
        values = tuple(unit.values for unit in self._units())
        nodes = -(-setup.world // inside)
        return own + costs.volume("all_reduce", nodes) * sum(wire_sizes(setup.wire, values)) / inside
