"""Differentiable products and convolutions: right against torch, and every sum the accumulator's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from narrowcast import simulate
from narrowcast.kernels.matmul import matmul as plain

SEQUENTIAL = "fp32+sequential"


def integers(*shape: int, seed: int = 0) -> Tensor:
    """Small integers: their sums are exact in any order, so that equality needs no tolerance."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float()


def check_equal(ours: Callable[..., Tensor], theirs: Callable[..., Tensor], *inputs: Tensor) -> None:
    mine, other = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    out, want = ours(*mine), theirs(*other)
    assert torch.equal(out, want)
    grad = integers(*out.shape, seed=9)
    out.backward(grad)
    want.backward(grad)
    for x, y in zip(mine, other, strict=True):
        assert torch.equal(x.grad, y.grad)


CONVOLUTIONS = [
    *[(1, 0, 1, 1), (2, 1, 1, 1), (3, 2, 2, 2), (2, (3, 0), 1, 2), ((1, 2), 1, (2, 1), 1), (2, 5, 1, 4)],
    *[(1, "same", 2, 1), (1, "valid", 1, 1)],
]


@pytest.mark.parametrize("stride, padding, dilation, groups", CONVOLUTIONS)
def test_a_2d_convolution_and_its_gradients(stride: int, padding: int, dilation: int, groups: int) -> None:
    x, w, b = integers(2, 4, 9, 10), integers(8, 4 // groups, 3, 2, seed=1), integers(8, seed=2)
    shape = stride, padding, dilation, groups
    check_equal(
        lambda x, w, b: simulate.conv2d(x, w, b, *shape, accumulate=SEQUENTIAL),
        lambda x, w, b: functional.conv2d(x, w, b, *shape),
        *(x, w, b),
    )
    check_equal(
        lambda x, w: simulate.conv2d(x, w, None, *shape, accumulate="fp32+pairwise"),
        lambda x, w: functional.conv2d(x, w, None, *shape),
        *(x[0], w),
    )


def test_convolutions_of_an_empty_batch() -> None:
    w, b = integers(6, 2, 3, 3, seed=1), integers(6, seed=2)
    check_equal(
        lambda x, w, b: simulate.conv2d(x, w, b, 2, 1, groups=2, accumulate=SEQUENTIAL),
        lambda x, w, b: functional.conv2d(x, w, b, 2, 1, groups=2),
        *(integers(0, 4, 9, 10), w, b),
    )
    check_equal(
        lambda x, w: simulate.conv1d(x, w, accumulate="bf16"),
        functional.conv1d,
        *(integers(0, 2, 9), w[:, :, 0]),
    )


@pytest.mark.parametrize("shape", [(1, 0, 1, 1), (2, 2, 2, 2), (3, "valid", 1, 4), (1, "same", 1, 1)])
def test_a_1d_convolution_and_its_gradients(shape: tuple[int, int, int, int]) -> None:
    x, w, b = integers(3, 4, 17), integers(8, 4 // shape[3], 5, seed=1), integers(8, seed=2)
    check_equal(
        lambda x, w, b: simulate.conv1d(x, w, b, *shape, accumulate=SEQUENTIAL),
        lambda x, w, b: functional.conv1d(x, w, b, *shape),
        *(x, w, b),
    )


SHAPES = [
    ((3, 4), (4, 5)),
    ((2, 3, 4), (4, 5)),
    ((2, 1, 3, 4), (5, 4, 6)),
    ((4,), (4, 5)),
    ((3, 4), (4,)),
    ((4,), (4,)),
]


@pytest.mark.parametrize("of_a, of_b", [*SHAPES, ((2, 3, 4), (4,)), ((0, 4), (4, 3)), ((3, 0), (0, 2))])
def test_products_of_every_shape_and_their_gradients(of_a: tuple[int, ...], of_b: tuple[int, ...]) -> None:
    check_equal(lambda a, b: simulate.matmul(a, b, SEQUENTIAL), torch.matmul, integers(*of_a), integers(*of_b, seed=1))


def test_a_linear_layer_with_and_without_bias() -> None:
    x, w, b = integers(2, 3, 7), integers(5, 7, seed=1), integers(5, seed=2)
    check_equal(lambda *given: simulate.linear(*given, accumulate=SEQUENTIAL), functional.linear, x, w, b)
    check_equal(lambda x, w: simulate.linear(x, w, accumulate=SEQUENTIAL), functional.linear, x, w)


def test_gradients_go_through_the_backward_accumulator() -> None:
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(6, 40, generator=g).requires_grad_(), torch.randn(40, 9, generator=g).requires_grad_()
    out = simulate.matmul(a, b, "bf16+kahan", backward="e5m10+pairwise")
    grad = torch.randn(6, 9, generator=g)
    out.backward(grad)
    assert torch.equal(out, plain(a, b, "bf16+kahan"))
    assert torch.equal(a.grad, plain(grad, b.t(), "e5m10+pairwise"))
    assert torch.equal(b.grad, plain(a.t(), grad, "e5m10+pairwise"))


def test_the_bias_is_the_last_term_of_the_sum() -> None:
    """bf16: 256 + 1 is 256 again, so a bias that came first would be lost in another way than one that comes last."""
    x, w = torch.ones(1, 256), torch.ones(1, 256)
    assert simulate.linear(x, w, torch.tensor([1.0]), accumulate="bf16").item() == 256
    assert simulate.linear(x, w, torch.tensor([2.0]), accumulate="bf16").item() == 258


def test_a_convolution_sums_channel_by_channel() -> None:
    x, w = torch.randn(1, 3, 4, 4), torch.randn(2, 3, 2, 2)
    out = simulate.conv2d(x, w, accumulate="e4m3+mul=fp32")
    columns = functional.unfold(x, 2)[0]
    assert torch.equal(out.view(2, -1), plain(w.flatten(1), columns, "e4m3+mul=fp32"))


def test_the_gradient_of_a_weight_is_one_sum_over_samples_and_places() -> None:
    x, w = torch.randn(3, 2, 5, 5), torch.randn(4, 2, 3, 3).requires_grad_()
    out = simulate.conv2d(x, w, accumulate="bf16")
    grad = torch.randn_like(out)
    out.backward(grad)
    columns = functional.unfold(x, 3).permute(0, 2, 1).flatten(0, 1)
    want = plain(grad.flatten(2).permute(1, 0, 2).flatten(1), columns, "bf16")
    assert torch.equal(w.grad, want.view_as(w))


def test_float32_accumulators_are_torchs_own() -> None:
    x, w, b = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3), torch.randn(4)
    assert torch.equal(simulate.conv2d(x, w, b, padding=1), functional.conv2d(x, w, b, padding=1))
    assert torch.equal(simulate.matmul(x, x.mT), x @ x.mT)


def test_a_product_and_its_two_gradients_draw_their_own_noise() -> None:
    """a @ b, grad @ b and a @ grad are the same product where a, b and grad are one symmetric matrix."""
    square = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
    square = square + square.t()
    a, b = square.clone().requires_grad_(), square.clone().requires_grad_()
    out = simulate.matmul(a, b, "e4m3+mul=fp32+sr", seed=1)
    out.backward(square)
    assert len({x.detach().numpy().tobytes() for x in (out, a.grad, b.grad)}) == 3


@pytest.mark.parametrize("what", [None, 3])
def test_what_is_no_accumulator_is_told(what: object) -> None:
    with pytest.raises(TypeError, match=f"accumulator: got {what}; give a string such as"):
        simulate.matmul(torch.ones(2, 2), torch.ones(2, 2), what)


def test_stochastic_sums_need_a_seed() -> None:
    with pytest.raises(ValueError, match="needs seed="):
        simulate.matmul(torch.ones(2, 2), torch.ones(2, 2), "bf16+sr")
