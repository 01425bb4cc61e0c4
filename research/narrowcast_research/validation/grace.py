"""GRACE: what is known at 10 Gb/s, and the order of methods at 1 Gb/s."""

from __future__ import annotations

import statistics
from functools import cache

from narrowcast.predict import costs
from narrowcast_research.validation.metrics import Cell, Result, figures
from narrowcast_research.validation.published import Row, rows

WORKERS = 8
PARAMETERS = {"resnet50": 25.557e6, "unet": 1_850_305.0, "LSTM": None}
BYTES = {"none": 4.0, "qsgd": 2.0} | dict.fromkeys(
    ("8bit", "natural", "signsgd", "signum", "onebit", "terngrad", "efsignsgd", "sketch"), 1.0
)
"""Bytes a value on the wire: the "1-bit" methods do not pack."""
SPARSE = {"topk": 8.0, "dgc": 8.0, "randomk": 4.0, "adaq": 4.0}
"""Bytes for each value that is kept: with its index, or without where all ranks know it."""
SAME = ("model", "method", "param", "memory")


@cache
def _runs(model: str, speed: str, workers: int) -> tuple[Row, ...]:
    wanted = {"model": model, "bw": speed, "workers": str(workers), "mode": "throughput", "backend": "mpi"}
    return tuple(r for r in rows("grace_runs.csv") if all(r[key] == value for key, value in wanted.items()))


def bytes_a_value(row: Row) -> float | None:
    """What a worker hands to the collective, for each parameter; None where nothing tells."""
    numel = PARAMETERS[row["model"]]
    for other in rows("grace_runs.csv"):
        if numel and other["data_volume_med"] and all(other[key] == row[key] for key in ("model", "method", "param")):
            return float(other["data_volume_med"]) / numel
    if row["method"] in SPARSE:
        return SPARSE[row["method"]] * float(row["param"])
    return BYTES.get(row["method"])


def sent(row: Row) -> float | None:
    """Bytes that a worker sends for each parameter."""
    each = bytes_a_value(row)
    gathered = costs.volume("one_shot", WORKERS) if row["comm"] == "allgather" else costs.volume("all_reduce", WORKERS)
    return None if each is None else each * gathered


def _seconds(row: Row, workers: int) -> float:
    """A step for one sample a worker: enough to compare methods."""
    return workers / float(row["throughput_med"])


def seconds_a_byte(model: str) -> float:
    """At 10 Gb/s, from float32 on 1 and on 8 workers alone."""
    alone = statistics.median(_seconds(row, 1) for row in _runs(model, "10g", 1) if row["method"] == "none")
    eight = statistics.median(_seconds(row, WORKERS) for row in _runs(model, "10g", WORKERS) if row["method"] == "none")
    return (eight - alone) / (BYTES["none"] * costs.volume("all_reduce", WORKERS))


def cells(model: str) -> list[Cell]:
    """Time at 10 Gb/s, and nine times more for each byte."""
    rate, found = seconds_a_byte(model), []
    fast = {tuple(row[key] for key in SAME): row for row in _runs(model, "10g", WORKERS)}
    for row in _runs(model, "1g", WORKERS):
        before, travels = fast.get(tuple(row[key] for key in SAME)), sent(row)
        if before is not None and travels is not None:
            made = WORKERS / (_seconds(before, WORKERS) + 9 * rate * travels)
            name = row["method"] if row["param"] == "n/a" else f"{row['method']} {row['param']}"
            found.append(Cell((model, name, f"memory {row['memory']}"), float(row["throughput_med"]), made))
    return found


def validate() -> Result:
    parts = {model: cells(model) for model in PARAMETERS}
    everything = [cell for part in parts.values() for cell in part]
    taus = {model: figures(part, case=lambda cell: cell.key[0], lower_is_better=False) for model, part in parts.items()}
    skipped = sum(len(_runs(model, "1g", WORKERS)) for model in parts) - len(everything)
    return Result(
        name="grace",
        title="GRACE: throughput of methods at 1 Gb/s, 8 workers",
        fitted="seconds a byte from float32 on 1 and 8 workers and each method's own time, all at 10 Gb/s",
        columns=("model", "method", "memory"),
        cells=everything,
        figures=figures(everything, case=lambda cell: cell.key[0], lower_is_better=False),
        extra=taus,
        targets={"rank": (">=", 0.7)},
        notes=[
            f"{skipped} runs are left out: their bytes are not published",
            "order is what is asked for; in time many runs (TensorFlow, MPI through the host, one each) are far off",
        ],
        unit="samples/s",
    )
