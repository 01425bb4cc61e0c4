"""The table of `narrowcast predict`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from narrowcast.console import new_table
from narrowcast.predict import Cluster, Prediction, Sweep


def _gbit(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _gib(size: float, made: Cluster) -> str:
    gib = size / 2**30
    return f"{gib:.3g}{'!' if 0 < made.device.memory_gib < gib else ''}"


def prediction_table(sweep: Sweep, cells: Sequence[Prediction]) -> Table:
    made = sweep.cluster
    state = "measured" if made.measured else "NOT measured"
    rows = []
    for cell in cells:
        times = (f"{1e3 * cell.step:.1f}", f"{1e3 * cell.low:.1f}-{1e3 * cell.high:.1f}")
        bounds = f"{1e3 * cell.max_bound:.0f}-{1e3 * cell.sum_bound:.0f}"
        ratios = (f"{ratio:.2f}x" for ratio in (cell.speedup, cell.over_fp32, cell.over_16bit))
        parts = (f"{1e3 * cell.exposed:.1f}", f"{1e3 * cell.codec:.1f}", cell.bottleneck)
        dollars = "" if cell.dollars_per_epoch is None else f"{cell.dollars_per_epoch:.2f}"
        limits = (_gbit(cell.hide_gbit), _gbit(cell.break_even_gbit), dollars, _gib(cell.memory_bytes, made))
        rows.append((cell.workers, cell.wire, cell.algorithm, *times, bounds, *ratios, *parts, *limits))
    shown = new_table(
        f"{sweep.profile.name} (batch {sweep.profile.batch}) on {made.name}, {state}",
        *("workers", "wire", "algorithm", "step ms", "5-95 %", "bounds", "speedup", "/fp32", "/16 bit"),
        *("exposed ms", "codec ms", "limit", "hidden from", "pays below", "$/epoch", "GiB"),
        rows=rows,
    )
    shown.caption = (
        "bounds: all overlapped, nothing overlapped. hidden from: Gb/s of the outermost link in use from which on "
        f"communication adds under 2 %. pays below: Gb/s under which the wire beats 16 bits. GiB: of a rank, without "
        f"activations (! more than the device has). cluster: {made.source}"
    )
    beyond = sorted({cell.workers for cell in cells if cell.beyond_probed})
    if beyond:
        shown.caption += (
            f"\nBEYOND WHAT WAS PROBED ({made.probed_ranks} members of the outermost link): "
            f"{', '.join(map(str, beyond))} workers; how calls grow is arithmetic there"
        )
    if not made.device.is_named:
        shown.caption += f"\n{unnamed([made])}"
    return shown


def unnamed(places: Sequence[Cluster]) -> str:
    names = ", ".join(made.name for made in places if not made.device.is_named)
    return f'NO DEVICE IS NAMED in {names}: taken for a GPU on NCCL; write `name` under [device], "cpu" for processors'
