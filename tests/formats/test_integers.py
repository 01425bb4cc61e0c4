"""Evenly spaced formats, against numpy's rint."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from each import each
from formats.points import assert_same, hard_points

import narrowcast as nc
from narrowcast.formats.integers import UniformFormat

pytestmark = pytest.mark.usefixtures("implementation")

SYMMETRIC = {f"int{n}": (-(2 ** (n - 1)) + 1, 2 ** (n - 1) - 1) for n in range(2, 9)}
UNSIGNED = {f"uint{n}": (0, 2**n - 1) for n in range(1, 9)}
LEVELS = {f"qsgd{n}": (-(2 ** (n - 1)) + 1, 2 ** (n - 1) - 1) for n in range(2, 9)} | {"ternary": (-1, 1)}
INTEGERS = SYMMETRIC | UNSIGNED | LEVELS
FIXED = ["fixed4.4", "fixed2.6", "fixed1.7", "fixed1.1", "fixed8.0", "fixed8.8", "fixed1.15", "fixed16.0"]


@each("name", INTEGERS)
def test_the_values_are_the_integers_in_range(name: str) -> None:
    low, high = INTEGERS[name]
    assert nc.format(name).grid.tolist() == list(range(low, high + 1))


@each("name", INTEGERS)
def test_integers_round_as_rint_and_saturate(name: str) -> None:
    x = hard_points(nc.format(name))
    wanted = np.clip(np.rint(x.double().numpy()), *INTEGERS[name]).astype(np.float32)
    got = nc.round_to(x, name)
    # only sign-magnitude codes have a negative zero
    assert_same(x, got, wanted if name in LEVELS else wanted + 0.0, name)


@pytest.mark.parametrize("name", FIXED)
def test_fixed_point_rounds_as_rint_on_its_step_and_saturates(name: str) -> None:
    fmt = nc.format(name)
    whole, fraction = map(int, name.removeprefix("fixed").split("."))
    x = hard_points(fmt)
    if len(x) > 50_000:
        x = x[:: len(x) // 50_000]
    steps = np.clip(
        np.rint(x.double().numpy() * 2.0**fraction), -(2 ** (whole + fraction - 1)), 2 ** (whole + fraction - 1) - 1
    )
    assert_same(x, nc.round_to(x, fmt), (steps / 2.0**fraction + 0.0).astype(np.float32), name)


@each("name", [*SYMMETRIC, *FIXED])
def test_codes_are_twos_complement(name: str) -> None:
    fmt = nc.format(name)
    assert isinstance(fmt, UniformFormat)
    codes = torch.arange(2**fmt.bits)
    signed = torch.where(codes >= 2 ** (fmt.bits - 1), codes - 2**fmt.bits, codes)
    assert torch.equal(fmt.values * fmt.steps_per_unit, signed.double())


@pytest.mark.parametrize("name", [*LEVELS, "linear8"])
def test_codes_are_a_sign_and_a_magnitude(name: str) -> None:
    fmt = nc.format(name)
    half = 2 ** (fmt.bits - 1)
    assert torch.equal(fmt.levels[:half], torch.arange(half).double())
    assert torch.equal(fmt.levels[half:], -torch.arange(half).double())
    assert fmt.negative_zero_code == half


@pytest.mark.parametrize("name", SYMMETRIC)
def test_the_code_without_a_partner_is_never_produced(name: str) -> None:
    fmt = nc.format(name)
    unused = 2 ** (fmt.bits - 1)
    assert fmt.reserved == {unused}
    assert unused not in fmt.grid_codes.tolist()


def test_linear8_is_i_over_127() -> None:
    wanted = (np.arange(128) / 127).astype(np.float32)
    assert np.array_equal(nc.format("linear8").values.numpy()[:128], wanted)


@pytest.mark.parametrize("name", ["int8", "uint4", "qsgd4", "fixed4.4", "linear8", "ternary"])
def test_non_finite_values_become_the_ends_as_the_rules_say(name: str) -> None:
    fmt = nc.format(name)
    got = nc.round_to(torch.tensor([float("nan"), float("inf"), float("-inf")]), fmt).tolist()
    assert got == [fmt.max, fmt.max, fmt.min]
    assert float(fmt.rules["nan"]) == pytest.approx(fmt.max, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["int8", "fixed4.4", "uint3", "qsgd5"])
def test_sixteen_bit_input_is_rounded_as_its_float32_value(name: str, dtype: torch.dtype) -> None:
    x = (torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 20).to(dtype)
    assert torch.equal(nc.round_to(x, name), nc.round_to(x.float(), name).to(dtype))
    assert nc.round_to(x, name).dtype is dtype
