"""Published timings of single collectives against tables and latency + bytes / bandwidth."""

from __future__ import annotations

import statistics

import torch

from narrowcast.predict import measured_curve
from narrowcast_research.validation.metrics import Cell, Result, figures, line
from narrowcast_research.validation.published import rows


def _nccl(ranks: int) -> list[tuple[float, float]]:
    found = [row for row in rows("nccl_allreduce_a100.csv") if int(row["ranks"]) == ranks]
    return [(float(row["size_MiB"]) * 2**20, float(row["out_of_place_us"]) / 1e6) for row in found]


def interpolated(points: list[tuple[float, float]], name: str) -> list[Cell]:
    """Every second size in a table, the others between them read off it."""
    table = measured_curve(points[::2], 0, torch.Generator())
    inner = [point for point in points[1::2] if point[0] < points[::2][-1][0]]
    sizes = torch.tensor([size for size, _ in inner], dtype=torch.float64)
    return [
        Cell((name, f"{size / 2**20:g} MiB"), seconds, float(made))
        for (size, seconds), made in zip(inner, table(sizes)[0], strict=True)
    ]


def by_line(points: list[tuple[float, float]], name: str) -> list[Cell]:
    """The same sizes by latency + bytes / bandwidth, for comparison."""
    half = points[::2]
    start, slope = line([x for x, _ in half], [y for _, y in half], [y**-2 for _, y in half])
    inner = [point for point in points[1::2] if point[0] < half[-1][0]]
    return [Cell((name, f"{size / 2**20:g} MiB"), seconds, start + slope * size) for size, seconds in inner]


def validate() -> Result:
    ranks = sorted({int(row["ranks"]) for row in rows("nccl_allreduce_a100.csv")})
    found = [cell for r in ranks for cell in interpolated(_nccl(r), f"NCCL, {r} A100")]
    lines = [cell for r in ranks for cell in by_line(_nccl(r), f"NCCL, {r} A100")]
    worst = statistics.fmean(abs(100 * cell.error) for cell in lines)
    return Result(
        name="collectives",
        title="nccl-tests on 2 to 8 A100: sizes between measured ones",
        fitted="a table of every second size for each number of ranks, judged on the sizes between",
        columns=("collective", "bytes"),
        cells=found,
        figures=figures(found),
        extra={"latency + bytes / bandwidth": figures(lines)},
        notes=[f"with latency + bytes / bandwidth instead of the table {worst:.1f} %: so tables inside, lines outside"],
        unit="us",
        scale=1e6,
    )
