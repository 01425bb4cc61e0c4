"""Differentiable matrix products and convolutions with a chosen accumulator, forward and backward.

A bias is one more term of each sum, the last: the product 1 * bias is rounded like the others. So its gradient is
summed by the accumulator, too.

Convolutions are unfolded into matrix products. The order of their sums, over what each index runs, the last fastest: an
output over (channel, kernel row, kernel column), then the bias; a gradient of the input over (output channel, kernel
row, kernel column) of the mirrored kernel, zeros between strides included; a gradient of the weight over (sample,
output row, output column). Letters: B batch, G groups, O outputs a group, C inputs a group, T taps (C x kernel),
P positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from narrowcast.kernels import Accumulator, accumulator, derive
from narrowcast.kernels import matmul as kernels
from narrowcast.simulate.precision import autograd

FORWARD, GRAD_A, GRAD_B = 0, 1, 2


@dataclass(frozen=True)
class Accumulators:
    """The accumulators of the product itself and of its two gradients, and the seed of their noise."""

    forward: Accumulator
    backward: Accumulator
    seed: int = 0

    @property
    def is_torch(self) -> bool:
        return self.forward.is_torch and self.backward.is_torch

    def product(self, a: Tensor, b: Tensor, which: int, out: Tensor | None = None) -> Tensor:
        """a @ b; `which` says whether forward or for a gradient, and separates their noise."""
        rule = self.forward if which == FORWARD else self.backward
        return kernels.matmul(a, b, rule, seed=derive(self.seed, which) if rule.stochastic else None, out=out)


def sums(accumulate: str | Accumulator, backward: str | Accumulator | None, seed: int | None) -> Accumulators:
    forward = accumulator(accumulate)
    back = forward if backward is None else accumulator(backward)
    if seed is None and (forward.stochastic or back.stochastic):
        raise ValueError("matmul: stochastic rounding needs seed=, an integer; take a new one for each step")
    return Accumulators(forward, back, seed or 0)


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, how: Accumulators) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.how = how
        return how.product(a, b, FORWARD)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        a, b = ctx.saved_tensors
        needs_a, needs_b, _ = ctx.needs_input_grad
        grad_a = ctx.how.product(grad, b.mT, GRAD_A).sum_to_size(a.shape) if needs_a else None
        grad_b = ctx.how.product(a.mT, grad, GRAD_B).sum_to_size(b.shape) if needs_b else None
        return grad_a, grad_b, None


def product(a: Tensor, b: Tensor, how: Accumulators) -> Tensor:
    """a @ b, differentiable; torch's own where the accumulators are."""
    if how.is_torch:
        return torch.matmul(a, b)
    if a.dim() == 1:
        return product(a[None], b, how).squeeze(-2 if b.dim() > 1 else -1)
    if b.dim() == 1:
        return product(a, b[:, None], how).squeeze(-1)
    if b.dim() == 2 and a.dim() > 2:
        # one matrix for the whole batch: its gradient is then one sum
        flat: Tensor = _Matmul.apply(a.flatten(0, -2), b, how)
        return flat.view(*a.shape[:-1], b.shape[1])
    result: Tensor = _Matmul.apply(a, b, how)
    return result


def with_ones(x: Tensor, dim: int) -> Tensor:
    """x with a slice of ones after the last along `dim`."""
    shape = list(x.shape)
    shape[dim] = 1
    return torch.cat([x, x.new_ones(shape)], dim)


def affine(x: Tensor, weight: Tensor, bias: Tensor | None, how: Accumulators) -> Tensor:
    """What F.linear computes."""
    if how.is_torch:
        return functional.linear(x, weight, bias)
    if bias is None:
        return product(x, weight.t(), how)
    return product(with_ones(x, -1), torch.cat([weight, bias[:, None]], 1).t(), how)


def matmul(
    a: Tensor,
    b: Tensor,
    accumulate: str | Accumulator = "fp32",
    *,
    backward: str | Accumulator | None = None,
    seed: int | None = None,
) -> Tensor:
    """a @ b, differentiable, with every product and sum rounded as `accumulate` says ("bf16+kahan", "fp16/128", ...).

    backward: the accumulator of both gradients, by default the same. Shapes are torch.matmul's. Where a batch was
    broadcast, its gradients are added in float32.
    """
    return product(a, b, sums(accumulate, backward, seed))


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    accumulate: str | Accumulator = "fp32",
    *,
    backward: str | Accumulator | None = None,
    seed: int | None = None,
) -> Tensor:
    """F.linear with a chosen accumulator; the bias is the last term of each sum."""
    return affine(x, weight, bias, sums(accumulate, backward, seed))


Pair = tuple[int, int]
Sizes = int | Sequence[int]


def _pair(value: Sizes) -> Pair:
    if isinstance(value, int):
        return value, value
    first, *rest = value
    return first, (rest or [first])[0]


@dataclass(frozen=True)
class Shape:
    """The kernel, stride, padding and so on of a 2-d convolution."""

    kernel: Pair
    stride: Pair
    padding: tuple[int, int, int, int]
    """As F.pad takes them: left, right, top, bottom."""
    dilation: Pair
    groups: int

    @classmethod
    def of(
        cls, weight: Tensor, stride: Sizes = 1, padding: str | Sizes = 0, dilation: Sizes = 1, groups: int = 1
    ) -> Shape:
        """From the arguments of F.conv2d."""
        kernel, steps, spacing = (weight.shape[2], weight.shape[3]), _pair(stride), _pair(dilation)
        if padding == "same" and steps != (1, 1):
            raise ValueError("conv: padding='same' goes with stride 1")
        if isinstance(padding, str) and padding not in ("same", "valid"):
            raise ValueError(f"conv: unknown padding {padding!r}; give 'same', 'valid' or numbers")
        if padding == "same":
            rows, columns = (d * (k - 1) for d, k in zip(spacing, kernel, strict=True))
            around = columns // 2, columns - columns // 2, rows // 2, rows - rows // 2
        else:
            rows, columns = _pair(0 if isinstance(padding, str) else padding)
            around = columns, columns, rows, rows
        return cls(kernel, steps, around, spacing, groups)

    def unfold(self, x: Tensor) -> Tensor:
        """cols_BGTP of an input."""
        return _unfold(functional.pad(x, self.padding), self.kernel, self.dilation, self.stride, self.groups)

    def output_size(self, x: Tensor) -> tuple[int, ...]:
        left, right, top, bottom = self.padding
        sizes = x.shape[2] + top + bottom, x.shape[3] + left + right
        axes = zip(sizes, self.kernel, self.dilation, self.stride, strict=True)
        return tuple((size - d * (k - 1) - 1) // s + 1 for size, k, d, s in axes)


def _unfold(x: Tensor, kernel: Pair, dilation: Pair, stride: Pair, groups: int) -> Tensor:
    """cols_BGTP of an input that is already padded."""
    cols = functional.unfold(x, kernel, dilation=dilation, stride=stride)
    return cols.view(x.shape[0], groups, cols.shape[1] // groups, cols.shape[2])


def _spread(grad: Tensor, stride: Pair) -> Tensor:
    """Zeros between the rows and columns of a strided gradient."""
    if stride == (1, 1):
        return grad
    rows, columns = ((n - 1) * s + 1 for n, s in zip(grad.shape[2:], stride, strict=True))
    wide = grad.new_zeros(*grad.shape[:2], rows, columns)
    wide[:, :, :: stride[0], :: stride[1]] = grad
    return wide


def _mirror(weight: Tensor, groups: int) -> Tensor:
    """weight_GCT of the convolution that takes gradients back: channels exchanged, kernel turned round."""
    outputs, inputs = weight.shape[0] // groups, weight.shape[1]
    turned = weight.flip(2, 3).view(groups, outputs, inputs, *weight.shape[2:])
    return turned.transpose(1, 2).reshape(groups, inputs, -1)


def grad_input(grad: Tensor, weight: Tensor, size: Sequence[int], shape: Shape, how: Accumulators) -> Tensor:
    """The gradient of the input, whose size is B x channels x `size`."""
    spread = _spread(grad, shape.stride)
    left, _, top, _ = shape.padding
    pads: list[int] = []
    for axis, before in ((1, left), (0, top)):
        reach = shape.dilation[axis] * (shape.kernel[axis] - 1)
        first = reach - before
        pads += [first, size[axis] + reach - first - spread.shape[2 + axis]]
    cols_BGTP = _unfold(functional.pad(spread, pads), shape.kernel, shape.dilation, (1, 1), shape.groups)
    result = how.product(_mirror(weight, shape.groups), cols_BGTP, GRAD_A)
    return result.view(grad.shape[0], weight.shape[1] * shape.groups, *size)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, shape: Shape, how: Accumulators) -> Tensor:
        cols_BGTP, groups, outputs = shape.unfold(x), shape.groups, weight.shape[0] // shape.groups
        weight_GOT = weight.reshape(groups, outputs, -1)
        if bias is not None:
            # one more tap
            cols_BGTP, weight_GOT = with_ones(cols_BGTP, 2), torch.cat([weight_GOT, bias.view(groups, -1, 1)], 2)
        ctx.save_for_backward(x, weight)
        ctx.shape, ctx.how, ctx.has_bias = shape, how, bias is not None
        # in its final shape at once: nobody could change a view of it in place
        out = x.new_empty(x.shape[0], weight.shape[0], *shape.output_size(x), dtype=torch.float32)
        out_BGOP = out.view(x.shape[0], groups, outputs, cols_BGTP.shape[3])
        how.product(weight_GOT, cols_BGTP, FORWARD, out_BGOP)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _, _ = ctx.needs_input_grad
        to_x = grad_input(grad, weight, x.shape[2:], ctx.shape, ctx.how) if needs_x else None
        if not (needs_weight or needs_bias):
            return to_x, None, None, None, None
        groups, cols_BGTP, taps = ctx.shape.groups, ctx.shape.unfold(x), weight[0].numel()
        if ctx.has_bias:
            cols_BGTP = with_ones(cols_BGTP, 2)
        grad_BGOP = grad.reshape(grad.shape[0], groups, weight.shape[0] // groups, cols_BGTP.shape[3])
        grad_GOX = grad_BGOP.permute(1, 2, 0, 3).flatten(2)
        cols_GXT = cols_BGTP.permute(1, 0, 3, 2).flatten(1, 2)
        taps_GOT = ctx.how.product(grad_GOX, cols_GXT, GRAD_B)
        to_bias = taps_GOT[:, :, taps].flatten() if ctx.has_bias else None
        return to_x, taps_GOT[:, :, :taps].reshape(weight.shape), to_bias, None, None


@lru_cache(maxsize=256)
def _torch_convolution(stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1) -> autograd.Convolution2d:
    return autograd.Convolution2d(list(_pair(stride)), list(_pair(padding)), list(_pair(dilation)), groups)


def torch_convolution(x: Tensor, *shape: Any, **named: Any) -> autograd.Convolution2d | None:
    """F.conv2d with its gradients, where it is given a batch, and its shape in numbers and tuples, as modules do."""
    values = *shape, *named.values()
    if x.dim() != 4 or not all(isinstance(value, int | tuple) for value in values):
        return None
    return _torch_convolution(*shape, **named)


def convolution2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, how: Accumulators, *shape: Any, **named: Any
) -> Tensor:
    """What F.conv2d computes, whose arguments follow; torch's own where the accumulators are."""
    if how.is_torch:
        return functional.conv2d(x, weight, bias, *shape, **named)
    if x.dim() == 3:
        return convolution2d(x[None], weight, bias, how, *shape, **named)[0]
    if x.dim() != 4 or weight.dim() != 4:
        shapes = f"got {tuple(x.shape)} and {tuple(weight.shape)}"
        raise ValueError(f"conv2d: input and weight are of 4 dimensions, or the input of 3; {shapes}")
    result: Tensor = _Convolution.apply(x, weight, bias, Shape.of(weight, *shape, **named), how)
    return result


def _as_2d(value: Sizes, other: int) -> Pair:
    return other, value if isinstance(value, int) else value[0]


def convolution1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    how: Accumulators,
    stride: Sizes = 1,
    padding: str | Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Tensor:
    """What F.conv1d computes: a 2-d convolution of one row."""
    if how.is_torch:
        return functional.conv1d(x, weight, bias, stride, padding, dilation, groups)
    if x.dim() not in (2, 3) or weight.dim() != 3:
        shapes = f"got {tuple(x.shape)} and {tuple(weight.shape)}"
        raise ValueError(f"conv1d: input and weight are of 3 dimensions, or the input of 2; {shapes}")
    flat_padding = padding if isinstance(padding, str) else _as_2d(padding, 0)
    steps = _as_2d(stride, 1), flat_padding, _as_2d(dilation, 1)
    return convolution2d(x.unsqueeze(-2), weight.unsqueeze(-2), bias, how, *steps, groups).squeeze(-2)


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: str | Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    *,
    accumulate: str | Accumulator = "fp32",
    backward: str | Accumulator | None = None,
    seed: int | None = None,
) -> Tensor:
    """F.conv2d with a chosen accumulator, differentiable; see `simulate.matmul`."""
    return convolution2d(x, weight, bias, sums(accumulate, backward, seed), stride, padding, dilation, groups)


def conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: str | Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    *,
    accumulate: str | Accumulator = "fp32",
    backward: str | Accumulator | None = None,
    seed: int | None = None,
) -> Tensor:
    """F.conv1d with a chosen accumulator, differentiable; see `simulate.matmul`."""
    return convolution1d(x, weight, bias, sums(accumulate, backward, seed), stride, padding, dilation, groups)
