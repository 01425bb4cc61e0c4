"""Small floats are those of ml_dtypes: every value, every midpoint, both neighbours. Names, limits, overflow."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from each import each
from formats.points import assert_same, beyond, hard_points, same, with_neighbours
from torch import Tensor

import narrowcast as nc
from narrowcast.formats import all_formats
from narrowcast.formats.floats import FloatFormat

pytestmark = pytest.mark.usefixtures("implementation")

TWINS = {
    "e5m2": ml_dtypes.float8_e5m2,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "e4m3": ml_dtypes.float8_e4m3,
    "e4m3fn": ml_dtypes.float8_e4m3fn,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e4m3b11fnuz": ml_dtypes.float8_e4m3b11fnuz,
    "e3m4": ml_dtypes.float8_e3m4,
    "e2m3fn": ml_dtypes.float6_e2m3fn,
    "e3m2fn": ml_dtypes.float6_e3m2fn,
    "e2m1fn": ml_dtypes.float4_e2m1fn,
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
}
SCALE = {"e8m0fnu": ml_dtypes.float8_e8m0fnu}
ROUNDINGS = ("nearest", "nearest-away", "toward-zero", "up", "down", "stochastic")
every_twin = pytest.mark.parametrize("name", TWINS)


def all_codes(bits: int, dtype: type) -> np.ndarray:
    """The value of every code, as the twin sees it."""
    codes = np.arange(2**bits).astype(np.uint16 if bits > 8 else np.uint8)
    return codes.view(dtype).astype(np.float32)


def cast(x: Tensor, dtype: type) -> np.ndarray:
    """The twin's own cast, and back. From float32: from float64 ml_dtypes rounds twice."""
    with np.errstate(over="ignore", invalid="ignore"):
        return x.numpy().astype(np.float32).astype(dtype).astype(np.float32)


@each("name", [*TWINS, *SCALE])
def test_every_code_has_the_value_that_ml_dtypes_gives_it(name: str) -> None:
    fmt = nc.format(name)
    assert same(fmt.values.float(), all_codes(fmt.bits, (TWINS | SCALE)[name]))


@every_twin
def test_every_value_midpoint_and_neighbour_rounds_as_in_ml_dtypes(name: str) -> None:
    fmt = nc.format(name)
    x = hard_points(fmt)
    assert_same(x, nc.round_to(x, fmt), cast(x, TWINS[name]), name)


@every_twin
def test_random_bit_patterns_round_as_in_ml_dtypes(name: str) -> None:
    patterns = torch.randint(-(2**31), 2**31, (100_000,), generator=torch.Generator().manual_seed(1))
    x = patterns.to(torch.int32).view(torch.float32)
    x = x[x.isfinite()]
    assert_same(x, nc.round_to(x, name), cast(x, TWINS[name]), name)


@every_twin
def test_nan_and_inf_are_what_ml_dtypes_makes_of_them_where_the_format_can_say_nan(name: str) -> None:
    fmt = nc.format(name)
    x = torch.tensor([math.inf, -math.inf, math.nan])
    if fmt.nan_code is None:
        x = x[:2]  # ml_dtypes turns NaN into -0 here; ours is tested below
    assert_same(x, nc.round_to(x, fmt), cast(x, TWINS[name]), name)


@pytest.mark.parametrize("name", [name for name in TWINS if nc.format(name).nan_code is None])
def test_nan_becomes_the_largest_value_of_a_format_with_numbers_only(name: str) -> None:
    fmt = nc.format(name)
    assert nc.round_to(torch.tensor([math.nan]), name).item() == fmt.max == float(fmt.rules["nan"])


@each("name", [*TWINS, *SCALE])
def test_derived_limits_are_those_of_ml_dtypes(name: str) -> None:
    fmt, info = nc.format(name), ml_dtypes.finfo((TWINS | SCALE)[name])
    assert (fmt.max, fmt.bits) == (float(info.max), info.bits)
    if name in TWINS:
        assert fmt.min == -fmt.max
        assert fmt.smallest_normal == float(info.smallest_normal)
        assert fmt.smallest_subnormal == fmt.smallest == float(info.smallest_subnormal)


def test_scale_type_rounds_as_in_ml_dtypes_off_ties_and_above_the_subnormals() -> None:
    # ml_dtypes has every second tie wrong, and values between 2**-127 and 2**-126 (its PR #398)
    fmt = nc.format("e8m0fnu")
    points = with_neighbours(torch.cat([fmt.grid, fmt.boundaries()]))
    tie = (points[:, None] == fmt.boundaries().float()).any(dim=1)
    x = points[~tie & (points >= 2.0**-126) & (points < 1.5 * 2.0**127)]
    assert len(x) > 5 * 250
    assert_same(x, nc.round_to(x, fmt), cast(x, SCALE["e8m0fnu"]), fmt)


def test_scale_type_has_no_place_for_zero_negatives_and_non_finite_values() -> None:
    x = torch.tensor([0.0, -0.0, -1.0, -(2.0**-149), math.inf, -math.inf, math.nan])
    assert nc.round_to(x, "e8m0fnu").isnan().all()


def test_scale_type_ties_go_to_the_even_code_and_what_is_too_small_or_large_to_the_end() -> None:
    x = torch.tensor([1.5, 3.0, 6.0, 2.0**-149, 3.4e38])
    assert nc.round_to(x, "e8m0fnu").tolist() == [2.0, 2.0, 8.0, 2.0**-127, 2.0**127]


FLOATS = [fmt for fmt in all_formats() if isinstance(fmt, FloatFormat)]
every_float = pytest.mark.parametrize("fmt", FLOATS, ids=str)


@every_float
def test_saturate_keeps_every_finite_value_in_the_format(fmt: FloatFormat) -> None:
    x = with_neighbours(beyond(fmt))
    x = x[x.isfinite() & (x.abs() >= fmt.max)]
    assert torch.equal(nc.round_to(x, fmt, overflow="saturate").double(), x.sign().double() * fmt.max)


@every_float
def test_each_overflow_rule_gives_what_it_says(fmt: FloatFormat) -> None:
    results = {"saturate": fmt.max, "inf": math.inf, "nan": math.nan}
    if 4 * fmt.max > 3.4e38:
        return
    for rule in fmt.overflows:
        wanted = torch.tensor([results[rule], -results[rule]], dtype=torch.float64)
        got = nc.round_to(torch.tensor([4 * fmt.max, -4 * fmt.max]), fmt, overflow=rule)
        assert same(got.double(), wanted), rule


@every_float
def test_an_overflow_rule_that_the_format_cannot_follow_is_refused(fmt: FloatFormat) -> None:
    for rule in {"saturate", "inf", "nan", "wrap"} - set(fmt.overflows):
        with pytest.raises(ValueError, match=f"{fmt} cannot follow overflow='{rule}'; take one of {fmt.overflows[0]}"):
            nc.round_to(torch.ones(1), fmt, overflow=rule)


@every_float
def test_the_corner_rules_in_words_are_what_round_to_does(fmt: FloatFormat) -> None:
    x = torch.tensor([math.nan, math.inf, -0.0])
    for got, wanted in zip(nc.round_to(x, fmt, overflow="saturate"), ("nan", "inf", "-0"), strict=True):
        assert same(got, torch.tensor(float(fmt.rules[wanted])))
    assert nc.format(fmt.name).default_overflow == fmt.rules["overflow"]


@every_float
def test_every_value_is_kept(fmt: FloatFormat) -> None:
    for rounding in ROUNDINGS:
        values = fmt.values[~fmt.values.isnan()].float()
        assert same(nc.round_to(values, fmt, rounding=rounding, seed=1), values), rounding


def test_names_are_those_of_ml_dtypes_and_bf16_and_fp16_have_one_name() -> None:
    assert nc.format("e8m7") == nc.format("bf16")
    assert nc.format("e5m10") == nc.format("fp16")
    assert nc.format("e4m3").max == 240
    assert nc.format("e4m3fn").max == 448
    assert nc.format("e4m3f").max == 480


WRONG = {
    "e9m2": ("X=9, Y=2", "X from 2 to 8", "at most 16 bits"),
    "e1m2": ("X=1, Y=2", "X from 2 to 8"),
    "e0m3fn": ("X=0, Y=3", "X from 1 to 8"),
    "e4m11": ("X=4, Y=11", "Y from 0 to 10"),
    "e8m8": ("X=8, Y=8", "at most 16 bits"),
    "e1m6fn": ("X=1, Y=6", "eXmYfn takes X from 2"),
    "e2m1f": ("finite-only variant is written e2m1fn",),
    "e8m2fn": ("reach outside float32", "take a smaller"),
    "e4m3b200": ("reach outside float32", "take a smaller bias"),
    "e4m3fnu": ("unknown format", "did you mean", "e4m3fn"),
    "E4M3": ("unknown format", "`narrowcast formats` lists them all"),
    "e04m3": ("unknown format",),
    "e4m03": ("unknown format",),
    "e4m3b07": ("unknown format",),
    "float8": ("unknown format", "`narrowcast formats`"),
    "": ("unknown format",),
    "int1": ("int takes 2 to 8 bits", "got 1"),
    "int9": ("int takes 2 to 8 bits", "got 9"),
    "int04": ("unknown format", "int4"),
    "uint0": ("uint takes 1 to 8 bits", "got 0"),
    "uint9": ("uint takes 1 to 8 bits", "got 9"),
    "fixed0.8": ("I >= 1", "I=0, F=8"),
    "fixed9.8": ("I + F from 2 to 16", "I=9, F=8"),
    "fixed1.0": ("I + F from 2 to 16", "I=1, F=0"),
    "fixed4": ("unknown format", "fixed4.4"),
    "fixed04.4": ("unknown format",),
    "posit2.0": ("N from 3 to 16", "N=2, ES=0"),
    "posit17.1": ("N from 3 to 16", "N=17, ES=1"),
    "posit8.4": ("ES from 0 to 3", "N=8, ES=4"),
    "posit8": ("unknown format", "posit8.0"),
    "posit08.1": ("unknown format",),
    "qsgd1": ("qsgd takes 2 to 8 bits", "got 1"),
    "qsgd9": ("qsgd takes 2 to 8 bits", "got 9"),
    "qsgd04": ("unknown format", "qsgd4"),
}


@each("name", WRONG)
def test_a_wrong_name_is_told_what_is_wrong_and_what_is_allowed(name: str) -> None:
    with pytest.raises(ValueError, match="format") as caught:
        nc.format(name)
    message = str(caught.value)
    assert repr(name) in message
    for fragment in WRONG[name]:
        assert fragment in message
