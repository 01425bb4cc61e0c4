"""`ternary` is TernGrad: s * sign(g) * b with s the largest magnitude and P(b = 1) = |g| / s."""

from __future__ import annotations

import math

import pytest
import torch
from laws.inputs import normal

import narrowcast as nc


def test_values_are_minus_the_maximum_zero_and_the_maximum_of_the_block() -> None:
    codec = nc.codec("ternary/64")
    x = normal(640)
    y = codec.decode(codec.encode(x, seed=1), 640)
    for part, back in zip(x.split(64), y.split(64), strict=True):
        top = part.abs().max().item()
        assert set(back.abs().unique().tolist()) <= {0.0, top}
        assert bool(((back == 0) | (back.sign() == part.sign())).all())


def test_the_largest_value_is_always_sent() -> None:
    codec = nc.codec("ternary/64")
    x = normal(64)
    where = int(x.abs().argmax())
    for seed in range(50):
        assert codec.decode(codec.encode(x, seed=seed), 64)[where] == x[where]


@pytest.mark.parametrize("share", [0.0, 0.125, 0.5, 0.9])
def test_a_value_is_sent_with_the_probability_of_its_share(share: float) -> None:
    codec = nc.codec("ternary/4096")
    x = torch.full((4096,), -3 * share)
    x[0] = 3.0
    sent = torch.stack([codec.decode(codec.encode(x, seed=seed), 4096)[1:] for seed in range(50)])
    assert set(sent.unique().tolist()) <= {-3.0, 0.0}
    found = float((sent == -3).double().mean())
    assert found == pytest.approx(share, abs=5 * math.sqrt(share * (1 - share) / sent.numel()) + 2**-17)


def test_two_bits_a_value_and_one_scale_a_block() -> None:
    assert nc.codec("ternary/512").nbytes(512) == 128 + 4
    assert nc.codec("ternary/512").stochastic
