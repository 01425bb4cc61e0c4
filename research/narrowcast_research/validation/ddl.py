"""ddl-benchmarks: the run without overlap is given, the effect of overlap is predicted."""

from __future__ import annotations

import statistics

import torch

from narrowcast.parallel import overlap
from narrowcast.predict import ddp_buckets, zoo
from narrowcast_research.validation.metrics import Cell, Result, figures
from narrowcast_research.validation.published import rows

MODELS = {"ResNet-50": zoo.resnet50, "BERT-Base": zoo.bert_base, "BERT-Large": zoo.bert_large}
GIVEN, WANTED = "BSP-A2A", "MG-WFBP"
SLOWER = tuple(1 + 0.05 * number for number in range(61))
"""Candidates for how much slower a collective is beside compute, up to 4 times: the best ones lie inside."""


def times(method: str) -> dict[tuple[str, str, int], float]:
    return {
        (row["dnn"], row["link"], int(row["gpus"])): float(row["iter_ms"]) / 1e3
        for row in rows("ddl_benchmarks_2020.csv")
        if row["method"] == method
    }


def compute_seconds(name: str) -> float:
    """Seconds of a step on one GPU."""
    row = next(row for row in rows("ddl_benchmarks_2020.csv") if row["dnn"] == name)
    return float(row["bs"]) / float(row["single_gpu"])


def predicted(name: str, without_overlap: float, slower: float) -> float:
    """A step whose communication, known from the run without overlap, starts as gradients become ready."""
    compute = compute_seconds(name)
    profile = MODELS[name]().profile_of(compute)
    cut = ddp_buckets(profile.tensors)
    total = sum(bucket.values for bucket in cut)
    communication = max(0.0, without_overlap - compute)
    ready = [[profile.forward + bucket.ready for bucket in cut]]
    service = [[communication * bucket.values / total for bucket in cut]]
    when, long = (torch.tensor(values, dtype=torch.float64) for values in (ready, service))
    whole = torch.tensor([compute], dtype=torch.float64)
    return float(overlap.step(whole, whole, when, long, overlap.Contention(1.0, slower)).step)


def cells(slower: dict[str, float]) -> list[Cell]:
    given = times(GIVEN)
    return [
        Cell((name, link, str(gpus)), measured, predicted(name, given[name, link, gpus], slower[name]))
        for (name, link, gpus), measured in times(WANTED).items()
    ]


def left_out() -> dict[str, float]:
    """For each model the factor that is best on the other two."""
    errors = {factor: cells(dict.fromkeys(MODELS, factor)) for factor in SLOWER}

    def error(factor: float, without: str) -> float:
        return statistics.fmean(abs(cell.error) for cell in errors[factor] if cell.key[0] != without)

    return {name: min(SLOWER, key=lambda factor: error(factor, name)) for name in MODELS}


def validate() -> Result:
    factors = left_out()
    found = cells(factors)
    plain = cells(dict.fromkeys(MODELS, 1.0))
    shown = ", ".join(f"{name} {factor:.2f}" for name, factor in factors.items())
    return Result(
        name="ddl",
        title="ddl-benchmarks 2020: steps with overlap (MG-WFBP)",
        fitted=f"one factor, how much slower collectives are beside compute, for each model on the other two "
        f"({shown}); "
        "gradient-ready times from layer descriptions; communication time from the run without overlap",
        columns=("model", "link", "GPUs"),
        cells=found,
        figures=figures(found),
        extra={"nothing fitted": figures(plain)},
        targets={"mape": ("<=", 7.0)},
        notes=["the fitted factor hardly helps: with nothing fitted the error is in the line `nothing fitted`"],
        unit="ms",
        scale=1e3,
    )
