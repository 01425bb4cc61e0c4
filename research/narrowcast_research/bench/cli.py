"""`narrowcast bench matmul`, `simulate` and `fsdp-curves`, and the tables of `narrowcast codecs --table`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from narrowcast.bench import codecs
from narrowcast.console import JsonPath, emit, make_console, new_table, number, progress
from narrowcast_research.bench import dettmers2016, matmul, nonfinite, simulate
from narrowcast_research.bench import fsdp_curves as curves


def fsdp_curves_command(
    wire: Annotated[list[str] | None, typer.Argument(help="plain, or gradients=SPEC,parameters=SPEC.")] = None,
    folder: Annotated[
        str, typer.Option(help="Where runs are kept; those that are there are not run again.")
    ] = "curves",
    steps: Annotated[int | None, typer.Option(help="Steps of a run; default 500.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Runs of each wire; default 3.")] = None,
    json_path: JsonPath = None,
) -> None:
    """Loss of a 3-million-parameter transformer on real text through codecs, paired by seed with plain FSDP2."""
    wires = ["plain", *(w for w in wire if w != "plain")] if wire else list(curves.WIRES)
    length, count = steps or curves.STEPS, seeds or curves.SEEDS
    runs = list(progress(curves.run(Path(folder), wires, length, count), len(wires) * count, "runs"))
    rows = curves.compared(runs)
    columns = ("wire", "seeds", "held-out loss", "difference to plain", "95 % ±", "largest gap of the curves")
    shown = new_table(f"FSDP2 on 2 ranks, {length} steps on real text", *columns)
    for row in rows:
        numbers = (f"{row[key]:.4f}" for key in ("held_out", "difference", "half_width", "largest_gap"))
        shown.add_row(row["wire"], str(row["seeds"]), *numbers)
    # each run says where it was made: a folder may come from elsewhere
    emit({"rows": rows, "runs": runs}, shown, json_path)


def simulate_command(
    values: Annotated[int | None, typer.Option(help="Values of the ring; default those of a ResNet-18.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds a median is taken over; default 5.")] = None,
    many: Annotated[bool, typer.Option("--many/--no-many", help="Time 256 workers too.")] = True,
    json_path: JsonPath = None,
) -> None:
    """Simulated exchanges: a ring of 8 workers beside eager torch in the same run, and 256 workers by the clock."""
    found = simulate.run(values or simulate.RESNET18, rounds or simulate.ROUNDS, many)
    rows = list(progress(found, 2 + many * len(simulate.MANY_CASES), "exchanges"))
    columns = ("exchange", "workers", "values", "s", "beside", "s", "faster", "promised", "kept")
    shown = new_table("Workers in one process", *columns)
    for row in rows:
        peer = (row.peer, number(row.peer_seconds), f"{row.times:.1f}x" if row.times else "")
        promised, kept = f"{row.target:g}x" if row.target else "", {True: "yes", False: "NO", None: ""}[row.met]
        shown.add_row(row.what, str(row.workers), str(row.values), f"{row.seconds:.3f}", *peer, promised, kept)
    emit({"machine": codecs.describe_machine(), "rows": [row.as_dict() for row in rows]}, shown, json_path)


def matmul_command(
    accumulator: Annotated[
        list[str] | None, typer.Argument(help="Accumulators, as bf16+kahan; default a list.")
    ] = None,
    size: Annotated[int, typer.Option(help="Rows and columns of the matrices.")] = matmul.SIZE,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds a median is taken over.")] = matmul.ROUNDS,
    model: Annotated[bool, typer.Option("--model/--no-model", help="Time a lowered ResNet-18 too.")] = True,
    json_path: JsonPath = None,
) -> None:
    """Matrix products with a chosen accumulator on one core, after their bits were checked against the reference."""
    specs = accumulator or [*matmul.TARGETS, *matmul.UNPROMISED]
    rows = list(progress(matmul.run(specs, size, rounds), len(specs), "accumulators"))
    shown = new_table(
        f"GFLOP/s of {size} x {size} matrices, one thread",
        "accumulator",
        "runs",
        "ours",
        "promised",
        "torch's float32",
        "kept",
    )
    for row in rows:
        kept = f"FAILED: {row.failed}" if row.failed else {True: "yes", False: "NO", None: ""}[row.met]
        shown.add_row(row.spec, row.runs, f"{row.gflops:.2f}", number(row.target), f"{row.torch_gflops:.0f}", kept)
    timed = matmul.run_model().as_dict() if model else None
    emit({"machine": codecs.describe_machine(), "rows": [r.as_dict() for r in rows], "model": timed}, shown, json_path)
    if timed and json_path != "-":
        text = f"ResNet-18 step with {timed['formats']} and float32 sums: {timed['ratio']:.2f} times the plain one"
        make_console().print(text)


def nonfinite_table(json_path: str | None) -> None:
    rows = list(nonfinite.run())
    columns = ("codec", "NaN ->", "Inf ->", "3.4e38 ->", "others lost", "kept", "exempt from")
    shown = new_table("One NaN, one Inf and one 3.4e38 in 4096 values of N(0,1)", *columns)
    for row in rows:
        shown.add_row(
            row.codec, row.nan, row.inf, row.huge, str(row.others_lost), "yes" if row.kept else "NO", row.exempt
        )
    shown.caption = "3.4e38 is sent by itself; the others lost are those that share a scale with the NaN or the Inf."
    emit([row.as_dict() for row in rows], shown, json_path)


def dettmers_table(json_path: str | None) -> None:
    cells = list(progress(dettmers2016.run(), len(dettmers2016.PUBLISHED), "cells"))
    columns = ("distribution", "type", "abs", "abs corrected", "sq", "sq corrected", "sq paper")
    shown = new_table(
        "Dettmers 2016, table 2, errors of the four types", *columns, "rel %", "rel corrected", "rel paper", "off by"
    )
    for cell in cells:
        then = cell.published
        absolute = number(cell.absolute), number(then.absolute)
        squared = number(cell.squared), number(then.squared), number(then.paper_squared)
        relative = f"{cell.relative:.3f}", number(then.relative), number(then.paper_relative)
        shown.add_row(cell.distribution, cell.codec, *absolute, *squared, *relative, f"{cell.deviation:.2%}")
    shown.caption = "The paper calls its squared error 'mean absolute error'; see docs/dettmers2016.md."
    emit([cell.as_dict() for cell in cells], shown, json_path)
