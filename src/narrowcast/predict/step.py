"""A training step of one model on one cluster with one wire: when it ends, and what it waits for."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from torch import Tensor

from narrowcast.codecs import codec as codec_named
from narrowcast.codecs import refuse_differences
from narrowcast.collectives import ALGORITHMS, choose, record
from narrowcast.parallel import BUCKET_BYTES, MIN_VALUES, overlap
from narrowcast.predict import costs, low_rank
from narrowcast.predict.costs import Costs
from narrowcast.predict.model import (
    CallPlan,
    PlannedSum,
    Profile,
    TensorTime,
    attach_calls,
    ddp_buckets,
    merged_calls,
    wire_sizes,
)

HIDDEN = 0.02
"""Communication counts as hidden when it adds less than this share of compute."""


@dataclass(frozen=True)
class Setup:
    """One cell of a sweep."""

    world: int
    wire: str
    algorithm: str = "auto"
    bucket_bytes: int = BUCKET_BYTES
    min_values: int = MIN_VALUES
    """Tensors with fewer values travel as they are."""
    overlap: bool = True
    """False: everything is sent after the backward pass."""
    queues: str = "one"
    """"one": a call after the other, as `attach` and NCCL do; "levels": one queue for each level of links."""

    def __post_init__(self) -> None:
        """Nothing is predicted that `attach` refuses."""
        codec = codec_named(self.wire)
        refuse_differences("predict: gradients", codec)
        way = ALGORITHMS.get(self.algorithm)
        if way is None:  # a default of the predictor's own
            return
        way.check_codec(codec.factors, self.world)
        if not way.takes_nodes:  # nodes are the cluster's
            way.check_world(self.world, None)
        if codec.factors.feedback:
            record.check_feedback(self.algorithm, f"predict with {codec}")


@dataclass(frozen=True)
class Prediction:
    """Seconds a step and what they are made of; `low` and `high` are the 5 and 95 % quantiles of its versions."""

    model: str
    cluster: str
    workers: int
    wire: str
    algorithm: str
    step: float
    low: float
    high: float
    compute: float
    communication: float
    exposed: float
    codec: float
    bytes_sent: float
    """By a rank, in a step."""
    sum_bound: float
    """Nothing overlaps; never below `step`."""
    max_bound: float
    """Everything overlaps; never above `step`."""
    speedup: float
    """Samples a second over one device."""
    throughput: float
    bottleneck: str
    measured: bool
    beyond_probed: bool = False
    """More ranks on the outermost link than those whose calls were timed."""
    roundings: int = 0
    """How often a value is rounded on its way."""
    over_fp32: float = 1.0
    over_16bit: float = 1.0
    over_16bit_low: float = 1.0
    over_16bit_high: float = 1.0
    hide_gbit: float | None = None
    """Bandwidth of the outermost link from which on communication is hidden; None: no bandwidth hides it."""
    break_even_gbit: float | None = None
    """Below this bandwidth the wire is faster than 16 bits; None: at none, inf: at every one that was tried."""
    dollars_per_epoch: float | None = None
    bubble: float = 0.0
    """Seconds in which the stages of a pipeline wait for one another, whatever the link."""
    memory_bytes: float = 0.0
    """Of a rank, without activations."""

    def as_dict(self) -> dict[str, Any]:
        return {key: finite(value) for key, value in asdict(self).items()}


def finite(value: object) -> object:
    """JSON knows no infinity."""
    return "inf" if isinstance(value, float) and math.isinf(value) else value


@dataclass(frozen=True)
class Timeline(overlap.Span):
    """A span and what brackets it, [D] each: with the same copies and slowdowns everything or nothing overlaps."""

    least: Tensor
    most: Tensor


def timeline(whole_D: Tensor, compute_D: Tensor, communication_D: Tensor, least_D: Tensor, most_D: Tensor) -> Timeline:
    """Of `whole_D` seconds, of which compute alone would take `compute_D`."""
    return Timeline(whole_D, whole_D, communication_D, (whole_D - compute_D).clamp_min(0), least_D, most_D)


def traffic(span: Timeline) -> float:
    """How much a wire matters to a step: the root of the share of it in which calls are under way, hidden or not."""
    return min(1.0, float(span.communication[0]) / max(float(span.step[0]), 1e-12)) ** 0.5


def slowest_of(world: int, jitter: float) -> float:
    """The slowest of so many ranks over a usual one: the expected largest of normal draws, by Blom's formula."""
    if world == 1 or not jitter:
        return 1.0
    return 1 + jitter * statistics.NormalDist().inv_cdf((world - 0.375) / (world + 0.25))


def planned_calls(
    tensors: tuple[TensorTime, ...], wire: str, bucket_bytes: int, min_values: int, split: bool, merged: bool = False
) -> tuple[CallPlan, ...]:
    """What `attach` starts in a step. split: whether small tensors of a bucket travel apart. merged: whether a device's
    backend carries the wires, so that they travel together.
    """
    made = ddp_buckets(tensors, bucket_bytes=bucket_bytes, min_values=min_values)
    if codec_named(wire).rank:
        return low_rank.low_rank_calls(made, wire, min_values, merged)
    return merged_calls(made, wire) if merged and split else attach_calls(made, wire, split)


Kinds = dict[tuple[str, str], list[tuple[int, PlannedSum]]]
"""Which sums go which way: by wire and algorithm, each with the place of its call."""


def _kinds(calls: Sequence[CallPlan], algorithm: str, world: int) -> Kinds:
    """Of all sums of these calls; "auto": each by its size."""
    placed = [(place, one) for place, call in enumerate(calls) for one in call.sums]
    codecs = {wire: codec_named(wire) for wire in dict.fromkeys(one.wire for _, one in placed)}
    kinds: Kinds = {}
    for place, one in placed:
        way = choose("auto", codecs[one.wire], one.values, world, False) if algorithm == "auto" else algorithm
        kinds.setdefault((one.wire, way), []).append((place, one))
    return kinds


class StepPredictor:
    """Predicts steps of one profile on one cluster; versions of the measurements are drawn once."""

    def __init__(self, profile: Profile, made: Costs) -> None:
        self.profile, self.cluster = profile, made.cluster
        self.alone = profile.compute
        self._plans: dict[Setup, tuple[tuple[CallPlan, ...], Kinds]] = {}
        self._ways: dict[Setup, str] = {}
        self._draw(made)

    def _draw(self, made: Costs) -> None:
        self.costs = made
        self.compute_D = made.spread("compute", self.profile.spread)

    def with_costs(self, made: Costs) -> Self:
        """The same calls on the same cluster, whose links are in other versions."""
        other = copy.copy(self)
        other._draw(made)
        return other

    def versions(self, setup: Setup, span: Timeline) -> Tensor:
        """A step in every version of the measurements, with what predictions were off elsewhere in it."""
        if setup.world == 1:
            return span.step
        spread, known = self.costs.spread, self.costs.known
        common_D = spread("model", known.step, known.freedom)
        # a wire cannot be off where nothing travels: the less calls are under way the less it is off
        own_D = spread(f"model {setup.wire}", known.wire) ** traffic(span)
        return span.step * common_D * own_D

    def together(self, world: int) -> float:
        """How many times slower compute is beside the others: where ranks share processors, unless the profile has seen
        it, and since all wait for the slowest.
        """
        shared = self.cluster.overlap.together if world > 1 and self.profile.ranks == 1 else 1.0
        return shared * slowest_of(world, self.profile.jitter or self.cluster.device.jitter)

    def algorithm(self, setup: Setup) -> str:
        """What the wire travels by, in a word."""
        if setup not in self._ways:
            self._ways[setup] = costs.resolve(setup.algorithm, setup.wire, self.cluster, setup.world)
        return self._ways[setup]

    def roundings(self, setup: Setup) -> int:
        lossless = setup.world == 1 or codec_named(setup.wire).lossless
        return 0 if lossless else self.costs.plan(self.algorithm(setup), setup.world).roundings

    def plan(self, setup: Setup) -> tuple[tuple[CallPlan, ...], Kinds]:
        """The calls of a step, and which of them go which way."""
        if setup.world == 1:
            return (), {}
        if setup not in self._plans:
            whole = self.algorithm(setup)
            # the backend's own sum takes a bucket as it is; `attach` sends small tensors apart
            how: dict[str, Any] = {"split": whole != "native", "min_values": setup.min_values}
            known = ALGORITHMS.get(whole)  # what is unknown is refused where it is looked for
            how["merged"] = not self.cluster.device.is_cpu and known is not None and known.shots is not None
            calls = planned_calls(self.profile.tensors, setup.wire, setup.bucket_bytes, **how)
            by_size = setup.algorithm == "auto" and whole not in ("native", "hierarchical")
            self._plans[setup] = calls, _kinds(calls, "auto" if by_size else whole, setup.world)
        return self._plans[setup]

    def services(self, setup: Setup) -> tuple[Tensor, Tensor, Tensor | None]:
        """Seconds of each call, of the codec in it and, where levels have queues, of its part inside nodes, [D, C]."""
        calls, kinds = self.plan(setup)
        seconds, coding, inner = torch.zeros(3, self.costs.draws + 1, len(calls), dtype=torch.float64)
        for (wire, algorithm), sums in kinds.items():
            values, often = (torch.tensor([float(one[at]) for _, one in sums], dtype=torch.float64) for at in (0, 2))
            took = [*self.costs.seconds(algorithm, wire, values, setup.world)]
            if setup.queues == "levels":
                took.append(self.costs.inner_seconds(algorithm, wire, values, setup.world))
            for total, more in zip((seconds, coding, inner), took, strict=False):
                slower = self.cluster.loop.plain if algorithm == "native" else self.cluster.loop.wires
                # a call may have two sums of one kind
                total.index_add_(
                    1, torch.tensor([place for place, _ in sums]), (slower * often * more).expand(len(total), -1)
                )
        for place, call in enumerate(calls):
            if call.matrices:
                products_D = low_rank.product_seconds(self.costs, call.wire, call.matrices)
                seconds[:, place] += products_D
                coding[:, place] += products_D
        return seconds, coding, inner if setup.queues == "levels" else None

    def bubble(self, setup: Setup) -> Tensor:
        """Seconds in which a worker has nothing to do even where nothing travels, [D]."""
        return torch.zeros_like(self.compute_D)

    def span(self, setup: Setup) -> tuple[Timeline, Tensor, Tensor]:
        """The step in every version, and the seconds of calls and codecs, [D, C]."""
        factor_D = self.compute_D * self.together(setup.world)
        profile = self.profile
        alone_D, backward_end_D = self.alone * factor_D, (profile.forward + profile.backward) * factor_D
        calls, compute_D = self.plan(setup)[0], alone_D
        seconds, coding, inner = self.services(setup)
        ready = [profile.forward + call.ready for call in calls]
        ready_DC = torch.tensor(ready, dtype=torch.float64) * factor_D[:, None]
        if calls:
            # DDP copies gradients into buckets as they get ready, and out of them at the end: 8 bytes a value each way
            speed = self.cluster.device.memory_gbyte
            copies = [8 * call.values / (speed * 1e9) if speed else 0.0 for call in calls]
            copied = torch.tensor(copies, dtype=torch.float64).cumsum(0)
            ready_DC, backward_end_D = ready_DC + copied, backward_end_D + copied[-1]
            own = self.cluster.loop.step_ms / 1e3
            ready_DC, backward_end_D = ready_DC + own, backward_end_D + own
            compute_D = compute_D + 2 * copied[-1] + own
        if not setup.overlap:
            ready_DC = backward_end_D[:, None].expand(-1, len(calls))
        if self.cluster.device.codec_stream == "compute" and calls:
            late = coding.cumsum(dim=1)
            ready_DC, seconds = ready_DC + late, seconds - coding
            backward_end_D, compute_D = backward_end_D + late[:, -1], compute_D + late[:, -1]
        beside = self.cluster.slowdowns(setup.wire)
        slow = overlap.Contention(beside.compute, beside.collective)
        span = overlap.step(compute_D, backward_end_D, ready_DC, seconds, slow, inner)
        after_D, link_D = compute_D - backward_end_D, span.communication
        if inner is not None:
            link_D = torch.maximum(inner.sum(-1), (seconds - inner).sum(-1))
        least_D = torch.maximum(span.backward_end, profile.forward * factor_D + link_D) + after_D
        most_D = span.backward_end + span.communication + after_D
        made = Timeline(span.step, span.backward_end, span.communication, span.step - alone_D, least_D, most_D)
        return made, seconds, coding

    def steps(self, setup: Setup) -> Tensor:
        """Seconds of the step in every version, [D]."""
        return self.versions(setup, self.span(setup)[0])

    def predict(self, setup: Setup) -> Prediction:
        """One cell, without what needs a comparison with others."""
        return self.predict_versions(setup)[0]

    def predict_versions(self, setup: Setup) -> tuple[Prediction, Tensor]:
        """One cell, and its step in every version, [D]."""
        span, seconds, coding = self.span(setup)
        profile, world = self.profile, setup.world
        own_compute = self.alone
        compute, bubble = own_compute * self.together(world), float(self.bubble(setup)[0])
        total, step = float(seconds[0].sum()), float(span.step[0])
        steps_D = self.versions(setup, span)
        low, high = overlap.interval(steps_D)
        made = Prediction(
            model=profile.name,
            cluster=self.cluster.name,
            workers=world,
            wire=setup.wire,
            algorithm=self.algorithm(setup) if world > 1 else "none",
            step=step,
            low=low,
            high=high,
            compute=compute,
            communication=total,
            exposed=float(span.exposed[0]),
            codec=float(coding[0].sum()),
            bytes_sent=self._bytes(setup),
            sum_bound=float(span.most[0]),
            max_bound=float(span.least[0]),
            speedup=world * own_compute / step if step else 1.0,
            throughput=world * profile.batch / step if step else 0.0,
            bottleneck=_bottleneck(compute, bubble, span, coding),
            measured=self.cluster.measured,
            beyond_probed=0 < self.cluster.probed_ranks < self.cluster.shape(world)[1],
            roundings=self.roundings(setup),
            bubble=bubble,
        )
        return made, steps_D

    def _bytes(self, setup: Setup) -> float:
        total = 0.0
        for (wire, algorithm), sums in self.plan(setup)[1].items():
            for stage in self.costs.plan(algorithm, setup.world).stages:
                sizes = wire_sizes("fp32" if stage.as_is else wire, tuple(one.values for _, one in sums))
                total += stage.own * sum(size * one.often for size, (_, one) in zip(sizes, sums, strict=True))
        return total


def _bottleneck(compute: float, bubble: float, span: overlap.Span, coding: Tensor) -> str:
    exposed = float(span.exposed[0])
    if max(exposed, bubble) < HIDDEN * compute:
        return "compute"
    if bubble > exposed:
        return "bubble"
    wire = float(span.communication[0]) - float(coding[0].sum())
    return "codec" if float(coding[0].sum()) > max(wire, 0.0) else "link"


PLAIN = "fp32"
BANDWIDTHS = torch.logspace(-2, 4, 121, dtype=torch.float64)
"""Gb/s, 10 Mb/s to 10 Tb/s: where the break-even of a wire is looked for."""
