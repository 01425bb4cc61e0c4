"""Auto Precision Scaling over real processes: exponents exactly as in the paper (papers.md 2.1-2.3, 6.3)."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from dist.pool import Pool
from torch import Tensor

import narrowcast as nc
from narrowcast.collectives.aps import agreed_scales
from narrowcast.collectives.runtime.messages import Exchange
from narrowcast.collectives.segments import Coder
from narrowcast.collectives.transports.torch import TorchTransport

UPPER = {"e5m2+aps": 15, "e4m3+aps": 7, "e3m0+aps": 3}
"""papers.md 2.1: the upper exponent is 2 ** (e - 1) - 1."""


def scales_of(group: dist.ProcessGroup, spec: str, ranks: list[list[Tensor]]) -> list[float]:
    """The agreed scale of each tensor; ranks: the tensors of each rank."""
    tensors = ranks[dist.get_rank(group)]
    exchange = Exchange(TorchTransport(group), 0)
    lengths = [t.numel() for t in tensors]
    x = torch.cat(tensors)
    found = agreed_scales(Coder(nc.codec(spec), lengths, x.dtype), exchange, x)
    return [float(scale) for scale in found]


def agreed(pool: Pool, spec: str, ranks: list[list[Tensor]]) -> list[float]:
    found = pool.run(len(ranks), scales_of, spec, ranks)
    assert all(scales == found[0] for scales in found), "ranks agreed on different scales"
    return found[0]


def test_the_golden_example(pool: Pool) -> None:
    """N = 8, (4,3), largest gradient 3e-4: M = -8, s = 15, worst-case sum 78.6 of 240."""
    ranks = [[torch.full((5,), 1e-5 * (rank + 1))] for rank in range(8)]
    ranks[3][0][2] = -3e-4
    assert agreed(pool, "e4m3+aps", ranks) == [2.0**-15]
    assert 8 * 3e-4 * 2**15 <= 2**7


@pytest.mark.parametrize("spec", UPPER)
@pytest.mark.parametrize("world", [2, 3, 8])
def test_exponents_are_the_papers_in_every_binade(pool: Pool, spec: str, world: int) -> None:
    """Each tensor's largest value on another rank; powers of two and both float32 neighbours of them."""
    tops = []
    for power in range(-60, 60, 7):
        exact = torch.tensor(2.0**power)
        tops += [float(exact), float(torch.nextafter(exact, torch.tensor(torch.inf))), float(exact) * 1.37]
    ranks = [[torch.full((3,), 2.0**-80) for _ in tops] for _ in range(world)]
    for number, top in enumerate(tops):
        ranks[number % world][number][1] = -top if number % 2 else top
    expected = [2.0 ** (math.ceil(math.log2(world) + math.log2(top)) - UPPER[spec]) for top in tops]
    for number, top in enumerate(tops):
        # exactly, where log2 of a product is not
        mantissa, power = math.frexp(world * top)
        expected[number] = 2.0 ** ((power - 1 if mantissa == 0.5 else power) - UPPER[spec])
    assert agreed(pool, spec, ranks) == expected


def test_a_zero_tensor_a_zero_rank_and_no_tensor_at_all(pool: Pool) -> None:
    ranks = [[torch.zeros(4), torch.zeros(4), torch.empty(0)], [torch.zeros(4), torch.full((4,), 2.0), torch.empty(0)]]
    assert agreed(pool, "e5m2+aps", ranks) == [0.0, 2.0 ** (2 - 15), 0.0]


def test_nan_and_inf_do_not_move_the_scale(pool: Pool) -> None:
    bad = [torch.tensor([1.0, torch.nan]), torch.tensor([torch.inf, 1.0]), torch.tensor([torch.nan, -torch.inf])]
    good = [torch.full((2,), 0.5) for _ in bad]
    assert agreed(pool, "e5m2+aps", [bad, good]) == [2.0 ** (1 - 15), 2.0 ** (1 - 15), 2.0 ** (0 - 15)]


def reduced(group: dist.ProcessGroup, spec: str, ranks: list[list[Tensor]], algorithm: str) -> list[Tensor]:
    tensors = [t.clone() for t in ranks[dist.get_rank(group)]]
    nc.all_reduce(tensors, spec, group=group, algorithm=algorithm)
    return tensors


@pytest.mark.parametrize("algorithm", ["two_shot", "one_shot", "ring", "tree"])
@pytest.mark.parametrize("spec", [*UPPER, "e4m3fn+aps"])
def test_the_worst_case_does_not_overflow_on_eight_ranks(pool: Pool, spec: str, algorithm: str) -> None:
    """All ranks at the maximum with one sign: the sum is 8 times that, and finite in every partial sum."""
    tops = [1.0, 1.9999, 1e-30, 1e-3, 57344.0, 1e30, 2.0**124]
    ranks = [[torch.full((33,), top) for top in tops] for _ in range(8)]
    for tensors in pool.run(8, reduced, spec, ranks, algorithm):
        for top, total in zip(tops, tensors, strict=True):
            assert bool(total.isfinite().all()), (top, total)
            # e3m0 in a ring rounds eight times to powers of two
            assert 2 <= float((total / top).min()) <= float((total / top).max()) <= 16, (top, total[0])


@pytest.mark.parametrize("algorithm", ["two_shot", "one_shot", "ring"])
def test_powers_of_two_are_exact(pool: Pool, algorithm: str) -> None:
    """Scaling and unscaling are exact: sums of powers of two that the format holds come back as they are."""
    ranks = [[torch.tensor([2.0**-9, 2.0**-12, 0.0, -(2.0**-9)]), torch.tensor([2.0**60] * 3)] for _ in range(4)]
    for tensors in pool.run(4, reduced, "e5m2+aps", ranks, algorithm):
        assert tensors[0].tolist() == [2.0**-7, 2.0**-10, 0.0, -(2.0**-7)]
        assert tensors[1].tolist() == [2.0**62] * 3


def test_a_nan_or_inf_of_one_rank_reaches_every_rank_and_stays_in_its_tensor(pool: Pool) -> None:
    ranks = [[torch.ones(40), torch.ones(40), torch.ones(40)] for _ in range(3)]
    ranks[1][0][7], ranks[2][1][8] = torch.nan, torch.inf
    for tensors in pool.run(3, reduced, "e5m2+aps", ranks, "two_shot"):
        assert not bool(tensors[0][7].isfinite())
        assert not bool(tensors[1][8].isfinite())
        assert tensors[2].tolist() == [3.0] * 40


def test_tiny_and_huge_tensors_of_one_bucket_keep_their_own_scale(pool: Pool) -> None:
    values = [1e-25, 1.0, 1e25]
    ranks = [[torch.full((20,), v) for v in values] for _ in range(2)]
    for tensors in pool.run(2, reduced, "e5m2+aps", ranks, "two_shot"):
        for v, total in zip(values, tensors, strict=True):
            assert float(total[0]) == pytest.approx(2 * v, rel=0.13)
