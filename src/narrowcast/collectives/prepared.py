"""All-reduces that were looked at: what the calls of one kind have in common, and how one or several are started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.codecs import codec as codec_named
from narrowcast.collectives import checks
from narrowcast.collectives.algorithms import record
from narrowcast.collectives.algorithms.context import Call, Flat, Reduction
from narrowcast.collectives.algorithms.record import Nodes
from narrowcast.collectives.residuals import Residuals
from narrowcast.collectives.runtime import agreement
from narrowcast.collectives.runtime.channel import Channel
from narrowcast.collectives.runtime.messages import Exchange
from narrowcast.collectives.segments import Times
from narrowcast.collectives.work import Work
from narrowcast.kernels import NO_NOISE, Noise, check_seed

SUM = Reduction()


def reduction_of(op: Any, world: int) -> Reduction:
    """What an op of torch.distributed means for a float32 sum."""
    kind = op.op if hasattr(op, "op") else op
    if kind == dist.ReduceOp.SUM:
        return SUM
    if kind == dist.ReduceOp.AVG:
        return Reduction(divide=float(world))
    if kind == dist.ReduceOp.PREMUL_SUM:
        # torch 2.11 has no op.factor, and all versions give it to pickle
        _, factor = op.__getstate__()
        return Reduction(multiply=float(factor))
    raise ValueError(f"collectives: op {op} is not a sum; take SUM, AVG or PREMUL_SUM")


MAX_KEPT = 1024
_TEXTS: dict[tuple[object, ...], str] = {}


def signature_text(what: str, codec: Codec, numel: int | None, dtype: torch.dtype, **more: object) -> str:
    """What all ranks compare. Kept: to write it takes the host as long as a launch."""
    # by what it shows: 1 and True are equal, and their texts are not
    key = agreement.VERSION, what, codec.spec, numel, dtype, repr(more)
    text = _TEXTS.get(key)
    if text is None:
        if len(_TEXTS) >= MAX_KEPT:
            _TEXTS.clear()
        common = {"version": agreement.VERSION, "call": what, "spec": codec.spec}
        signature = {**common, "dtype": str(dtype).removeprefix("torch."), "numel": numel, **more}
        text = _TEXTS[key] = agreement.to_text(signature)
    return text


@dataclass(frozen=True)
class AllReduce:
    """An all-reduce that was looked at: what the calls of one kind have in common, found once."""

    codec: Codec
    algorithm: str
    reduction: Reduction
    noise: Noise
    """Of the seed; each call derives its own."""
    nodes: Nodes | None
    inner: Codec
    accumulator: str
    draws: bool
    """Whether an encoding draws random numbers."""
    text: str
    """The signature."""

    @classmethod
    def of(
        cls,
        codec: Codec,
        lengths: Sequence[int],
        dtype: torch.dtype,
        world: int,
        reduction: Reduction,
        *,
        algorithm: str = "auto",
        seed: int = 0,
        nodes: Nodes | None = None,
        inner: checks.Spec = "as-is",
        accumulator: str = "float32",
        feedback: bool = False,
    ) -> AllReduce:
        """For segments of these lengths; raises where it cannot be done. feedback: calls have residuals."""
        numel, inside = sum(lengths), codec_named(inner)
        chosen = record.choose(algorithm, codec, numel, world, bool(nodes))
        options: dict[str, Any] = {"inner": inside, "accumulator": accumulator, "feedback": feedback}
        checks.check_algorithm(chosen, codec, world, nodes, **options)
        noise = Noise(check_seed("all_reduce", seed))
        more: dict[str, object] = {"algorithm": chosen, "op": str(reduction), "segments": lengths}
        draws = codec.stochastic or inside.stochastic
        more["seed"] = noise.seed if draws else None
        more |= {"nodes": nodes, "inner": str(inside), "accumulator": accumulator}
        text = signature_text("all_reduce", codec, numel, dtype, **more)
        return cls(codec, chosen, reduction, noise, nodes, inside, accumulator, draws, text)

    def start(
        self,
        channel: Channel,
        flat: Flat,
        step: tuple[int, ...],
        residuals: Residuals | None = None,
        times: Times | None = None,
    ) -> Work:
        """Submit a call. step: its number, of integers."""
        run = partial(self.run, flat, self.noise_of(step), residuals, times or Times())
        memory = memory_of(flat, residuals)
        return channel.submit(self.text, run, memory, waits=self.host_waits(flat))

    def noise_of(self, step: tuple[int, ...]) -> Noise:
        """Of a call."""
        return self.noise.derive(*step) if self.draws else NO_NOISE

    def host_waits(self, flat: Flat) -> bool:
        return record.ALGORITHMS[self.algorithm].host_waits or flat.host_waits(self.codec, self.inner)

    def run(self, flat: Flat, noise: Noise, residuals: Residuals | None, times: Times, exchange: Exchange) -> None:
        """In the call's turn."""
        record.run(self.algorithm, self.call(flat, noise, residuals, times, exchange))
        flat.write_back()

    def call(self, flat: Flat, noise: Noise, residuals: Residuals | None, times: Times, exchange: Exchange) -> Call:
        """What the algorithm works on."""
        options = (self.accumulator, self.nodes, self.inner, times)
        return Call(flat.x, self.codec, exchange, flat.lengths, self.reduction, noise, residuals, *options)


_PREPARED: dict[tuple[object, ...], AllReduce] = {}


def prepared(
    codec: Codec,
    lengths: tuple[int, ...],
    dtype: torch.dtype,
    world: int,
    reduction: Reduction,
    *,
    inner: checks.Spec,
    seed: int,
    **options: Any,
) -> AllReduce:
    """`AllReduce.of`, kept: to look at a call takes the host longer than to start it."""
    inside, word = codec_named(inner), check_seed("all_reduce", seed)
    # as in `Coder.of`
    key = codec.spec, inside.spec, lengths, dtype, world, reduction, word, *options.values()
    kind = _PREPARED.get(key)
    if kind is None or (kind.codec, kind.inner) != (codec, inside):
        if len(_PREPARED) >= MAX_KEPT:
            _PREPARED.clear()
        kind = AllReduce.of(codec, lengths, dtype, world, reduction, inner=inside, seed=word, **options)
        _PREPARED[key] = kind
    return kind


@dataclass
class PreparedCall:
    """A call to be started, by itself or together with others."""

    kind: AllReduce
    flat: Flat
    step: tuple[int, ...]
    """Its number."""
    residuals: Residuals | None = None
    times: Times = field(default_factory=Times)

    def call(self, exchange: Exchange) -> Call:
        """What its algorithm works on."""
        return self.kind.call(self.flat, self.kind.noise_of(self.step), self.residuals, self.times, exchange)

    @property
    def device(self) -> torch.device:
        return self.flat.device

    @property
    def travels_together(self) -> bool:
        """Whether its messages may be parts of those of another call."""
        return record.ALGORITHMS[self.kind.algorithm].shots is not None and not self.kind.host_waits(self.flat)


def memory_of(flat: Flat, residuals: Residuals | None) -> list[Tensor]:
    return flat.memory if residuals is None else [*flat.memory, residuals.first, residuals.second]


def start_together(channel: Channel, calls: Sequence[PreparedCall]) -> Work:
    """Submit calls whose messages travel together; each computes what it would by itself. All `travels_together`."""
    if len(calls) == 1:
        one = calls[0]
        return one.kind.start(channel, one.flat, one.step, one.residuals, one.times)
    text = _text_together(tuple(one.kind.text for one in calls))
    memory = [tensor for one in calls for tensor in memory_of(one.flat, one.residuals)]
    return channel.submit(text, partial(_run_together, calls), memory, waits=False)


@lru_cache(maxsize=1024)
def _text_together(texts: tuple[str, ...]) -> str:
    """Field by field, so that ranks that differ read in which."""
    signature: dict[str, object] = {"version": agreement.VERSION, "call": "all_reduces together", "calls": len(texts)}
    for number, text in enumerate(texts):
        signature |= {f"{name} of call {number}": value for name, value in agreement.read(text).items()}
    return agreement.to_text(signature)


def _run_together(calls: Sequence[PreparedCall], exchange: Exchange) -> None:
    record.run_together([(one.kind.algorithm, one.call(exchange)) for one in calls])
    for one in calls:
        one.flat.write_back()
