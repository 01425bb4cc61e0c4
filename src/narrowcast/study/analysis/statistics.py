"""The statistics of a study: medians with bootstrap intervals, paired differences, equivalence within a margin.

Step times have heavy tails, so they are told by medians, and their intervals come from a bootstrap. Accuracies over few
seeds are too few for a bootstrap, which would give intervals that are too short: Student's t is used. Every draw is
seeded: the same results give the same report.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from statistics import median

import torch
from torch import Tensor

DRAWS = 1000
"""Of a bootstrap, or more where the confidence asks for it."""
IN_TAIL = 10
"""So many draws must lie beyond each end of an interval: an end that rests on one of them is that one's luck."""
SEED = 20180326
CONFIDENCE = 0.95
ALPHA = 0.05

Repeats = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Interval:
    """An estimate, and between what it lies."""

    value: float
    low: float
    high: float

    def contains(self, x: float) -> bool:
        return self.low <= x <= self.high

    def inverse(self) -> Interval:
        return Interval(1 / self.value, 1 / self.high, 1 / self.low)

    def times(self, factor: float) -> Interval:
        if factor < 0:
            raise ValueError(f"an interval times {factor}: its ends would change places; take a factor of 0 or more")
        return Interval(self.value * factor, self.low * factor, self.high * factor)


def flat(repeats: Repeats) -> list[float]:
    return [value for repeat in repeats for value in repeat]


def p95(values: Sequence[float]) -> float:
    """The 95 % quantile, between two values where it falls there."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=20, method="inclusive")[-1]


def _medians(repeats: Repeats, chosen_DR: Tensor, source: torch.Generator) -> Tensor:
    """The median of each draw: the chosen repeats, and of each as many steps as it has, with replacement."""
    lengths = torch.tensor([len(repeat) for repeat in repeats])
    starts = lengths.cumsum(0) - lengths
    values = torch.tensor(flat(repeats), dtype=torch.float64)
    steps = int(lengths.max())
    picked_DRS = torch.rand(*chosen_DR.shape, steps, generator=source, dtype=torch.float64)
    index_DRS = starts[chosen_DR][..., None] + (picked_DRS * lengths[chosen_DR][..., None]).long()
    # as long as the longest, each: what a shorter one does not have goes behind all others, and does not count
    beyond_DRS = torch.arange(steps) >= lengths[chosen_DR][..., None]
    drawn_DN = values[index_DRS].masked_fill(beyond_DRS, math.inf).flatten(1).sort(dim=1).values
    counts_D1 = lengths[chosen_DR].sum(1, keepdim=True)
    # torch's own median takes the lower of two middle values
    low, high = (drawn_DN.gather(1, at_D1).squeeze(1) for at_D1 in ((counts_D1 - 1) // 2, counts_D1 // 2))
    return (low + high) / 2


def _between(point: float, draws_D: Tensor, confidence: float) -> Interval:
    tail = (1 - confidence) / 2
    low, high = draws_D.quantile(torch.tensor([tail, 1 - tail], dtype=draws_D.dtype)).tolist()
    # the point is inside by definition, though a few coarse draws may say otherwise
    return Interval(point, min(low, point), max(high, point))


def _enough(confidence: float) -> int:
    return max(DRAWS, math.ceil(2 * IN_TAIL / (1 - confidence)))


def _checked(repeats: Repeats) -> Repeats:
    kept = [repeat for repeat in repeats if len(repeat)]
    if not kept:
        raise ValueError("no step times: give at least one repeat with one step")
    return kept


def median_interval(repeats: Repeats, *, draws: int | None = None, confidence: float = CONFIDENCE) -> Interval:
    """The median of all steps. Repeats are drawn first, then steps within each, so that drift between them counts."""
    repeats = _checked(repeats)
    draws = draws or _enough(confidence)
    source = torch.Generator().manual_seed(SEED)
    medians = _medians(repeats, torch.randint(len(repeats), (draws, len(repeats)), generator=source), source)
    return _between(median(flat(repeats)), medians, confidence)


def speedup(
    baseline: Repeats,
    other: Repeats,
    *,
    interleaved: bool = True,
    draws: int | None = None,
    confidence: float = CONFIDENCE,
) -> Interval:
    """The ratio of medians, baseline over other: above 1 the other is faster.

    Interleaved repeats saw the same machine: where both have as many, a draw takes the same repeats of both.
    """
    baseline, other = _checked(baseline), _checked(other)
    draws = draws or _enough(confidence)
    source = torch.Generator().manual_seed(SEED)
    chosen = torch.randint(len(baseline), (draws, len(baseline)), generator=source)
    paired = interleaved and len(other) == len(baseline)
    theirs = chosen if paired else torch.randint(len(other), (draws, len(other)), generator=source)
    ratios = _medians(baseline, chosen, source) / _medians(other, theirs, source)
    return _between(median(flat(baseline)) / median(flat(other)), ratios, confidence)


def _beta_fraction(a: float, b: float, x: float) -> float:
    """The continued fraction of the incomplete beta function, by Lentz's method."""
    tiny, fraction, c, d = 1e-300, 1.0, 1.0, 0.0
    for step in range(400):
        m = step // 2
        if step == 0:
            term = 1.0
        elif step % 2 == 0:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        else:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d = 1 / (1 + term * d or tiny)
        c = 1 + term / c or tiny
        fraction *= c * d
        if step and abs(c * d - 1) < 1e-15:
            break
    return fraction - 1


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """I_x(a, b), the regularised one."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    # the fraction converges fast on this side only
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(front) / a * _beta_fraction(a, b, x)


def student_cdf(t: float, freedom: int) -> float:
    """The share of Student's distribution below t."""
    if math.isinf(t):
        return float(t > 0)
    tail = _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t)) / 2
    return 1 - tail if t > 0 else tail


@cache
def student_quantile(share: float, freedom: int) -> float:
    """The t below which `share` of the distribution lies."""
    if not 0 < share < 1:
        raise ValueError(f"student_quantile: the share must be between 0 and 1, got {share}")
    if share < 0.5:
        return -student_quantile(1 - share, freedom)
    low, high = 0.0, 1.0
    while student_cdf(high, freedom) < share:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if student_cdf(middle, freedom) < share else (low, middle)
    return (low + high) / 2


def mean_interval(values: Sequence[float], *, confidence: float = CONFIDENCE) -> Interval:
    """The mean, with Student's interval; of one value nothing is known about its spread."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Interval(mean, -math.inf, math.inf)
    t = student_quantile((1 + confidence) / 2, len(values) - 1)
    half = t * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


class Conclusion(Enum):
    """What the differences show, at a margin that was fixed beforehand."""

    EQUAL = "equal"
    BETTER = "better"
    LOST = "lost"
    UNKNOWN = "cannot tell"


@dataclass(frozen=True)
class Equivalence:
    """Two one-sided tests (TOST): is the mean difference inside of -margin ... +margin?

    `interval` holds at 95 %. `p` is the larger of the two one-sided probabilities: below `ALPHA` the two are equal
    within the margin, as if an interval of 90 % lay inside of it. `p_lost` tests the opposite, a mean below -margin.
    """

    seeds: int
    margin: float
    interval: Interval
    p: float
    p_lost: float
    p_better: float

    @property
    def mean(self) -> float:
        return self.interval.value

    @property
    def conclusion(self) -> Conclusion:
        if self.p < ALPHA:
            return Conclusion.EQUAL
        if self.p_lost < ALPHA:
            return Conclusion.LOST
        return Conclusion.BETTER if self.p_better < ALPHA else Conclusion.UNKNOWN


def _above(mean: float, error: float, freedom: int, bound: float) -> float:
    """The probability of a mean at least this high if the true one were `bound`."""
    if error == 0:
        return 0.0 if mean > bound else 1.0
    return 1 - student_cdf((mean - bound) / error, freedom)


def equivalence(differences: Sequence[float], margin: float) -> Equivalence:
    """Test paired differences (other - baseline, one a seed) against a margin. Fewer than two seeds tell nothing."""
    if margin <= 0:
        raise ValueError(f"equivalence: the margin must be positive, got {margin}; fix it before you measure")
    count = len(differences)
    if count < 2:
        mean = differences[0] if count else math.nan
        return Equivalence(count, margin, Interval(mean, -math.inf, math.inf), 1.0, 1.0, 1.0)
    interval = mean_interval(differences)
    mean, freedom = interval.value, count - 1
    error = statistics.stdev(differences) / math.sqrt(count)
    return Equivalence(
        seeds=count,
        margin=margin,
        interval=interval,
        p=max(_above(mean, error, freedom, -margin), _above(-mean, error, freedom, -margin)),
        p_lost=_above(-mean, error, freedom, margin),
        p_better=_above(mean, error, freedom, margin),
    )


def holm(probabilities: Sequence[float]) -> list[float]:
    """Holm's correction of several tests, in their order: the chance of one wrong claim among all stays below alpha."""
    adjusted, so_far = [0.0] * len(probabilities), 0.0
    order = sorted(range(len(probabilities)), key=probabilities.__getitem__)
    for rank, index in enumerate(order):
        so_far = max(so_far, min(1.0, (len(probabilities) - rank) * probabilities[index]))
        adjusted[index] = so_far
    return adjusted
