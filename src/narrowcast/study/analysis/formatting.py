"""Numbers as words, with no more digits than are known."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from datetime import UTC, datetime

from narrowcast.study.analysis.statistics import Interval

RATE = re.compile(r"(\d+(?:\.\d+)?)([kmg])bit")
PREFIX = {"k": "kb/s", "m": "Mb/s", "g": "Gb/s"}
MINUS = "\N{MINUS SIGN}"
NARROW = "\N{NO-BREAK SPACE}"
MAX_DECIMALS = 2


def decimals(half_width: float, most: int = MAX_DECIMALS) -> int:
    """How many places after the point an interval of this half width allows."""
    if not math.isfinite(half_width):
        return 0
    if half_width <= 0:
        return most
    return max(0, min(most, -math.floor(math.log10(half_width))))


def _half(x: Interval) -> float:
    return (x.high - x.low) / 2


def significant(value: float, digits: int = 3) -> str:
    """Three digits, without an exponent for what people read every day."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "?"
    if not 1e-4 <= abs(value) < 1e7:
        return f"{value:.{digits}g}"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{places}f}".replace("-", MINUS)


def _times_places(x: Interval) -> int:
    # near 1 the second place decides; at 3× nobody cares for it
    return max(1, min(decimals(_half(x)), 2 if x.value < 1.95 else 1))


def times(x: Interval) -> str:
    """`2.9×`."""
    return f"{x.value:.{_times_places(x)}f}×"


def times_between(x: Interval) -> str:
    """`2.9× (2.7–3.1)`."""
    places = _times_places(x)
    if x.low == x.high:
        return times(x)
    return f"{x.value:.{places}f}× ({x.low:.{places}f}–{x.high:.{places}f})"


def ratio(value: float) -> str:
    return f"{value:.2f}×" if value < 10 else f"{value:.1f}×"


def signed(value: float, places: int) -> str:
    if not math.isfinite(value):
        return "+∞" if value > 0 else f"{MINUS}∞"
    text = f"{value:+.{places}f}".replace("-", MINUS)
    return text if float(f"{value:.{places}f}") else f"{0:.{places}f}"


def points(x: Interval) -> str:
    """`−0.12 points (−0.40 to +0.16)`."""
    places = max(1, decimals(_half(x)))
    if not math.isfinite(x.low):
        return f"{signed(x.value, 1)} points (one seed: no interval)"
    return f"{signed(x.value, places)} points ({signed(x.low, places)} to {signed(x.high, places)})"


def difference(x: Interval) -> str:
    """Of points, where the head of a column names them."""
    return points(x).replace(" points", "")


def margin(points_: float) -> str:
    return f"{points_:g} point{'s' * (points_ != 1)}"


def between(x: Interval, least: int = 0) -> str:
    """`12.3 (11.9–12.8)`, with places after the point by its width, but at least so many."""
    if not math.isfinite(x.low):
        return f"{x.value:.1f}"
    if x.low == x.high:
        return significant(x.value)
    places = max(least, decimals(_half(x)))
    return f"{x.value:,.{places}f} ({x.low:,.{places}f}–{x.high:,.{places}f})"


def rate(name: str | None) -> str:
    """`1 Gb/s` for 1gbit; other names as they are."""
    match = RATE.fullmatch(name or "")
    return f"{match[1]}{NARROW}{PREFIX[match[2]]}" if match else (name or "no limit")


def at_rate(name: str | None) -> str:
    words = rate(name)
    return f"at {words}" if words[0].isdigit() else f"on {words}"


def primitive(transport: str) -> str:
    """`Gloo`, `MPI`, `NCCL`."""
    return "Gloo" if transport == "gloo" else str(transport).upper()


def byte_size(count: float) -> str:
    for size, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= size:
            return f"{count / size:.3g}{NARROW}{unit}"
    return f"{count:.0f}{NARROW}B"


def percent(share: float, places: int = 1) -> str:
    return f"{signed(100 * share, places)}{NARROW}%"


def p_value(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def moment(iso: str) -> str:
    """`2026-11-15 14:59 UTC`."""
    try:
        return f"{datetime.fromisoformat(iso).astimezone(UTC):%Y-%m-%d %H:%M} UTC"
    except ValueError:
        return iso


def listed(words: Sequence[str], last: str = "and") -> str:
    """`a, b and c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}" if words else ""


def capital(text: str) -> str:
    """The first letter alone: `Gb/s` stays."""
    return text[:1].upper() + text[1:]


def shares(counts: dict[str, int]) -> str:
    """`a (751 cases), b (28 cases)`; one alone has them all."""
    if len(counts) < 2:
        return "".join(counts)
    return ", ".join(f"{name} ({count(number, 'case')})" for name, number in counts.items())


def count(number: int, thing: str, things: str | None = None) -> str:
    return f"{number} {thing if number == 1 else things or thing + 's'}"
