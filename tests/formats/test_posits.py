"""Posits are those of SoftPosit: every value, every boundary, both neighbours, and random numbers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
import pytest
import softposit
import torch
from each import each
from formats.points import assert_same, same, with_neighbours
from torch import Tensor

import narrowcast as nc

pytestmark = pytest.mark.usefixtures("implementation")

STANDARD = range(3, 17)
"""SoftPosit's PX2 has es = 2 (the standard of 2022) in every width."""


def oracle(name: str) -> Callable[[float], float]:
    if name == "posit8.0":
        return lambda x: float(softposit.convertP8ToDouble(softposit.convertDoubleToP8(x)))
    if name == "posit16.1":
        return lambda x: float(softposit.convertP16ToDouble(softposit.convertDoubleToP16(x)))
    width = int(name.removeprefix("posit").removesuffix(".2"))
    return lambda x: float(softposit.convertPX2ToDouble(softposit.convertDoubleToPX2(x, width)))


@functools.cache
def rounded_by_softposit(name: str) -> np.ndarray:
    """Slow, so once for both implementations."""
    return np.array(list(map(oracle(name), points(name).tolist())), dtype=np.float32)


def points(name: str, most: int = 30_000) -> Tensor:
    fmt = nc.format(name)
    ends = torch.tensor([fmt.max * 2, -fmt.max * 2, fmt.smallest / 2, -fmt.smallest / 2, 1e-30, -1e-30, 1e30])
    hard = with_neighbours(torch.cat([fmt.grid, fmt.boundaries(), ends.double()]))
    hard = hard[torch.linspace(0, len(hard) - 1, min(most, len(hard))).long()]
    generator = torch.Generator().manual_seed(3)
    random = torch.randn(2000, generator=generator) * torch.exp2(24 * torch.randn(2000, generator=generator))
    return torch.cat([hard, random])


NAMES = ["posit8.0", "posit16.1", *(f"posit{width}.2" for width in STANDARD)]


@pytest.mark.parametrize("name", NAMES)
def test_every_value_boundary_and_neighbour_rounds_as_in_softposit(name: str) -> None:
    x = points(name)
    assert_same(x, nc.round_to(x, name), rounded_by_softposit(name), name)


@each("name", NAMES)
def test_every_value_is_one_of_softposit(name: str) -> None:
    values = nc.format(name).grid
    wanted = list(map(oracle(name), values.tolist()))
    assert values.tolist() == wanted
    assert len(set(wanted)) == 2 ** nc.format(name).bits - 1


@pytest.mark.parametrize("name", ["posit8.0", "posit8.1", "posit8.2", "posit6.2", "posit16.1"])
def test_nothing_overflows_and_nothing_but_zero_becomes_zero(name: str) -> None:
    fmt = nc.format(name)
    x = torch.tensor([3.4e38, -3.4e38, 2.0**-149, -(2.0**-149), 0.0, -0.0])
    assert nc.round_to(x, fmt).tolist() == [fmt.max, -fmt.max, fmt.smallest, -fmt.smallest, 0.0, 0.0]


@pytest.mark.parametrize("name", ["posit8.0", "posit8.1", "posit8.2", "posit6.2", "posit16.1"])
def test_nan_and_inf_are_not_a_real(name: str) -> None:
    fmt = nc.format(name)
    assert nc.round_to(torch.tensor([math.nan, math.inf, -math.inf]), fmt).isnan().all()
    assert fmt.nan_code == 2 ** (fmt.bits - 1)
    assert fmt.inf_code is None


def test_negating_a_code_negates_the_value() -> None:
    values = nc.format("posit8.1").values
    codes = torch.arange(1, 256)
    codes = codes[codes != 128]
    assert same(values[256 - codes], -values[codes])


def test_the_codes_of_rising_values_rise_as_signed_integers() -> None:
    fmt = nc.format("posit16.1")
    signed = torch.where(fmt.grid_codes >= 2**15, fmt.grid_codes - 2**16, fmt.grid_codes)
    assert bool((signed.diff() > 0).all())
