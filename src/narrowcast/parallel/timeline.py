"""When each call ran: the last some thousand of them, for traces."""

from __future__ import annotations

from dataclasses import dataclass

KEPT = 10_000
"""Events kept; older ones go."""


@dataclass(frozen=True)
class Event:
    """One collective call of this rank."""

    name: str
    start: float
    """Seconds since 1970, so that the ranks' traces fit together as well as their clocks do."""
    seconds: float
    sent_bytes: int
    plain_bytes: int
    encode_seconds: float
    decode_seconds: float
