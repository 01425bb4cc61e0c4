"""All measured training steps that ship, as rows of one kind: what intervals are calibrated and checked on.

A cluster is a link of one data set: errors of its rows have causes in common, so it is left out as a whole.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from narrowcast.predict import Cluster, Description, Layer, Setup, load_cluster, traffic, zoo
from narrowcast.predict import spreads as spread_file
from narrowcast_research.validation import ddl, lab, qsgd
from narrowcast_research.validation.published import DATA, rows
from narrowcast_research.validation.table import GUESS_LAYERS, Run

NOT_COUNTED = "{} hosts, {}".format(*lab.NOT_COUNTED)
STUDY = DATA / "edbt18_steps.jsonl"
"""The measured steps of docs/examples/edbt18, with what was predicted for them."""


@dataclass(frozen=True)
class Step:
    """A measured step, and what could have been known before."""

    table: str
    run: Run
    preset: Cluster | None = None
    """What a reader would have taken, where that is not derived from the same table."""
    probed: float | None = None
    """Seconds that were predicted from a probe of this cluster."""
    traffic: float = 1.0
    """How much wires matter to it: the root of the share in which calls are under way."""
    quiet: bool = False
    """Of a probe: whether it saw that the machine did nothing else."""

    @property
    def cluster(self) -> str:
        return f"{self.table}: {self.run.link}"

    @property
    def case(self) -> tuple[str, str, int, bool]:
        """What its wires have in common."""
        return self.cluster, self.run.model, self.run.setup.world, self.run.setup.overlap


def equal_layers(name: str, parameters: int) -> Description:
    """A model of which only the size is known."""
    size = max(1, parameters // GUESS_LAYERS)
    return Description(name, tuple(Layer(f"layer{i}", (size,), 1.0) for i in range(GUESS_LAYERS)), 1)


def _ddl() -> Iterator[Step]:
    """Two methods: everything after the backward pass, and merged as gradients become ready. Four GPUs a node."""
    for method, overlap in ((ddl.GIVEN, False), (ddl.WANTED, True)):
        for (name, link, gpus), seconds in ddl.times(method).items():
            if gpus > 4:
                profile = ddl.MODELS[name]().profile_of(ddl.compute_seconds(name), spread=0.0)
                setup = Setup(gpus, "fp32", "native", overlap=overlap)
                yield Step("ddl", Run(name, profile, link, setup, seconds, "predict", gpus_per_node=4))


def _qsgd() -> Iterator[Step]:
    wires = {"32bit": "fp32", **qsgd.WIRES}
    for (name, precision, gpus), (communication, compute) in qsgd.hours().items():
        if name not in qsgd.MODELS or precision not in wires:
            continue
        build, batches = qsgd.MODELS[name]
        # an epoch's steps only scale both sides: an hour is taken for a second
        plain = qsgd.hours()[name, "32bit", gpus][1]
        steps = zoo.IMAGENET / batches[qsgd.GPUS.index(gpus)] / 3600
        profile = build().profile_of(plain / steps, spread=0.0)
        setup = Setup(gpus, wires[precision], "two_shot", min_values=qsgd.NOT_QUANTISED, overlap=False)
        run = Run(name, profile, "K80, MPI", setup, (communication + compute) / steps, "predict")
        yield Step("qsgd", run)


GRACE_MODELS = {"resnet50": (zoo.resnet50, 64), "vgg19": (zoo.vgg19, 64)}
"""With the batch on each worker, as far as it is known: it scales both sides."""


def _grace() -> Iterator[Step]:
    """float32 alone: the codecs are TensorFlow's."""
    plain = [r for r in rows("grace_runs.csv") if r["method"] == "none" and r["mode"] == "throughput"]
    for name, (build, batch) in GRACE_MODELS.items():
        own = [r for r in plain if r["model"] == name]
        alone = next(float(r["throughput_med"]) for r in own if r["workers"] == "1")
        for r in own:
            world = int(r["workers"])
            if world > 1:
                profile = build().profile_of(batch / alone, spread=0.0)
                preset = load_cluster("10gbe-tcp" if r["bw"] == "10g" else "1gbe-tcp")
                seconds = batch * world / float(r["throughput_med"])
                link = f"{r['bw']}, {r['backend']}"
                yield Step(
                    "grace", Run(name, profile, link, Setup(world, "fp32", "native"), seconds, "predict"), preset
                )


def at_rate(rate: str) -> Cluster:
    """What a reader takes for a link of which the rate is known."""
    gbit = {"100mbit": 0.1, "1gbit": 1.0, "10gbit": 10.0}[rate]
    if gbit < 1:
        return load_cluster("1gbe-tcp").with_bandwidth(0.94 * gbit)
    return load_cluster(f"{gbit:g}gbe-tcp")


def _lab() -> Iterator[Step]:
    for step in _probed("lab", lab.SHIPPED):
        if step.run.link != NOT_COUNTED:
            wire, rate = step.run.setup.wire, step.run.link.rpartition(" ")[2]
            yield replace(step, preset=at_rate(rate) if wire == "fp32" else None, quiet=True)


def _nccl() -> Iterator[Step]:
    """One machine, whose GPU all ranks share: a cluster, however many tables there are of it."""
    for folder in (lab.SHIPPED_NCCL, lab.SHIPPED_EDBT18):
        yield from _probed("nccl", folder)


def _probed(table: str, folder: Path) -> Iterator[Step]:
    for row, profile, made in lab.predicted(folder):
        for wire, seconds in row["seconds"].items():
            setup, link = lab.setup_of(row["hosts"], wire), f"{row['hosts']} hosts, {row['rate']}"
            span = made.span(setup)[0]
            run = Run(row["model"], profile, link, setup, statistics.median(seconds), "predict")
            quiet = spread_file.kind_of(made.costs.cluster) == "probed"
            yield Step(table, run, None, float(span.step[0]), traffic(span), quiet)


def _study() -> Iterator[Step]:
    for line in STUDY.read_text().splitlines():
        row = json.loads(line)
        profile = equal_layers(row["model"], row["parameters"]).profile_of(row["compute_ms"] / 1e3, spread=0.0)
        link = f"{row['layout']} hosts, {row['rate']}"
        run = Run(row["model"], profile, link, Setup(row["workers"], row["wire"]), row["measured_ms"] / 1e3, "predict")
        preset = at_rate(row["rate"]) if row["wire"] == "fp32" and "x" not in row["layout"] else None
        share = max(0.0, 1 - row["compute_ms"] / row["predicted_ms"]) ** 0.5
        yield Step("edbt18", run, preset, row["predicted_ms"] / 1e3, share)


TABLES = {"ddl": _ddl, "qsgd": _qsgd, "grace": _grace, "lab": _lab, "nccl": _nccl, "edbt18": _study}


def steps() -> list[Step]:
    return [step for make in TABLES.values() for step in make()]
