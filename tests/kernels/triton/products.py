"""Products of low rank by Triton beside the reference: used in the interpreter and on a GPU."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from narrowcast.kernels import low_rank
from narrowcast.kernels.arithmetic import Feedback
from narrowcast.kernels.reference import low_rank as plain
from narrowcast.kernels.triton import low_rank as kernels

SHAPES = ((1, 1), (5, 300), (40, 17))
FEEDBACK = ((1.0, 1.0), (3.0, 0.95), (1024.0, 1.0))


def close(got: Tensor, wanted: Tensor) -> None:
    """To rounding: sums have another order."""
    scale = float(wanted.abs().max())
    torch.testing.assert_close(got.cpu(), wanted, rtol=1e-4, atol=1e-5 * scale)


def check_products(device: str, rank: int, rows: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(rows * columns + rank)
    x, residual = (torch.randn(rows, columns, generator=generator) for _ in range(2))
    p, q = torch.randn(rank, rows, generator=generator), torch.randn(rank, columns, generator=generator)
    there, left, right = x.to(device), p.to(device), q.to(device)
    for feedback in (None, *(Feedback(residual, *kind) for kind in FEEDBACK)):
        on_device = feedback and feedback._replace(residual=residual.to(device))
        close(kernels.left(there, on_device, right), plain.left(x, feedback, q))
        close(kernels.right(there, on_device, left), plain.right(x, feedback, p))
        for share in (1.0, 0.25):
            out, wanted = there.clone(), x.clone()
            kept, expected = (feedback and feedback._replace(residual=residual.clone()) for _ in range(2))
            kept = kept and kept._replace(residual=kept.residual.to(device))
            kernels.finish(out, kept, left, right, share)
            low_rank.finish(wanted, expected, p, q, share)
            assert torch.equal(out.cpu(), wanted)
            if kept is not None and expected is not None:
                assert torch.equal(kept.residual.cpu(), expected.residual)


def check_orthonormal(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    factors = [torch.randn(4, length, generator=generator) for length in (5, 100, 4099, 64)]
    # one vector twice, one that is zero, one that is too small
    factors[1][2], factors[0][1], factors[3][0] = 2 * factors[1][0], 0, factors[3][0] * 2.0**-120
    made = kernels.orthonormal([factor.to(device) for factor in factors], low_rank.TINY, low_rank.DEPENDENT)
    for got, wanted in zip(made, low_rank.orthonormal(factors), strict=True):
        close(got, wanted)
    factors[2][1, 77] = torch.nan
    lost = kernels.orthonormal([factors[2].to(device)], low_rank.TINY, low_rank.DEPENDENT)[0]
    assert lost[1].isnan().any()


def check(device: str) -> None:
    for rank, (rows, columns) in itertools.product((1, 6), SHAPES):
        check_products(device, rank, rows, columns)
    check_orthonormal(device)
