"""rules="cpd" is the cast of CPD, corner cases and all: papers.md, sections 2.4 and 6.2."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest
import torch
from formats.points import sampled_points, with_neighbours

import narrowcast as nc
from narrowcast.formats.floats import FloatFormat

FORMATS = [(5, 2), (4, 3), (3, 0), (5, 10), (6, 9), (8, 7), (2, 1), (4, 0), (8, 0), (3, 4)]


def named(exp: int, man: int) -> FloatFormat:
    fmt = nc.format(f"e{exp}m{man}")
    assert isinstance(fmt, FloatFormat)
    return fmt


def cast_precision(x: float, exp: int, man: int) -> float:
    """The text of section 2.4, one number at a time, in integers."""
    if x == 0 or not math.isfinite(x):
        return x
    (pattern,) = struct.unpack("<I", struct.pack("<f", x))
    sign = -1.0 if pattern >> 31 else 1.0
    field, fraction = (pattern >> 23) & 255, pattern & 0x7FFFFF
    if field == 0:
        return sign * 0.0  # a float32 subnormal
    bias = 2 ** (exp - 1) - 1
    true_exponent = field - 127
    biased = true_exponent + bias
    if biased >= 2**exp - 1:
        return sign * math.inf
    significand = fraction | 1 << 23
    if biased <= 0:
        significand >>= 1 - biased  # sticky bits are lost
        true_exponent = 1 - bias
    unit = 1 << (23 - man)
    kept, rest = divmod(significand, unit)
    if 2 * rest > unit or (2 * rest == unit and kept & 1):
        kept += 1
    return sign * math.ldexp(kept, true_exponent - man)


GOLDEN = {
    (5, 2): {17.5: 16, 1.6: 1.5, 61440: 65536, 65535: 65536, 65536: math.inf, 2.0**-17: 0, 2.0**-17 * 1.01: 2.0**-16},
    (4, 3): {247.9: 240, 248: 256, 255.9: 256, 256: math.inf},
    (3, 0): {0.125: 0, 0.126: 0.25, 0.375: 0.5, 1.5: 2, 2.9: 2, 3.0: 4, 12: 16, 15.9: 16, 16: math.inf},
}


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("form", GOLDEN, ids=str)
def test_the_golden_values(form: tuple[int, int], sign: int) -> None:
    x = torch.tensor(list(GOLDEN[form]))
    wanted = torch.tensor(list(map(float, GOLDEN[form].values())))
    assert torch.equal(nc.round_to(sign * x, named(*form), rules="cpd"), sign * wanted)


TABLE = {
    (5, 2): (15, 57344, 2.0**-14, 2.0**-16),
    (4, 3): (7, 240, 2.0**-6, 2.0**-9),
    (3, 0): (3, 8, 0.25, None),
    (5, 10): (15, 65504, 2.0**-14, 2.0**-24),
    (6, 9): (31, (2 - 2.0**-9) * 2.0**31, 2.0**-30, 2.0**-39),
    (8, 7): (127, (2 - 2.0**-7) * 2.0**127, 2.0**-126, 2.0**-133),
}


@pytest.mark.parametrize("form", TABLE, ids=str)
def test_the_limits_in_the_table_of_formats(form: tuple[int, int]) -> None:
    fmt = named(*form)
    bias, largest, normal, subnormal = TABLE[form]
    assert (fmt.bias, fmt.max, fmt.smallest_normal, fmt.smallest_subnormal) == (bias, largest, normal, subnormal)
    assert fmt.max_exponent == 2 ** (fmt.exp_bits - 1) - 1, "the upper bound of APS"


def test_the_positive_values_of_e3m0() -> None:
    grid = nc.format("e3m0").grid
    assert grid[grid > 0].tolist() == [0.25, 0.5, 1, 2, 4, 8]


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_every_input_is_cast_as_the_text_says(form: tuple[int, int]) -> None:
    fmt = named(*form)
    patterns = torch.randint(-(2**31), 2**31, (3000,), generator=torch.Generator().manual_seed(2))
    x = torch.cat([sampled_points(fmt), patterns.to(torch.int32).view(torch.float32), with_neighbours(torch.zeros(1))])
    x = x[x.isfinite()]
    wanted = torch.tensor([cast_precision(v, *form) for v in x.tolist()], dtype=torch.float64).float()
    got = nc.round_to(x, fmt, rules="cpd")
    wrong = (got != wanted).nonzero().flatten()
    assert len(wrong) == 0, f"{x[wrong[0]].item()!r}: {got[wrong[0]].item()!r}, the text {wanted[wrong[0]].item()!r}"


def test_the_corner_cases_do_differ_from_the_standard() -> None:
    x = torch.tensor([61440.0, 2.0**-15 * 1.1250001, 1e-39])
    assert nc.round_to(x, "e5m2", rules="cpd").tolist() != nc.round_to(x, "e5m2").tolist()


def test_nan_inf_and_zero_are_unchanged() -> None:
    x = torch.tensor([math.inf, -math.inf, 0.0, -0.0, math.nan])
    got = nc.round_to(x, "e4m3", rules="cpd")
    assert got[:4].tolist() == x[:4].tolist()
    assert torch.equal(got.signbit()[:4], x.signbit()[:4])
    assert got[4].isnan()


WRONG = [
    ({"fmt": "e4m3fn", "rules": "cpd"}, "rules='cpd' is for IEEE-style floats such as e5m2 and e4m3, got e4m3fn"),
    ({"fmt": "int8", "rules": "cpd"}, "IEEE-style floats"),
    ({"fmt": "e5m2", "rules": "cpd", "rounding": "up"}, "CPD rounds to nearest"),
    ({"fmt": "e5m2", "rules": "cpd", "overflow": "saturate"}, "leave rounding and overflow alone"),
    ({"fmt": "e5m2", "rules": "qtorch"}, "unknown rules 'qtorch'; take 'ieee' or 'cpd'"),
]


@pytest.mark.parametrize("arguments, message", WRONG, ids=str)
def test_what_cpd_cannot_do_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nc.round_to(torch.ones(1), **arguments)
