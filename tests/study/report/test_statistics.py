"""Statistics against closed forms and against the truth of simulated data. Nothing here is fitted to its own output."""

from __future__ import annotations

import math
import random
import statistics

import pytest
import torch

from narrowcast.measure import torch_threads
from narrowcast.study.analysis import statistics as stats
from narrowcast.study.analysis.statistics import Conclusion, Interval, equivalence, holm, student_cdf, student_quantile


@pytest.mark.parametrize("t", [-30.0, -2.0, -0.3, 0.0, 0.1, 1.0, 4.5, 200.0])
def test_students_distribution_has_its_closed_forms(t: float) -> None:
    """One degree of freedom is Cauchy's distribution, two and four are algebraic."""
    assert student_cdf(t, 1) == pytest.approx(0.5 + math.atan(t) / math.pi, abs=1e-13)
    assert student_cdf(t, 2) == pytest.approx(0.5 + t / (2 * math.sqrt(2 + t * t)), abs=1e-13)
    u = t / math.sqrt(4 + t * t)
    assert student_cdf(t, 4) == pytest.approx(0.5 + 0.75 * (u - u**3 / 3), abs=1e-13)


def test_with_many_degrees_of_freedom_it_is_the_normal_distribution() -> None:
    normal = statistics.NormalDist()
    for t in (-3.0, -1.0, 0.5, 1.96):
        assert student_cdf(t, 10**6) == pytest.approx(normal.cdf(t), abs=1e-6)


@pytest.mark.parametrize("freedom, expected", [(1, 12.7062), (2, 4.3027), (4, 2.7764), (9, 2.2622), (30, 2.0423)])
def test_quantiles_are_those_of_the_printed_tables(freedom: int, expected: float) -> None:
    assert student_quantile(0.975, freedom) == pytest.approx(expected, abs=5e-5)
    assert student_quantile(0.025, freedom) == pytest.approx(-expected, abs=5e-5)
    assert student_cdf(student_quantile(0.9, freedom), freedom) == pytest.approx(0.9, abs=1e-12)


def test_a_share_outside_of_0_and_1_is_refused() -> None:
    with pytest.raises(ValueError, match="between 0 and 1, got 1"):
        student_quantile(1, 4)


def test_medians_and_p95() -> None:
    assert stats.median([3, 1, 2, 10]) == 2.5
    assert stats.p95(list(range(101))) == 95
    assert stats.p95([7.0]) == 7.0
    assert stats.median_interval([[5.0]]) == Interval(5.0, 5.0, 5.0)
    assert stats.median_interval([[], [1.0, 3.0]]).value == 2.0
    with pytest.raises(ValueError, match="at least one repeat"):
        stats.median_interval([[]])


def test_the_same_results_give_the_same_interval() -> None:
    source = random.Random(3)
    a, b = ([[source.gauss(10, 1) for _ in range(9)] for _ in range(4)] for _ in range(2))
    assert stats.speedup(a, b) == stats.speedup(a, b)
    state = torch.random.get_rng_state()
    stats.median_interval(a)
    assert torch.equal(torch.random.get_rng_state(), state), "the global generator is nobody's to draw from"


def test_a_speedup_turned_around_is_its_inverse() -> None:
    source = random.Random(4)
    a, b = ([[source.gauss(m, 0.5) for _ in range(10)] for _ in range(5)] for m in (20, 10))
    there, back = stats.speedup(a, b), stats.speedup(b, a).inverse()
    assert there.value == pytest.approx(back.value)
    assert (there.low, there.high) == pytest.approx((back.low, back.high), rel=0.03)
    assert 1.8 < there.low < there.value < there.high < 2.2


def _skewed(source: random.Random, repeats: int, steps: int, drift: float) -> list[list[float]]:
    """Step times with a tail to the right, and a machine that is a little faster or slower in each repeat."""
    shift = [math.exp(source.gauss(0, drift)) for _ in range(repeats)]
    return [[s * math.exp(source.gauss(0, 0.1)) for _ in range(steps)] for s in shift]


def _coverage(drift: float, repeats: int = 8, trials: int = 150) -> float:
    source = random.Random(11)
    with torch_threads(1):
        found = [stats.median_interval(_skewed(source, repeats, 10, drift), draws=300) for _ in range(trials)]
    # the median of exp(normal) is 1, whatever its spread
    return sum(interval.contains(1.0) for interval in found) / trials


def test_intervals_of_medians_hold_the_truth_as_often_as_they_say() -> None:
    assert 0.90 <= _coverage(drift=0.0) <= 1.0


def test_drift_between_repeats_makes_intervals_wider() -> None:
    """With steps alone, the interval would hold the truth in a third of the trials; repeats are drawn first."""
    assert _coverage(drift=0.15) >= 0.80


def _speedup_coverage(repeats: int, drift: float, trials: int = 400) -> float:
    """Of two sides that are equally fast: both see the same machine, and each drifts a little by itself."""
    source = random.Random(12)
    held = 0
    with torch_threads(1):
        for _ in range(trials):
            shared = [math.exp(source.gauss(0, 0.05)) for _ in range(repeats)]
            sides = [
                [
                    [s * own * math.exp(source.gauss(0, 0.05)) for _ in range(8)]
                    for s, own in zip(shared, drifts, strict=True)
                ]
                for drifts in ([math.exp(source.gauss(0, drift)) for _ in shared] for _ in range(2))
            ]
            held += stats.speedup(*sides).contains(1.0)
    return held / trials


def test_speedups_of_three_repeats_of_eight_steps_hold_the_truth_nearly_as_often_as_they_say() -> None:
    """As many as studies take; docs/report.md has the numbers of more trials."""
    assert _speedup_coverage(3, drift=0.024) >= 0.92
    assert 0.83 <= _speedup_coverage(3, drift=0.05) <= 0.94


def test_more_confidence_takes_a_wider_interval_and_more_draws() -> None:
    source = random.Random(6)
    base, other = ([[source.gauss(10, 1) for _ in range(8)] for _ in range(3)] for _ in range(2))
    usual, surer = stats.speedup(base, other), stats.speedup(base, other, confidence=0.9999)
    assert surer.low < usual.low < usual.high < surer.high
    # an end that only a thousand draws made would be the luck of one
    assert surer != stats.speedup(base, other, confidence=0.9999, draws=stats.DRAWS)


def test_interleaving_takes_the_drift_out_of_a_speedup() -> None:
    """Both sides saw the same machine, so a speedup is known far better than either time."""
    source = random.Random(5)
    base = [[s * source.gauss(2, 0.01) for _ in range(10)] for s in (1.0, 1.3, 0.8, 1.1)]
    other = [[s * source.gauss(1, 0.005) for _ in range(10)] for s in (1.0, 1.3, 0.8, 1.1)]
    gain, time = stats.speedup(base, other), stats.median_interval(base)
    assert (gain.high - gain.low) / gain.value < 0.25 * (time.high - time.low) / time.value
    assert gain.contains(gain.value)
    assert gain.low > 1.9


def test_what_was_not_interleaved_keeps_the_drift_in_its_speedup() -> None:
    """Sides that saw the machine at different times: the same numbers say less."""
    source = random.Random(5)
    drift = (1.0, 1.3, 0.8, 1.1)
    base, other = ([[s * source.gauss(1, 0.01) for _ in range(10)] for s in drift] for _ in range(2))
    together, apart = (stats.speedup(base, other, interleaved=known) for known in (True, False))
    assert together.value == apart.value
    assert apart.high - apart.low > 4 * (together.high - together.low)


@pytest.mark.parametrize("most, one", [(1.0, 5.0), (5.0, 1.0)])
def test_a_repeat_counts_by_as_many_steps_as_it_has(most: float, one: float) -> None:
    """Two repeats, one much shorter: of three draws in four the long one has the majority, as in the median itself."""
    repeats = [[most] * 100, [one]]
    assert stats.median_interval(repeats, confidence=0.4) == Interval(most, most, most)
    assert stats.median_interval(repeats) == Interval(most, 1.0, 5.0)


def test_equivalence_in_a_case_that_was_computed_by_hand() -> None:
    """Mean 0.2, standard deviation 0.1581 over 5 seeds: standard error 0.07071, t(0.975, 4) = 2.7764."""
    found = equivalence([0.0, 0.1, 0.2, 0.3, 0.4], margin=1.0)
    assert found.interval.value == pytest.approx(0.2)
    assert found.interval.high - found.interval.value == pytest.approx(2.77645 * 0.0707107, rel=1e-4)
    assert found.p == pytest.approx(1 - student_cdf(0.8 / 0.0707107, 4), rel=1e-4)
    assert found.conclusion is Conclusion.EQUAL


@pytest.mark.parametrize(
    "differences, conclusion",
    [
        ([0.1, -0.2, 0.0, 0.15, -0.05], Conclusion.EQUAL),
        ([-0.5, -0.6, -0.4, -0.5, -0.55], Conclusion.EQUAL),  # surely lower, and surely by less than the margin
        ([-3.0, -2.6, -3.3, -2.9, -3.1], Conclusion.LOST),
        ([3.0, 2.6, 3.3, 2.9, 3.1], Conclusion.BETTER),
        ([-1.0, -0.8, -1.2, -0.9, -1.1], Conclusion.UNKNOWN),
        ([-4.0, 3.0, 2.0, -3.0, 0.5], Conclusion.UNKNOWN),
        ([0.0], Conclusion.UNKNOWN),
        ([], Conclusion.UNKNOWN),
        ([0.5, 0.5, 0.5], Conclusion.EQUAL),
        ([-2.0, -2.0, -2.0], Conclusion.LOST),
    ],
)
def test_conclusions(differences: list[float], conclusion: Conclusion) -> None:
    assert equivalence(differences, margin=1.0).conclusion is conclusion


def test_equal_means_an_interval_of_90_percent_inside_of_the_margin() -> None:
    source = random.Random(9)
    for _ in range(300):
        values = [source.gauss(source.choice([0, 0.5, 0.9]), 0.3) for _ in range(5)]
        inside = stats.mean_interval(values, confidence=0.90)
        found = equivalence(values, 1.0)
        assert (found.p < stats.ALPHA) is (inside.low > -1 and inside.high < 1)


def test_a_wire_that_loses_exactly_the_margin_is_rarely_called_equal() -> None:
    """The promise of the test: at most one in twenty such wires slips through."""
    source = random.Random(10)
    wrong = sum(
        equivalence([source.gauss(-1.0, 0.4) for _ in range(5)], 1.0).conclusion is Conclusion.EQUAL
        for _ in range(2000)
    )
    assert wrong / 2000 <= 0.065


def test_a_margin_must_be_positive() -> None:
    with pytest.raises(ValueError, match="margin must be positive, got 0"):
        equivalence([0.1, 0.2], 0)


def test_holms_correction_as_in_its_textbook_example() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []
