"""What may stand in each field of a line of results: a kind of value, and between what a number lies.

A line that was written by hand, by another program or by a disk that fails is refused with its place before anything is
computed from it. `null` may stand everywhere: which fields a line needs, `lines` says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from narrowcast.toml_file import brief

LEAST, MOST = 1e-9, 1e12
"""Milliseconds, dollars and the like: far beyond what is measured, and quotients of two are still numbers."""
MOST_COUNT = 10**15


class Check(NamedTuple):
    """In words, and as a test."""

    words: str
    holds: Callable[[Any], bool]


def _is_number(value: object, low: float, high: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


def number(low: float, high: float) -> Check:
    return Check(f"a number from {low:g} to {high:g}", lambda value: _is_number(value, low, high))


def whole(low: int, high: int = MOST_COUNT) -> Check:
    holds = lambda value: isinstance(value, int) and _is_number(value, low, high)  # noqa: E731
    return Check(f"a whole number from {low} to {high:g}", holds)


def one_of(*names: str) -> Check:
    return Check(f"one of {', '.join(names)}", lambda value: value in names)


def list_of(inner: Check) -> Check:
    def holds(value: object) -> bool:
        return isinstance(value, list) and bool(value) and all(map(inner.holds, value))

    return Check(f"a list of {inner.words}", holds)


def pair_of(inner: Check) -> Check:
    listed = list_of(inner)
    holds = lambda value: listed.holds(value) and len(value) == 2 and value[0] <= value[1]  # noqa: E731
    return Check(f"[low, high], each {inner.words}", holds)


def table_of(inner: Check) -> Check:
    """Any names, and one kind of value, which may be null."""

    def holds(value: object) -> bool:
        return isinstance(value, dict) and all(v is None or inner.holds(v) for v in value.values())

    return Check(f"an object whose values are {inner.words}", holds)


def table(fields: Mapping[str, Check], needed: tuple[str, ...] = ()) -> Check:
    """These names, each with its own kind of value; others may stand beside them."""

    def holds(value: object) -> bool:
        if not isinstance(value, dict) or any(value.get(name) is None for name in needed):
            return False
        return all(fields[name].holds(v) for name, v in value.items() if name in fields and v is not None)

    return Check("an object with " + ", ".join(f"{name} ({check.words})" for name, check in fields.items()), holds)


def rows_of(fields: Mapping[str, Check], needed: tuple[str, ...] = ()) -> Check:
    """A list, which may be empty."""
    inner = table(fields, needed)
    return Check(f"a list of {inner.words}", lambda value: value == [] or list_of(inner).holds(value))


TEXT = Check("a string", lambda value: isinstance(value, str))
SCALAR = Check("a string or a number", lambda value: TEXT.holds(value) or _is_number(value, -MOST, MOST))
TIME, POINTS, REAL = number(LEAST, MOST), number(0, 100), number(-MOST, MOST)
ANY = number(-1.7e308, 1.7e308)
"""What a training that diverges has, too."""
COUNT, AMOUNT, PART = whole(0), number(0, MOST_COUNT), number(0, 1)

EVERY = {"kind": TEXT, "case": TEXT}
SESSION = {
    **dict.fromkeys(("study", "text", "started", "launcher", "commit", "primary", "baseline"), TEXT),
    **dict.fromkeys(("machine", "versions"), table_of(SCALAR)),
    "margin": POINTS,
    "targets": table_of(POINTS),
}
CASE = {
    **dict.fromkeys(("model", "data", "wire", "algorithm", "layout", "rate_name", "transport"), TEXT),
    **dict.fromkeys(("parallel", "cluster", "error", "start"), TEXT),
    "status": one_of("done", "failed"),
    "source": one_of("measured", "simulated", "predicted"),
    "workers": whole(1, 10**9),
    "rate": number(1, 1e18),
    "seconds": number(0, MOST),
    "min_values": COUNT,
    "compressed": table({"values": PART, "bytes": PART}, ("values",)),
}
TIMES = {
    "steps_ms": list_of(list_of(TIME)),
    "step_ms": TIME,
    "predicted_ms": TIME,
    **dict.fromkeys(("interval_ms", "predicted_interval_ms"), pair_of(TIME)),
    **dict.fromkeys(("parameters", "batch"), COUNT),
    "breakdown_ms": table_of(REAL),
    "bytes": table_of(AMOUNT),
    "dollars_per_epoch": TIME,
}
POINT = {"epoch": number(0, MOST), "accuracy": POINTS, "loss": ANY}
LAYER = {"name": TEXT, "values": COUNT, **dict.fromkeys(("bias", "snr_db", "flushed", "saturated"), ANY)}
ACCURACY = {
    "seed": whole(0, 1 << 63),
    "accuracy": POINTS,
    "loss": ANY,
    "epochs": number(0, MOST),
    "steps_per_epoch": COUNT,
    "curve": rows_of(POINT, ("epoch",)),
    "layers": rows_of(LAYER, ("name", "values")),
}
BUS = {"bytes": whole(1), "ms": list_of(TIME), "bus_gbps": TIME}
KINDS: dict[str, dict[str, Check]] = {
    "session": {**EVERY, **SESSION},
    "time": {**EVERY, **CASE, **TIMES},
    "accuracy": {**EVERY, **CASE, **ACCURACY},
    "bus": {**EVERY, **CASE, **BUS},
}
"""The fields of each kind of line."""


def fault_of(line: Mapping[str, Any]) -> str | None:
    """The first field that cannot be right, and what may stand there."""
    kind = line.get("kind")
    known = isinstance(kind, str) and kind in KINDS
    for name, check in (KINDS[str(kind)] if known else {**EVERY, "kind": one_of(*KINDS)}).items():
        if line.get(name) is not None and not check.holds(line[name]):
            return f"{name} must be {check.words}, got {brief(line[name])}"
    return None
