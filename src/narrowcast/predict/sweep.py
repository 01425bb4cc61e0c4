"""Many steps of one model on one cluster: every world, wire and algorithm, each beside float32 and 16 bits, with
break-even bandwidths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from narrowcast.codecs import codec as codec_named
from narrowcast.parallel import overlap
from narrowcast.predict.cluster import Cluster
from narrowcast.predict.costs import DRAWS, Costs
from narrowcast.predict.memory import needed
from narrowcast.predict.model import Description, Profile
from narrowcast.predict.step import BANDWIDTHS, HIDDEN, PLAIN, Prediction, Setup, StepPredictor, steps_for

PAYS = 0.01
"""A wire pays where it makes the step at least so much shorter."""


def half_precision(cluster: Cluster) -> Setup:
    """The 16-bit baseline: the backend's own sum on accelerators, `attach(model, "bf16")` on CPUs."""
    return Setup(1, "bf16", "auto" if cluster.device.is_cpu else "native")


class Sweep:
    """All predictions of one model on one cluster."""

    def __init__(
        self,
        profile: Profile,
        cluster: Cluster,
        draws: int = DRAWS,
        seed: int = 0,
        samples: int = 0,
        mode: str = "data",
        description: Description | None = None,
    ) -> None:
        self.profile, self.cluster, self.samples, self.mode = profile, cluster, samples, mode
        self.steps = steps_for(mode, profile, Costs(cluster, draws, seed), description)
        self._baselines: dict[int, tuple[Tensor, Tensor]] = {}
        self._tuned: dict[Setup, Tensor] = {}
        self._levels: dict[int, StepPredictor] = {}

    def cells(
        self,
        workers: Sequence[int],
        wires: Sequence[str],
        algorithms: Sequence[str] = ("auto",),
        queues: str = "one",
    ) -> Iterator[Prediction]:
        for world in workers:
            for algorithm in algorithms:
                for wire in wires:
                    yield self.cell(Setup(world, wire, algorithm, queues=queues))

    def cell(self, setup: Setup) -> Prediction:
        """One prediction with its comparisons."""
        made, steps_D = self.steps.predict_versions(setup)
        fp32_D, half_D = self._baseline(setup.world)
        gains = half_D / steps_D
        low, high = overlap.interval(gains)
        return replace(
            made,
            over_fp32=float(fp32_D[0] / steps_D[0]),
            over_16bit=float(gains[0]),
            over_16bit_low=low,
            over_16bit_high=high,
            hide_gbit=self._hides(setup),
            break_even_gbit=self._break_even(setup),
            memory_bytes=needed(self.profile, setup, self.mode, self.cluster.shape(setup.world)[0]).total,
            dollars_per_epoch=self.price(setup.world) * made.step or None,
        )

    def _baseline(self, world: int) -> tuple[Tensor, Tensor]:
        """Steps in float32 and in 16 bits, [D] each: what a wire is compared with."""
        if world not in self._baselines:
            half = replace(half_precision(self.cluster), world=world)
            self._baselines[world] = self.steps.steps(Setup(world, PLAIN)), self.steps.steps(half)
        return self._baselines[world]

    def tuned_steps(self, setup: Setup) -> Tensor:
        """The step at each of BANDWIDTHS."""
        level = self.cluster.level_of(setup.world)
        if level not in self._levels:
            self._levels[level] = self.steps.with_costs(Costs(self.cluster, bandwidths=BANDWIDTHS, level=level))
        if setup not in self._tuned:
            self._tuned[setup] = self._levels[level].steps(setup)
        return self._tuned[setup]

    def _hides(self, setup: Setup) -> float | None:
        if setup.world == 1:
            return None
        compute = self.profile.compute * self.steps.together(setup.world)
        hidden = self.tuned_steps(setup) <= (1 + HIDDEN) * compute + float(self.steps.bubble(setup)[0])
        return float(BANDWIDTHS[hidden][0]) if bool(hidden.any()) else None

    def _break_even(self, setup: Setup) -> float | None:
        """The largest bandwidth at which the wire still beats 16 bits."""
        if setup.world == 1 or codec_named(setup.wire).bits_per_value >= 16:
            return None
        half = self.tuned_steps(replace(half_precision(self.cluster), world=setup.world))
        wins = self.tuned_steps(setup) < half * (1 - PAYS)
        if not bool(wins.any()):
            return None
        last = float(BANDWIDTHS[wins][-1])
        return float("inf") if last == float(BANDWIDTHS[-1]) else last

    def price(self, world: int) -> float:
        """Dollars of an epoch for each second that a step takes; 0: not known."""
        nodes, steps = -(-world // self.cluster.node), self.samples / (self.profile.batch * world)
        return self.cluster.price_per_hour * nodes * steps / 3600
