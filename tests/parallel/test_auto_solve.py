"""Which wire for which tensor: what the search finds, beside the best of all choices."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from narrowcast.parallel import overlap
from narrowcast.parallel.autopilot.solve import Problem, Solution, solve, solve_by_trying

GAP = 0.02
"""How much longer than the shortest step that there is the one found may be, with up to six tensors."""


def problem_of(seed: int, most: int = 6) -> Problem:
    """A random step: tensors of all sizes and energies, in buckets, on a link of some speed."""
    draw = random.Random(seed)
    tensors, wires = draw.randint(1, most), draw.randint(2, 4)
    cuts = [0, *sorted(draw.sample(range(1, tensors), draw.randint(0, min(2, tensors - 1)))), tensors]
    buckets = tuple(tuple(range(first, last)) for first, last in itertools.pairwise(cuts))
    ready = tuple(itertools.accumulate(draw.expovariate(1) for _ in buckets))
    bits = [32, *sorted(draw.sample([16, 8, 6, 4, 3, 2, 1], wires - 1), reverse=True)]
    speed = draw.lognormvariate(-1, 1)
    sizes, energies = ([draw.lognormvariate(0, by) for _ in range(tensors)] for by in (1, 2))
    errors = tuple(
        (0.0, *(math.inf if draw.random() < 0.1 else e * 4.0**-b * draw.uniform(0.3, 3) for b in bits[1:]))
        for e in energies
    )
    largest = sum(max(filter(math.isfinite, row)) for row in errors)
    return Problem(
        ready=ready,
        buckets=buckets,
        seconds=tuple(tuple(s * b / 32 * 3 * speed * draw.uniform(0.8, 1.2) for b in bits) for s in sizes),
        errors=errors,
        latency=tuple(draw.uniform(0, 0.1) * speed for _ in bits),
        bound=largest * draw.random() ** 4,
        fixed=tuple(draw.uniform(0, 0.1) for _ in buckets) if draw.random() < 0.5 else (),
        together=draw.random() < 0.5,
    )


def test_the_step_found_is_nearly_the_shortest_that_is_allowed() -> None:
    gaps = []
    for seed in range(150):
        problem = problem_of(seed, 5)
        found, best = solve(problem), solve_by_trying(problem)
        assert found == Solution.of(problem, found.choice)
        assert found.error <= problem.bound
        assert best.step <= found.step * (1 + 1e-12)
        gaps.append(found.step / best.step - 1)
    assert max(gaps) <= GAP
    assert sum(gap < 1e-9 for gap in gaps) >= 0.98 * len(gaps)


@pytest.mark.parametrize("seed", range(5))
def test_many_tensors_are_allowed_and_no_worse_than_one_wire_for_all(seed: int) -> None:
    problem = problem_of(seed, 40)
    found = solve(problem)
    assert found.error <= problem.bound
    for wire in range(problem.wires):
        one = Solution.of(problem, [wire if math.isfinite(row[wire]) else 0 for row in problem.errors])
        assert one.error > problem.bound or found.step <= one.step


@pytest.mark.parametrize("seed", range(10))
def test_a_step_is_the_queue_that_the_predictor_has(seed: int) -> None:
    problem = problem_of(seed)
    services = [problem.service(b, solve(problem).choice) for b in range(len(problem.buckets))]
    ready, times = (torch.tensor([row], dtype=torch.float64) for row in (problem.ready, services))
    end = ready[:, -1]
    assert problem.finish(services) == pytest.approx(float(overlap.step(end, end, ready, times).step), rel=1e-12)


def test_what_backward_hides_keeps_its_bits() -> None:
    """Two alike tensors, one early: only the late one costs time, so only it is rounded."""
    seconds, errors = ((1.0, 0.25), (1.0, 0.25)), ((0.0, 1.0), (0.0, 1.0))
    problem = Problem((0.0, 10.0), ((0,), (1,)), seconds, errors, (0.0, 0.0), bound=5.0)
    assert solve(problem).choice == (0, 1)


def test_few_values_travel_with_others_where_a_call_costs_more() -> None:
    """One wire for both is one call; the second would wait for a call of its own."""
    problem = Problem((0.0,), ((0, 1),), ((1.0, 0.2), (0.01, 0.002)), ((0.0, 1.0), (0.0, 1.0)), (0.5, 0.5), bound=5.0)
    assert solve(problem).choice == (1, 1)
