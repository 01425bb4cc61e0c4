"""The 8-bit types of Dettmers 2016: closed forms and golden values of papers.md, sections 1.2 and 6.1."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch

import narrowcast as nc

pytestmark = pytest.mark.usefixtures("implementation")

TEN = Fraction(10)


def dynamic_tree(code: int) -> Fraction:
    """Read the bits: n zeros, a flag, a path through a tree whose first split of (0.1, 1) is at 0.45."""
    if code in (0, 1):
        return Fraction(code)
    text = f"{code:07b}"
    zeros = text.index("1")
    path = text[zeros + 1 :]
    low, high = (Fraction(45, 100), Fraction(1)) if path[0] == "1" else (Fraction(1, 10), Fraction(45, 100))
    for bit in path[1:]:
        middle = (low + high) / 2
        low, high = (middle, high) if bit == "1" else (low, middle)
    return (low + high) / 2 / TEN**zeros


def static_tree(code: int) -> Fraction:
    exponent, leaf = code >> 4, code & 15
    lower = Fraction(1, 10) + Fraction(4375, 100_000) * leaf
    upper = Fraction(45, 100) + Fraction(675, 10_000) * (leaf - 8)
    return (lower if leaf < 8 else upper) * TEN ** (exponent - 5) if code else Fraction(0)


def mantissa(code: int) -> Fraction:
    return (code & 15) * TEN ** ((code >> 4) - 6)


RULES: dict[str, Callable[[int], Fraction]] = {"dtree8": dynamic_tree, "stree8": static_tree, "mantissa8": mantissa}


def float32(value: Fraction | float) -> float:
    return float(np.float32(float(value)))


@pytest.mark.parametrize("name", RULES)
def test_every_code_has_the_value_of_its_bits(name: str) -> None:
    values = nc.format(name).values
    wanted = [float32(RULES[name](code)) for code in range(128)]
    # a decimal number has two neighbouring float32 at most one unit apart; the shipped tables are met as closely
    assert values[:128].tolist() == pytest.approx(wanted, rel=1.2e-7, abs=0)
    assert torch.equal(values[128:], -values[:128])


@pytest.mark.parametrize("name", RULES)
def test_every_value_is_the_float32_nearest_to_the_decimal_number(name: str) -> None:
    assert nc.format(name).values[:128].tolist() == [float32(RULES[name](code)) for code in range(128)]


LITERAL = {
    "0000010": 2.75e-6,
    "0000011": 7.25e-6,
    "0000100": 1.875e-5,
    "0000111": 8.625e-5,
    "0001000": 1.4375e-4,
    "1000000": 0.10546875,
    "1011111": 0.44453125,
    "1100000": 0.45859375,
    "1111111": 0.99140625,
}


@pytest.mark.parametrize("bits", LITERAL)
def test_the_literal_codes_of_the_dynamic_tree(bits: str) -> None:
    values = nc.format("dtree8").values
    assert values[int(bits, 2)].item() == float32(LITERAL[bits])
    assert values[int("1" + bits, 2)].item() == -float32(LITERAL[bits])


def test_the_number_in_the_reference_kernels_is_the_code_less_two() -> None:
    """There 0 to 125 count the table of 126 values in rising order, 126 is zero and 127 the maximum."""
    values = nc.format("dtree8").values[:128]
    kernel_table = [*sorted(values[2:].tolist()), 0.0, 1.0]
    assert len(kernel_table) == 128
    for code in range(128):
        assert kernel_table[(code - 2) % 128] == values[code]


def test_the_decades_of_the_dynamic_tree_hold_64_32_16_8_4_and_2_values() -> None:
    values = nc.format("dtree8").values[2:128]
    counts = [int(((values > 10.0 ** -(n + 1)) & (values < 10.0**-n)).sum()) for n in range(6)]
    assert counts == [64, 32, 16, 8, 4, 2]


def test_the_ranges_that_the_paper_states() -> None:
    assert nc.format("stree8").smallest == float32(1.4375e-6)
    assert nc.format("stree8").max == 92.25
    assert nc.format("mantissa8").max == 150.0
    assert nc.format("mantissa8").smallest == float32(1e-6)
    assert len(nc.format("mantissa8").grid) < 255, "many values of the mantissa type have several codes"


GOLDEN = {
    0.2345678: (0.23671875, 0.23125, 0.2, 30 / 127),
    0.0000234: (1.875e-5, 2.3125e-5, 2e-5, 0.0),
    1.0: (1.0, 1.0, 1.0, 1.0),
    1e-6: (0.0, 1.4375e-6, 1e-6, 0.0),
}


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("x", GOLDEN)
def test_the_golden_values(x: float, sign: int) -> None:
    for name, wanted in zip(("dtree8", "stree8", "mantissa8", "linear8"), GOLDEN[x], strict=True):
        assert nc.round_to(torch.tensor([sign * x]), name).item() == sign * float32(wanted), name


def test_the_golden_values_through_codecs() -> None:
    x = torch.tensor([0.2345678, 0.0000234, 1.0, 1e-6])
    for spec, column in (("dtree8", 0), ("linear8", 3), ("stree8@1", 1), ("mantissa8@1", 2)):
        codec = nc.codec(spec)
        wanted = torch.tensor([GOLDEN[key][column] for key in GOLDEN])
        assert torch.equal(codec.decode(codec.encode(x), 4), wanted), spec


@pytest.mark.parametrize("name", [*RULES, "linear8"])
def test_rounding_is_symmetric(name: str) -> None:
    fmt = nc.format(name)
    x = torch.cat([fmt.boundaries().float(), fmt.grid.float(), torch.linspace(-2, 2, 1001)])
    assert torch.equal(nc.round_to(-x, fmt), -nc.round_to(x, fmt))
