"""Local updates: workers train by themselves and exchange every so many steps. How much of their time do they compute?

A worker is what the outermost link joins: a site with all its devices, or one device where a cluster has one level. It
makes its steps without the others; after each H steps the outer gradients of a fragment of the model go through
`LocalSGD`'s all-reduce, and while they travel the next `delay` steps go on. Shapes: D versions of the measurements, P
fragments, C calls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from narrowcast.codecs import Codec, Matrix
from narrowcast.codecs import codec as codec_named
from narrowcast.collectives import ALGORITHMS, Coder, Cost, Stage, choose, direct_steps, record
from narrowcast.parallel import overlap
from narrowcast.predict import costs, low_rank
from narrowcast.predict.cluster import Cluster
from narrowcast.predict.costs import DRAWS, Costs
from narrowcast.predict.model import CallPlan, Profile, TensorTime
from narrowcast.predict.parallelism import shared_otherwise
from narrowcast.predict.rounds import LocalSetup, fragments_of, round_seconds
from narrowcast.predict.step import HIDDEN, Setup, StepPredictor, finite, slowest_of
from narrowcast.predict.sweep import needed

AIM = 0.95
"""The share of time computing that answers ask for."""
OUTER_BYTES = 56
"""Of memory for each value of an exchange: the outer gradient, Nesterov's step of torch, and the way back into the
parameter read and write 14 float32."""
DAY = 86_400.0
SLOWEST_GBIT, QUICKEST_GBIT = 1e-4, 1e5
"""Between them the bandwidth is looked for that reaches AIM."""
HALVINGS = 24

Interval = tuple[float, float]


@dataclass(frozen=True)
class LocalPrediction:
    """What local updates come to; pairs are 5 and 95 % quantiles. Bytes are a worker's, of all its devices."""

    model: str
    cluster: str
    devices: int
    workers: int
    wire: str
    every: int
    fragments: int
    delay: int
    mixing: str
    step: float
    """Seconds, with its part of the exchanges."""
    step_interval: Interval
    compute: float
    """Of a step without them."""
    exchange: float
    """Seconds of the longest: encode, send, sum, decode, and the outer step."""
    exchange_interval: Interval
    codec: float
    """Its part in that."""
    waits: float
    """Seconds a round in which a worker waits for exchanges."""
    share: float
    """Of the time that is spent in steps."""
    share_interval: Interval
    needed_gbit: float
    """Bandwidth of the outermost link at which the share is 95 %; infinite: no bandwidth."""
    needed_interval: Interval
    needed_every: int
    """Steps between exchanges at which it is, with this link."""
    hiding_delay: int
    """Steps that the longest exchange takes, at the slow end of its interval; 0: the next one begins before."""
    exchange_bytes: float
    """Of the largest exchange: what the link must carry at a stretch."""
    round_bytes: float
    bytes_a_day: float
    day_interval: Interval
    bytes_a_parameter_and_step: float
    limit: str
    """What the time of an exchange is, mostly: codec, latency, window (of TCP) or link; compute where all is hidden."""
    memory_bytes: float
    """Of a device, without activations: as its share of the model takes it, with anchors, outer momentum, residuals or
    copies of neighbours, and what is under way.
    """
    measured: bool

    def as_dict(self) -> dict[str, Any]:
        numbers = asdict(self).items()
        return {
            key: [finite(one) for one in value] if isinstance(value, tuple) else finite(value) for key, value in numbers
        }


class _Call(NamedTuple):
    """One call of an exchange: segments through a codec, and the matrices that were multiplied for it."""

    fragment: int
    codec: Codec
    segments: tuple[int, ...]
    often: float = 1.0

    @property
    def values(self) -> int:
        return sum(self.segments)


class Exchanges(NamedTuple):
    """Those of a round, fragment by fragment."""

    seconds_DP: Tensor
    coding_DP: Tensor
    latency_DP: Tensor
    bytes_P: Tensor
    """Of a worker."""


class LocalPredictor:
    """Predicts local updates of one profile on one cluster."""

    def __init__(self, profile: Profile, cluster: Cluster, draws: int = DRAWS, seed: int = 0) -> None:
        self.profile, self.cluster = profile, cluster
        self._draws, self._seed = draws, seed
        self.outer = replace(cluster, levels=cluster.levels[-1:])
        self.costs = Costs(self.outer, draws, seed)

    def workers(self, world: int) -> int:
        """What the outermost link joins of so many devices."""
        count = self.cluster.sizes(world)[-1]
        if count < 2:
            raise ValueError(
                f"local updates: {world} device(s) are one worker on {self.cluster.name}, which has nobody to exchange "
                f"with; take more than {math.prod(level.ranks for level in self.cluster.levels[:-1])}"
            )
        return count

    def _devices(self, setup: LocalSetup) -> int:
        """Of a worker."""
        return -(-setup.world // self.workers(setup.world))

    def _shards(self, setup: LocalSetup) -> int:
        """Into how many parts the devices of a worker cut the model."""
        inside = self._devices(setup)
        return {"data": 1, "hsdp": min(self.cluster.node, inside)}.get(setup.inside, inside)

    def compute(self, setup: LocalSetup) -> Tensor:
        """Seconds of a step of one worker by itself, [D]."""
        inside = self._devices(setup)
        if inside == 1:
            alone = StepPredictor(self.profile, self.costs)
            shared = self.cluster.overlap.together if self.profile.ranks == 1 else 1.0
            return alone.alone * shared * alone.compute_D
        within = Costs(replace(self.cluster, levels=self.cluster.levels[:-1]), self._draws, self._seed)
        if setup.inside == "data":
            steps = StepPredictor(self.profile, within)
        else:
            steps = shared_otherwise(setup.inside, self.profile, within, None)
        way = "native" if setup.inside == "data" and costs.is_summed_by_backend(setup.inside_wire) else "auto"
        return steps.steps(Setup(inside, setup.inside_wire, way))

    def _calls(self, setup: LocalSetup) -> tuple[list[_Call], list[tuple[int, CallPlan]]]:
        """What `LocalSGD` starts in a round, and those by low rank, each with its fragment."""
        codec, shards = codec_named(setup.wire), self._shards(setup)
        if codec.rank and shards > 1:
            raise ValueError(
                f"local updates with {codec}: the devices of a worker hold parts of a matrix, and low rank sums whole "
                f"ones; take {codec.factors}, or inside 'data'"
            )
        calls, planned = list[_Call](), list[tuple[int, CallPlan]]()
        for number, tensors in enumerate(fragments_of(self.profile.tensors, setup.fragments)):
            groups: dict[Codec, list[TensorTime]] = {}
            for tensor in tensors:
                groups.setdefault(low_rank.choice_of(tensor, codec, setup.min_values), []).append(tensor)
            for chosen, members in groups.items():
                if chosen.rank:
                    matrices = tuple(Matrix.of(tensor.shape) for tensor in members)
                    planned.append((number, CallPlan(0, 0.0, setup.wire, matrices)))
                    calls += [_Call(number, *one) for one in _factors(chosen, matrices)]
                else:
                    calls.append(_Call(number, chosen, tuple(-(-tensor.numel // shards) for tensor in members)))
        return calls, planned

    def _way(self, setup: LocalSetup, call: _Call) -> tuple[str, Cost]:
        """The algorithm of a call and what it costs, with all devices of a worker on its link."""
        inside, world = self._devices(setup), self.workers(setup.world)
        if setup.neighbours:
            peers = min(setup.neighbours, world - 1)
            stage = Stage(0, "send", float(peers), direct_steps(peers + 1), trips=1.0, peers=float(peers))
            name, cost = setup.mixing, Cost((stage,), encodes=1.0, decodes=float(peers), roundings=1)
        else:
            name = choose("auto", call.codec, call.values, world, False)
            cost = ALGORITHMS[name].cost(costs.placement(self.outer, world))
        stages = tuple(replace(one, sent=one.sent * inside, peers=one.peers * inside) for one in cost.stages)
        return name, replace(cost, stages=stages)

    def _bytes(self, setup: LocalSetup, call: _Call) -> float:
        """What a worker sends in a call, of all its devices."""
        world, coder = self.workers(setup.world), Coder(call.codec, call.segments, torch.float32)
        if setup.neighbours:
            own = min(setup.neighbours, world - 1) * coder.nbytes((0, coder.numel))
        else:
            own = max(record.sent_bytes(self._way(setup, call)[0], record.Setting(coder, world)))
        return own * call.often * self._devices(setup)

    def exchanges(self, setup: LocalSetup, made: Costs | None = None) -> Exchanges:
        """Of a round. made: costs in other versions."""
        made = made or self.costs
        calls, planned = self._calls(setup)
        seconds, coding, latency = torch.zeros(3, made.draws + 1, setup.fragments, dtype=torch.float64)
        sent_P = torch.zeros(setup.fragments, dtype=torch.float64)
        kinds: dict[tuple[str, str], list[_Call]] = {}
        for call in calls:
            kinds.setdefault((str(call.codec), self._way(setup, call)[0]), []).append(call)
            sent_P[call.fragment] += self._bytes(setup, call)
        world, peers = self.workers(setup.world), 1.0
        for (wire, _), alike in kinds.items():
            cost = self._way(setup, alike[0])[1]
            values = torch.tensor([float(call.values) for call in alike], dtype=torch.float64)
            at, often = torch.tensor([call.fragment for call in alike]), torch.tensor([call.often for call in alike])
            took = made.seconds_of(cost, wire, values, world)
            waited = sum(made.levels[0].latency(stage.steps, stage.trips) for stage in cost.stages)
            peers = max(peers, *(stage.peers for stage in cost.stages))
            for total, more in zip((seconds, coding, latency), (*took, torch.full_like(took[0], waited)), strict=True):
                total.index_add_(1, at, (often * more).expand(len(total), -1))
        for number, plan in planned:
            products_D = low_rank.product_seconds(made, plan.wire, plan.matrices)
            seconds[:, number] += products_D
            coding[:, number] += products_D
        ramp_DP = made.levels[0].ramp(sent_P, peers, seconds - latency)
        outer_P = self._outer_step(setup)
        own_D = made.spread("model", made.known.step, made.known.freedom)
        own_D = own_D * made.spread(f"model {setup.wire}", made.known.wire)
        seconds = (seconds + ramp_DP) * own_D[:, None] + outer_P
        return Exchanges(seconds, coding, latency + ramp_DP, sent_P)

    def _outer_step(self, setup: LocalSetup) -> Tensor:
        """Seconds of it for each fragment, [P]."""
        parts, speed = fragments_of(self.profile.tensors, setup.fragments), self.cluster.device.memory_gbyte
        values = [sum(tensor.numel for tensor in part) / self._shards(setup) for part in parts]
        return torch.tensor([OUTER_BYTES * n / (speed * 1e9) if speed else 0.0 for n in values], dtype=torch.float64)

    def _round(self, setup: LocalSetup, compute_D: Tensor, seconds_DP: Tensor) -> Tensor:
        """Seconds of a round, [D]."""
        beside = self.cluster.slowdowns(setup.wire)
        if setup.delay:
            seconds_DP = seconds_DP * beside.collective * self.cluster.loop.wires
        # the slowest of all workers is waited for at each exchange: by then their steps have evened out
        jitter = (self.profile.jitter or self.cluster.device.jitter) * (setup.fragments / setup.every) ** 0.5
        slowest = slowest_of(self.workers(setup.world), jitter)
        return round_seconds(compute_D * slowest, seconds_DP, setup.every, setup.delay, max(1.0, beside.compute))

    def share(self, setup: LocalSetup, compute_D: Tensor, seconds_DP: Tensor) -> Tensor:
        """Of the time that is spent in steps, [D]."""
        return (setup.every * compute_D / self._round(setup, compute_D, seconds_DP)).clamp_max(1.0)

    def needed_gbit(self, setup: LocalSetup, compute_D: Tensor, aim: float = AIM) -> Tensor:
        """The bandwidth of the outermost link that reaches a share, in every version, [D]; infinite where none does."""

        def reaches(log_D: Tensor) -> Tensor:
            made = self.costs.with_bandwidths(10**log_D)
            return self.share(setup, compute_D, self.exchanges(setup, made).seconds_DP) >= aim

        low_D = torch.full_like(compute_D, math.log10(SLOWEST_GBIT))
        high_D = torch.full_like(compute_D, math.log10(QUICKEST_GBIT))
        never_D = ~reaches(high_D)
        for _ in range(HALVINGS):
            middle_D = (low_D + high_D) / 2
            enough_D = reaches(middle_D)
            low_D, high_D = torch.where(enough_D, low_D, middle_D), torch.where(enough_D, middle_D, high_D)
        return torch.where(never_D, math.inf, 10**high_D)

    def needed_every(self, setup: LocalSetup, compute_D: Tensor, seconds_DP: Tensor, aim: float = AIM) -> int:
        """The fewest steps between exchanges that reach a share, by the means."""

        def reaches(every: int) -> bool:
            return float(self.share(replace(setup, every=every), compute_D[:1], seconds_DP[:1])[0]) >= aim

        low, high = max(setup.fragments, setup.delay + 1) - 1, max(setup.every, setup.fragments, setup.delay + 1)
        while not reaches(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if reaches(middle) else (middle, high)
        return high

    def predict(self, setup: LocalSetup) -> LocalPrediction:
        """One case."""
        compute_D, made = self.compute(setup), self.exchanges(setup)
        round_D, longest = self._round(setup, compute_D, made.seconds_DP), int(made.seconds_DP[0].argmax())
        step_D, exchange_D = round_D / setup.every, made.seconds_DP[:, longest]
        share_D, needed_D = self.share(setup, compute_D, made.seconds_DP), self.needed_gbit(setup, compute_D)
        sent, share = float(made.bytes_P.sum()), float(share_D[0])
        day_D, compute = sent * DAY / round_D, float(compute_D[0])
        return LocalPrediction(
            model=self.profile.name,
            cluster=self.cluster.name,
            devices=setup.world,
            workers=self.workers(setup.world),
            wire=setup.wire,
            every=setup.every,
            fragments=setup.fragments,
            delay=setup.delay,
            mixing=setup.mixing,
            step=float(step_D[0]),
            step_interval=overlap.interval(step_D),
            compute=compute,
            exchange=float(exchange_D[0]),
            exchange_interval=overlap.interval(exchange_D),
            codec=float(made.coding_DP[0, longest]),
            waits=max(0.0, float(round_D[0]) - setup.every * compute),
            share=share,
            share_interval=overlap.interval(share_D),
            needed_gbit=float(needed_D[0]),
            needed_interval=_interval(needed_D),
            needed_every=self.needed_every(setup, compute_D, made.seconds_DP),
            hiding_delay=_hiding(setup, overlap.interval(exchange_D)[1] / compute if compute else math.inf),
            exchange_bytes=float(made.bytes_P.max()),
            round_bytes=sent,
            bytes_a_day=float(day_D[0]),
            day_interval=overlap.interval(day_D),
            bytes_a_parameter_and_step=sent / (setup.every * self.profile.numel),
            limit="compute" if 1 - share < HIDDEN else self._limit(setup, made, longest),
            memory_bytes=self._memory(setup),
            measured=self.cluster.measured,
        )

    def _memory(self, setup: LocalSetup) -> float:
        inside, world = self._devices(setup), self.workers(setup.world)
        own = needed(self.profile, Setup(inside, setup.inside_wire), setup.inside, self._shards(setup)).total
        codec, kept = codec_named(setup.wire), 2.0  # anchors, outer momentum
        if setup.neighbours and not codec.lossless:
            # what both ends of each link know, and what all had in common
            links = min(2, world - 1) + 1 if setup.mixing == "ring" else 2 * max(1, math.ceil(math.log2(world)))
            kept += links + 1
        elif codec.feedback and not setup.neighbours:
            kept += 2
        kept += 1 / setup.fragments if setup.delay else 0.0
        return own + 4.0 * kept * self.profile.numel / self._shards(setup)

    def _limit(self, setup: LocalSetup, made: Exchanges, longest: int) -> str:
        calls, _ = self._calls(setup)
        waited, coded = float(made.latency_DP[0, longest]), float(made.coding_DP[0, longest])
        moved = float(made.seconds_DP[0, longest]) - waited - coded
        link, largest = self.costs.levels[0], max(calls, key=lambda call: call.values)
        peers = min(stage.peers for stage in self._way(setup, largest)[1].stages)
        by_window = bool(link.reached_D(peers)[0] < link.gbit_D[0])
        return max((coded, "codec"), (waited, "latency"), (moved, "window" if by_window else "link"))[1]


def _factors(codec: Codec, matrices: Sequence[Matrix]) -> list[tuple[Codec, tuple[int, ...], float]]:
    """The sums of a call by low rank: of both factors, or of each in turn."""
    often = 0.5 if codec.sends_one_factor else 1.0
    sides = (True, False)
    return [(codec.factors, tuple(codec.rank * m.length(side) for m in matrices), often) for side in sides]


def _hiding(setup: LocalSetup, steps: float) -> int:
    return math.ceil(steps) if steps < setup.every / setup.fragments else 0


def _interval(values_D: Tensor) -> Interval:
    """As of finite numbers: some may be infinite."""
    low, high = (
        math.inf if end >= QUICKEST_GBIT else end for end in overlap.interval(values_D.clamp_max(QUICKEST_GBIT))
    )
    return low, high
