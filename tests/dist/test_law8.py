"""Law 8, whatever happens in training: what arrived + residual = what was wanted. `make law8` runs many more cases."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from dist.law8.cases import KINDS, case_of
from dist.law8.run import run_all
from dist.pool import Pool

import narrowcast as nc

FIRST, CASES, JOBS = 1912, 64, 4
"""So many cases from this seed on have every combination that is asked for below."""
LONG = range(1700, FIRST)


@pytest.mark.parametrize(
    "seeds",
    [
        *(range(FIRST + part, FIRST + CASES, JOBS) for part in range(JOBS)),
        *(pytest.param(LONG[part::6], marks=pytest.mark.slow) for part in range(6)),
    ],
    ids=str,
)
def test_nothing_is_lost_in_any_combination(_pools: Callable[[], Pool], seeds: range) -> None:  # noqa: PT019
    failures = [failure for _, found in run_all(_pools, seeds) for failure in found]
    assert not failures, "\n".join(map(str, failures))


def test_the_cases_cover_the_product() -> None:
    """Each way to train with each thing that can happen to it, more than once in what is run here."""
    cases = [case_of(seed) for seed in range(FIRST, FIRST + CASES)]
    happens = {
        "several passes, one exchange": lambda c: c.passes > 1 and c.sync == "last",
        "several exchanges a step": lambda c: c.passes > 1 and c.sync == "every",
        "unused parameters": lambda c: c.unused > 0,
        "16 bits": lambda c: c.dtypes != "float32",
        "wires that change": lambda c: len(c.plan) > 1,
        "a checkpoint": lambda c: len(c.worlds) > 1,
        "frozen later": lambda c: c.frozen is not None,
    }
    low_rank = [case for case in cases if any(nc.codec(wire).rank for _, wires in case.plan for _, wire in wires)]
    assert len(low_rank) > 5
    assert sum(len(case.worlds) > 1 for case in low_rank) > 1
    assert sum(bool(case.scaler and case.skips) for case in low_rank) > 1
    with_gradients = {
        "steps that are skipped": lambda c: c.scaler and c.skips,
        "several optimizers on one scaler": lambda c: c.scaler and c.optimizers > 1,
        "a scale lowered by hand": lambda c: c.lowered,
    }
    for kind in KINDS:
        for what, of in {**happens, **({} if kind == "local" else with_gradients)}.items():
            assert sum(bool(of(case)) for case in cases if case.kind == kind) > 1, f"{kind}: {what}"
    changed = [case.reduce for case in cases if len(set(case.reduce)) > 1]
    assert any("float16" in pair for pair in changed), changed
    assert sum("float16" in case.reduce for case in cases) > 2
    inners = [case.inner for case in cases if case.inner is not None]
    assert len(set(inners)) > 2
    assert sum(nc.codec(inner).feedback for inner in inners) > 5
    assert sum(case.strides for case in cases if case.kind in ("ddp", "local")) > 2
    assert {world for case in cases for world in case.worlds} == {1, 2, 3, 4}
