"""Other ways to share the work than plain data parallelism: FSDP, pipelines, and layers split in sub-batches.

Each is a `StepPredictor` with its own timeline. Shapes as in step.py: D versions, U units of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from narrowcast.codecs import codec as codec_named
from narrowcast.collectives import Cost, choose
from narrowcast.parallel import BUCKET_BYTES, overlap
from narrowcast.predict import costs, low_rank
from narrowcast.predict.costs import Costs
from narrowcast.predict.model import Bucket, CallPlan, Description, Layer, PlannedSum, Profile, ddp_buckets, wire_sizes
from narrowcast.predict.step import Setup, StepPredictor, Timeline, timeline

MODES = ("data", "fsdp", "pipeline", "model", "hybrid")
MICRO_BATCHES = 4
"""Micro-batches for each stage of a pipeline."""


class _Scheme(StepPredictor):
    """A way to share the work whose collectives go from rank to rank, each value encoded once."""

    name: ClassVar[str]
    sums_gradients: ClassVar[bool] = False
    """Whether the wire is that of gradients alone."""

    def algorithm(self, setup: Setup) -> str:
        return self.name

    def roundings(self, setup: Setup) -> int:
        return int(setup.world > 1 and not codec_named(setup.wire).lossless)

    def span(self, setup: Setup) -> tuple[Timeline, Tensor, Tensor]:
        factor_D = self.compute_D * self.together(setup.world)
        if setup.world == 1:
            compute_D = self.profile.compute * factor_D
            nothing = torch.zeros(len(compute_D), 0, dtype=torch.float64)
            return timeline(compute_D, compute_D, nothing.sum(1), compute_D, compute_D), nothing, nothing
        if codec_named(setup.wire).rank and not self.sums_gradients:
            raise ValueError(
                f"--parallel {self.name} with {setup.wire}: low rank is for gradients, and here the wire is that of "
                "activations; take --parallel data or fsdp, or another wire"
            )
        return self._span(setup, factor_D)

    def _span(self, setup: Setup, factor_D: Tensor) -> tuple[Timeline, Tensor, Tensor]:
        """Of several workers; a rank takes `factor_D` times the profile's time to compute."""
        raise NotImplementedError

    def _bytes(self, setup: Setup) -> float:
        return self._sent_bytes(setup) if setup.world > 1 else 0.0

    def _sent_bytes(self, setup: Setup) -> float:
        raise NotImplementedError

    def _collective(self, kind: str, wire: str, world: int, values: Sequence[float]) -> tuple[Tensor, Tensor]:
        """Seconds of a collective of each size, and of the codec in it, [D, N]."""
        sizes_N = torch.tensor([float(n) for n in values], dtype=torch.float64)
        encodes = 1 / world if kind == "all_gather" else 1.0
        cost = Cost((costs.stage_of(kind, self.cluster, world),), encodes=encodes, decodes=1.0, roundings=1)
        coding = torch.zeros(self.costs.draws + 1, len(sizes_N), dtype=torch.float64)
        if wire not in ("fp32", "as-is"):
            coding = self.costs.codec_seconds(cost, wire, sizes_N)
        return self.costs.wire_seconds(cost, wire, sizes_N) + coding, coding


class Fsdp(_Scheme):
    """Parameters are gathered before forward and again before backward, gradients reduced and scattered: 3 collectives.

    The wire is that of gradients; parameters travel as `parameters` says.
    """

    name = "fsdp"
    sums_gradients = True

    def __init__(self, profile: Profile, made: Costs, parameters: str = "bf16") -> None:
        super().__init__(profile, made)
        self.parameters = parameters

    def _units(self) -> tuple[Bucket, ...]:
        """As the backward pass meets them."""
        return ddp_buckets(self.profile.tensors, first_bytes=BUCKET_BYTES, min_values=0)

    def _span(self, setup: Setup, factor: Tensor) -> tuple[Timeline, Tensor, Tensor]:
        profile, units, world = self.profile, self._units(), setup.world
        ends = torch.tensor([unit.ready for unit in units], dtype=torch.float64)
        slices = torch.diff(ends, prepend=torch.zeros(1, dtype=torch.float64))
        backward_DU = slices * factor[:, None]
        forward_DU = (slices.flip(0) / ends[-1] * profile.forward) * factor[:, None]
        values = [unit.values for unit in units]
        gather, coding = self._collective("all_gather", self.parameters, world, values)
        scatter, more = self._reduced(setup, units)
        # forward: the next unit is gathered while this one computes
        start = torch.zeros_like(gather)
        forward = overlap.queue(overlap.queue(start, gather.flip(-1)), forward_DU)[:, -1:]
        # backward: gathers and scatters take turns on one link
        taken = overlap.queue(forward + start, gather + torch.cat([start[:, :1], scatter[:, :-1]], dim=-1))
        computed = overlap.queue(taken, backward_DU)
        sent = overlap.queue(computed, scatter)[:, -1]
        link = forward[:, 0] + gather.sum(-1) + scatter.sum(-1)
        end = torch.maximum(torch.maximum(sent, link), computed[:, -1])
        update_D, work_D = profile.update / world * factor, (profile.forward + profile.backward) * factor
        seconds = torch.cat([gather, gather, scatter], dim=-1)
        codec = torch.cat([coding, coding, more], dim=-1)
        total_D = seconds.sum(-1)
        least_D, most_D = torch.maximum(work_D, total_D) + update_D, work_D + total_D + update_D
        return timeline(end + update_D, profile.compute * factor, total_D, least_D, most_D), seconds, codec

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


class Pipeline(_Scheme):
    """As many stages as workers, micro-batches in a row; activations and their gradients cross boundaries."""

    name = "pipeline"

    def bubble(self, setup: Setup) -> Tensor:
        """The pipeline fills and drains: every stage waits for the others' first and last micro-batch."""
        work_D = (self.profile.forward + self.profile.backward) * self.compute_D * self.together(setup.world)
        return (setup.world - 1) * work_D / (MICRO_BATCHES * setup.world)

    def _span(self, setup: Setup, factor: Tensor) -> tuple[Timeline, Tensor, Tensor]:
        """The same samples a worker as with data parallelism: a stage computes 1/P of each of P times the samples."""
        profile, stages = self.profile, setup.world
        if not profile.activations:
            problem = "does not say how many activations cross a boundary"
            raise ValueError(f"pipeline: the profile of {profile.name} {problem}")
        work_D, count = (profile.forward + profile.backward) * factor, MICRO_BATCHES * stages
        values = max(1.0, profile.activations * profile.batch * stages / count)
        cross_D, coding_D = (x[:, 0] for x in self._collective("send", setup.wire, stages, [values]))
        link_D, bubble_D = 2 * count * cross_D, self.bubble(setup)
        # fill and drain: every boundary is crossed once each way with nothing to hide under
        alone_D = (stages - 1) * 2 * cross_D + profile.update / stages * factor
        whole_D = torch.maximum(work_D, link_D) + bubble_D + alone_D
        compute_D = profile.compute * factor + bubble_D
        made = timeline(whole_D, compute_D, link_D, whole_D, work_D + link_D + bubble_D + alone_D)
        return made, link_D[:, None], (2 * count * coding_D)[:, None]

    def _sent_bytes(self, setup: Setup) -> float:
        values = int(self.profile.activations * self.profile.batch * setup.world)
        return 2.0 * sum(wire_sizes(setup.wire, (values,)))


class SubBatches(_Scheme):
    """Dettmers' scheme: layers split over the workers, in as many sub-batches as there are workers.

    "hybrid": fully connected layers are split, the others data parallel. "model": every layer is split. A layer's
    activations are gathered while the next sub-batch computes; what does not fit under it is added for each sub-batch
    (the paper adds it once, which may be less than the link needs), and workers + 1 times the first activations, which
    have nothing to hide under.
    """

    name = "sub-batches"

    def __init__(self, description: Description, profile: Profile, made: Costs, mode: str) -> None:
        super().__init__(profile, made)
        self.description, self.mode = description, mode

    def _split(self, name: str) -> bool:
        return self.mode == "model" or name.startswith(("linear", "lstm"))

    def _split_layers(self) -> list[Layer]:
        return [layer for layer in self.description.layers if self._split(layer.name) and layer.macs]

    def _data_parallel(self) -> StepPredictor:
        names = {layer.name for layer in self.description.layers if not self._split(layer.name)}
        kept = tuple(t for t in self.profile.tensors if t.name.rpartition(".")[0] in names)
        share = sum(layer.macs for layer in self.description.layers if layer.name in names) / self.description.macs
        scaled = replace(
            self.profile.scaled(share),
            update=self.profile.update * sum(t.numel for t in kept) / self.profile.numel,
            tensors=tuple(replace(t, ready=t.ready * share) for t in kept),
            source="",
            activations=0,
            ranks=1,
        )
        return StepPredictor(scaled, self.costs)

    def _span(self, setup: Setup, factor: Tensor) -> tuple[Timeline, Tensor, Tensor]:
        world = setup.world
        base, seconds, coding = self._data_parallel().span(setup)
        split = self._split_layers()
        outputs = [layer.output * self.profile.batch for layer in split]
        sync, codec = self._collective("all_gather", setup.wire, world, outputs)
        share = torch.tensor([layer.macs / self.description.macs for layer in split], dtype=torch.float64)
        # a sub-batch computes 1/world of the layer's work, three times: forward, and two products backward
        work = (self.profile.forward + self.profile.backward) * share[None, :] * factor[:, None]
        hidden = torch.cat([work / world / 3, work / world * 2 / 3], dim=-1)
        beyond_D = world * (torch.cat([sync, sync], dim=-1) - hidden).clamp_min(0).sum(-1)
        alone_D, work_D, link_D = (world + 1) * sync[:, :1].sum(-1), work.sum(-1), 2 * world * sync.sum(-1)
        update_D = self.profile.update * factor / world
        whole_D = base.step + work_D + beyond_D + alone_D + update_D
        least_D = base.least + torch.maximum(work_D, link_D) + alone_D + update_D
        most_D = base.most + work_D + link_D + alone_D + update_D
        every, coded = (
            torch.cat([a, 2 * world * b, (world + 1) * b[:, :1]], dim=-1) for a, b in ((seconds, sync), (coding, codec))
        )
        return timeline(whole_D, self.profile.compute * factor, every.sum(-1), least_D, most_D), every, coded

    def _sent_bytes(self, setup: Setup) -> float:
        share = costs.volume("all_gather", setup.world)
        values = tuple(layer.output * self.profile.batch for layer in self._split_layers())
        sizes = wire_sizes(setup.wire, values)
        moved = 2 * setup.world * sum(sizes) + (setup.world + 1) * sum(sizes[:1])
        return self._data_parallel()._bytes(setup) + share * moved


def shared_otherwise(mode: str, profile: Profile, made: Costs, description: Description | None) -> StepPredictor:
    """The timeline of a way to share the work other than "data"."""
    if mode == "fsdp":
        return Fsdp(profile, made)
    if mode == "pipeline":
        return Pipeline(profile, made)
    if mode in ("model", "hybrid"):
        if description is None:
            needs = "needs the layers of a built-in description; a profile does not know them"
            raise ValueError(f"--parallel {mode}: {needs}")
        return SubBatches(description, profile, made, mode)
    raise ValueError(f"--parallel: unknown {mode!r}; take {', '.join(MODES)}")
