"""What is finite stays finite, subnormals are kept and NaN has one pattern: in every implementation and every codec."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from each import each
from laws.implementations import require_native, use
from laws.inputs import hard_values, normal
from torch import Tensor

import narrowcast as nc
from narrowcast.codecs import Codec, all_specs
from narrowcast.codecs.base import Law
from narrowcast.formats import all_formats
from narrowcast.kernels import CastPlan, Feedback, Finish, Noise, native, ops, reference

LARGEST = torch.finfo(torch.float32).max
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FINITE = [spec for spec in all_specs() if Law.FINITE not in nc.codec(spec).exemptions]
N = 336


def huge(n: int = N) -> Tensor:
    """Finite numbers whose sums are not, of either sign, between others."""
    x = normal(n, seed=3) * 2.0**100
    x[::5], x[1::5], x[2::25] = LARGEST, -LARGEST, 3e38
    return x


@pytest.fixture(params=["native", "reference"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    use(request.param, monkeypatch)
    return str(request.param)


@each("spec", FINITE)
def test_sums_of_finite_values_are_finite(spec: str, implementation: str) -> None:
    codec, x = nc.codec(spec), huge()
    wires = [codec.encode(x, seed=seed) for seed in range(4)]
    for dtype in FLOATS:
        if spec == "as-is" and dtype != torch.float32:
            continue
        total = torch.zeros(N, dtype=dtype)
        for wire in wires:
            codec.decode(wire, N, out=total, accumulate=True)
        assert total.isfinite().all(), dtype
    for divide, multiply in ((1.0, 1.0), (3.0, 1.0), (1e-30, 1.0), (1.0, -1e30)):
        decoded = torch.empty(N)
        codec.reduce(wires, N, divide=divide, multiply=multiply, decoded=decoded)
        assert decoded.isfinite().all(), (divide, multiply)
    residual = huge() * 0.9
    wire = codec.encode(x, residual=residual, unit=4.0)
    assert codec.decode(wire, N).isfinite().all()
    assert residual.isfinite().all()


def test_a_sum_is_held_at_each_step(implementation: str) -> None:
    codec = nc.codec("fp32")
    values = torch.tensor([3e38, 3e38, -3e38]).repeat(21, 1).T
    wires = [codec.encode(row.contiguous()) for row in values]
    found = codec.decode(codec.reduce(wires, 21), 21)
    assert torch.equal(found, torch.full((21,), LARGEST) - 3e38)


def test_what_was_not_finite_stays_so(implementation: str) -> None:
    codec, inf = nc.codec("fp32"), torch.inf
    a = torch.tensor([inf, -inf, torch.nan, inf, LARGEST]).repeat(9)
    b = torch.tensor([1.0, LARGEST, 1.0, -inf, inf]).repeat(9)
    found = codec.decode(codec.reduce([codec.encode(a), codec.encode(b)], 45), 45)
    assert found[:5].tolist()[:2] == [inf, -inf]
    assert found[:5].isnan().tolist() == [False, False, True, True, False]
    assert found[4] == inf


def both_casts(x: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    require_native()
    for kernels in (native.CASTS, reference.CASTS):
        wire = torch.full((len(x) * dtype.itemsize,), 0xA5, dtype=torch.uint8)
        kernels.encode(CastPlan(dtype), x, wire)
        yield wire


NANS = (0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFFC00000, 0xFF812345, 0x7F802000)
ONE_NAN = {torch.float32: 0x7FC00000, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}


def nans(dtype: torch.dtype) -> Tensor:
    """NaNs of every kind between other numbers, in whole and broken vectors."""
    wide = torch.tensor([n - 2**32 if n >= 2**31 else n for n in NANS], dtype=torch.int32)
    if dtype == torch.float32:
        kinds = wide.view(torch.float32)
    else:
        top = 0x7F80 if dtype == torch.bfloat16 else 0x7C00
        patterns = [top + 1, top + 0x3F, top - 2**15 + 1, top - 2**15 + 0x55]
        kinds = torch.tensor(patterns, dtype=torch.int16).view(dtype)
    x = torch.linspace(-3, 3, 77).to(dtype)
    x[5 : 5 + len(kinds)], x[-len(kinds) :] = kinds, kinds
    return x


@pytest.mark.parametrize("stored", FLOATS, ids=str)
@pytest.mark.parametrize("given", FLOATS, ids=str)
def test_casts_write_one_nan(given: torch.dtype, stored: torch.dtype) -> None:
    x = nans(given)
    for wire in both_casts(x, stored):
        pattern = wire.view({2: torch.int16, 4: torch.int32}[stored.itemsize])
        assert set(pattern[x.isnan()].tolist()) == {ONE_NAN[stored]}
        assert torch.equal(wire.view(stored)[~x.isnan()], x[~x.isnan()].to(stored))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_values_of_16_bits_have_one_nan(dtype: torch.dtype, implementation: str) -> None:
    x = nans(torch.float32)
    for found in (
        nc.codec("fp32").decode(x.view(torch.uint8), 77, out=torch.empty(77, dtype=dtype)),
        nc.round_to(nans(dtype), "e5m2"),
        nc.codec("int8/16").decode(nc.codec("int8/16").encode(x), 77, dtype=dtype),
    ):
        assert set(found.view(torch.int16)[found.isnan()].tolist()) == {ONE_NAN[dtype]}


def casts_agree(x: Tensor) -> None:
    for dtype in FLOATS:
        first, second = both_casts(x, dtype)
        assert torch.equal(first, second), dtype
        for out in FLOATS:
            for accumulate in (False, True):
                found = [torch.linspace(-LARGEST, LARGEST, len(x)).to(out).nan_to_num(1.0) for _ in range(2)]
                for kernels, values in zip((native.CASTS, reference.CASTS), found, strict=True):
                    kernels.decode(CastPlan(dtype), first, len(x), values, accumulate)
                assert torch.equal(*(values.nan_to_num(7.0) for values in found)), (dtype, out, accumulate)


@pytest.mark.parametrize("n", [1, 15, 16, 17, 4099])
def test_native_casts_equal_the_reference(n: int, native_library: None) -> None:
    isas = [isa for isa in ("avx512", "avx2", "baseline") if native.load()[0].nc_set_isa(isa.encode()) == 0]
    for isa in isas:
        native.set_isa(isa)
        for dtype in FLOATS:
            casts_agree(hard_values(16, n).to(dtype))


# made before anybody flushes
EXPONENTS = torch.randint(-149, -90, (N,), generator=torch.Generator().manual_seed(1))
SMALL = normal(N, seed=1) * torch.exp2(EXPONENTS.float())
SMALL_OF = {dtype: SMALL.to(dtype) for dtype in FLOATS}
HALF, OTHER = SMALL * 0.5, SMALL.flip(0) * -3


def of_codec(codec: Codec) -> Iterator[Tensor]:
    for dtype, values in SMALL_OF.items():
        wire = codec.encode(values, seed=3)
        yield wire
        yield codec.decode(wire, N, dtype=dtype)
        if str(codec) != "as-is" or dtype == torch.float32:
            yield codec.decode(wire, N, out=OTHER.clone(), accumulate=True)
    residual = HALF.clone()
    yield codec.encode(SMALL, residual=residual, unit=2.0**-3, seed=1)
    yield residual
    yield codec.reduce([codec.encode(SMALL), codec.encode(OTHER)], N, divide=3.0, multiply=0.7, seed=5)


def of_formats(rounding: str) -> Iterator[Tensor]:
    for fmt in all_formats():
        yield nc.round_to(SMALL, fmt, rounding=rounding, seed=1)


def same_when_flushing(make: Callable[[], Iterator[Tensor]]) -> None:
    before = list(make())
    assert torch.set_flush_denormal(True)
    try:
        after = list(make())
        assert float(torch.tensor(1e-40) * 1.0) == 0.0, "the mode that the caller chose is back"
    finally:
        torch.set_flush_denormal(False)
    for number, (a, b) in enumerate(zip(before, after, strict=True)):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), number


flushes = pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this processor cannot flush subnormals")


@flushes
@each("spec", all_specs())
def test_codecs_keep_subnormals_whatever_the_thread_does(spec: str, implementation: str) -> None:
    same_when_flushing(lambda: of_codec(nc.codec(spec)))


@flushes
@pytest.mark.parametrize("rounding", ops.ROUNDINGS)
def test_round_to_keeps_subnormals_whatever_the_thread_does(rounding: str, implementation: str) -> None:
    same_when_flushing(lambda: of_formats(rounding))


def test_native_and_reference_hold_sums_alike(native_library: None) -> None:
    x = huge()
    for spec in FINITE:
        codec = nc.codec(spec)
        plan = codec.plan_for(torch.float32)
        if native.why_not(plan) is not None:
            continue
        wires = [codec.encode(x), codec.encode(x.flip(0)), codec.encode(x)]
        found = []
        for kernels in (native.kernels(plan), reference.kernels(plan)):
            wire, residual, out = torch.empty_like(wires[0]), x * 0.5, torch.empty(N)
            kernels.reduce(plan, wires, N, wire, Noise(1, 2), None, Feedback(residual, 4.0), Finish(3.0, 1e20), out)
            found.append((wire, residual, out))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), spec
