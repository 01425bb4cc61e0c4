"""The calls of a rank as a trace for Perfetto: when each ran, what it sent, how long the codec took."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from narrowcast.parallel.stats import CallEvent, Watched

MICROSECONDS = 1e6
BASE = "baseTimeNanoseconds"
"""Where a trace has it, its times count from this many nanoseconds since 1970, otherwise from 1970."""


def trace(events: Iterable[CallEvent], rank: int = 0) -> dict[str, Any]:
    """The trace of one rank: a process with a row for each kind of call, and a counter of bytes sent."""
    kinds: dict[str, int] = {}
    records: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"narrowcast, rank {rank}"}}
    ]
    sent = 0
    for event in sorted(events, key=lambda e: e.start + e.seconds):
        row = kinds.setdefault(_kind(event), len(kinds))
        sent += event.sent_bytes
        records += [_slice(event, rank, row), _counter(event, rank, sent)]
    records += [
        {"name": "thread_name", "ph": "M", "pid": rank, "tid": row, "args": {"name": kind}}
        for kind, row in kinds.items()
    ]
    return {"traceEvents": records, "displayTimeUnit": "ms"}


def _kind(event: CallEvent) -> str:
    """Without the module: "reduce_scatter of gradients"."""
    return " ".join(event.name.split()[:3])


def _slice(event: CallEvent, rank: int, row: int) -> dict[str, Any]:
    details = {
        "sent bytes": event.sent_bytes,
        "plain bytes": event.plain_bytes,
        "encode ms": 1e3 * event.encode_seconds,
        "decode ms": 1e3 * event.decode_seconds,
    }
    when = {"ts": event.start * MICROSECONDS, "dur": event.seconds * MICROSECONDS}
    return {"name": event.name, "cat": "narrowcast", "ph": "X", "pid": rank, "tid": row, **when, "args": details}


def _counter(event: CallEvent, rank: int, sent: int) -> dict[str, Any]:
    when = (event.start + event.seconds) * MICROSECONDS
    return {"name": "sent bytes", "ph": "C", "pid": rank, "ts": when, "args": {"bytes": sent}}


def write(watched: Watched, path: str | Path, rank: int | None = None) -> None:
    """Write this rank's trace; a path for each rank, to be put together by `merge`."""
    if rank is None:
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    Path(path).write_text(json.dumps(trace(watched.events(), rank)))


def merge(paths: Iterable[str | Path], out: str | Path) -> None:
    """Traces of several ranks in one file; also torch.profiler's own, whose times count from a base that they name."""
    parts = [json.loads(Path(path).read_text()) for path in paths]
    # the merged file keeps a base: of microseconds since 1970 a double holds only quarters, too coarse for kernels
    base = min((part[BASE] for part in parts if part.get(BASE)), default=0)
    events = [_later(event, (part.get(BASE, 0) - base) / 1e3) for part in parts for event in part["traceEvents"]]
    Path(out).write_text(json.dumps({BASE: base, "traceEvents": events, "displayTimeUnit": "ms"}))


def _later(event: dict[str, Any], microseconds: float) -> dict[str, Any]:
    return {**event, "ts": event["ts"] + microseconds} if "ts" in event else event
