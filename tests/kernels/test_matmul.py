"""Matrix products with a chosen accumulator: the reference against exact fractions, the rest against it."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from each import each
from kernels.exact_matmul import dot
from torch import Tensor

from narrowcast.kernels import native
from narrowcast.kernels.matmul import explain, matmul
from narrowcast.kernels.matmul.accumulator import Accumulator, How, accumulator, how_to_compute
from narrowcast.kernels.native import matmul as native_matmul
from narrowcast.kernels.ops import round_to
from narrowcast.kernels.reference import matmul as reference

FORMATS = ("bf16", "fp16", "e5m2", "e4m3", "e4m3fn", "e3m0", "e6m9", "e2m1fn", "e4m3fnuz", "fixed8.8", "fixed4.4")
METHODS = ("", "+kahan", "+fma", "+fma+kahan", "+pairwise", "+sr", "+sr+kahan", "+mogami", "+saturate")
MIXED = [
    *("e5m2+mul=fp16", "bf16+mul=fp32", "e8m2+mul=e5m2", "fp16/3", "fp16/4+outer=fp32", "e4m3/5+kahan"),
    *("fp32+sequential", "fp32+pairwise", "fp32+kahan", "fp32+sr", "bf16+mul=e4m3fn+saturate", "e4m3fn+mul=e5m2"),
    *(
        "e2m1fn+mul=bf16",
        "e8m6+sr",
        "e5m2+mul=bf16+sr",
        "bf16+fma+sr",
        "e6m9/4+fma+sr+kahan",
        "fp32+mul=bf16",
        "fp32/3",
    ),
]
RULES = [f"{name}{method}" for name in FORMATS for method in METHODS] + MIXED


def hard(*shape: int, seed: int = 0) -> Tensor:
    """Zeros, ties, and a spread of sizes that overflows and underflows narrow formats."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g) * torch.exp(3 * torch.randn(shape, generator=g))
    x[torch.rand(shape, generator=g) < 0.1] = 0.0
    return torch.where(torch.rand(shape, generator=g) < 0.2, (4 * x).round() / 4, x)


def narrow(x: Tensor, name: str | None) -> Tensor:
    return x if name is None else round_to(x, name, overflow="saturate")


def by_reference(a: Tensor, b: Tensor, spec: str, seed: int = 7) -> Tensor:
    out = torch.empty(a.shape[0], a.shape[1], b.shape[2])
    return reference.matmul(a, b, accumulator(spec), seed, out)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """NaN has one pattern."""
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32)) or (
        torch.equal(a.isnan(), b.isnan())
        and torch.equal(a.nan_to_num().view(torch.int32), b.nan_to_num().view(torch.int32))
    )


@pytest.fixture
def native_matmuls(native_library: None) -> None:
    why = native_matmul.why_not(accumulator("bf16"))
    if why is not None:
        pytest.skip(why)


@pytest.mark.parametrize("method", ["", "+kahan", "+fma", "+fma+kahan"])
@each("name", [*FORMATS, "e5m2+mul=fp16", "bf16+mul=fp32", "fp32+sequential"])
def test_the_reference_equals_exact_fractions(name: str, method: str) -> None:
    if "mul=" in name and "fma" in method:
        pytest.skip("a fused product has no format")
    rule = accumulator(name.replace("+sequential", "" if method else "+sequential") + method)
    a, b = hard(1, 3, 5, seed=1) / 8, hard(1, 5, 3, seed=2) / 8
    got = reference.matmul(a, b, rule, 0, torch.empty(1, 3, 3))[0]
    for i in range(3):
        for j in range(3):
            want = dot([Fraction(v) for v in a[0, i].tolist()], [Fraction(v) for v in b[0, :, j].tolist()], rule)
            if math.isfinite(want):
                assert got[i, j] == want
            else:
                assert not got[i, j].isfinite()


def test_a_small_term_decides_what_float64_would_call_a_tie() -> None:
    """2**-70 + 1.125 in e8m2: exactly 1.125 would be a tie that goes down to 1; a float64 sum drops the small term."""
    a, b = torch.tensor([[2.0**-70, 1.125]]), torch.ones(2, 1)
    for spec in ("e8m2+mul=fp32", "e8m2+fma"):
        assert by_reference(a[None], b[None], spec).item() == 1.25
        assert matmul(a, b, spec).item() == 1.25
    assert 2.0**-70 + 1.125 == 1.125


def test_a_product_is_rounded_once() -> None:
    """Both have 24 bits: their product, rounded to float32 first, would lie on a tie of bf16 and go down."""
    a = torch.tensor([[1.0 + 2**-8 + 2**-23]])
    b = torch.tensor([[1.0 + 2**-20]])
    exact = Fraction(float(a)) * Fraction(float(b))
    assert exact > 1 + Fraction(1, 2**8)
    assert matmul(a, b, "bf16").item() == 1 + 2**-7


def test_bf16_sums_of_ones_stand_still_and_the_other_methods_do_not() -> None:
    ones = torch.ones(1, 1024), torch.ones(1024, 1)
    assert matmul(*ones, "bf16").item() == 256
    assert matmul(*ones, "bf16+kahan").item() == 1024
    assert matmul(*ones, "bf16+pairwise").item() == 1024
    assert matmul(*ones, "bf16/64").item() == 1024
    assert matmul(*ones, "bf16/64+outer=fp32").item() == 1024
    assert abs(matmul(*ones, "bf16+sr", seed=1).item() - 1024) < 256


def test_huge_k_is_summed_to_the_end(native_matmuls: None) -> None:
    terms = 300_007
    assert matmul(torch.ones(1, terms), torch.ones(terms, 1), "fp32+sequential").item() == terms
    assert matmul(torch.ones(terms), torch.ones(terms), "fp16/1024+outer=fp32").item() == terms


def test_stochastic_sums_have_the_right_mean() -> None:
    a, b = torch.full((64, 32), 0.3), torch.full((32, 256), 0.7)
    got = matmul(a, b, "e4m3+sr+mul=fp32", seed=5)
    assert abs(got.mean() / (0.3 * 0.7 * 32) - 1) < 0.01
    assert got.unique().numel() > 5
    assert torch.equal(got, matmul(a, b, "e4m3+sr+mul=fp32", seed=5))
    assert not torch.equal(got, matmul(a, b, "e4m3+sr+mul=fp32", seed=6))


def test_multiplication_by_adding_patterns() -> None:
    """Mitchell: exact where a mantissa is zero, at worst 1/9 too small, never too large; zero and Inf as usual."""
    x = torch.linspace(1, 4, 501)[None]
    got = matmul(x.t(), x, "fp32+mogami")
    ratio = got / (x.t() * x)
    assert ratio.max() <= 1
    assert 8 / 9 <= ratio.min() <= 8 / 9 + 1e-4
    assert torch.equal(matmul(x.t(), torch.tensor([[-2.0]]), "fp32+mogami"), -2 * x.t())
    special = matmul(
        torch.tensor([[0.0], [-3.0], [1e-39], [1e30]]), torch.tensor([[math.inf, 0.0, 1e30]]), "fp32+mogami"
    )
    assert special[0, 0].isnan()
    assert special[1, 0] == -math.inf
    assert special[2].nan_to_num(0).tolist() == [0, 0, 0]
    assert special[3, 2] == math.inf


@each("spec", RULES)
def test_native_equals_the_reference(spec: str, native_matmuls: None) -> None:
    rule = accumulator(spec)
    for of_a, of_b, seed in ((None, None, 0), ("e4m3fn", "bf16", 2)):
        a, b = narrow(hard(1, 5, 11, seed=seed), of_a), narrow(hard(1, 11, 35, seed=seed + 1), of_b)
        want, how = by_reference(a, b, spec), how_to_compute(a, b, rule)
        for way in {how, replace(how, single_on_cpu=how.single), How(False, how.careful, how.plain), How(False, True)}:
            got = torch.full_like(want, 9.0)
            native_matmul.matmul(a, b, rule, 7, got, way)
            assert same_bits(got, want), way


def spread(*shape: int, seed: int, name: str | None) -> Tensor:
    """Numbers of a format whose sums float32, or even float64, cannot hold."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g) * torch.exp2(torch.randint(-30, 20, shape, generator=g).float())
    return narrow(torch.where(torch.rand(shape, generator=g) < 0.1, 0.0, x), name)


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
@pytest.mark.parametrize(
    "spec",
    [
        *("bf16+sr", "bf16+sr+kahan", "bf16+sr+fma", "e8m6+sr", "fp16+sr", "e7m3/8+sr", "e4m3fnuz+sr", "fp32+kahan"),
        *("fp32/8", "fp16+fma+kahan", "e4m3+fma", "bf16+kahan", "fp32+fma+kahan", "fixed8.8", "fixed2.14+kahan"),
    ],
)
def test_sums_of_numbers_far_apart_are_exact_before_they_are_rounded(isa: str, spec: str, native_matmuls: None) -> None:
    try:
        native.set_isa(isa)
    except ValueError as error:
        pytest.skip(str(error))
    for name in ("bf16", "fp16", None):
        a, b = spread(1, 3, 40, seed=3, name=name), spread(1, 40, 131, seed=4, name=name)
        assert same_bits(matmul(a, b, spec, seed=7), by_reference(a, b, spec))


def test_a_stochastic_sum_that_float32_rounds_to_even_still_counts_its_last_bit(native_matmuls: None) -> None:
    """1 + 2**-24 in bf16: the random bits that carry are one more than those of 1 exactly, one in 65536."""
    a, b = torch.tensor([[1.0, 2.0**-24]]).repeat(2048, 1), torch.ones(2, 256)
    got = matmul(a, b, "bf16+sr", seed=7)
    assert same_bits(got, by_reference(a[None], b[None], "bf16+sr")[0])
    assert 0 < int((got > 1).sum()) < 40


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
@pytest.mark.parametrize(
    "spec", ["bf16", "fp16+kahan", "e3m0", "e4m3fn+pairwise", "fp32/4", "fixed4.4+sr", "bf16+mogami"]
)
def test_every_instruction_set_gives_the_same_bits(isa: str, spec: str, native_matmuls: None) -> None:
    try:
        native.set_isa(isa)
    except ValueError as error:
        pytest.skip(str(error))
    for name in (None, "e4m3fn"):
        a, b = narrow(hard(1, 6, 9), name), narrow(hard(1, 9, 21, seed=1), name)
        assert same_bits(matmul(a, b, spec, seed=7), by_reference(a, b, spec))


@pytest.mark.parametrize(
    "spec", ["e4m3fn", "e5m2+saturate", "e2m1fn", "fixed4.4", "e3m0", "bf16+kahan", "fp16+sr", "e4m3fn+mogami"]
)
def test_nan_and_inf_become_what_the_format_says(spec: str, native_matmuls: None) -> None:
    a, b = hard(1, 4, 6), hard(1, 6, 5, seed=1)
    a[0, 0, 2], a[0, 1, 3], b[0, 4, 1], b[0, 0, 2] = math.inf, math.nan, -math.inf, 3e38
    assert same_bits(matmul(a, b, spec, seed=7), by_reference(a, b, spec))


@pytest.mark.parametrize("spec", ["bf16", "fp16+kahan+mul=fp32", "e5m2+sr", "fp16+pairwise"])
@pytest.mark.parametrize(
    "shape", [(0, 3, 4), (3, 0, 4), (3, 4, 0), (1, 1, 1), (1, 7, 1), (17, 1, 2), (2, 3, 129), (65, 5, 33)]
)
def test_every_shape_is_right(shape: tuple[int, int, int], spec: str) -> None:
    m, k, n = shape
    a, b = hard(1, m, k), hard(1, k, n, seed=1)
    got = matmul(a[0], b[0], spec, seed=7)
    assert got.shape == (m, n)
    assert same_bits(got, by_reference(a, b, spec)[0])


@pytest.mark.parametrize("spec", ["bf16", "fp16+kahan+mul=fp32"])
def test_batches_broadcast_and_transposes_are_views(spec: str) -> None:
    a, b = hard(2, 1, 4, 6), hard(3, 6, 5, seed=1)
    got = matmul(a, b, spec)
    assert got.shape == (2, 3, 4, 5)
    for i in range(2):
        for j in range(3):
            assert same_bits(got[i, j], by_reference(a[i], b[j][None], spec)[0])
    assert same_bits(matmul(b[0].t(), a[0, 0].t(), spec), got[0, 0].t())
    assert same_bits(
        matmul(a[:, :, :, ::2], b[:, ::2], spec)[1, 2], by_reference(a[1][..., ::2], b[2][None, ::2], spec)[0]
    )
    vector = matmul(a[0, 0, 0], b[0], spec)
    assert same_bits(vector, got[0, 0, 0])
    assert matmul(a[0, 0, 0], b[0, :, 0], spec).shape == ()


def test_threads_change_no_bit(native_matmuls: None) -> None:
    a, b = hard(150, 90), hard(90, 130, seed=1)
    for spec in ("bf16", "e4m3fn+sr", "fp16+kahan+mul=fp32"):
        torch.set_num_threads(1)
        one = matmul(a, b, spec, seed=3)
        torch.set_num_threads(3)
        assert same_bits(one, matmul(a, b, spec, seed=3))


def test_float32_is_used_only_where_it_gives_the_same_bits() -> None:
    a, b = torch.randn(1, 4, 4).bfloat16().float(), torch.randn(1, 4, 4).bfloat16().float()
    assert how_to_compute(a, b, accumulator("bf16")).single
    assert how_to_compute(a, b, accumulator("bf16+mogami")).single
    for spec in ("bf16+mul=fp16", "bf16+fma", "bf16+sr", "fp32+sequential", "e5m2+mul=fp32"):
        assert not how_to_compute(a, b, accumulator(spec)).single
    assert not how_to_compute(a * 1.0001, b, accumulator("bf16")).single
    assert not how_to_compute(a * 2.0**-120, b, accumulator("bf16")).single
    assert not how_to_compute(a * 2.0**110, b, accumulator("bf16")).single
    assert how_to_compute(a * math.inf, b, accumulator("bf16")).careful


def test_the_cpu_computes_in_float32_or_plain_float64_only_where_that_gives_the_same_bits() -> None:
    wide = torch.randn(1, 4, 4), torch.randn(1, 4, 4)
    narrow16 = tuple(x.bfloat16().float() for x in wide)

    def how(spec: str, operands: tuple[Tensor, ...] = narrow16) -> How:
        return how_to_compute(operands[0], operands[1], accumulator(spec))

    for spec in ("fp32+sequential", "fp32+kahan", "fp32/8", "fp32+pairwise"):
        assert how(spec, wide).single_on_cpu
        assert not how(spec, wide).single
    for spec in ("bf16+sr", "e4m3fn+sr+kahan", "fp16+fma+sr", "fp32+mul=bf16", "bf16+kahan"):
        assert how(spec).single_on_cpu
        assert not how(spec, wide).single_on_cpu
    for spec in ("fp32+fma", "fp32+sr", "bf16+mul=fp32", "fixed8.8+sr", "bf16+mul=fp32+sr"):
        assert not how(spec).single_on_cpu
    for spec in ("fixed8.8", "bf16+kahan", "fp16/8+outer=fp32", "fp32+kahan"):
        assert how(spec, wide).plain
    for spec in ("bf16+fma", "bf16+mul=fp32", "fp32+fma", "bf16+sr", "fp16/8+outer=bf16"):
        assert not how(spec).plain
    assert how("fp16+fma+kahan").plain
    assert not how("fp16+fma+kahan", wide).plain


def test_a_table_of_values_runs_in_the_reference_and_says_so() -> None:
    assert explain("posit8.1").implementation == "reference"
    assert "table" in explain("posit8.1").why
    got = matmul(torch.ones(2, 3), torch.ones(3, 2), "posit8.1")
    assert got.tolist() == [[3, 3], [3, 3]]
    assert explain("fp32").implementation == "torch"


@each("spec", [*RULES, "fp32", "fp16/128+outer=fp32+kahan", "posit16.1+pairwise"])
def test_an_accumulator_prints_as_it_is_read(spec: str) -> None:
    assert accumulator(str(accumulator(spec))) == accumulator(spec)


def test_a_bare_fp32_is_torchs_own_matmul() -> None:
    a, b = torch.randn(20, 30), torch.randn(30, 10)
    assert torch.equal(matmul(a, b, "fp32"), a @ b)
    assert accumulator("fp32").is_torch
    assert not accumulator("fp32+sequential").is_torch
    assert str(Accumulator()) == "fp32+sequential"


@pytest.mark.parametrize(
    "spec, word",
    [
        ("fp99", "unknown format"),
        ("bf16+kaan", "unknown option 'kaan'"),
        ("bf16+kahan+kahan", "stands twice"),
        ("bf16+mul=fp32+mul=e4m3", "option 'mul' stands twice"),
        ("fp32+mul=", "mul= names no format"),
        ("bf16+kahan=1", "unknown option 'kahan'"),
        ("fp32+saturate", "saturate is for narrower formats"),
        ("fp32/64+outer=fp32+saturate", "saturate is for narrower formats"),
        ("bf16+kahan+pairwise", "running sum"),
        ("bf16/8+pairwise", "exclude"),
        ("bf16+fma+mul=fp32", "fused"),
        ("bf16+outer=fp32", "give a block"),
        ("e8m0fnu", "neither a zero"),
        ("+kahan", "write SUMS"),
    ],
)
def test_a_wrong_accumulator_says_what_is_wrong(spec: str, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        accumulator(spec)


def test_a_negated_view_keeps_its_sign_and_a_seed_is_any_integer() -> None:
    a, b = hard(3, 40), hard(40, 20, seed=1)
    wanted = matmul(a, b, "bf16+sr", seed=5)
    negated = torch._neg_view(-a), torch._neg_view(-b.t().contiguous()).t()
    assert all(x.is_neg() for x in negated)
    assert torch.equal(matmul(*negated, "bf16+sr", seed=torch.tensor(5)), wanted)  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", ["bf16", "fp32"])
def test_a_result_goes_where_it_is_wanted_operands_included(spec: str) -> None:
    a, b = hard(20, 20), hard(20, 20, seed=1)
    want = matmul(a, b, spec)
    for out in (torch.empty(20, 20), torch.empty(20, 20).t(), a.clone()):
        assert matmul(a, b, spec, out=out) is out
        assert torch.equal(out, want)
    assert matmul(a, b, spec, out=a) is a
    assert torch.equal(a, want)


def test_wrong_arguments_are_told() -> None:
    with pytest.raises(TypeError, match="matmul: got list; give a torch tensor"):
        matmul([1.0], torch.ones(1), "bf16")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"matmul: seed and stream are 64-bit unsigned integers, got 0\.5"):
        matmul(torch.ones(2, 2), torch.ones(2, 2), "bf16+sr", seed=0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a has 3 columns and b 4 rows"):
        matmul(torch.ones(2, 3), torch.ones(4, 2), "bf16")
    with pytest.raises(ValueError, match="needs seed="):
        matmul(torch.ones(2, 3), torch.ones(3, 2), "bf16+sr")
    with pytest.raises(TypeError, match="float64"):
        matmul(torch.ones(2, 3).double(), torch.ones(3, 2).double(), "bf16")
    with pytest.raises(ValueError, match="out is"):
        matmul(torch.ones(2, 3), torch.ones(3, 2), "bf16", out=torch.empty(3, 2))
