"""`narrowcast predict` and `advise`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated

import typer
from rich.table import Table

from narrowcast.cli.options import (
    Batch,
    ClusterName,
    ComputeMs,
    Flops,
    ModelName,
    Shape,
    one_line,
    out_file,
    positive,
    specs_of,
    workers_of,
)
from narrowcast.codecs import codec as codec_named
from narrowcast.collectives import ALGORITHMS
from narrowcast.console import JsonPath, emit, new_table, progress
from narrowcast.predict import Cluster, Prediction, Setup, Sweep, advice, parallelism, report, zoo
from narrowcast.predict import cluster as cluster_file
from narrowcast.predict import profile as profiling

WIRES = "fp32,bf16,int8/256,int4/128"
WORKERS = (1, 2, 4, 8, 16)


@one_line
def predict(
    model: ModelName = "",
    cluster: ClusterName = "",
    workers: Annotated[
        str,
        typer.Option(help="Numbers of workers, separated by commas; default 1,2,4,8,16 as far as the cluster goes."),
    ] = "",
    wires: Annotated[str, typer.Option(help="Specs, separated by commas.")] = WIRES,
    algorithms: Annotated[str, typer.Option(help=f"auto, {', '.join(ALGORITHMS)}; separated by commas.")] = "auto",
    parallel: Annotated[str, typer.Option(help=", ".join(parallelism.MODES))] = "data",
    queues: Annotated[str, typer.Option(help="one: a call after the other; levels: a queue for each level.")] = "one",
    bandwidth: Annotated[float, typer.Option(help="Another bandwidth for the outermost link, in Gb/s.")] = 0.0,
    batch: Batch = 0,
    shape: Shape = "",
    flops: Flops = 0.0,
    compute_ms: ComputeMs = 0.0,
    price: Annotated[float, typer.Option(help="Dollars for a node and an hour, instead of the cluster's.")] = 0.0,
    samples: Annotated[int, typer.Option(help="Samples of an epoch, instead of the model's.")] = 0,
    html: Annotated[str, typer.Option(help="Write a page with figures to this file.")] = "",
    list_names: Annotated[bool, typer.Option("--list", help="List built-in models and clusters.")] = False,
    json_path: JsonPath = None,
) -> None:
    """Predict the time of a training step, with an interval, for each number of workers and each wire."""
    if list_names:
        _list(json_path)
        return
    if not model or not cluster:
        raise ValueError("predict: give --model and --cluster; --list shows the built-in ones")
    positive("--samples", samples)
    page = out_file("--html", html) if html else None
    made = _cluster(cluster, bandwidth, price)
    counts = workers_of(workers) if workers else [world for world in WORKERS if _joins(made, world)]
    setups = _setups(counts, specs_of(wires), algorithms, queues)
    source = profiling.resolve(model, made, batch=batch, shape=shape, flops=flops, compute_ms=compute_ms)
    sweep = _sweep(source, made, parallel, samples)
    cells = list(progress((sweep.cell(setup) for setup in setups), len(setups), "cells"))
    if page:
        page.write_text(report.page(sweep, cells, setups))
    emit([cell.as_dict() for cell in cells], _prediction_table(sweep, cells), json_path)


def _cluster(name: str, bandwidth: float, price: float) -> Cluster:
    positive("--bandwidth", bandwidth)
    positive("--price", price)
    made = cluster_file.load(name)
    made = made.with_bandwidth(bandwidth) if bandwidth else made
    return replace(made, price_per_hour=price) if price else made


def _setups(counts: list[int], specs: list[str], algorithms: str, queues: str) -> list[Setup]:
    ways = [way.strip() for way in algorithms.split(",")]
    if queues not in ("one", "levels"):
        raise ValueError(f"--queues: take one or levels, got {queues!r}")
    setups = [Setup(world, spec, way, queues=queues) for world in counts for way in ways for spec in specs]
    for setup in setups:
        if setup.algorithm in ALGORITHMS:
            ALGORITHMS[setup.algorithm].check_codec(codec_named(setup.wire), setup.world)
    return setups


def _joins(made: Cluster, world: int) -> bool:
    try:
        made.shape(world)
    except ValueError:
        return False
    return True


def _sweep(source: profiling.ModelSource, made: Cluster, parallel: str, samples: int = 0) -> Sweep:
    return Sweep(source.profile, made, samples=samples or source.samples, mode=parallel, description=source.description)


def _gbit(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _prediction_table(sweep: Sweep, cells: Iterable[Prediction]) -> Table:
    made = sweep.cluster
    state = "measured" if made.measured else "NOT measured"
    columns = (
        "workers",
        "wire",
        "algorithm",
        "step ms",
        "5-95 %",
        "bounds",
        "speedup",
        "/fp32",
        "/16 bit",
        "exposed ms",
        "codec ms",
    )
    shown = new_table(
        f"{sweep.profile.name} (batch {sweep.profile.batch}) on {made.name}, {state}",
        *(*columns, "limit", "hidden from", "pays below", "$/epoch"),
    )
    for cell in cells:
        dollars = "" if cell.dollars_per_epoch is None else f"{cell.dollars_per_epoch:.2f}"
        shown.add_row(
            *(
                str(cell.workers),
                cell.wire,
                cell.algorithm,
                f"{1e3 * cell.step:.1f}",
                f"{1e3 * cell.low:.1f}-{1e3 * cell.high:.1f}",
            ),
            *(
                f"{1e3 * cell.max_bound:.0f}-{1e3 * cell.sum_bound:.0f}",
                f"{cell.speedup:.2f}x",
                f"{cell.over_fp32:.2f}x",
            ),
            *(f"{cell.over_16bit:.2f}x", f"{1e3 * cell.exposed:.1f}", f"{1e3 * cell.codec:.1f}", cell.bottleneck),
            *(_gbit(cell.hide_gbit), _gbit(cell.break_even_gbit), dollars),
        )
    shown.caption = (
        "bounds: all overlapped, nothing overlapped. hidden from: Gb/s of the outermost link in use from which on "
        f"communication adds under 2 %. pays below: Gb/s under which the wire beats 16 bits. cluster: {made.source}"
    )
    return shown


def _list(json_path: str | None) -> None:
    models = {name: build() for name, build in zoo.MODELS.items()}
    clusters = {name: cluster_file.load(name) for name in cluster_file.presets()}
    shown = new_table("Built-in models and clusters", "name", "what", "source")
    shown.columns[1].justify = shown.columns[2].justify = "left"
    for name, made in models.items():
        shown.add_row(name, f"{made.numel:,} parameters, {made.macs / 1e9:.3g} G multiply-adds a sample", made.source)
    for name, found in clusters.items():
        links = "; ".join(f"{level.name}: {level.bandwidth_gbit:g} Gb/s" for level in found.levels)
        shown.add_row(name, links, f"not measured; {found.source}")
    data = {
        "models": {name: {"parameters": m.numel, "macs": m.macs, "source": m.source} for name, m in models.items()},
        "clusters": {name: {"source": c.source, "measured": c.measured} for name, c in clusters.items()},
    }
    emit(data, shown, json_path)


@one_line
def advise(
    model: ModelName = "",
    cluster: ClusterName = "",
    workers: Annotated[int, typer.Option(help="Workers.")] = 0,
    wires: Annotated[str, typer.Option(help="Wires to choose from, beside float32 and 16 bits.")] = ",".join(
        advice.WIRES
    ),
    bandwidth: Annotated[float, typer.Option(help="Another bandwidth for the outermost link, in Gb/s.")] = 0.0,
    batch: Batch = 0,
    shape: Shape = "",
    flops: Flops = 0.0,
    compute_ms: ComputeMs = 0.0,
    json_path: JsonPath = None,
) -> None:
    """Which wire to use, in words: how much it gains, where it stops paying, and what it risks."""
    if not model or not cluster:
        raise ValueError("advise: give --model and --cluster; `narrowcast predict --list` shows the built-in ones")
    made = _cluster(cluster, bandwidth, 0.0)
    tables = [level.tables[0].ranks for level in made.levels if level.tables]
    world = workers or (tables[-1] * made.node if tables else 0)
    if world < 2:
        raise ValueError(f"advise: --workers: must be 2 or more, got {workers}")
    source = profiling.resolve(model, made, batch=batch, shape=shape, flops=flops, compute_ms=compute_ms)
    sweep = _sweep(source, made, "data")
    found = advice.advise_model(sweep, world, source.module, source.batches, specs_of(wires))
    emit(found.as_dict(), found.text, json_path)
