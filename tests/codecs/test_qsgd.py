"""QSGD (papers.md 3.2): levels, probabilities, no bias, and the bounds of the paper. TernGrad is in test_ternary.py."""

from __future__ import annotations

import math

import pytest
import torch
from laws.inputs import normal, unpacked
from torch import Tensor

import narrowcast as nc

ROUNDS = 400


def draws(spec: str, x: Tensor, rounds: int = ROUNDS) -> Tensor:
    codec = nc.codec(spec)
    return torch.stack([codec.decode(codec.encode(x, seed=seed), len(x)) for seed in range(rounds)]).double()


@pytest.mark.parametrize("norm", ["", "+l2"])
@pytest.mark.parametrize("bits", range(2, 9))
def test_values_are_whole_levels_of_the_norm(bits: int, norm: str) -> None:
    """norm * sign * level / s with s = 2**(bits - 1) - 1: the norm is the maximum, or with +l2 the L2 norm."""
    codec = nc.codec(f"qsgd{bits}/128{norm}")
    x, s = normal(512), 2 ** (bits - 1) - 1
    wire = codec.encode(x, seed=1)
    code = unpacked(wire[: 512 * bits // 8], bits, 512)
    level, negative = code % 2 ** (bits - 1), code >> (bits - 1) == 1
    norms = x.view(4, 128).double().norm(dim=1) if norm else x.view(4, 128).double().abs().amax(dim=1)
    wanted = norms.repeat_interleave(128) * torch.where(negative, -1, 1) * level / s
    assert torch.allclose(codec.decode(wire, 512).double(), wanted, rtol=1e-6, atol=0)
    assert bool((negative == x.signbit()).all())
    # the level is floor(a s) or the next one
    exact = x.double().abs() / norms.repeat_interleave(128) * s
    assert bool(((level >= (exact - 1e-5).floor()) & (level <= (exact + 1e-5).floor() + 1)).all())


@pytest.mark.parametrize("spec", ["qsgd2/128", "qsgd4/512", "qsgd4/512+l2", "qsgd8/512", "qsgd2/64+l2"])
def test_the_mean_is_the_input(spec: str) -> None:
    x = normal(512)
    found = draws(spec, x)
    error = float((found.mean(dim=0) - x).square().mean().sqrt())
    assert error == pytest.approx(math.sqrt(float(found.var(dim=0).mean()) / ROUNDS), rel=0.15)


@pytest.mark.parametrize("bits, block", [(2, 128), (4, 512), (8, 512), (2, 64), (3, 4096)])
def test_with_the_l2_norm_the_variance_is_within_the_bound_of_the_paper(bits: int, block: int) -> None:
    """E |Q - v|^2 <= min(d / s^2, sqrt(d) / s) |v|^2."""
    s = 2 ** (bits - 1) - 1
    x = normal(block, seed=bits)
    error = (draws(f"qsgd{bits}/{block}+l2", x) - x).square().sum(dim=1).mean()
    bound = min(block / s**2, math.sqrt(block) / s) * float(x.double().square().sum())
    assert 0 < float(error) <= bound


@pytest.mark.parametrize("bits, block", [(2, 128), (2, 4096), (3, 4096)])
def test_with_the_l2_norm_few_values_are_left(bits: int, block: int) -> None:
    """E |Q|_0 <= s (s + sqrt(d))."""
    s = 2 ** (bits - 1) - 1
    left = (draws(f"qsgd{bits}/{block}+l2", normal(block), 100) != 0).double().sum(dim=1).mean()
    assert float(left) <= s * (s + math.sqrt(block)) * 1.02


def test_the_probability_of_the_upper_level_is_the_fraction() -> None:
    x = torch.tensor([7.0] + [2.25] * 4095)
    y = draws("qsgd4/4096", x, 50)[:, 1:]
    assert set(y.unique().tolist()) == {2.0, 3.0}
    share = float((y == 3).double().mean())
    assert share == pytest.approx(0.25, abs=5 * math.sqrt(0.25 * 0.75 / y.numel()))


def test_the_examples_of_the_paper_cost_what_it_says() -> None:
    """Bits per element with one float32 for each bucket: papers.md 3.2."""
    wanted = {"qsgd2/128": 2.25, "qsgd4/512": 4.0625, "qsgd8/512": 8.0625}
    assert {spec: nc.codec(spec).bits_per_value for spec in wanted} == wanted
    assert nc.codec("qsgd4/512").nbytes(512 * 1000) == (512 * 4 // 8 + 4) * 1000
