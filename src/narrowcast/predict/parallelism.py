"""Other ways to share the work than plain data parallelism: pipelines, tensor and expert parallelism, and layers split
in sub-batches; FSDP and HSDP are in sharded.py.

Each is a `StepPredictor` with its own timeline. Shapes as in step.py: D versions, U units of the model.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from narrowcast.predict import costs
from narrowcast.predict.costs import Costs
from narrowcast.predict.model import Description, Layer, Profile, wire_sizes
from narrowcast.predict.scheme import Scheme
from narrowcast.predict.sharded import Fsdp, Hsdp, block_of
from narrowcast.predict.step import Setup, StepPredictor, Timeline, timeline

MODES = ("data", "fsdp", "hsdp", "pipeline", "tensor", "expert", "model", "hybrid")
MICRO_BATCHES = 4
"""Micro-batches for each stage of a pipeline."""
SPLIT = ("linear", "lstm")
"""What hybrid splits, by how names of layers begin."""
SUMS_A_BLOCK = 4
"""Exchanges of activations in a block: two forward, two backward."""


class Pipeline(Scheme):
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


class SubBatches(Scheme):
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
        return self.mode == "model" or name.startswith(SPLIT)

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


class TensorParallel(Scheme):
    """Every block's matrices cut over all ranks: two sums of activations forward and two backward, nothing hidden.

    The same samples a worker as with data parallelism: all ranks compute their part of all samples.
    """

    name = "tensor"

    def __init__(self, profile: Profile, made: Costs, blocks: int) -> None:
        super().__init__(profile, made)
        self.blocks = blocks

    def algorithm(self, setup: Setup) -> str:
        return "native" if costs.is_summed_by_backend(setup.wire) else "two_shot"

    def roundings(self, setup: Setup) -> int:
        return StepPredictor.roundings(self, setup)

    def _values(self, setup: Setup) -> int:
        return max(1, int(self.profile.activations * self.profile.batch * setup.world))

    def _span(self, setup: Setup, factor: Tensor) -> tuple[Timeline, Tensor, Tensor]:
        sizes = torch.tensor([float(self._values(setup))], dtype=torch.float64)
        once, coding = self.costs.seconds(self.algorithm(setup), setup.wire, sizes, setup.world)
        often = SUMS_A_BLOCK * self.blocks
        update_D = self.profile.update / setup.world * factor
        work_D = (self.profile.forward + self.profile.backward) * factor
        total_D = often * once[:, 0]
        whole_D = work_D + total_D + update_D
        made = timeline(whole_D, self.profile.compute * factor, total_D, whole_D, whole_D)
        return made, total_D[:, None], (often * coding[:, 0])[:, None]

    def _sent_bytes(self, setup: Setup) -> float:
        stages = self.costs.plan(self.algorithm(setup), setup.world).stages
        size = wire_sizes(setup.wire, (self._values(setup),))[0]
        return SUMS_A_BLOCK * self.blocks * size * sum(stage.own for stage in stages)


class ExpertParallel(Scheme):
    """The feed-forward matrices of each block are one expert a rank: samples travel there and back, forward and
    backward, with nothing to hide under; the gradients of all else are added up as with data parallelism.
    """

    name = "expert"

    def __init__(self, profile: Profile, made: Costs, blocks: int) -> None:
        super().__init__(profile, made)
        self.blocks = blocks
        kept = tuple(tensor for tensor in profile.tensors if tensor.numel != _expert_size(profile, blocks))
        self._dense = StepPredictor(replace(profile, tensors=kept), made)

    def with_costs(self, made: Costs) -> Self:
        other = super().with_costs(made)
        other._dense = self._dense.with_costs(made)
        return other

    def _values(self) -> int:
        return max(1, int(self.profile.activations * self.profile.batch))

    def _span(self, setup: Setup, factor: Tensor) -> tuple[Timeline, Tensor, Tensor]:
        base, seconds, coding = self._dense.span(setup)
        once, coded = self._collective("all_to_all", setup.wire, setup.world, [self._values()])
        often = SUMS_A_BLOCK * self.blocks
        moved, coded = often * once, often * coded
        total_D = moved[:, 0]
        made = timeline(
            base.step + total_D,
            self.profile.compute * factor,
            base.communication + total_D,
            base.least + total_D,
            base.most + total_D,
        )
        return made, torch.cat([seconds, moved], dim=-1), torch.cat([coding, coded], dim=-1)

    def _sent_bytes(self, setup: Setup) -> float:
        size = wire_sizes(setup.wire, (self._values(),))[0]
        moved = SUMS_A_BLOCK * self.blocks * size * costs.volume("all_to_all", setup.world)
        return self._dense._bytes(setup) + moved


def _expert_size(profile: Profile, blocks: int) -> int:
    """Of the largest matrix that every block has."""
    counts = Counter(tensor.numel for tensor in profile.tensors)
    return max((numel for numel, count in counts.items() if count >= blocks), default=0)


def blocks_of(mode: str, profile: Profile, description: Description | None) -> int:
    """How many transformer blocks there are, by their attention or by numbered modules."""
    layers = description.layers if description is not None else ()
    named = {block_of(tensor.name) for tensor in profile.tensors} - {""}
    blocks = sum(layer.name.startswith("attention") for layer in layers) or len(named)
    if not blocks or not profile.activations:
        raise ValueError(
            f"--parallel {mode}: {profile.name} has no blocks with known activations; take bert-base, bert-large or "
            "gpt2, or a profile whose names have numbered blocks and that says `activations`"
        )
    return blocks


def shared_otherwise(mode: str, profile: Profile, made: Costs, description: Description | None) -> StepPredictor:
    """The timeline of a way to share the work other than "data"."""
    if mode in ("fsdp", "hsdp"):
        return (Fsdp if mode == "fsdp" else Hsdp)(profile, made)
    if mode in ("tensor", "expert"):
        blocks = blocks_of(mode, profile, description)
        return (TensorParallel if mode == "tensor" else ExpertParallel)(profile, made, blocks)
    if mode == "pipeline":
        return Pipeline(profile, made)
    if mode in ("model", "hybrid"):
        if description is None:
            needs = "needs the layers of a built-in description; a profile does not know them"
            raise ValueError(f"--parallel {mode}: {needs}")
        return SubBatches(description, profile, made, mode)
    raise ValueError(f"--parallel: unknown {mode!r}; take {', '.join(MODES)}")
