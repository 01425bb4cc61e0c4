"""What travelled, how long it took, and what stayed as it is."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from narrowcast.codecs import ErrorReport
from narrowcast.collectives.coder import Times
from narrowcast.parallel.timeline import KEPT, Event


@dataclass
class Stats:
    """Counters since `attach`, of this rank."""

    steps: int = 0
    calls: int = 0
    values: int = 0
    sent_bytes: int = 0
    plain_bytes: int = 0
    """What a float32 (or 16-bit, for 16-bit gradients) all-reduce would have sent."""
    call_seconds: float = 0.0
    times: Times = field(default_factory=Times)
    sampled: dict[str, ErrorReport] = field(default_factory=dict)
    """The last error report of each tensor, where sampling is on."""
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=KEPT), repr=False)
    """The last calls, for traces."""
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def count(self, name: str, values: int, sent: int, plain_bytes: int, times: Times, seconds: float) -> None:
        """One call that has just ended, from whatever thread."""
        event = Event(name, time.time() - seconds, seconds, sent, plain_bytes, times.encode, times.decode)
        with self.lock:
            self.calls += 1
            self.values += values
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
            for key in ("calls", "values", "sent_bytes", "plain_bytes", "call_seconds"):
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
        return {**flat, "ratio": self.ratio, **ms}


@dataclass(frozen=True)
class Row:
    """One tensor in `explain()`."""

    name: str
    numel: int
    wire: str
    bits_per_value: float
    why: str
    role: str = "gradient"


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
    return "\n".join(lines + notes)
