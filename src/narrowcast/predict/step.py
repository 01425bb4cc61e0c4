"""A training step of one model on one cluster with one wire: when it ends, and what it waits for."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from narrowcast.codecs import codec as codec_named
from narrowcast.collectives import choose
from narrowcast.parallel import BUCKET_BYTES, MIN_VALUES, overlap
from narrowcast.predict import costs, curve
from narrowcast.predict.costs import Costs
from narrowcast.predict.model import CallPlan, Profile, attach_calls, ddp_buckets, wire_bytes

MODEL_SPREAD, WIRE_SPREAD = 0.05, 0.03
"""What remains where all inputs are exact: the timeline's own error, common to all wires and of each wire. About what
`narrowcast validate` finds in the lab."""
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

    def as_dict(self) -> dict[str, Any]:
        return {key: _finite(value) for key, value in asdict(self).items()}


def _finite(value: object) -> object:
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


class StepPredictor:
    """Predicts steps of one profile on one cluster; versions of the measurements are drawn once."""

    def __init__(self, profile: Profile, made: Costs) -> None:
        self.profile, self.costs = profile, made
        self.cluster = made.cluster
        self.compute_D = self._factor("compute", profile.spread)
        self._calls: dict[tuple[int, int, str, bool], tuple[CallPlan, ...]] = {}

    def _factor(self, name: str, spread: float) -> Tensor:
        made = self.costs
        return curve.spread_factor(0.0 if made.fixed else spread, made.draws, made.generator(name))

    def versions(self, setup: Setup, step_D: Tensor) -> Tensor:
        """A step in every version of the measurements, with the timeline's own error in it."""
        if setup.world == 1:
            return step_D
        return step_D * self._factor("model", MODEL_SPREAD) * self._factor(f"model {setup.wire}", WIRE_SPREAD)

    def together(self, world: int) -> float:
        """How many times slower a rank computes beside the others, unless the profile has seen it."""
        return self.cluster.overlap.together if world > 1 and self.profile.ranks == 1 else 1.0

    def copy_seconds(self, values: int) -> float:
        """Between gradients and buckets, one way: 4 bytes read and 4 written a value."""
        speed = self.cluster.device.memory_gbyte
        return 8 * values / (speed * 1e9) if speed else 0.0

    def algorithm(self, setup: Setup) -> str:
        """What the wire travels by, in a word."""
        return costs.resolve(setup.algorithm, setup.wire, self.cluster, setup.world)

    def roundings(self, setup: Setup) -> int:
        lossless = setup.world == 1 or codec_named(setup.wire).lossless
        return 0 if lossless else costs.plan(self.algorithm(setup), self.cluster, setup.world).roundings

    def calls(self, setup: Setup) -> tuple[CallPlan, ...]:
        # the backend's own sum takes a bucket as it is; `attach` sends small tensors apart
        split = self.algorithm(setup) != "native"
        key = setup.bucket_bytes, setup.min_values, setup.wire, split
        if key not in self._calls:
            sizes = {"bucket_bytes": setup.bucket_bytes, "min_values": setup.min_values}
            self._calls[key] = attach_calls(ddp_buckets(self.profile.tensors, **sizes), setup.wire, split=split)
        return self._calls[key]

    def services(self, setup: Setup, calls: tuple[CallPlan, ...]) -> tuple[Tensor, Tensor]:
        """Seconds of each call and of the codec in it, [D, C]."""
        seconds = torch.zeros(self.costs.draws + 1, len(calls), dtype=torch.float64)
        coding = seconds.clone()
        if setup.world == 1:
            return seconds, coding
        for (wire, algorithm), places in self._kinds(setup, calls).items():
            values = torch.tensor([float(calls[c].values) for c in places], dtype=torch.float64)
            seconds[:, places], coding[:, places] = self.costs.seconds(algorithm, wire, values, setup.world)
        return seconds, coding

    def _inner(self, setup: Setup, calls: tuple[CallPlan, ...]) -> Tensor:
        """The part of each call inside nodes, [D, C]."""
        seconds = torch.zeros(self.costs.draws + 1, len(calls), dtype=torch.float64)
        for (wire, algorithm), places in self._kinds(setup, calls).items():
            values = torch.tensor([float(calls[c].values) for c in places], dtype=torch.float64)
            seconds[:, places] = self.costs.inner_seconds(algorithm, wire, values, setup.world)
        return seconds

    def _kinds(self, setup: Setup, calls: tuple[CallPlan, ...]) -> dict[tuple[str, str], list[int]]:
        """Which calls go which way."""
        kinds: dict[tuple[str, str], list[int]] = {}
        whole = costs.resolve(setup.algorithm, setup.wire, self.cluster, setup.world)
        for place, call in enumerate(calls):
            algorithm = whole
            if setup.algorithm == "auto" and whole != "native":
                algorithm = choose("auto", codec_named(call.wire), call.values, setup.world, whole == "hierarchical")
            kinds.setdefault((call.wire, algorithm), []).append(place)
        return kinds

    def bubble(self, setup: Setup) -> Tensor:
        """Seconds in which a worker has nothing to do even where nothing travels, [D]."""
        return torch.zeros_like(self.compute_D)

    def span(self, setup: Setup) -> tuple[Timeline, Tensor, Tensor]:
        """The step in every version, and the seconds of calls and codecs, [D, C]."""
        calls = self.calls(setup) if setup.world > 1 else ()
        seconds, coding = self.services(setup, calls)
        factor_D = self.compute_D * self.together(setup.world)
        profile = self.profile
        backward_end_D = (profile.forward + profile.backward) * factor_D
        compute_D = profile.compute * factor_D
        ready = [profile.forward + call.ready for call in calls]
        ready_DC = torch.tensor(ready, dtype=torch.float64) * factor_D[:, None]
        if calls:
            # DDP copies gradients into buckets as they get ready, and out of them at the end
            copied = torch.tensor([self.copy_seconds(call.values) for call in calls], dtype=torch.float64).cumsum(0)
            ready_DC, backward_end_D = ready_DC + copied, backward_end_D + copied[-1]
            compute_D = compute_D + 2 * copied[-1]
        if not setup.overlap:
            ready_DC = backward_end_D[:, None].expand(-1, len(calls))
        if self.cluster.device.codec_stream == "compute" and calls:
            late = coding.cumsum(dim=1)
            ready_DC, seconds = ready_DC + late, seconds - coding
            backward_end_D, compute_D = backward_end_D + late[:, -1], compute_D + late[:, -1]
        beside = self.cluster.slowdowns(setup.wire)
        slow = overlap.Contention(beside.compute, beside.collective)
        inner = self._inner(setup, calls) if setup.queues == "levels" and calls else None
        span = overlap.step(compute_D, backward_end_D, ready_DC, seconds, slow, inner)
        after_D, link_D = compute_D - backward_end_D, span.communication
        if inner is not None:
            link_D = torch.maximum(inner.sum(-1), (seconds - inner).sum(-1))
        least_D = torch.maximum(span.backward_end, profile.forward * factor_D + link_D) + after_D
        most_D = span.backward_end + span.communication + after_D
        exposed_D = span.step - profile.compute * factor_D
        made = Timeline(span.step, span.backward_end, span.communication, exposed_D, least_D, most_D)
        return made, seconds, coding

    def steps(self, setup: Setup) -> Tensor:
        """Seconds of the step in every version, [D]."""
        return self.versions(setup, self.span(setup)[0].step)

    def predict(self, setup: Setup) -> Prediction:
        """One cell, without what needs a comparison with others."""
        return self.predict_versions(setup)[0]

    def predict_versions(self, setup: Setup) -> tuple[Prediction, Tensor]:
        """One cell, and its step in every version, [D]."""
        span, seconds, coding = self.span(setup)
        profile, world = self.profile, setup.world
        compute, bubble = profile.compute * self.together(world), float(self.bubble(setup)[0])
        total, step = float(seconds[0].sum()), float(span.step[0])
        steps_D = self.versions(setup, span.step)
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
            speedup=world * profile.compute / step if step else 1.0,
            throughput=world * profile.batch / step if step else 0.0,
            bottleneck=_bottleneck(compute, bubble, span, coding),
            measured=self.cluster.measured,
            roundings=self.roundings(setup),
            bubble=bubble,
        )
        return made, steps_D

    def _bytes(self, setup: Setup) -> float:
        if setup.world == 1:
            return 0.0
        total = 0.0
        calls = self.calls(setup)
        for (wire, algorithm), places in self._kinds(setup, calls).items():
            made = costs.plan(algorithm, self.cluster, setup.world)
            for stage in made.stages:
                name = "fp32" if stage.as_is else wire
                own = stage.sent if stage.own is None else stage.own
                total += own * sum(wire_bytes(name, calls[c].values) for c in places)
        return total


def _bottleneck(compute: float, bubble: float, span: overlap.Span, coding: Tensor) -> str:
    exposed = float(span.exposed[0])
    if max(exposed, bubble) < HIDDEN * compute:
        return "compute"
    if bubble > exposed:
        return "bubble"
    wire = float(span.communication[0]) - float(coding[0].sum())
    return "codec" if float(coding[0].sum()) > max(wire, 0.0) else "link"
