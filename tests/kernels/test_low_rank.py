"""The products of low rank: native and reference give the same bits; Gram-Schmidt does what it says."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from narrowcast.kernels import low_rank, native
from narrowcast.kernels.arithmetic import Feedback
from narrowcast.kernels.native import low_rank as compiled
from narrowcast.kernels.reference import low_rank as plain

SHAPES = ((1, 1), (3, 17), (5, 16), (9, 100), (4, 1030))
UNITS = ((1.0, 1.0), (3.0, 1.0), (1.0, 0.95), (2.0, 0.5))
"""Of residuals, and how much of them is kept."""
needs_native = pytest.mark.skipif(compiled.why_not() is not None, reason="the native library is not built")


def isas() -> Iterator[str]:
    if compiled.why_not() is not None:
        return
    best = native.isa()
    for isa in ("baseline", "avx2", "avx512"):
        try:
            native.set_isa(isa)
        except ValueError:
            continue
        yield isa
    native.set_isa(best)


def matrices(rows: int, columns: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(rows * columns)
    x = torch.randn(rows, columns, generator=generator)
    yield x
    hard = x * torch.logspace(-30, 30, columns)
    for number, value in enumerate((0.0, -0.0, 1e-40, -3.4e38, 3.4e38, torch.finfo(torch.float32).max)):
        hard.view(-1)[number * 3 % hard.numel()] = value
    yield hard
    lost = hard.clone()
    lost.view(-1)[0], lost.view(-1)[-1] = torch.nan, torch.inf
    yield lost


def same(one: Tensor, other: Tensor) -> bool:
    """Bit for bit, but for the pattern of a NaN."""
    nan = one.isnan() & other.isnan()
    return torch.equal(one.contiguous().view(torch.int32)[~nan], other.contiguous().view(torch.int32)[~nan])


@needs_native
@pytest.mark.parametrize("rank", [1, 3, 4, 9])
def test_native_equals_the_reference(rank: int) -> None:
    for _, (rows, columns), (unit, decay) in itertools.product(isas(), SHAPES, UNITS):
        p, q = torch.randn(rank, rows) / 50, torch.randn(rank, columns) / 50
        for x, residual in itertools.product(matrices(rows, columns), list(matrices(rows, columns))[:2]):
            for feedback in (None, Feedback(residual, unit, decay)):
                assert same(compiled.left(x, feedback, q), plain.left(x, feedback, q))
                assert same(compiled.right(x, feedback, p), plain.right(x, feedback, p))
            _check_finish(x, Feedback(residual, unit, decay), p, q)


def _check_finish(x: Tensor, feedback: Feedback, p: Tensor, q: Tensor) -> None:
    for share in (1.0, 0.25):
        kept, expected = (feedback._replace(residual=feedback.residual.clone()) for _ in range(2))
        out = x.clone()
        compiled.finish(out, kept, p, q, share)
        total = plain.product(p, q)
        expected.keep(plain.with_residual(x, expected), total if share == 1.0 else total * share)
        assert same(out, total)
        assert same(kept.residual, expected.residual)


def test_vectors_become_orthonormal_and_keep_their_span() -> None:
    factor = torch.randn(5, 333, generator=torch.Generator().manual_seed(0)) * torch.logspace(-20, 20, 5)[:, None]
    (made,) = low_rank.orthonormal([factor])
    torch.testing.assert_close(made @ made.T, torch.eye(5), atol=1e-5, rtol=0)
    scaled = (factor / factor.abs().amax(dim=1, keepdim=True)).double()
    expected, _ = torch.linalg.qr(scaled.T)
    torch.testing.assert_close((made.double() @ expected).abs(), torch.eye(5).double(), atol=1e-5, rtol=0)


def test_a_vector_that_depends_on_others_becomes_zero() -> None:
    one = torch.randn(100, generator=torch.Generator().manual_seed(1))
    tiny = torch.full((100,), 2.0**-101)
    (made,) = low_rank.orthonormal([torch.stack([one, 3 * one, torch.zeros(100), tiny, one.flip(0)])])
    assert [bool(v.any()) for v in made] == [True, False, False, False, True]


def test_factors_that_go_together_have_the_bits_that_each_has_alone() -> None:
    generator = torch.Generator().manual_seed(2)
    factors = [torch.randn(3, length, generator=generator) for length in (1, 60, 64, 65, 100, 128, 700)]
    for together, factor in zip(low_rank.orthonormal(factors), factors, strict=True):
        assert torch.equal(together, low_rank.orthonormal([factor])[0])


def test_what_is_finite_stays_finite() -> None:
    x = torch.full((40, 30), 3.4e38)
    x[::2] *= -1
    (q,) = low_rank.orthonormal([torch.ones(1, 30)])
    p = low_rank.left(x, None, q)
    assert p.isfinite().all()
    right = low_rank.right(x, None, low_rank.orthonormal([p])[0])
    assert right.isfinite().all()
    low_rank.finish(x, None, low_rank.orthonormal([p])[0], low_rank.within_reach(right))
    assert x.isfinite().all()


def test_drawn_factors_are_between_minus_one_and_one_and_differ() -> None:
    drawn = low_rank.random_factor(4, 1000, low_rank.Noise(3), torch.device("cpu"))
    assert drawn.abs().max() < 1
    assert abs(float(drawn.mean())) < 0.05
    assert len(drawn.unique()) > 3000
