"""`narrowcast predict` and `advise`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer

from narrowcast.cli import local, options
from narrowcast.cli.options import (
    Bandwidth,
    Batch,
    ClusterName,
    CodecSystem,
    ComputeMs,
    DelaySteps,
    DeviceName,
    Every,
    Flops,
    Fragments,
    Inside,
    InsideWire,
    Mixing,
    ModelName,
    Parameters,
    Rtt,
    Shape,
    Streams,
    Window,
    one_line,
    out_file,
)
from narrowcast.cli.prediction import prediction_table, unnamed
from narrowcast.collectives import ALGORITHMS
from narrowcast.console import JsonPath, emit, new_table, progress
from narrowcast.predict import (
    Cluster,
    Setup,
    Sweep,
    advice,
    codec_systems,
    decision,
    devices,
    offers,
    parallelism,
    report,
    rounds,
    speeds,
    zoo,
)
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
    wires: Annotated[
        str, typer.Option(help=f"Specs, separated by commas; default {WIRES}, or what the --codec-system covers.")
    ] = "",
    algorithms: Annotated[str, typer.Option(help=f"auto, {', '.join(ALGORITHMS)}; separated by commas.")] = "auto",
    parallel: Annotated[str, typer.Option(help=", ".join((*parallelism.MODES, rounds.LOCAL)))] = "data",
    every: Every = 0,
    fragments: Fragments = 0,
    delay_steps: DelaySteps = 0,
    mixing: Mixing = "",
    inside: Inside = "",
    inside_wire: InsideWire = "",
    rtt: Rtt = "",
    streams: Streams = 0,
    window: Window = "",
    parameters: Parameters = 0.0,
    codec_system: CodecSystem = "",
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
    if bool(model) == bool(parameters) or not cluster:
        raise ValueError("predict: give --model and --cluster, or --parameters for a model; --list shows built-in ones")
    options.positive("--samples", samples)
    asked = local.Rounds(every, fragments, delay_steps, mixing, inside, inside_wire)
    asked.check(parallel)
    page = out_file("--html", html) if html else None
    made = local.linked(_cluster(cluster, bandwidth, price, device, codec_system), rtt, streams, window)
    how: dict[str, Any] = {"batch": batch, "shape": shape, "flops": flops, "compute_ms": compute_ms}
    if parallel == rounds.LOCAL:
        local.refuse("predict", parallel, {"--html": html, "--samples": samples, "--price": price})
        local.refuse("predict", parallel, {"--algorithms": algorithms != "auto", "--queues": queues != "one"})
        specs = options.specs_of(wires) if wires else []
        numbers = options.workers_of(workers) if workers else []
        source = _with_jitter(profiling.resolve(model, made, parameters=parameters, **how), jitter)
        local.predict(source.profile, made, numbers, specs, asked, json_path)
        return
    counts = options.workers_of(workers) if workers else [world for world in WORKERS if _joins(made, world)]
    specs = options.specs_of(wires) if wires else _default_wires(made)
    for spec in specs:
        speeds.check_covered(spec, made)
    setups = _setups(counts, specs, algorithms, queues)
    source = _with_jitter(profiling.resolve(model, made, parameters=parameters, **how), jitter)
    sweep = _sweep(source, made, parallel, samples)
    cells = list(progress((sweep.cell(setup) for setup in setups), len(setups), "cells"))
    if page:
        page.write_text(report.page(sweep, cells, setups))
    if json_path != "-":
        typer.echo(report.verdict(cells, setups) + "\n")
    emit([cell.as_dict() for cell in cells], prediction_table(sweep, cells), json_path)


def _with_jitter(source: profiling.ModelSource, jitter: float) -> profiling.ModelSource:
    options.positive("--jitter", jitter)
    return replace(source, profile=replace(source.profile, jitter=jitter)) if jitter else source


def _default_wires(made: Cluster) -> list[str]:
    own = [speed.wire for speed in made.codecs] if made.codec_system else []
    return [wire for wire in dict.fromkeys([*WIRES.split(","), *own]) if speeds.is_covered(wire, made)]


def _cluster(name: str, bandwidth: float, price: float, device: str, codec_system: str) -> Cluster:
    options.positive("--bandwidth", bandwidth)
    options.positive("--price", price)
    made = cluster_file.load(name)
    made = made.with_bandwidth(bandwidth) if bandwidth else made
    made = devices.with_device(made, device) if device else made
    made = codec_systems.with_codec_system(made, codec_system) if codec_system else made
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
            "under 8 bits where the gradients of a real model can be looked at; or the --codec-system's own."
        ),
    ] = "",
    codec_system: CodecSystem = "",
    parallel: Annotated[
        str, typer.Option(help=f"data, or {rounds.LOCAL}: exchanges between rounds of steps.")
    ] = "data",
    every: Every = 0,
    fragments: Fragments = 0,
    delay_steps: DelaySteps = 0,
    mixing: Mixing = "",
    inside: Inside = "",
    inside_wire: InsideWire = "",
    rtt: Rtt = "",
    streams: Streams = 0,
    window: Window = "",
    parameters: Parameters = 0.0,
    samples: Annotated[int, typer.Option(help="Samples to pay for; default the model's epoch, or a million.")] = 0,
    bandwidth: Bandwidth = 0.0,
    device: DeviceName = "",
    batch: Batch = 0,
    shape: Shape = "",
    flops: Flops = 0.0,
    compute_ms: ComputeMs = 0.0,
    html: Annotated[str, typer.Option(help="With --clusters: write a page with figures to this file.")] = "",
    json_path: JsonPath = None,
) -> None:
    """Which wire to use, in words: how much it gains, where it stops paying, and what it risks.

    With --clusters: whether to buy a faster network or to compress, in steps and dollars.
    """
    if bool(model) == bool(parameters) or bool(cluster) == bool(clusters):
        problem = "give --model (or --parameters for one) and either --cluster or --clusters"
        raise ValueError(f"advise: {problem}; `narrowcast predict --list` shows the built-in ones")
    options.positive("--samples", samples)
    if price and not clusters:
        raise ValueError(f"advise: --price goes with --clusters, which compares costs; got {price!r} without it")
    if html and not clusters:
        raise ValueError(f"advise: --html goes with --clusters; for one cluster take `predict --html {html}`")
    page = out_file("--html", html) if html else None
    specs = options.specs_of(wires) if wires else None
    if codec_system and specs is None and codec_system in codec_systems.codec_systems():
        specs = [codec_systems.codec_systems()[codec_system].wire]
    names = [name.strip() for name in clusters.split(",")] if clusters else [cluster]
    prices = options.prices_of(price, names)
    places = [_cluster(name, bandwidth, prices.get(name, 0.0), device, codec_system) for name in names]
    places = [local.linked(made, rtt, streams, window) for made in places]
    for spec in specs or ():
        speeds.check_covered(spec, places[0])
    how: dict[str, Any] = {"batch": batch, "shape": shape, "flops": flops, "compute_ms": compute_ms}
    how["parameters"] = parameters
    asked = local.Rounds(every, fragments, delay_steps, mixing, inside, inside_wire)
    asked.check(parallel)
    if parallel == rounds.LOCAL:
        local.refuse("advise", parallel, {"--clusters": clusters, "--samples": samples})
        local.advise(profiling.resolve(model, places[0], **how).profile, places[0], workers, specs, asked, json_path)
        return
    if parallel != "data":
        raise ValueError(f"advise: --parallel: take data or {rounds.LOCAL}, got {parallel!r}")
    unpriced = [] if price else _unpriced(places)
    if unpriced:
        places = [replace(made, price_per_hour=0.0) for made in places]
    world = _world(places[0], workers)
    source = profiling.resolve(model, places[0], **how)
    # what was measured is the same everywhere, what is described runs at each device's speed
    others = [source if source.description is None else profiling.resolve(model, made, **how) for made in places[1:]]
    amount = samples or source.samples or decision.MILLION
    sweeps = [_sweep(one, made, "data", amount) for one, made in zip([source, *others], places, strict=True)]
    errors = advice.errors_of(source.module, source.batches, specs or advice.WIRES)
    answer = (
        decision.decide(sweeps, world, specs, errors) if clusters else advice.advise(sweeps[0], world, specs, errors)
    )
    if any(not made.device.is_named for made in places):
        answer = replace(answer, text=f"{answer.text}\n{unnamed(places)}")
    if unpriced:
        note = f"no dollars: there is no price of {', '.join(unpriced)}; give all of them one with --price"
        answer = replace(answer, text=f"{answer.text}\n{note}")
    if page and isinstance(answer, decision.Decision):
        page.write_text(offers.page(sweeps, answer))
    emit(answer.as_dict(), answer.text, json_path)


def _unpriced(places: Sequence[Cluster]) -> list[str]:
    """Those without a price, where others have one in their file: dollars and seconds cannot be compared."""
    missing = [made.name for made in places if not made.price_per_hour]
    return missing if len(missing) < len(places) else []


def _world(made: Cluster, workers: int) -> int:
    world = workers or made.probed_ranks * made.node
    if world < 2:
        raise ValueError(f"advise: --workers: must be 2 or more, got {workers}")
    return world
