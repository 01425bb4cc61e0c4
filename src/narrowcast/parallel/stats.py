"""What travelled, when, how long it took, and what stayed as it is."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from narrowcast.codecs import Codec, ErrorReport, error_report
from narrowcast.codecs import codec as codec_named
from narrowcast.collectives import Times, Work
from narrowcast.parallel.policy import AS_IS, MIN_VALUES, CodecChoice
from narrowcast.parallel.seeds import seed_of

KEPT = 10_000
"""Calls kept for traces; older ones go."""
SUMMED = (
    *("calls", "values", "compressed_values", "sent_bytes", "inside_bytes", "plain_bytes", "compressed_bytes"),
    "call_seconds",
)
UNWATCHED = {"watch_seconds": 0.0, "watch_share": 0.0, "decisions": 0.0}
"""What the autopilot counts, where there is none: so that `stats()` has the same keys always."""
TOO_SMALL = re.compile(r"has \d+ values, under (\d+)")


@dataclass(frozen=True)
class CallEvent:
    """One collective call of this rank."""

    name: str
    start: float
    """Seconds since 1970, so that the ranks' traces fit together as well as their clocks do."""
    seconds: float
    sent_bytes: int
    plain_bytes: int
    encode_seconds: float
    decode_seconds: float


class Watched(Protocol):
    """What can be watched: a handle of `attach`, a `LocalSGD`, a `HookState`."""

    def stats(self) -> dict[str, float]:
        """Counters since the beginning."""

    def events(self) -> list[CallEvent]:
        """The last calls."""


@dataclass
class Stats:
    """Counters since `attach`, of this rank."""

    steps: int = 0
    calls: int = 0
    values: int = 0
    compressed_values: int = 0
    """Of `values`: those that travelled in fewer bits than their own type has."""
    sent_bytes: int = 0
    inside_bytes: int = 0
    """Of `sent_bytes`: those that stayed inside a node, where there are nodes."""
    plain_bytes: int = 0
    """What a float32 (or 16-bit, for 16-bit gradients) all-reduce would have sent."""
    compressed_bytes: float = 0.0
    """Of `plain_bytes`: those of the compressed values."""
    call_seconds: float = 0.0
    times: Times = field(default_factory=Times)
    sampled: dict[str, ErrorReport] = field(default_factory=dict)
    """The last error report of each tensor, where sampling is on."""
    events: deque[CallEvent] = field(default_factory=lambda: deque(maxlen=KEPT), repr=False)
    """The last calls, for traces."""
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def count(
        self, name: str, values: int, sent: int, plain_bytes: int, times: Times, seconds: float, *, compressed: int
    ) -> None:
        """One call that has just ended, from whatever thread. compressed: how many of its values were."""
        event = CallEvent(name, time.time() - seconds, seconds, sent, plain_bytes, times.encode, times.decode)
        with self.lock:
            self.calls += 1
            self.values += values
            self.compressed_values += compressed
            self.compressed_bytes += plain_bytes * compressed / values if values else 0.0
            self.sent_bytes += sent
            self.inside_bytes += times.inside_bytes
            self.plain_bytes += plain_bytes
            self.call_seconds += seconds
            self.times.encode += times.encode
            self.times.decode += times.decode
            self.events.append(event)

    def counter(
        self, name: str, values: int, plain_bytes: int, times: Times, *, compressed: int
    ) -> Callable[[Work], None]:
        """Begin to time a call; what is returned counts it once its work is done."""
        began = time.perf_counter()

        def count(work: Work) -> None:
            seconds = time.perf_counter() - began
            self.count(name, values, work.sent_bytes, plain_bytes, times, seconds, compressed=compressed)

        return count

    def sample(self, name: str, gradient: Tensor, codec: Codec, *, seed: int, rank: int, step: int) -> None:
        """Note what a codec that rounds would lose on a gradient."""
        if not codec.lossless:
            own_seed = seed_of(f"sample {seed} {rank} {name}")
            self.sampled[name] = error_report(gradient, codec, seed=own_seed, stream=step)

    @classmethod
    def total(cls, parts: Iterable[Stats]) -> Stats:
        """The sum of several counters; the steps are those of the first."""
        listed = list(parts)
        whole = cls(steps=listed[0].steps if listed else 0)
        for part in listed:
            for key in SUMMED:
                setattr(whole, key, getattr(whole, key) + getattr(part, key))
            whole.times.encode += part.times.encode
            whole.times.decode += part.times.decode
            whole.sampled |= part.sampled
            whole.events.extend(part.events)
        return whole

    @property
    def ratio(self) -> float:
        """How many times fewer bytes."""
        return self.plain_bytes / self.sent_bytes if self.sent_bytes else 1.0

    def as_dict(self) -> dict[str, float]:
        flat = {key: value for key, value in vars(self).items() if isinstance(value, (int, float))}
        waiting = self.call_seconds - self.times.encode - self.times.decode
        ms = {"encode_ms": 1e3 * self.times.encode, "decode_ms": 1e3 * self.times.decode, "wire_ms": 1e3 * waiting}
        shares = {
            "compressed_share": self.compressed_values / self.values if self.values else 0.0,
            "compressed_bytes_share": self.compressed_bytes / self.plain_bytes if self.plain_bytes else 0.0,
        }
        return {**flat, "ratio": self.ratio, **shares, **ms, **UNWATCHED}


@dataclass(frozen=True)
class TensorRow:
    """One tensor in `explain()`."""

    name: str
    numel: int
    wire: str
    bits_per_value: float
    why: str
    role: str = "gradient"
    own_bits: float = 32.0
    """Of a value in its own type."""

    @classmethod
    def of(
        cls,
        name: str,
        numel: int,
        choice: CodecChoice,
        dtype: torch.dtype,
        role: str = "gradient",
        shape: Sequence[int] = (),
    ) -> TensorRow:
        """shape: where it is known, for low rank."""
        own = 8.0 * dtype.itemsize
        bits = own if choice.codec == AS_IS else choice.codec.bits_for(shape or (numel, 1))
        return cls(name, numel, str(choice.codec), bits, choice.why, role, own)

    @property
    def compressed(self) -> bool:
        return self.wire != str(AS_IS) and self.bits_per_value < self.own_bits


def is_compressed(codec: Codec, dtype: torch.dtype) -> bool:
    """Whether values of this type take fewer bits on the wire than in memory."""
    return codec != AS_IS and codec.bits_per_value < 8 * dtype.itemsize


def compressed_values(codec: Codec, dtype: torch.dtype, values: int, world: int) -> int:
    """How many of the values of a call travel in fewer bits than their type has: all or none."""
    return values if world > 1 and is_compressed(codec, dtype) else 0


def all_reduce_bytes(values: int, itemsize: int, world: int) -> int:
    """What a rank sends in a plain all-reduce."""
    return 2 * (world - 1) * values * itemsize // world


def lossy(rows: Iterable[TensorRow]) -> dict[Codec, int]:
    """The codecs that round, and how many values each takes."""
    values: dict[Codec, int] = {}
    for row in rows:
        # what a value costs, whatever it is the difference to
        codec = codec_named(row.wire.removesuffix("+diff"))
        if not codec.lossless:
            values[codec] = values.get(codec, 0) + row.numel
    return values


def summary(rows: list[TensorRow]) -> str:
    """All tensors in a line: how much is compressed, or why nothing is."""
    values, compressed = sum(row.numel for row in rows), sum(row.numel for row in rows if row.compressed)
    if not compressed:
        return f"nothing is compressed: {_reasons(rows)}"
    bits = sum(row.numel * row.bits_per_value for row in rows) / values
    share = 100 * compressed / values
    return f"total: {values} values, {compressed} compressed ({share:.1f} %), {bits:.2f} bits a value"


def headline(rows: list[TensorRow], link: str) -> str:
    """What a handle is, in a line. link: whether few bits pay on it, where that is known."""
    values, compressed = sum(row.numel for row in rows), sum(row.numel for row in rows if row.compressed)
    if not compressed:
        return f"{summary(rows)}{link and f'; {link}'}"
    own = sum(row.numel * row.own_bits for row in rows)
    fewer = own / sum(row.numel * row.bits_per_value for row in rows)
    wires: Counter[str] = Counter()
    for row in rows:
        wires[row.wire] += row.numel if row.compressed else 0
    most = ", ".join(wire for wire, count in wires.most_common(3) if count)
    share = f"{100 * compressed / values:.1f} % of {values} values compressed"
    return f"{share} ({most}), {fewer:.2f} times fewer bits{link and f'; {link}'}"


def small_values(rows: list[TensorRow]) -> list[str]:
    """Where most values stay as they are because each tensor is small, as with LoRA: what would send them."""
    small = sorted((row.numel for row in rows if TOO_SMALL.search(row.why)), reverse=True)
    values, left = sum(row.numel for row in rows), sum(small)
    if 2 * left <= values or left < MIN_VALUES:
        return []
    # vectors are the smallest and the most sensitive: nine tenths of the values are those of matrices
    sent = next(count for count in range(1, len(small) + 1) if 10 * sum(small[:count]) >= 9 * left)
    share = 100 * left / values
    why = f"{share:.0f} % of the values stay as they are, in tensors smaller than min_values, as those of LoRA are"
    return [f"{why}; min_values={small[sent - 1]} sends most of them"]


def _reasons(rows: list[TensorRow]) -> str:
    """Why tensors stay as they are, each reason once, with the number of tensors."""
    reasons = Counter(TOO_SMALL.sub(r"have fewer than min_values=\1 values", row.why) or row.wire for row in rows)
    counts = [("all " if count == len(rows) else "", count, reason) for reason, count in reasons.items()]
    return "; ".join(f"{all_of}{count} tensors: {reason}" for all_of, count, reason in counts).replace(
        ": have", " have"
    )


def render(rows: list[TensorRow], notes: list[str]) -> str:
    """A plain table; with a column for the role where there are several."""
    width = max([len(row.name) for row in rows] + [6])
    several = len({row.role for row in rows}) > 1
    roles = [f"  {row.role:9}" if several else "" for row in rows]
    lines = [f"{'tensor':{width}}{'  role     ' if several else ''}  {'values':>12}  {'wire':14}  {'bits':>6}  why"]
    lines += [
        f"{row.name:{width}}{role}  {row.numel:>12}  {row.wire:14}  {row.bits_per_value:>6.2f}  {row.why}"
        for row, role in zip(rows, roles, strict=True)
    ]
    return "\n".join([*lines, *notes, summary(rows)])
