"""The random bits are Philox4x32-7, assigned to elements as written down, and rounding with them has no bias."""

from __future__ import annotations

import math
from importlib import import_module

import pytest
import torch

import narrowcast as nc
from narrowcast.kernels.reference.rounding import level_grid

ours = import_module("narrowcast.kernels.reference.rounding")
MASK = 2**32 - 1
Words = tuple[int, int, int, int]


def philox4x32(counter: Words, key: tuple[int, int], rounds: int) -> Words:
    """Salmon et al. 2011, in Python's integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        product0, product1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (product1 >> 32) ^ c1 ^ k0, product1 & MASK, (product0 >> 32) ^ c3 ^ k1, product0 & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1, c2, c3


ONES: Words = (MASK, MASK, MASK, MASK)
PI: Words = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
PI_KEY = (0xA4093822, 0x299F31D0)
KNOWN = [
    (10, (0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (10, ONES, (MASK, MASK), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (10, PI, PI_KEY, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    (7, (0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    (7, ONES, (MASK, MASK), (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (7, PI, PI_KEY, (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
]
"""The known answers of Random123."""


@pytest.mark.parametrize("rounds, counter, key, answer", KNOWN)
def test_the_known_answers_of_random123(rounds: int, counter: Words, key: tuple[int, int], answer: Words) -> None:
    assert philox4x32(counter, key, rounds) == answer


@pytest.mark.parametrize("rounds, counter, key, answer", KNOWN)
def test_ours_gives_the_known_answers(
    rounds: int, counter: Words, key: tuple[int, int], answer: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ours, "ROUNDS", rounds)
    low, high, stream_low, stream_high = counter
    both = low | high << 32
    signed = both - 2**64 if both >= 2**63 else both
    words = ours.philox(torch.tensor([signed]), key[0] | key[1] << 32, stream_low | stream_high << 32)
    assert tuple(int(word) for word in words) == answer


def test_seven_rounds_are_used() -> None:
    assert ours.ROUNDS == 7


def bits_of_element(index: int, seed: int, stream: int) -> int:
    """The words of docs/wire-format.md: i = 128 g + 16 p + l takes half p % 2 of word p // 2 of counter 16 g + l."""
    group, rest = divmod(index, 128)
    piece, lane = divmod(rest, 16)
    count = 16 * group + lane
    counter = (count & MASK, count >> 32, stream & MASK, stream >> 32)
    words = philox4x32(counter, (seed & MASK, seed >> 32), 7)
    return words[piece // 2] >> (16 * (piece % 2)) & 0xFFFF


@pytest.mark.parametrize("seed, stream", [(0, 0), (7, 0), (0, 7), (2**63 + 12345, 2**40 + 3), (2**64 - 1, 2**64 - 1)])
@pytest.mark.parametrize("offset", [0, 16, 112, 128, 4096, 2**34 + 48])
def test_each_element_has_the_bits_that_its_index_says(seed: int, stream: int, offset: int) -> None:
    wanted = [bits_of_element(offset + i, seed, stream) for i in range(300)]
    assert ours.random_bits(300, seed, stream, offset).tolist() == wanted


def test_a_part_has_the_noise_of_the_whole() -> None:
    whole = ours.random_bits(5000, 3, 4)
    for start, count in ((0, 1), (16, 100), (112, 32), (128, 128), (1008, 3992)):
        assert torch.equal(ours.random_bits(count, 3, 4, offset=start), whole[start : start + count])


def test_seed_and_stream_both_matter_and_nothing_else_does() -> None:
    first = ours.random_bits(1000, 1, 2)
    torch.manual_seed(99)
    torch.rand(10)
    assert torch.equal(ours.random_bits(1000, 1, 2), first)
    assert not torch.equal(ours.random_bits(1000, 2, 1), first)
    assert not torch.equal(ours.random_bits(1000, 1, 3), first)
    assert not torch.equal(ours.random_bits(1000, 0, 2), first)


def test_all_sixteen_bits_are_evenly_distributed() -> None:
    bits = ours.random_bits(2**20, 5, 0)
    assert int(bits.min()) >= 0
    assert int(bits.max()) < 2**16
    expected = 2**20 / 256
    for part in (bits >> 8, bits & 255):
        chi_square = float(((torch.bincount(part, minlength=256) - expected) ** 2 / expected).sum())
        # 255 degrees of freedom: mean 255, standard deviation 22.6
        assert 255 - 5 * 22.6 < chi_square < 255 + 5 * 22.6


def test_neighbouring_elements_are_uncorrelated() -> None:
    u = ours.random_bits(2**20, 5, 0).double() / 2**16 - 0.5
    for distance in (1, 2, 15, 16, 17, 128):
        correlation = float((u[distance:] * u[:-distance]).mean()) * 12
        assert abs(correlation) < 5 / math.sqrt(2**20)


@pytest.mark.parametrize("name", ["int8", "e4m3fn", "e5m2", "dtree8", "posit8.1", "qsgd4"])
def test_over_all_noise_the_share_rounded_up_is_the_fraction_exactly(name: str) -> None:
    """Of the 65536 values that the noise can take, fraction * 65536 round away from zero: no bias at all."""
    grid = level_grid(nc.format(name))
    every_noise = torch.arange(2**16)
    for fraction in (0, 1, 2, 3, 1000, 2**15, 2**16 - 1):
        for low in (len(grid.values) // 2 + 3, len(grid.values) - 2):
            near, far = float(grid.values[low]), float(grid.values[low + 1])
            t = torch.tensor(near + (far - near) * fraction / 2**16)
            exact = (t.double() - near) / (far - near) * 2**16
            up = int((grid.stochastic(t.expand(2**16), every_noise) == low + 1).sum())
            assert abs(up - exact) <= 0.5, f"{fraction} of 65536 between {near} and {far}: {up}"


@pytest.mark.parametrize("x", [1.1, -1.1, 1.0001, 1e-5, 3e-6, 447.0, -0.3])
@pytest.mark.parametrize("name", ["e5m2", "e4m3fn", "int8", "fixed4.4"])
def test_the_mean_of_stochastic_rounding_is_the_value(name: str, x: float) -> None:
    fmt = nc.format(name)
    x = max(fmt.min, min(fmt.max, x))
    n = 2**18
    y = nc.round_to(torch.full((n,), x), fmt, rounding="stochastic", seed=11).double()
    wanted = float(torch.tensor(x))
    low, high = float(fmt.grid[fmt.grid <= wanted][-1]), float(fmt.grid[fmt.grid >= wanted][0])
    assert set(y.unique().tolist()) <= {low, high}
    gap = high - low
    fraction = (wanted - low) / gap if gap else 0
    sigma = gap * math.sqrt(max(fraction * (1 - fraction), 1 / 2**17) / n)
    # 16 bits of noise resolve a share to 2**-17
    assert abs(float(y.mean()) - wanted) <= 4.5 * sigma + gap * 2**-17


@pytest.mark.parametrize("spec", ["int8/64+sr", "qsgd4/64", "mxfp4+sr", "uint4/64+sr", "nvfp4+sr", "e4m3fn/64+sr"])
def test_the_mean_over_seeds_of_a_codec_is_the_input(spec: str) -> None:
    codec = nc.codec(spec)
    x = torch.randn(256, generator=torch.Generator().manual_seed(0))
    rounds = 1500
    total, square = torch.zeros(256, dtype=torch.float64), torch.zeros(256, dtype=torch.float64)
    for seed in range(rounds):
        y = codec.decode(codec.encode(x, seed=seed, stream=3), 256).double()
        total += y
        square += y * y
    mean = total / rounds
    variance = square / rounds - mean * mean
    limits = codec.limits(codec.encode(x), 256)
    assert limits is not None
    inside = (x >= limits[0]) & (x <= limits[1])  # what saturates has a bias, as it must
    assert inside.float().mean() > 0.9
    # an unbiased mean of `rounds` draws errs by the square root of variance / rounds, neither more nor less
    error = float((mean - x)[inside].square().mean().sqrt())
    assert error == pytest.approx(math.sqrt(float(variance[inside].mean()) / rounds), rel=0.2)
