"""A quire: the exact sum of exact products, rounded once; compared with fractions."""

from __future__ import annotations

import bisect
import math
from fractions import Fraction
from functools import cache

import pytest
import torch
from torch import Tensor

from narrowcast import simulate
from narrowcast.formats import format as format_named
from narrowcast.kernels.matmul import explain
from narrowcast.kernels.matmul.accumulator import accumulator
from narrowcast.kernels.reference import quire

FORMATS = ("posit8.0", "posit8.1", "posit16.1", "e4m3fn", "bf16", "fp16")


def random(*shape: int, seed: int, spread: float = 0.0) -> Tensor:
    """Normal numbers, times powers of two up to 2**spread either way."""
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=made)
    return torch.ldexp(x, (spread * (2 * torch.rand(*shape, generator=made) - 1)).int())


def exact(a: Tensor, b: Tensor) -> list[list[Fraction]]:
    rows, columns = a.tolist(), b.t().tolist()
    return [[sum(Fraction(x) * Fraction(y) for x, y in zip(r, c, strict=True)) for c in columns] for r in rows]


@cache
def boundaries_of(name: str) -> list[Fraction]:
    return [Fraction(x) for x in format_named(name).boundaries().tolist()]


def nearest(value: Fraction, name: str) -> float:
    """By the format's own table: the boundaries between neighbours, and where a tie goes; within its range."""
    fmt, boundaries = format_named(name), boundaries_of(name)
    at = bisect.bisect_left(boundaries, value)
    if at < len(boundaries) and boundaries[at] == value and bool(fmt.tie_goes_up()[at]):
        at += 1
    return float(fmt.grid[at])


@pytest.mark.parametrize("spread", [0, 30], ids=["alike", "far apart"])
@pytest.mark.parametrize("name", FORMATS)
def test_the_sum_is_exact_and_rounded_once(name: str, spread: int) -> None:
    fmt = format_named(name)
    a, b = random(3, 50, seed=1, spread=spread), random(50, 4, seed=2, spread=spread)
    a[0, 1], b[1] = -a[0, 0], b[0]  # these two cancel, so that what is left decides
    got = simulate.matmul(a, b, f"{name}+quire+saturate").tolist()
    for i, row in enumerate(exact(a, b)):
        for j, value in enumerate(row):
            assert got[i][j] == nearest(min(max(value, Fraction(fmt.min)), Fraction(fmt.max)), name)


def test_what_every_order_of_float64_would_lose_is_kept() -> None:
    a = torch.tensor([[2.0**60, 1.0, -(2.0**60), 2.0**-60, 2.0**-149]])
    b = torch.tensor([[2.0**60], [1.0], [2.0**60], [2.0**-60], [2.0**-149]])
    assert simulate.matmul(a, b, "fp32+quire").item() == 1.0
    assert simulate.matmul(a[:, 2:] * -1, b[2:] * 0 + torch.tensor([[0.0], [1.0], [1.0]]), "fp32+quire").item() < 0
    total = float(quire.exact_product(a[None], b[None]))
    # rounded to odd: beyond 1 there is more
    assert total == math.nextafter(1.0, 2.0)


def test_many_terms_are_cut_and_carried(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = random(2, 300, seed=3, spread=20), random(300, 2, seed=4, spread=20)
    want = quire.exact_product(a[None], b[None])
    monkeypatch.setattr(quire, "TERMS", 7)
    assert torch.equal(quire.exact_product(a[None], b[None]), want)
    ones = torch.ones(1, 9000)
    assert simulate.matmul(ones, ones.t(), "fp32+quire").item() == 9000


def test_what_is_not_finite_stays_so_in_its_own_row() -> None:
    a = torch.tensor([[1.0, math.inf], [1.0, math.nan], [1.0, 2.0], [0.0, -0.0]])
    got = simulate.matmul(a, torch.ones(2, 1), "bf16+quire").flatten()
    assert got[0] == math.inf
    assert got[1].isnan()
    assert got[2:].tolist() == [3.0, 0.0]
    assert simulate.matmul(a, torch.ones(2, 1), "posit8.1+quire").isnan().flatten().tolist() == [
        True,
        True,
        False,
        False,
    ]


def test_empty_products_are_zero() -> None:
    assert simulate.matmul(torch.ones(2, 0), torch.ones(0, 3), "posit8.1+quire").tolist() == [[0.0] * 3] * 2


def test_its_gradients_are_exact_sums_too() -> None:
    a, b = random(3, 40, seed=5).requires_grad_(), random(40, 2, seed=6).requires_grad_()
    simulate.matmul(a, b, "posit16.1+quire").sum().backward()
    assert torch.equal(a.grad, simulate.matmul(torch.ones(3, 2), b.detach().t(), "posit16.1+quire"))


@pytest.mark.parametrize("option", ["kahan", "fma", "sr", "mogami", "mul=bf16", "pairwise"])
def test_it_goes_with_nothing_that_rounds_on_the_way(option: str) -> None:
    with pytest.raises(ValueError, match="quire"):
        accumulator(f"posit8.1+quire+{option}")


def test_its_name_is_read_back_and_explained() -> None:
    assert str(accumulator("posit8.1+quire")) == "posit8.1+quire"
    assert "exact sums" in explain("posit8.1+quire").why
