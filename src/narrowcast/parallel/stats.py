"""What travelled, how long it took, and what stayed as it is."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from narrowcast.codecs import Codec, ErrorReport
from narrowcast.collectives.segments import Times
from narrowcast.parallel.policy import AS_IS, Choice
from narrowcast.parallel.timeline import KEPT, Event

SUMMED = ("calls", "values", "compressed_values", "sent_bytes", "plain_bytes", "compressed_bytes", "call_seconds")
TOO_SMALL = re.compile(r"has \d+ values, under (\d+)")


@dataclass
class Stats:
    """Counters since `attach`, of this rank."""

    steps: int = 0
    calls: int = 0
    values: int = 0
    compressed_values: int = 0
    """Of `values`: those that travelled in fewer bits than their own type has."""
    sent_bytes: int = 0
    plain_bytes: int = 0
    """What a float32 (or 16-bit, for 16-bit gradients) all-reduce would have sent."""
    compressed_bytes: float = 0.0
    """Of `plain_bytes`: those of the compressed values."""
    call_seconds: float = 0.0
    times: Times = field(default_factory=Times)
    sampled: dict[str, ErrorReport] = field(default_factory=dict)
    """The last error report of each tensor, where sampling is on."""
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=KEPT), repr=False)
    """The last calls, for traces."""
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def count(
        self, name: str, values: int, sent: int, plain_bytes: int, times: Times, seconds: float, *, compressed: int
    ) -> None:
        """One call that has just ended, from whatever thread. compressed: how many of its values were."""
        event = Event(name, time.time() - seconds, seconds, sent, plain_bytes, times.encode, times.decode)
        with self.lock:
            self.calls += 1
            self.values += values
            self.compressed_values += compressed
            self.compressed_bytes += plain_bytes * compressed / values if values else 0.0
            self.sent_bytes += sent
            self.plain_bytes += plain_bytes
            self.call_seconds += seconds
            self.times.encode += times.encode
            self.times.decode += times.decode
            self.events.append(event)

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
        return {**flat, "ratio": self.ratio, **shares, **ms}


@dataclass(frozen=True)
class Row:
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
    def of(cls, name: str, numel: int, choice: Choice, dtype: torch.dtype, role: str = "gradient") -> Row:
        own = 8.0 * dtype.itemsize
        bits = own if choice.codec == AS_IS else choice.codec.bits_per_value
        return cls(name, numel, str(choice.codec), bits, choice.why, role, own)

    @property
    def compressed(self) -> bool:
        return self.wire != str(AS_IS) and self.bits_per_value < self.own_bits


def is_compressed(codec: Codec, dtype: torch.dtype) -> bool:
    """Whether values of this type take fewer bits on the wire than in memory."""
    return codec != AS_IS and codec.bits_per_value < 8 * dtype.itemsize


def total(rows: list[Row]) -> str:
    """All tensors in a line: how much is compressed, or why nothing is."""
    values, compressed = sum(row.numel for row in rows), sum(row.numel for row in rows if row.compressed)
    if not compressed:
        return f"nothing is compressed: {_reasons(rows)}"
    bits = sum(row.numel * row.bits_per_value for row in rows) / values
    share = 100 * compressed / values
    return f"total: {values} values, {compressed} compressed ({share:.1f} %), {bits:.2f} bits a value"


def _reasons(rows: list[Row]) -> str:
    """Why tensors stay as they are, each reason once, with the number of tensors."""
    reasons = Counter(TOO_SMALL.sub(r"have fewer than min_values=\1 values", row.why) or row.wire for row in rows)
    counts = [("all " if count == len(rows) else "", count, reason) for reason, count in reasons.items()]
    return "; ".join(f"{all_of}{count} tensors: {reason}" for all_of, count, reason in counts).replace(
        ": have", " have"
    )


def render(rows: list[Row], notes: list[str]) -> str:
    """A plain table; with a column for the role where there are several."""
    width = max([len(row.name) for row in rows] + [6])
    several = len({row.role for row in rows}) > 1
    roles = [f"  {row.role:9}" if several else "" for row in rows]
    lines = [f"{'tensor':{width}}{'  role     ' if several else ''}  {'values':>12}  {'wire':14}  {'bits':>6}  why"]
    lines += [
        f"{row.name:{width}}{role}  {row.numel:>12}  {row.wire:14}  {row.bits_per_value:>6.2f}  {row.why}"
        for row, role in zip(rows, roles, strict=True)
    ]
    return "\n".join([*lines, *notes, total(rows)])
