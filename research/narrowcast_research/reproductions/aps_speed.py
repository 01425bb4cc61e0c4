"""Han et al., Fig. 11: what APS gains over fp16 on 32 V100, from latency and bandwidth."""

from __future__ import annotations

from typing import ClassVar

from narrowcast_research.reproductions.base import Cell, Claim, Options, Report, Reproduction, Result, Work

TENSORS = {
    "res5c_2a": (1_048_576, 1243, 1110),
    "res5c_2b": (2_359_296, 2402, 1755),
    "res5c_2c": (1_048_576, 1242, 1105),
    "merged": (4_456_448, 3733, 2752),
}
"""Values, and the figure's microseconds of fp16 and of APS, all of it."""
AGREEMENT = 240.0
"""Microseconds that the workers take to agree on an exponent, read off the figure's bars for single layers."""
SINGLE = ("res5c_2a", "res5c_2b")
"""The line goes through these two."""


def _line() -> tuple[float, float]:
    """Latency in microseconds and bytes a microsecond, from the fp16 times of two layers."""
    (small, first, _), (large, second, _) = (TENSORS[name] for name in SINGLE)
    speed = 2 * (large - small) / (second - first)
    return first - 2 * small / speed, speed


class ApsSpeed(Reproduction):
    """Predicted: fp16's own latency and bandwidth, half the bytes, and one agreement before."""

    name: ClassVar[str] = "aps-speed"
    title: ClassVar[str] = "APS beside fp16 on 32 GPUs, predicted (Han et al., Fig. 11)"
    needs: ClassVar[str] = "none"

    def cells(self, options: Options) -> list[Cell]:
        return [{"row": name} for name in TENSORS]

    def run(self, cell: Cell, options: Options, work: Work) -> Result | None:
        values, fp16, aps = TENSORS[cell["row"]]
        latency, speed = _line()
        whole, half = latency + 2 * values / speed, AGREEMENT + latency + values / speed
        return {"paper": fp16 / aps, "predicted": whole / half, "fp16": whole, "aps": half}

    def report(self, found: list[tuple[Cell, Result]], options: Options) -> Report:
        rows, off = [], {}
        for cell, result in found:
            name = cell["row"]
            off[name] = 100 * (result["predicted"] / result["paper"] - 1)
            times = f"{result['fp16']:.0f} / {result['aps']:.0f}", f"{TENSORS[name][1]} / {TENSORS[name][2]}"
            rows.append([name, times[1], times[0], f"{result['paper']:.2f}", f"{result['predicted']:.2f}"])
        single = max((abs(off[name]) for name in off if name != "merged"), default=float("nan"))
        claims = [Claim("single layers: the gain is met within 10 %", single < 10, f"{single:.1f} %")]
        notes = [
            f"merged: {off.get('merged', float('nan')):+.0f} %: its fp16 is 12 % faster than a line through two layers",
            "and the agreement took 450 us instead of 240; the paper does not say why",
            "not known: the cluster's links, and whether 8-bit sums ran at the bandwidth of fp16's",
        ]
        columns = ("tensor", "paper: fp16 / APS, us", "predicted, us", "paper: gain", "predicted")
        return Report(self.title, columns, rows, claims, notes)
