"""Other ways to share the work than plain data parallelism: FSDP, pipelines, and layers split in sub-batches.

Each is a `StepPredictor` with its own timeline. Shapes as in step.py: D versions, U units of the model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowcast.codecs import codec as codec_named
from narrowcast.collectives import Cost
from narrowcast.parallel import BUCKET_BYTES, overlap
from narrowcast.predict import costs
from narrowcast.predict.costs import Costs
from narrowcast.predict.model import Bucket, Description, Layer, Profile, ddp_buckets, wire_bytes
from narrowcast.predict.step import Setup, StepPredictor, Timeline, timeline

MODES = ("data", "fsdp", "pipeline", "model", "hybrid")
MICRO_BATCHES = 4
"""Micro-batches for each stage of a pipeline."""


class Fsdp(StepPredictor):
    """Parameters are gathered before forward and again before backward, gradients reduced and scattered: 3 collectives.

    The wire is that of gradients; parameters travel as `parameters` says.
    """

    def __init__(self, profile: Profile, made: Costs, parameters: str = "bf16") -> None:
        super().__init__(profile, made)
        self.parameters = parameters

    def algorithm(self, setup: Setup) -> str:
        return "fsdp"

    def roundings(self, setup: Setup) -> int:
        return _once(setup)

    def _units(self) -> tuple[Bucket, ...]:
        """As the backward pass meets them."""
        return ddp_buckets(self.profile.tensors, first_bytes=BUCKET_BYTES, min_values=0)

    def _collective(self, kind: str, wire: str, world: int) -> tuple[Tensor, Tensor]:
        """Seconds and codec seconds of each unit's collective, [D, U]."""
        values = torch.tensor([float(unit.values) for unit in self._units()], dtype=torch.float64)
        share = 1 / world if kind == "all_gather" else 1.0
        made = Cost((costs.ring_stage(kind, self.cluster, world),), encodes=share, decodes=1.0, roundings=1)
        plain = wire in ("fp32", "as-is")
        coding = torch.zeros(self.costs.draws + 1, len(values), dtype=torch.float64)
        if not plain:
            coding = self.costs.codec_seconds(made, wire, values)
        return self.costs.wire_seconds(made, wire, values) + coding, coding

    def span(self, setup: Setup) -> tuple[Timeline, Tensor, Tensor]:
        profile, units = self.profile, self._units()
        factor = self.compute_D * self.together(setup.world)
        compute_D = profile.compute * factor
        if setup.world == 1:
            return _alone(compute_D)
        ends = torch.tensor([unit.ready for unit in units], dtype=torch.float64)
        slices = torch.diff(ends, prepend=torch.zeros(1, dtype=torch.float64))
        backward_DU = slices * factor[:, None]
        forward_DU = (slices.flip(0) / ends[-1] * profile.forward) * factor[:, None]
        gather, coding = self._collective("all_gather", self.parameters, setup.world)
        scatter, more = self._collective("reduce_scatter", setup.wire, setup.world)
        # forward: the next unit is gathered while this one computes
        start = torch.zeros_like(gather)
        forward = overlap.queue(overlap.queue(start, gather.flip(-1)), forward_DU)[:, -1:]
        # backward: gathers and scatters take turns on one link
        taken = overlap.queue(forward + start, gather + torch.cat([start[:, :1], scatter[:, :-1]], dim=-1))
        computed = overlap.queue(taken, backward_DU)
        sent = overlap.queue(computed, scatter)[:, -1]
        link = forward[:, 0] + gather.sum(-1) + scatter.sum(-1)
        end = torch.maximum(torch.maximum(sent, link), computed[:, -1])
        update_D, work_D = profile.update / setup.world * factor, (profile.forward + profile.backward) * factor
        seconds = torch.cat([gather, gather, scatter], dim=-1)
        codec = torch.cat([coding, coding, more], dim=-1)
        total_D = seconds.sum(-1)
        least_D, most_D = torch.maximum(work_D, total_D) + update_D, work_D + total_D + update_D
        return timeline(end + update_D, compute_D, total_D, least_D, most_D), seconds, codec

    def _bytes(self, setup: Setup) -> float:
        share = costs.volume("all_gather", setup.world) if setup.world > 1 else 0.0
        sizes = [(wire_bytes(self.parameters, u.values), wire_bytes(setup.wire, u.values)) for u in self._units()]
        return share * sum(2 * weights + gradients for weights, gradients in sizes)


class Pipeline(StepPredictor):
    """As many stages as workers, micro-batches in a row; activations and their gradients cross boundaries."""

    def __init__(self, profile: Profile, made: Costs, micro_batches: int = 0) -> None:
        super().__init__(profile, made)
        self.micro_batches = micro_batches

    def algorithm(self, setup: Setup) -> str:
        return "pipeline"

    def roundings(self, setup: Setup) -> int:
        return _once(setup)

    def _count(self, setup: Setup) -> int:
        return self.micro_batches or MICRO_BATCHES * setup.world

    def bubble(self, setup: Setup) -> Tensor:
        """The pipeline fills and drains: every stage waits for the others' first and last micro-batch."""
        work_D = (self.profile.forward + self.profile.backward) * self.compute_D * self.together(setup.world)
        return (setup.world - 1) * work_D / self._count(setup)

    def _boundary(self, setup: Setup) -> tuple[Tensor, Tensor, int]:
        """Seconds of one crossing and of the codec in it, [D], and the number of micro-batches."""
        count = self._count(setup)
        values = max(1.0, self.profile.activations * self.profile.batch * setup.world / count)
        made = Cost((costs.ring_stage("send", self.cluster, setup.world),), encodes=1.0, decodes=1.0, roundings=1)
        sizes = torch.tensor([values], dtype=torch.float64)
        coding = torch.zeros(self.costs.draws + 1, dtype=torch.float64)
        if setup.wire not in ("fp32", "as-is"):
            coding = self.costs.codec_seconds(made, setup.wire, sizes)[:, 0]
        return self.costs.wire_seconds(made, setup.wire, sizes)[:, 0] + coding, coding, count

    def span(self, setup: Setup) -> tuple[Timeline, Tensor, Tensor]:
        """The same samples a worker as with data parallelism: a stage computes 1/P of each of P times the samples."""
        profile, stages = self.profile, setup.world
        if not profile.activations and stages > 1:
            raise ValueError(
                f"pipeline: the profile of {profile.name} does not say how many activations cross a boundary"
            )
        factor = self.compute_D * self.together(stages)
        work_D = (profile.forward + profile.backward) * factor
        if stages == 1:
            return _alone(profile.compute * factor)
        cross_D, coding_D, count = self._boundary(setup)
        link_D, bubble_D = 2 * count * cross_D, self.bubble(setup)
        # fill and drain: every boundary is crossed once each way with nothing to hide under
        alone_D = (stages - 1) * 2 * cross_D + profile.update / stages * factor
        whole_D = torch.maximum(work_D, link_D) + bubble_D + alone_D
        compute_D = profile.compute * factor + bubble_D
        made = timeline(whole_D, compute_D, link_D, whole_D, work_D + link_D + bubble_D + alone_D)
        return made, link_D[:, None], (2 * count * coding_D)[:, None]

    def _bytes(self, setup: Setup) -> float:
        values = int(self.profile.activations * self.profile.batch * setup.world)
        return 2.0 * wire_bytes(setup.wire, values) if setup.world > 1 else 0.0


class SubBatches(StepPredictor):
    """Dettmers' scheme: layers split over the workers, in as many sub-batches as there are workers.

    "hybrid": fully connected layers are split, the others data parallel. "model": every layer is split. A layer's
    activations are gathered while the next sub-batch computes; what does not fit under it is added for each sub-batch
    (the paper adds it once, which may be less than the link needs), and workers + 1 times the first activations, which
    have nothing to hide under.
    """

    def __init__(self, description: Description, profile: Profile, made: Costs, mode: str) -> None:
        super().__init__(profile, made)
        self.description, self.mode = description, mode

    def algorithm(self, setup: Setup) -> str:
        return "sub-batches"

    def roundings(self, setup: Setup) -> int:
        return _once(setup)

    def _split(self, name: str) -> bool:
        return self.mode == "model" or name.startswith(("linear", "lstm"))

    def _split_layers(self) -> list[Layer]:
        return [layer for layer in self.description.layers if self._split(layer.name) and layer.macs]

    def _data_parallel(self) -> StepPredictor:
        names = {layer.name for layer in self.description.layers if not self._split(layer.name)}
        kept = tuple(t for t in self.profile.tensors if t.name.rpartition(".")[0] in names)
        share = sum(layer.macs for layer in self.description.layers if layer.name in names) / self.description.macs
        scaled = Profile(
            self.profile.name,
            self.profile.batch,
            self.profile.forward * share,
            self.profile.backward * share,
            self.profile.update * sum(t.numel for t in kept) / self.profile.numel,
            tuple(type(t)(t.name, t.numel, t.ready * share) for t in kept),
            spread=self.profile.spread,
        )
        return StepPredictor(scaled, self.costs)

    def span(self, setup: Setup) -> tuple[Timeline, Tensor, Tensor]:
        world = setup.world
        factor = self.compute_D * self.together(world)
        compute_D = self.profile.compute * factor
        if world == 1:
            return _alone(compute_D)
        base, seconds, coding = self._data_parallel().span(setup)
        split = self._split_layers()
        sync, codec = self._syncs(setup, [layer.output * self.profile.batch for layer in split])
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
        return timeline(whole_D, compute_D, every.sum(-1), least_D, most_D), every, coded

    def _syncs(self, setup: Setup, outputs: list[int]) -> tuple[Tensor, Tensor]:
        values = torch.tensor([float(n) for n in outputs], dtype=torch.float64)
        stage = costs.ring_stage("all_gather", self.cluster, setup.world)
        made = Cost((stage,), encodes=1 / setup.world, decodes=1.0, roundings=1)
        coding = torch.zeros(self.costs.draws + 1, len(values), dtype=torch.float64)
        if setup.wire not in ("fp32", "as-is"):
            coding = self.costs.codec_seconds(made, setup.wire, values)
        return self.costs.wire_seconds(made, setup.wire, values) + coding, coding

    def _bytes(self, setup: Setup) -> float:
        if setup.world == 1:
            return 0.0
        share = costs.volume("all_gather", setup.world)
        sizes = [wire_bytes(setup.wire, layer.output * self.profile.batch) for layer in self._split_layers()]
        moved = 2 * setup.world * sum(sizes) + (setup.world + 1) * sum(sizes[:1])
        return self._data_parallel()._bytes(setup) + share * moved


def _alone(compute_D: Tensor) -> tuple[Timeline, Tensor, Tensor]:
    """One worker: nothing travels."""
    nothing = torch.zeros(len(compute_D), 0, dtype=torch.float64)
    return timeline(compute_D, compute_D, nothing.sum(1), compute_D, compute_D), nothing, nothing


def _once(setup: Setup) -> int:
    """What travels is encoded once."""
    return int(setup.world > 1 and not codec_named(setup.wire).lossless)


def steps_for(mode: str, profile: Profile, made: Costs, description: Description | None = None) -> StepPredictor:
    """The timeline of a way to share the work."""
    if mode == "data":
        return StepPredictor(profile, made)
    if mode == "fsdp":
        return Fsdp(profile, made)
    if mode == "pipeline":
        return Pipeline(profile, made)
    if mode in ("model", "hybrid"):
        if description is None:
            raise ValueError(
                f"--parallel {mode}: needs the layers of a built-in description; a profile does not know them"
            )
        return SubBatches(description, profile, made, mode)
    raise ValueError(f"--parallel: unknown {mode!r}; take {', '.join(MODES)}")
