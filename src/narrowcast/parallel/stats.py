"""What travelled, how long it took, and what stayed as it is."""

from __future__ import annotations

from dataclasses import dataclass, field

from narrowcast.codecs import ErrorReport
from narrowcast.collectives.coder import Times


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


def render(rows: list[Row], notes: list[str]) -> str:
    """A plain table."""
    width = max([len(row.name) for row in rows] + [6])
    lines = [f"{'tensor':{width}}  {'values':>12}  {'wire':14}  {'bits':>6}  why"]
    lines += [
        f"{row.name:{width}}  {row.numel:>12}  {row.wire:14}  {row.bits_per_value:>6.2f}  {row.why}" for row in rows
    ]
    return "\n".join(lines + notes)
