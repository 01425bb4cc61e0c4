"""`onebit` is 1-bit SGD as CNTK has it (papers.md 3.2), and `sign` is signSGD with the mean magnitude."""

from __future__ import annotations

import math

import pytest
import torch
from laws.inputs import normal
from torch import Tensor

import narrowcast as nc


def cntk_column(u: list[float]) -> tuple[list[int], list[float]]:
    """ColumnQuantizer with ZeroThreshold and one bit, line by line of the text, in Python's floats."""
    below, rest = [v for v in u if v < 0], [v for v in u if not v < 0]
    mean0 = math.fsum(below) / max(len(below), 1)
    mean1 = math.fsum(rest) / max(len(rest), 1)
    newmean = (mean0 + mean1) / 2
    radius = 2 * (mean1 - newmean)
    lower, upper = newmean - radius, newmean + radius
    bits = [int(v >= 0) for v in u]
    return bits, [lower + (bit + 0.5) * (upper - lower) / 2 for bit in bits]


def cntk(x: Tensor, rows: int) -> tuple[list[int], Tensor]:
    bits: list[int] = []
    values: list[float] = []
    for column in x.split(rows):
        some_bits, some_values = cntk_column(column.tolist())
        bits += some_bits
        values += some_values
    return bits, torch.tensor(values, dtype=torch.float64)


def bits_of(wire: Tensor, n: int) -> list[int]:
    return [int(wire[i // 8]) >> (i % 8) & 1 for i in range(n)]


@pytest.mark.parametrize("rows", [16, 48, 64, 512])
@pytest.mark.parametrize("n", [1, 16, 63, 64, 65, 1000])
def test_bits_and_values_are_those_of_cntk(rows: int, n: int) -> None:
    codec = nc.codec(f"onebit/{rows}")
    x = normal(n, seed=n) * torch.exp(normal(n, seed=n + 1)) + 0.1
    x[::11] = 0
    wire = codec.encode(x)
    bits, values = cntk(x, rows)
    assert bits_of(wire, n) == bits
    # ours sums float32 numbers by halves: a few units in the last place
    assert torch.allclose(codec.decode(wire, n).double(), values, rtol=2e-6, atol=0)


def test_on_numbers_whose_means_are_exact_it_is_cntk_exactly() -> None:
    x = torch.tensor([-1.0, -2.0, -3.0, -2.0, 0.0, 4.0, 8.0, 0.0, 0.5, -0.5, 1.5, -1.5, 2.0, -3.0, 4.0, -3.0])
    codec = nc.codec("onebit/16")
    assert torch.equal(codec.decode(codec.encode(x), 16).double(), cntk(x, 16)[1])


def test_an_empty_side_counts_as_one_value_and_is_zero() -> None:
    codec = nc.codec("onebit/16")
    for x in (torch.full((16,), 3.0), torch.full((16,), -3.0)):
        wire = codec.encode(x)
        low, high = wire[4:].clone().view(torch.float32).tolist()
        assert {low, high} == {0.0, x[0].item()}
        assert torch.equal(codec.decode(wire, 16), x)


def test_the_padding_of_the_last_block_does_not_count() -> None:
    codec = nc.codec("onebit/64")
    assert codec.decode(codec.encode(torch.tensor([4.0, 2.0, -1.0])), 3).tolist() == [3.0, 3.0, -1.0]


def test_the_mean_of_a_block_is_kept() -> None:
    x = normal(6400)
    y = nc.codec("onebit/64").decode(nc.codec("onebit/64").encode(x), 6400)
    assert torch.allclose(y.view(-1, 64).mean(dim=1), x.view(-1, 64).mean(dim=1), atol=1e-6)


def test_cntk_with_feedback_over_many_steps() -> None:
    """residual_new = u - decoded, with u = gradient + residual."""
    codec, n = nc.codec("onebit/64+ef"), 256
    feedback = nc.ErrorFeedback(codec)
    residual = torch.zeros(n, dtype=torch.float64)
    for step in range(20):
        gradient = normal(n, seed=100 + step)
        u = gradient.double() + residual
        decoded = cntk(u, 64)[1]
        residual = u - decoded
        y = codec.decode(feedback.encode(gradient), n)
        assert torch.allclose(y.double(), decoded, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("block", [16, 48, 64, 4096])
def test_sign_is_plus_or_minus_the_mean_magnitude(block: int) -> None:
    codec = nc.codec(f"sign/{block}")
    x = normal(3 * block + 5)
    x[7] = 0
    wire = codec.encode(x)
    y = codec.decode(wire, len(x))
    assert bits_of(wire, len(x)) == (x >= 0).int().tolist()
    for part, back in zip(x.split(block), y.split(block), strict=True):
        mean = part.double().abs().mean()
        assert torch.allclose(back.double(), torch.where(part >= 0, mean, -mean), rtol=2e-6)


def test_sums_of_huge_values_do_not_overflow() -> None:
    for spec in ("onebit/64", "sign/64"):
        y = nc.codec(spec).decode(nc.codec(spec).encode(torch.full((64,), 3.4e38)), 64)
        assert torch.allclose(y, torch.tensor(3.4e38), rtol=1e-6)
