"""What all ways to share the work but plain data parallelism have in common: a timeline of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from narrowcast.codecs import codec as codec_named
from narrowcast.collectives import Cost
from narrowcast.parallel import activation_codecs
from narrowcast.predict import costs
from narrowcast.predict.step import Setup, StepPredictor, Timeline, timeline


class Scheme(StepPredictor):
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
        if not self.sums_gradients:
            activation_codecs(f"--parallel {self.name}", setup.wire, None)
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
        encodes = 1 / world if kind == "all_gather" else 1.0
        stage = costs.stage_of(kind, self.cluster, world)
        if kind == "reduce_scatter" and not costs.is_summed_by_backend(wire):
            # our own: every rank sends its part to each owner
            stage = costs.placement(self.cluster, world).direct(kind)
        return self._call(Cost((stage,), encodes=encodes, decodes=1.0, roundings=1), wire, values)

    def _call(self, cost: Cost, wire: str, values: Sequence[float]) -> tuple[Tensor, Tensor]:
        """Seconds of calls of each size, and of the codec in them, one after the other, [D, N]."""
        sizes_N = torch.tensor([float(n) for n in values], dtype=torch.float64)
        coding = torch.zeros(self.costs.draws + 1, len(sizes_N), dtype=torch.float64)
        if wire not in ("fp32", "as-is"):
            coding = self.costs.codec_seconds(cost, wire, sizes_N)
        return self.costs.wire_seconds(cost, wire, sizes_N) + coding, coding
