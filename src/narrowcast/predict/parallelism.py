"""Other ways to share the work than plain data parallelism: FSDP, pipelines, and layers split in sub-batches.

Each is a `Steps` with its own timeline. Shapes as in step.py: D versions, U units of the model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowcast.codecs import codec as codec_named
from narrowcast.parallel.overlap import Span, queue
from narrowcast.predict import buckets, costs
from narrowcast.predict.costs import Costs, Plan, Stage
from narrowcast.predict.model import Description, Profile
from narrowcast.predict.step import Setup, Steps

MODES = ("data", "fsdp", "pipeline", "model", "hybrid")
MICRO_BATCHES = 4
"""Micro-batches for each stage of a pipeline."""


class Fsdp(Steps):
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

    def _units(self) -> tuple[buckets.Bucket, ...]:
        """As the backward pass meets them."""
        return buckets.buckets(self.profile.tensors, first_bytes=buckets.BUCKET_BYTES, min_values=0)

    def _collective(self, kind: str, wire: str, world: int) -> tuple[Tensor, Tensor]:
        """Seconds and codec seconds of each unit's collective, [D, U]."""
        values = torch.tensor([float(unit.values) for unit in self._units()], dtype=torch.float64)
        level = 0 if world <= self.cluster.node or len(self.cluster.levels) == 1 else 1
        stage = Stage(level, kind, costs.volume(kind, world), costs.steps(kind, world))
        share = 1 / world if kind == "all_gather" else 1.0
        made = Plan((stage,), encodes=share, decodes=1.0, roundings=1)
        plain = wire in ("fp32", "as-is")
        coding = torch.zeros(self.costs.draws + 1, len(values), dtype=torch.float64)
        if not plain:
            coding = self.costs.codec_seconds(made, wire, values)
        return self.costs.wire_seconds(made, wire, values) + coding, coding

    def span(self, setup: Setup) -> tuple[Span, Tensor, Tensor]:
        profile, units = self.profile, self._units()
        factor = self.compute_D * self.together(setup.world)
        compute_D = profile.compute * factor
        if setup.world == 1:
            nothing = torch.zeros(self.costs.draws + 1, 0, dtype=torch.float64)
            return Span(compute_D, compute_D, nothing.sum(1), torch.zeros_like(compute_D)), nothing, nothing
        ends = torch.tensor([unit.ready for unit in units], dtype=torch.float64)
        slices = torch.diff(ends, prepend=torch.zeros(1, dtype=torch.float64))
        backward_DU = slices * factor[:, None]
        forward_DU = (slices.flip(0) / ends[-1] * profile.forward) * factor[:, None]
        gather, coding = self._collective("all_gather", self.parameters, setup.world)
        scatter, more = self._collective("reduce_scatter", setup.wire, setup.world)
        # forward: the next unit is gathered while this one computes
        start = torch.zeros_like(gather)
        forward = queue(queue(start, gather.flip(-1)), forward_DU)[:, -1:]
        # backward: gathers and scatters take turns on one link
        taken = queue(forward + start, gather + torch.cat([start[:, :1], scatter[:, :-1]], dim=-1))
        computed = queue(taken, backward_DU)
        sent = queue(computed, scatter)[:, -1]
        link = forward[:, 0] + gather.sum(-1) + scatter.sum(-1)
        end = torch.maximum(torch.maximum(sent, link), computed[:, -1])
        whole = end + profile.update / setup.world * factor
        seconds = torch.cat([gather, gather, scatter], dim=-1)
        codec = torch.cat([coding, coding, more], dim=-1)
        exposed = (whole - compute_D).clamp_min(0)
        return Span(whole, computed[:, -1], seconds.sum(-1), exposed), seconds, codec

    def _bytes(self, setup: Setup) -> float:
        share = costs.volume("all_gather", setup.world) if setup.world > 1 else 0.0
        sizes = [
            (buckets.nbytes(self.parameters, u.values), buckets.nbytes(setup.wire, u.values)) for u in self._units()
        ]
        return share * sum(2 * weights + gradients for weights, gradients in sizes)


class Pipeline(Steps):
    """As many stages as workers, micro-batches in a row; activations and their gradients cross boundaries."""

    def __init__(self, profile: Profile, made: Costs, micro_batches: int = 0) -> None:
        super().__init__(profile, made)
        self.micro_batches = micro_batches

    def algorithm(self, setup: Setup) -> str:
        return "pipeline"

    def roundings(self, setup: Setup) -> int:
        return _once(setup)

    def _boundary(self, setup: Setup) -> tuple[Tensor, Tensor, int]:
        """Seconds of one crossing and of the codec in it, [D], and the number of micro-batches."""
        count = self.micro_batches or MICRO_BATCHES * setup.world
        values = max(1.0, self.profile.activations * self.profile.batch * setup.world / count)
        level = 0 if setup.world <= self.cluster.node or len(self.cluster.levels) == 1 else 1
        made = Plan((Stage(level, "send", 1.0, 1.0),), encodes=1.0, decodes=1.0, roundings=1)
        sizes = torch.tensor([values], dtype=torch.float64)
        coding = torch.zeros(self.costs.draws + 1, dtype=torch.float64)
        if setup.wire not in ("fp32", "as-is"):
            coding = self.costs.codec_seconds(made, setup.wire, sizes)[:, 0]
        return self.costs.wire_seconds(made, setup.wire, sizes)[:, 0] + coding, coding, count

    def span(self, setup: Setup) -> tuple[Span, Tensor, Tensor]:
        """The same samples a worker as with data parallelism: a stage computes 1/P of each of P times the samples."""
        profile, stages = self.profile, setup.world
        if not profile.activations and stages > 1:
            raise ValueError(
                f"pipeline: the profile of {profile.name} does not say how many activations cross a boundary"
            )
        factor = self.compute_D * self.together(stages)
        work_D = (profile.forward + profile.backward) * factor
        cross_D, coding_D, count = (
            self._boundary(setup) if stages > 1 else (torch.zeros_like(work_D), torch.zeros_like(work_D), 1)
        )
        slot_D = torch.maximum(work_D / count, 2 * cross_D)
        # fill and drain: every boundary is crossed once each way with nothing to hide under
        whole = slot_D * count + (stages - 1) * (work_D / count + 2 * cross_D) + profile.update / stages * factor
        seconds = (2 * count * cross_D)[:, None]
        compute_D = profile.compute * factor
        return Span(whole, whole, seconds[:, 0], whole - compute_D), seconds, (2 * count * coding_D)[:, None]

    def _bytes(self, setup: Setup) -> float:
        values = int(self.profile.activations * self.profile.batch * setup.world)
        return 2.0 * buckets.nbytes(setup.wire, values) if setup.world > 1 else 0.0


class SubBatches(Steps):
    """Dettmers' scheme: layers split over the workers, in as many sub-batches as there are workers.

    "hybrid": fully connected layers are split, the others data parallel. "model": every layer is split. A layer's
    activations are gathered while the next sub-batch computes; what does not fit under it is added, and workers + 1
    times the first activations, which have nothing to hide under.
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

    def _data_parallel(self) -> Steps:
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
        return Steps(scaled, self.costs)

    def span(self, setup: Setup) -> tuple[Span, Tensor, Tensor]:
        world = setup.world
        factor = self.compute_D * self.together(world)
        compute_D = self.profile.compute * factor
        if world == 1:
            nothing = torch.zeros(self.costs.draws + 1, 0, dtype=torch.float64)
            return Span(compute_D, compute_D, nothing.sum(1), torch.zeros_like(compute_D)), nothing, nothing
        base, seconds, coding = self._data_parallel().span(setup)
        split = [layer for layer in self.description.layers if self._split(layer.name) and layer.macs]
        sync, codec = self._syncs(setup, [layer.output * self.profile.batch for layer in split])
        share = torch.tensor([layer.macs / self.description.macs for layer in split], dtype=torch.float64)
        # a sub-batch computes 1/world of the layer's work, three times: forward, and two products backward
        work = (self.profile.forward + self.profile.backward) * share[None, :] * factor[:, None]
        hidden = torch.cat([work / world / 3, work / world * 2 / 3], dim=-1)
        penalty = (torch.cat([sync, sync], dim=-1) - hidden).clamp_min(0).sum(-1) + (world + 1) * sync[:, 0]
        update = self.profile.update * factor / world
        whole = base.step + work.sum(-1) + penalty + update
        every = torch.cat([seconds, sync.repeat(1, 2 * world)], dim=-1)
        return (
            Span(whole, whole, every.sum(-1), whole - compute_D),
            every,
            torch.cat([coding, codec.repeat(1, 2 * world)], dim=-1),
        )

    def _syncs(self, setup: Setup, outputs: list[int]) -> tuple[Tensor, Tensor]:
        values = torch.tensor([float(n) for n in outputs], dtype=torch.float64)
        level = 0 if setup.world <= self.cluster.node or len(self.cluster.levels) == 1 else 1
        stage = Stage(
            level, "all_gather", costs.volume("all_gather", setup.world), costs.steps("all_gather", setup.world)
        )
        made = Plan((stage,), encodes=1 / setup.world, decodes=1.0, roundings=1)
        coding = torch.zeros(self.costs.draws + 1, len(values), dtype=torch.float64)
        if setup.wire not in ("fp32", "as-is"):
            coding = self.costs.codec_seconds(made, setup.wire, values)
        return self.costs.wire_seconds(made, setup.wire, values) + coding, coding

    def _bytes(self, setup: Setup) -> float:
        if setup.world == 1:
            return 0.0
        share = costs.volume("all_gather", setup.world)
        split = [layer for layer in self.description.layers if self._split(layer.name)]
        sizes = [buckets.nbytes(setup.wire, layer.output * self.profile.batch) for layer in split]
        return self._data_parallel()._bytes(setup) + 2 * setup.world * share * sum(sizes)


def _once(setup: Setup) -> int:
    """What travels is encoded once."""
    return int(setup.world > 1 and not codec_named(setup.wire).lossless)


def steps_for(mode: str, profile: Profile, made: Costs, description: Description | None = None) -> Steps:
    """The timeline of a way to share the work."""
    if mode == "data":
        return Steps(profile, made)
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
