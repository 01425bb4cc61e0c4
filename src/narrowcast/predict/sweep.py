"""Many steps of one model on one cluster: every world, wire and algorithm, each beside float32 and 16 bits, with
break-even bandwidths, and what a rank must hold for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from torch import Tensor

from narrowcast.codecs import codec as codec_named
from narrowcast.parallel import overlap
from narrowcast.predict.cluster import Cluster
from narrowcast.predict.costs import DRAWS, Costs
from narrowcast.predict.model import Description, Profile, TensorTime, ddp_buckets, wire_sizes
from narrowcast.predict.parallelism import MICRO_BATCHES, SPLIT, shared_otherwise
from narrowcast.predict.sharded import units_of
from narrowcast.predict.step import BANDWIDTHS, HIDDEN, PLAIN, Prediction, Setup, StepPredictor

PAYS = 0.01
"""A wire pays where it makes the step at least so much shorter."""


def half_precision(cluster: Cluster, world: int) -> Setup:
    """The 16-bit baseline: the backend's own sum on accelerators, `attach(model, "bf16")` on CPUs."""
    return Setup(world, "bf16", "auto" if cluster.device.is_cpu else "native")


def steps_for(mode: str, profile: Profile, made: Costs, description: Description | None = None) -> StepPredictor:
    """The timeline of a way to share the work."""
    if mode == "data":
        return StepPredictor(profile, made)
    return shared_otherwise(mode, profile, made, description)


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
        self._halves: dict[int, Setup] = {}
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
            half = self._half(world)
            self._baselines[world] = self.steps.steps(Setup(world, PLAIN)), self.steps.steps(half)
        return self._baselines[world]

    def _half(self, world: int) -> Setup:
        if world not in self._halves:
            self._halves[world] = half_precision(self.cluster, world)
        return self._halves[world]

    def tuned_steps(self, setup: Setup) -> Tensor:
        """The step at each of BANDWIDTHS."""
        if setup not in self._tuned:
            level = self.cluster.level_of(setup.world)
            if level not in self._levels:
                self._levels[level] = self.steps.with_costs(self.steps.costs.at(BANDWIDTHS, level))
            self._tuned[setup] = self._levels[level].steps(setup)
        return self._tuned[setup]

    def _hides(self, setup: Setup) -> float | None:
        if setup.world == 1:
            return None
        compute = self.steps.alone * self.steps.together(setup.world)
        hidden = self.tuned_steps(setup) <= (1 + HIDDEN) * compute + float(self.steps.bubble(setup)[0])
        return float(BANDWIDTHS[hidden][0]) if bool(hidden.any()) else None

    def _break_even(self, setup: Setup) -> float | None:
        """The largest bandwidth at which the wire still beats 16 bits."""
        if setup.world == 1 or codec_named(setup.wire).bits_per_value >= 16:
            return None
        half = self.tuned_steps(self._half(setup.world))
        wins = self.tuned_steps(setup) < half * (1 - PAYS)
        if not bool(wins.any()):
            return None
        last = float(BANDWIDTHS[wins][-1])
        return float("inf") if last == float(BANDWIDTHS[-1]) else last

    def price(self, world: int) -> float:
        """Dollars of an epoch for each second that a step takes; 0: not known."""
        nodes, steps = -(-world // self.cluster.node), self.samples / (self.profile.batch * world)
        return self.cluster.price_per_hour * nodes * steps / 3600


VALUE = 4
"""Bytes: parameters, gradients and residuals are float32."""
MOMENTS = 2
"""Values of Adam for each parameter."""
WIRES = 3
"""What leaves, what arrives and what is gathered of the largest call."""
AHEAD = 2
"""Units of FSDP that are whole at once: the one that computes, and the next one."""

SHARDED = ("fsdp", "hsdp")


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank."""

    parameters: float
    gradients: float
    optimizer: float
    residuals: float
    buffers: float

    @property
    def total(self) -> float:
        return sum(asdict(self).values())


def needed(profile: Profile, setup: Setup, mode: str, inside: int) -> Memory:
    """For a way to share the work; inside: the ranks of a node, which hsdp shards over."""
    summed = _summed(profile, mode)
    whole = sum(tensor.numel for tensor in summed)
    held = whole + (profile.numel - whole) / (inside if mode == "hsdp" else setup.world)
    buffers = _buffers(profile, setup, mode, summed) if setup.world > 1 else 0.0
    residuals = _residuals(setup, profile.numel if mode in SHARDED else whole, mode in SHARDED)
    return Memory(VALUE * held, VALUE * held, VALUE * MOMENTS * held, residuals, buffers)


def _summed(profile: Profile, mode: str) -> tuple[TensorTime, ...]:
    """What every rank holds whole, and whose gradients it adds up with the others; of the rest it holds its part."""
    if mode in (*SHARDED, "tensor", "pipeline", "model"):
        return ()
    if mode == "hybrid":
        return tuple(tensor for tensor in profile.tensors if not tensor.name.startswith(SPLIT))
    return profile.tensors


def _buffers(profile: Profile, setup: Setup, mode: str, summed: tuple[TensorTime, ...]) -> float:
    """DDP keeps a copy of all gradients in its buckets, FSDP whole parameters and gradients of some units; and the
    wires of the largest call."""
    if mode in SHARDED:
        calls = [unit.values for unit in units_of(profile.tensors)] or [0]
        copied = (AHEAD + 1) * max(calls)
    else:
        calls = [bucket.values for bucket in ddp_buckets(summed)] if summed else []
        copied = sum(tensor.numel for tensor in summed)
    samples = {"tensor": setup.world, "pipeline": 1 / MICRO_BATCHES, "model": 1, "hybrid": 1}.get(mode, 0)
    largest = max(*calls, int(samples * profile.batch * profile.activations), 0)
    # the backend adds float32 up in place, and the factors of low rank are a hundredth of a matrix
    small = setup.wire in ("fp32", "as-is") or codec_named(setup.wire).rank or not largest
    return float(VALUE * copied + (0 if small else WIRES * wire_sizes(setup.wire, (largest,))[0]))


def _residuals(setup: Setup, sent: float, sharded: bool) -> float:
    """Of all gradients that a rank sends, and of the sums that it owns."""
    if setup.world == 1 or not codec_named(setup.wire).feedback:
        return 0.0
    return VALUE * (sent + (0.0 if sharded else sent / setup.world))
