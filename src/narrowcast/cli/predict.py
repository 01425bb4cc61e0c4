"""`narrowcast profile`, `predict` and `advise`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer
from rich.table import Table

from narrowcast.cli import options
from narrowcast.cli.options import (
    Bandwidth,
    Batch,
    ClusterName,
    ComputeMs,
    DeviceName,
    Flops,
    ModelName,
    Shape,
    one_line,
    out_file,
)
from narrowcast.collectives import ALGORITHMS
from narrowcast.console import JsonPath, emit, new_table, progress
from narrowcast.predict import (
    Cluster,
    Prediction,
    Profile,
    Setup,
    Sweep,
    advice,
    codec_systems,
    decision,
    devices,
    parallelism,
    report,
    speeds,
    zoo,
)
from narrowcast.predict import cluster as cluster_file
from narrowcast.predict import model as model_file
from narrowcast.predict import probe as probing
from narrowcast.predict import profile as profiling

WIRES = "fp32,bf16,int8/256,int4/128"
WORKERS = (1, 2, 4, 8, 16)


def _profile_ranks(model: str, batch: int, shape: str, steps: int) -> tuple[Profile, bool]:
    """The mean over all ranks of the process group, and whether this rank shows it."""
    import torch.distributed as dist

    dist.init_process_group()
    device = probing.local_device()
    module = profiling.build(model).to(device)
    examples = profiling.example_batch(module, shape, batch or profiling.DEFAULT_BATCH).to(device)
    made = profiling.profile_together(module, examples, model, steps)
    first = dist.get_rank() == 0
    dist.destroy_process_group()
    return made, first


@one_line
def profile(
    model: Annotated[str, typer.Argument(help="module:name, file.py:name, or a built-in description.")],
    out: Annotated[str, typer.Option("--out", "-o", help="Where to write the profile.")] = "model.toml",
    batch: Batch = 0,
    shape: Shape = "",
    steps: Annotated[int, typer.Option(help="Steps a mean is taken over.")] = profiling.STEPS,
    flops: Flops = 0.0,
    compute_ms: ComputeMs = 0.0,
    json_path: JsonPath = None,
) -> None:
    """When each gradient of a model is ready: from a few real steps, or from a description of its layers.

    Under torchrun all ranks step at the same time, so that what they share shows.
    """
    file = out_file("--out", out)
    profiling.check_numbers(batch=batch, flops=flops, compute_ms=compute_ms, steps=steps)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and ":" in model:
        made, first = _profile_ranks(model, batch, shape, steps)
        if not first:
            return
    else:
        source = profiling.resolve(model, batch=batch, shape=shape, flops=flops, compute_ms=compute_ms, steps=steps)
        made = source.profile
    file.write_text(model_file.dump(made))
    rows = [(part, f"{1e3 * getattr(made, part):.3f}") for part in ("forward", "backward", "update")]
    shown = new_table(f"{made.name}: {made.numel} values, batch {made.batch} -> {out}", "part", "ms", rows=rows)
    shown.caption = f"{len(made.tensors)} tensors; {made.source}; spread of the mean {100 * made.spread:.1f} %"
    tensors = [{"name": t.name, "numel": t.numel, "ready": t.ready, "shape": t.shape} for t in made.tensors]
    emit({**{k: v for k, v in vars(made).items() if k != "tensors"}, "tensors": tensors}, shown, json_path)


@one_line
def predict(
    model: ModelName = "",
    cluster: ClusterName = "",
    workers: Annotated[
        str,
        typer.Option(help="Numbers of workers, separated by commas; default 1,2,4,8,16 as far as the cluster goes."),
    ] = "",
    wires: Annotated[
        str, typer.Option(help=f"Specs, separated by commas; default {WIRES}, or what the --codec-system covers.")
    ] = "",
    algorithms: Annotated[str, typer.Option(help=f"auto, {', '.join(ALGORITHMS)}; separated by commas.")] = "auto",
    parallel: Annotated[str, typer.Option(help=", ".join(parallelism.MODES))] = "data",
    codec_system: Annotated[
        str, typer.Option(help="Codecs as slow as those of grace-8bit, dettmers-8bit, ...; --list shows them.")
    ] = "",
    queues: Annotated[str, typer.Option(help="one: a call after the other; levels: a queue for each level.")] = "one",
    bandwidth: Bandwidth = 0.0,
    device: DeviceName = "",
    batch: Batch = 0,
    shape: Shape = "",
    flops: Flops = 0.0,
    compute_ms: ComputeMs = 0.0,
    jitter: Annotated[
        float, typer.Option(help="Relative standard deviation of a rank's compute; all wait for the slowest.")
    ] = 0.0,
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
    options.positive("--samples", samples)
    page = out_file("--html", html) if html else None
    made = _cluster(cluster, bandwidth, price, device)
    if codec_system:
        made = codec_systems.with_codec_system(made, codec_system)
    counts = options.workers_of(workers) if workers else [world for world in WORKERS if _joins(made, world)]
    specs = options.specs_of(wires) if wires else _default_wires(made)
    for spec in specs:
        speeds.check_covered(spec, made)
    setups = _setups(counts, specs, algorithms, queues)
    source = profiling.resolve(model, made, batch=batch, shape=shape, flops=flops, compute_ms=compute_ms)
    options.positive("--jitter", jitter)
    if jitter:
        source = replace(source, profile=replace(source.profile, jitter=jitter))
    sweep = _sweep(source, made, parallel, samples)
    cells = list(progress((sweep.cell(setup) for setup in setups), len(setups), "cells"))
    if page:
        page.write_text(report.page(sweep, cells, setups))
    emit([cell.as_dict() for cell in cells], _prediction_table(sweep, cells), json_path)


def _default_wires(made: Cluster) -> list[str]:
    own = [speed.wire for speed in made.codecs] if made.codec_system else []
    return [wire for wire in dict.fromkeys([*WIRES.split(","), *own]) if speeds.is_covered(wire, made)]


def _cluster(name: str, bandwidth: float, price: float, device: str) -> Cluster:
    options.positive("--bandwidth", bandwidth)
    options.positive("--price", price)
    made = cluster_file.load(name)
    made = made.with_bandwidth(bandwidth) if bandwidth else made
    made = devices.with_device(made, device) if device else made
    return replace(made, price_per_hour=price) if price else made


def _setups(counts: list[int], specs: list[str], algorithms: str, queues: str) -> list[Setup]:
    ways = [way.strip() for way in algorithms.split(",")]
    if queues not in ("one", "levels"):
        raise ValueError(f"--queues: take one or levels, got {queues!r}")
    return [Setup(world, spec, way, queues=queues) for world in counts for way in ways for spec in specs]


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


def _gib(size: float, made: Cluster) -> str:
    gib = size / 2**30
    return f"{gib:.3g}{'!' if 0 < made.device.memory_gib < gib else ''}"


def _prediction_table(sweep: Sweep, cells: Sequence[Prediction]) -> Table:
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
    return shown


def _list(json_path: str | None) -> None:
    models = {name: build() for name, build in zoo.MODELS.items()}
    clusters = {name: cluster_file.load(name) for name in cluster_file.presets()}
    shown = new_table("Built-in models and clusters", "name", "what", "source")
    shown.columns[1].justify = shown.columns[2].justify = "left"
    for name, model in models.items():
        size = f"{model.numel:,} parameters, {model.macs / 1e9:.3g} G multiply-adds a sample"
        shown.add_row(name, size, model.source)
    for name, made in clusters.items():
        links = "; ".join(f"{level.name}: {level.bandwidth_gbit:g} Gb/s" for level in made.levels)
        shown.add_row(name, links, f"not measured; {made.source}")
    for name, device in devices.devices().items():
        speed = f"{device.flops / 1e12:.3g} Tflop/s as training reaches them, {device.memory_gib:g} GiB"
        shown.add_row(name, speed, "for --device; from memory of its data sheet")
    for name, system in codec_systems.codec_systems().items():
        speed = (
            f"encode {system.encode_ns:g}, decode {system.decode_ns:g} ns a value; {system.wire}, {system.algorithm}"
        )
        shown.add_row(name, speed, f"for --codec-system; {system.source}")
    data = {
        "codec_systems": {name: asdict(system) for name, system in codec_systems.codec_systems().items()},
        "devices": {name: asdict(device) for name, device in devices.devices().items()},
        "models": {name: {"parameters": m.numel, "macs": m.macs, "source": m.source} for name, m in models.items()},
        "clusters": {name: {"source": c.source, "measured": c.measured} for name, c in clusters.items()},
    }
    emit(data, shown, json_path)


@one_line
def advise(
    model: ModelName = "",
    cluster: ClusterName = "",
    clusters: Annotated[
        str, typer.Option(help="Buy or compress: several clusters, separated by commas; the first is what you have.")
    ] = "",
    price: Annotated[
        str, typer.Option(help="With --clusters: dollars for a node and an hour, as 10gbe-tcp=2.0,25gbe-tcp=2.4.")
    ] = "",
    workers: Annotated[int, typer.Option(help="Workers.")] = 0,
    wires: Annotated[
        str,
        typer.Option(
            help=f"Wires to choose from, beside float32 and 16 bits; default {','.join(advice.WIRES)}, of which those "
            "under 8 bits where the gradients of a real model can be looked at."
        ),
    ] = "",
    samples: Annotated[int, typer.Option(help="Samples to pay for; default the model's epoch, or a million.")] = 0,
    bandwidth: Bandwidth = 0.0,
    device: DeviceName = "",
    batch: Batch = 0,
    shape: Shape = "",
    flops: Flops = 0.0,
    compute_ms: ComputeMs = 0.0,
    json_path: JsonPath = None,
) -> None:
    """Which wire to use, in words: how much it gains, where it stops paying, and what it risks.

    With --clusters: whether to buy a faster network or to compress, in steps and dollars.
    """
    if not model or bool(cluster) == bool(clusters):
        problem = "give --model and either --cluster or --clusters"
        raise ValueError(f"advise: {problem}; `narrowcast predict --list` shows the built-in ones")
    options.positive("--samples", samples)
    if price and not clusters:
        raise ValueError(f"advise: --price goes with --clusters, which compares costs; got {price!r} without it")
    specs = options.specs_of(wires) if wires else None
    names = [name.strip() for name in clusters.split(",")] if clusters else [cluster]
    prices = options.prices_of(price, names)
    places = [_cluster(name, bandwidth, prices.get(name, 0.0), device) for name in names]
    unpriced = [] if price else _unpriced(places)
    if unpriced:
        places = [replace(made, price_per_hour=0.0) for made in places]
    world = _world(places[0], workers)
    how: dict[str, Any] = {"batch": batch, "shape": shape, "flops": flops, "compute_ms": compute_ms}
    source = profiling.resolve(model, places[0], **how)
    # what was measured is the same everywhere, what is described runs at each device's speed
    others = [source if source.description is None else profiling.resolve(model, made, **how) for made in places[1:]]
    amount = samples or source.samples or decision.MILLION
    sweeps = [_sweep(one, made, "data", amount) for one, made in zip([source, *others], places, strict=True)]
    errors = advice.errors_of(source.module, source.batches, specs or advice.WIRES)
    answer = (
        decision.decide(sweeps, world, specs, errors) if clusters else advice.advise(sweeps[0], world, specs, errors)
    )
    if unpriced:
        note = f"no dollars: there is no price of {', '.join(unpriced)}; give all of them one with --price"
        answer = replace(answer, text=f"{answer.text}\n{note}")
    emit(answer.as_dict(), answer.text, json_path)


def _unpriced(places: Sequence[Cluster]) -> list[str]:
    """Those without a price, where others have one in their file: dollars and seconds cannot be compared."""
    missing = [made.name for made in places if not made.price_per_hour]
    return missing if len(missing) < len(places) else []


def _world(made: Cluster, workers: int) -> int:
    tables = [level.tables[0].ranks for level in made.levels if level.tables]
    world = workers or (tables[-1] * made.node if tables else 0)
    if world < 2:
        raise ValueError(f"advise: --workers: must be 2 or more, got {workers}")
    return world
