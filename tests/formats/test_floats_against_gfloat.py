"""Small floats in every width and variant are those of gfloat, in every rounding."""

from __future__ import annotations

from collections.abc import Iterator

import gfloat
import numpy as np
import pytest
from each import each
from formats.points import assert_same, same, sampled_points
from gfloat import Domain, FormatInfo, RoundMode
from torch import Tensor

import narrowcast as nc
from narrowcast.formats.floats import FloatFormat, Specials
from narrowcast.kernels.reference.rounding import random_bits

# the reference; that native equals it is another test, and ml_dtypes is compared with both
pytestmark = pytest.mark.usefixtures("reference_only")

ROUNDINGS = {
    "nearest": RoundMode.TiesToEven,
    "nearest-away": RoundMode.TiesToAway,
    "toward-zero": RoundMode.TowardZero,
    "up": RoundMode.TowardPositive,
    "down": RoundMode.TowardNegative,
}
VARIANTS = ("", "fn", "fnuz", "f")


def descriptor(fmt: FloatFormat) -> FormatInfo:
    """The same format in gfloat's words. Written from the definition of each variant, not from our tables."""
    specials = fmt.specials
    bias = 2 ** (fmt.exp_bits - 1) - (0 if specials is Specials.FNUZ else 1)
    return FormatInfo(
        fmt.name,
        1 + fmt.exp_bits + fmt.man_bits,
        fmt.man_bits + 1,
        bias=bias,
        is_signed=True,
        domain=Domain.Extended if specials is Specials.IEEE else Domain.Finite,
        has_nz=specials is not Specials.FNUZ,
        num_high_nans={Specials.IEEE: 2**fmt.man_bits - 1, Specials.FN: 1}.get(specials, 0),
        has_subnormals=True,
        is_twos_complement=False,
    )


def spelled(exp: int, man: int, variant: str) -> str | None:
    """The name of a variant, or None where there is none: above float32, or written otherwise."""
    bits = 1 + exp + man
    least = 1 if variant == "f" else 2
    if bits > 16 or exp < least or (exp == 8 and variant in ("fn", "f")) or (variant == "fn" and bits < 8):
        return None
    return f"e{exp}m{man}" + ("fn" if variant == "f" and bits < 8 else variant)


def formats_with(exp: int, variant: str) -> Iterator[FloatFormat]:
    names = (spelled(exp, man, variant) for man in range(11))
    for name in filter(None, names):
        fmt = nc.format(name)
        assert isinstance(fmt, FloatFormat)
        if len(fmt.grid) > 1:
            yield fmt


def agrees(fmt: FloatFormat, x: Tensor, rounding: str, overflow: str, **bits: object) -> None:
    mode = RoundMode.StochasticFast if rounding == "stochastic" else ROUNDINGS[rounding]
    seed = 5 if rounding == "stochastic" else None
    got = nc.round_to(x, fmt, rounding=rounding, overflow=overflow, seed=seed)
    with np.errstate(all="ignore"):
        wanted = gfloat.round_ndarray(descriptor(fmt), x.double().numpy(), mode, overflow == "saturate", **bits)
    assert_same(x, got, wanted.astype(np.float32), f"{fmt} {rounding} {overflow}")


every_family = pytest.mark.parametrize(
    "exp, variant", [(exp, v) for v in VARIANTS for exp in range(1, 9) if any(formats_with(exp, v))]
)


@every_family
def test_every_code_has_the_value_that_gfloat_gives_it(exp: int, variant: str) -> None:
    for fmt in formats_with(exp, variant):
        codes = np.arange(2**fmt.bits)
        if len(codes) > 4096:
            codes = codes[:: len(codes) // 4096]
        wanted = gfloat.decode_ndarray(descriptor(fmt), codes)
        assert same(fmt.values.numpy()[codes], wanted), fmt.name


@every_family
def test_nearest_is_that_of_gfloat(exp: int, variant: str) -> None:
    for fmt in formats_with(exp, variant):
        x = sampled_points(fmt)
        for overflow in dict.fromkeys([fmt.default_overflow, "saturate"]):
            agrees(fmt, x, "nearest", overflow)


@each("rounding", ["nearest-away", "toward-zero", "up", "down"])
@every_family
def test_directed_roundings_are_those_of_gfloat(exp: int, variant: str, rounding: str) -> None:
    for fmt in formats_with(exp, variant):
        x = sampled_points(fmt, 600)
        for overflow in dict.fromkeys([fmt.default_overflow, "saturate"]):
            agrees(fmt, x, rounding, overflow)


@every_family
def test_stochastic_rounding_is_that_of_gfloat_given_the_same_bits(exp: int, variant: str) -> None:
    for fmt in formats_with(exp, variant):
        x = sampled_points(fmt)
        random = random_bits(len(x), seed=5, stream=0).numpy()
        for overflow in dict.fromkeys([fmt.default_overflow, "saturate"]):
            agrees(fmt, x, "stochastic", overflow, srbits=random, srnumbits=16)
