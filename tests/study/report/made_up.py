"""A study that never ran: lines as docs/study-results.md has them, from a small model of a cluster and seeded noise.

Its numbers are plausible, so that figures can be judged by eye; its truth is known, so that sentences can be tested.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from narrowcast.codecs import codec

Line = dict[str, Any]

RATES = {"100mbit": 1e8, "1gbit": 1e9, "loopback": None}
LOOPBACK = 2e10
CODEC_BYTES_A_MS = 1.5e6
WIRES = (
    *("fp32", "int8/256", "fp16", "int4/128+ef", "qsgd2/128", "onebit/64+ef", "e4m3fn/128", "e5m2/128", "int4/128"),
    *("int2/128+ef", "sign/4096+ef", "ternary/512", "mxfp8", "mxfp6", "mxfp4", "nf4/64", "int8/128", "uint8/512"),
    *("qsgd4/512", "int8/1024"),
)
"""The study's question first; as many as a long study has."""
LAYERS = ("conv1.weight", "conv2.weight", "layer1.0.weight", "layer1.1.weight", "fc.weight", "fc.bias")


@dataclass(frozen=True)
class Net:
    """A model: its parameters, milliseconds of compute a step, and accuracy in points."""

    data: str
    parameters: int
    compute: float
    accuracy: float


NETS = {
    "mlp": Net("digits", 240_000, 2.5, 96.8),
    "cnn": Net("digits", 110_000, 6.0, 98.1),
    "alexnet-cifar": Net("cifar10", 2_500_000, 24.0, 74.5),
    "resnet-cifar": Net("cifar10", 700_000, 60.0, 84.0),
    "lstm-text": Net("shakespeare", 1_600_000, 30.0, 52.3),
}


@dataclass(frozen=True)
class Truth:
    """What the made-up world is like."""

    nets: Sequence[str] = tuple(NETS)
    wires: Sequence[str] = ("fp32", "fp16", "int8/256", "int4/128+ef", "qsgd2/128", "onebit/64+ef")
    rates: Sequence[str] = ("100mbit", "1gbit", "loopback")
    workers: Sequence[int] = (2, 4)
    seeds: int = 5
    noise: float = 0.03
    loss: dict[str, float] = field(default_factory=lambda: {"qsgd2/128": 1.1, "onebit/64+ef": 2.6})
    """Points of accuracy that a wire costs."""
    spread: float = 0.15
    """Standard deviation of the difference between two wires with one seed."""
    slow_codec: float = 1.0
    """Above 1 encoding takes longer than it should."""


def session(**other: Any) -> Line:
    return {
        "schema": 1,
        "kind": "session",
        "study": "made-up",
        "text": '# a study\nname = "made-up"\nmodels = ["mlp", "cnn"]\n',
        "started": "2026-11-15T12:00:00Z",
        "launcher": "lab",
        "machine": {"cpu": "Intel Xeon 2.7 GHz", "cores": 2, "memory_gib": 24, "gpu": None, "system": "Linux 6.1"},
        "versions": {"narrowcast": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
        "commit": "0123abcd+",
        "margin": 1.0,
        "primary": "int8/256",
        "baseline": "fp32",
        "targets": {"digits": 95.0},
        **other,
    }


def axes(kind: str, **axes: Any) -> Line:
    line = {
        "schema": 1,
        "kind": kind,
        "status": "done",
        "source": "measured",
        "algorithm": "native" if axes["wire"] in ("fp32", "fp16") else "two_shot",
        "rate": RATES.get(axes.get("rate_name", "")),
        "transport": "gloo",
        "parallel": "data",
        "seconds": 1.5,
        **axes,
    }
    names = ("model", "data", "wire", "algorithm", "workers", "rate_name", "transport", "parallel", "seed", "cluster")
    line["case"] = "|".join([kind, *(str(line[name]) for name in names if line.get(name) is not None)])
    return line


def wire_bytes(wire: str, net: Net, workers: int) -> float:
    share = 2 * (workers - 1) / workers
    return share * net.parameters * codec(wire).bits_per_value / 8


def parts(truth: Truth, wire: str, net: Net, workers: int, rate: float | None) -> dict[str, float]:
    """Milliseconds of each part of a step."""
    sent = wire_bytes(wire, net, workers)
    code = 0.0 if wire == "fp32" else truth.slow_codec * net.parameters * 4 / CODEC_BYTES_A_MS / 4
    on_the_wire = sent * 8 / (rate or LOOPBACK) * 1e3 + 0.3 * workers
    hidden = min(on_the_wire, 0.3 * net.compute)
    return {
        "forward": 0.3 * net.compute,
        "backward": 0.6 * net.compute,
        "encode": 0.6 * code,
        "wire": on_the_wire - hidden,
        "decode": 0.4 * code,
        "update": 0.1 * net.compute,
    }


def _bytes(wire: str, net: Net, workers: int, counted: bool, source: random.Random) -> dict[str, Any]:
    claimed = wire_bytes(wire, net, workers)
    protocol = claimed * 0.046
    found = round((claimed + protocol) * source.uniform(0.995, 1.015)) if counted else None
    plain = wire_bytes("fp32", net, workers)
    return {"claimed": round(claimed), "counted": found, "protocol": round(protocol), "plain": round(plain)}


def _repeats(middle: float, noise: float, source: random.Random) -> list[list[float]]:
    drift = [source.gauss(1, noise / 2) for _ in range(4)]
    return [[round(middle * d * (1 + abs(source.gauss(0, noise))), 4) for _ in range(10)] for d in drift]


def times(truth: Truth, source: random.Random) -> Iterable[Line]:
    for name in truth.nets:
        net = NETS[name]
        for workers in truth.workers:
            for rate in truth.rates:
                for wire in truth.wires:
                    split = parts(truth, wire, net, workers, RATES[rate])
                    middle = sum(split.values())
                    forecast = middle * source.gauss(1.0, 0.06)
                    yield {
                        **axes("time", model=name, data=net.data, wire=wire, workers=workers, rate_name=rate),
                        "steps_ms": _repeats(middle, truth.noise, source),
                        "parameters": net.parameters,
                        "batch": 16,
                        "breakdown_ms": split,
                        "bytes": _bytes(wire, net, workers, rate != "loopback", source),
                        "predicted_ms": forecast,
                        "predicted_interval_ms": [0.9 * forecast, 1.12 * forecast],
                    }


def _curve(final: float, epochs: int, source: random.Random) -> list[Line]:
    shape = [1 - math.exp(-0.9 * epoch) for epoch in range(1, epochs + 1)]
    reached = [
        final * s / shape[-1] + (source.gauss(0, 0.2) if epoch < epochs - 1 else 0) for epoch, s in enumerate(shape)
    ]
    return [
        {"epoch": epoch, "accuracy": round(accuracy, 3), "loss": round(2.3 * math.exp(-0.5 * epoch), 4)}
        for epoch, accuracy in enumerate(reached, 1)
    ]


def _layers(wire: str, source: random.Random) -> list[Line]:
    if wire == "fp32":
        return []
    snr = 6.02 * codec(wire).bits_per_value - 5
    return [
        {
            "name": name,
            "values": 64 * (position + 1) ** 3,
            "bias": source.gauss(0, 1e-4),
            "snr_db": snr + 1.5 * position + source.gauss(0, 0.7),
            "flushed": max(0.0, 0.3 - 0.04 * snr / 6),
            "saturated": 0.0,
        }
        for position, name in enumerate(LAYERS)
    ]


def accuracies(truth: Truth, source: random.Random) -> Iterable[Line]:
    for name in truth.nets:
        net = NETS[name]
        for seed in range(truth.seeds):
            common = source.gauss(0, 0.4)
            for wire in truth.wires:
                own = 0.0 if wire == "fp32" else source.gauss(0, truth.spread) - truth.loss.get(wire, 0.0)
                final = min(100.0, net.accuracy + common + own)
                line = axes("accuracy", model=name, data=net.data, wire=wire, workers=4, seed=seed, source="simulated")
                yield {
                    **line,
                    "accuracy": final,
                    "loss": 0.1,
                    "epochs": 8,
                    "steps_per_epoch": 40,
                    "curve": _curve(final, 8, source),
                    "layers": _layers(wire, source),
                }


def buses(truth: Truth, source: random.Random) -> Iterable[Line]:
    for rate in truth.rates:
        for wire in truth.wires[:4]:
            for power in range(16, 27, 2):
                bits = codec(wire).bits_per_value
                best = (RATES[rate] or LOOPBACK) / 8e9 * 32 / bits
                busbw = best * source.gauss(1, 0.02) / (1 + 2e5 / 2**power)
                ms = 2**power * 1.5 / busbw / 1e6
                line = axes("bus", model="", data="", wire=wire, workers=4, rate_name=rate)
                line["case"] += f"|{2**power}"
                yield {
                    **line,
                    "bytes": 2**power,
                    "ms": [ms * source.gauss(1, 0.02) for _ in range(5)],
                    "bus_gbps": busbw,
                }


PAPER = {
    "alexnet": (62e6, 120, 1.0),
    "vgg19": (143e6, 900, 1.0),
    "resnet152": (60e6, 1200, 1.0),
    "lstm": (13e6, 40, 1.0),
}
CLUSTERS = {"p2.16xlarge": (10e9, 14.4, 1.0), "dgx-1": (40e9, 45.0, 0.25)}


def paper_grid(truth: Truth) -> Iterable[Line]:
    """Predictions of the paper's own axes; here from two lines of arithmetic."""
    for model, (parameters, compute, _) in PAPER.items():
        for cluster, (speed, price, factor) in CLUSTERS.items():
            for transport in ("mpi", "nccl"):
                for workers in (2, 4, 8, 16):
                    if cluster == "dgx-1" and workers > 8:
                        continue
                    for wire in ("fp32", "fp16", "int8/256", "int4/128+ef", "qsgd2/128", "onebit/64+ef"):
                        net = Net("imagenet", int(parameters), compute * factor, 70)
                        bandwidth = speed * (4 if transport == "nccl" else 1)
                        step = sum(parts(replace(truth, slow_codec=0.02), wire, net, workers, bandwidth * 4).values())
                        yield {
                            **axes(
                                "time", model=model, data="imagenet", wire=wire, workers=workers, cluster=cluster,
                                transport=transport, source="predicted", rate_name=cluster,
                            ),
                            "step_ms": step,
                            "interval_ms": [0.85 * step, 1.2 * step],
                            "dollars_per_epoch": price * step * 1.28e6 / 64 / workers / 3.6e6,
                        }  # fmt: skip


def failures() -> Iterable[Line]:
    for workers in (2, 4):
        line = axes(
            "time", model="mlp", data="digits", wire="int8/256", workers=workers, rate_name="1gbit", transport="mpi"
        )
        error = "ModuleNotFoundError: no module <mpi4py> & friends; pip install 'narrowcast[mpi]'"
        yield {**line, "status": "failed", "error": error}


def study(truth: Truth = Truth(), seed: int = 7, **asked: Any) -> list[Line]:
    """All kinds of lines."""
    source = random.Random(seed)
    lines: list[Line] = [session(**asked), *times(truth, source), session(**asked), *accuracies(truth, source)]
    return [*lines, *buses(truth, source), *paper_grid(truth), *failures()]


def write(folder: Path, lines: Iterable[Line]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder
