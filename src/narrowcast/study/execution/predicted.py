"""What the predictor says: beside measured steps, at rates that this machine cannot make, on the paper's machines."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, Protocol

from narrowcast import plugins
from narrowcast.predict import Cluster, Description, Prediction, Profile, Setup, StepPredictor, costs, zoo
from narrowcast.predict import cluster as cluster_file
from narrowcast.study.cases import PLAIN, Case
from narrowcast.study.file import BUILTIN
from narrowcast.study.spec_bits import profile_share

PROBED = ("fp32", "bf16", "int8/256", "int4/128")
"""Wires that a link is measured with; others run like the one with the nearest number of bits."""


def _setup(case: Case) -> Setup:
    # on hosts with several ranks `attach` knows nothing about them unless the case says so: it stays flat
    flat = case.algorithm == "auto" and case.layout.per_host > 1 and case.wire != PLAIN
    algorithm = "two_shot" if flat else case.algorithm
    return Setup(case.layout.workers, case.wire, algorithm, min_values=case.min_values)


def beside(case: Case, profile: Profile | None, cluster: Cluster | None) -> dict[str, Any]:
    """The predicted step of a measured case: from the profile and the probe, without that measurement."""
    if profile is None or cluster is None:
        return {}
    try:
        made = StepPredictor(profile, costs.Costs(cluster)).predict(_setup(case))
    except ValueError:  # an algorithm that the predictor does not know
        return {}
    return {"predicted_ms": 1e3 * made.step, "predicted_interval_ms": [1e3 * made.low, 1e3 * made.high]}


def at_rate(case: Case, profile: Profile, loopback: Cluster) -> dict[str, Any]:
    """A step on this machine's ranks, were they joined by links of the case's rate."""
    assert case.rate is not None
    cluster = loopback.with_bandwidth(case.rate / 1e9)
    made = StepPredictor(profile, costs.Costs(cluster)).predict(_setup(case))
    return {**_facts(case, made, profile), "cluster": cluster.name, "batch": profile.batch}


def cluster_for(name: str, transport: str) -> Cluster:
    """A machine as a primitive sees it, where a file of that name says so, or as its preset has it."""
    for folder in (BUILTIN, *plugins.loaded().studies):
        own = folder / "clusters" / f"{name}-{transport}.toml"
        if own.is_file():
            return cluster_file.load(own)
    return cluster_file.load(name)


def on_cluster(case: Case) -> dict[str, Any]:
    """A step of a known network on a known machine. Nothing is sent before the backward pass ends: the published bars
    of communication and computation add up."""
    cluster, network = cluster_for(case.rate_name, case.transport), zoo.MODELS[case.model]()
    profile = _paper_profile(network, cluster, case.layout.workers)
    algorithm = case.algorithm
    if algorithm == "auto":  # MPI reduces and broadcasts by ranges, whatever the precision; NCCL adds float32 itself
        algorithm = "native" if case.transport == "nccl" and case.wire == PLAIN else "two_shot"
    setup = replace(_setup(case), algorithm=algorithm, overlap=False)
    made = StepPredictor(profile, costs.Costs(cluster)).predict(setup)
    dollars = _dollars(cluster, profile, network.samples, case.layout.workers, made.step)
    more = {"dollars_per_epoch": dollars} if dollars is not None else {}
    about = {"cluster": cluster.name, "batch": profile.batch, "parameters": profile.numel}
    return {**_facts(case, made, profile), **more, **about}


class Published(Protocol):
    """What a plugin knows of runs that a paper describes; None where the paper has nothing."""

    def batch(self, network: Description, workers: int) -> int | None:
        """Over all devices."""

    def compute_seconds(self, network: Description, workers: int, batch: int, flops: float) -> float | None:
        """Of a step with so many samples on each device, were the paper's devices as fast as `flops`."""


@cache
def _published() -> tuple[Published, ...]:
    return tuple(map(plugins.resolve, plugins.loaded().published))


def _paper_profile(network: Description, cluster: Cluster, workers: int) -> Profile:
    """With a paper's batch, and its time of computation, where one is published; from flops otherwise."""
    device = cluster.device
    batches = (paper.batch(network, workers) for paper in _published())
    total = next((batch for batch in batches if batch is not None), network.batch * workers)
    batch = -(-total // workers)
    times = (paper.compute_seconds(network, workers, batch, device.flops) for paper in _published())
    seconds = next((time for time in times if time is not None), None)
    if seconds is None:
        return network.profile(device.flops, device.memory_gbyte, batch, spread=device.spread)
    return network.profile_of(seconds, batch, spread=device.spread)


def _dollars(cluster: Cluster, profile: Profile, samples: int, workers: int, step: float) -> float | None:
    if not cluster.price_per_hour or not samples:
        return None
    nodes = -(-workers // cluster.node)
    return cluster.price_per_hour * nodes * samples / (profile.batch * workers) * step / 3600


def _facts(case: Case, made: Prediction, profile: Profile) -> dict[str, Any]:
    scale = made.compute / profile.compute if profile.compute else 1.0
    parts = {key: 1e3 * scale * getattr(profile, key) for key in ("forward", "backward", "update")}
    codec = min(made.codec, made.exposed)
    parts |= {"encode": 1e3 * codec / 2, "decode": 1e3 * codec / 2, "wire": 1e3 * max(0.0, made.exposed - codec)}
    times = {"step_ms": 1e3 * made.step, "interval_ms": [1e3 * made.low, 1e3 * made.high], "breakdown_ms": parts}
    return {**times, "compressed": profile_share(profile, case.wire, case.min_values)}
