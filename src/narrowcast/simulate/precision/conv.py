"""Convolutions with a chosen accumulator: unfolded into matrix products, forward and both gradients.

The order of the sums, over what each index runs, the last fastest: an output over (channel, kernel row, kernel column),
then the bias; a gradient of the input over (output channel, kernel row, kernel column) of the mirrored kernel, zeros
between strides included; a gradient of the weight over (sample, output row, output column).

Letters: B batch, G groups, O outputs a group, C inputs a group, T taps (C x kernel), P positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from narrowcast.kernels import Accumulator
from narrowcast.simulate.precision import autograd
from narrowcast.simulate.precision.gemm import FORWARD, GRAD_A, GRAD_B, Accumulators, sums, with_ones

Pair = tuple[int, int]


@dataclass(frozen=True)
class Shape:
    """Stride, padding (before and after each axis) and so on of a 2-d convolution."""

    stride: Pair
    padding: tuple[int, int, int, int]
    """As F.pad takes them: left, right, top, bottom."""
    dilation: Pair
    groups: int


def _unfold(x: Tensor, kernel: Pair, dilation: Pair, stride: Pair, groups: int) -> Tensor:
    """cols_BGTP of an input that is already padded."""
    cols = functional.unfold(x, kernel, dilation=dilation, stride=stride)
    return cols.view(x.shape[0], groups, cols.shape[1] // groups, cols.shape[2])


def _weights(weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
    """weight_GOT, the bias as one more tap."""
    flat = weight.reshape(groups, weight.shape[0] // groups, -1)
    return flat if bias is None else torch.cat([flat, bias.view(groups, -1, 1)], 2)


def _output_size(x: Tensor, kernel: Pair, shape: Shape) -> Pair:
    left, right, top, bottom = shape.padding
    sizes = x.shape[2] + top + bottom, x.shape[3] + left + right
    rows, columns = (
        (size - d * (k - 1) - 1) // s + 1
        for size, k, d, s in zip(sizes, kernel, shape.dilation, shape.stride, strict=True)
    )
    return rows, columns


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
    kernel: Pair = (weight.shape[2], weight.shape[3])
    spread = _spread(grad, shape.stride)
    left, _, top, _ = shape.padding
    pads: list[int] = []
    for axis, before in ((1, left), (0, top)):
        reach = shape.dilation[axis] * (kernel[axis] - 1)
        first = reach - before
        pads += [first, size[axis] + reach - first - spread.shape[2 + axis]]
    cols_BGTP = _unfold(functional.pad(spread, pads), kernel, shape.dilation, (1, 1), shape.groups)
    result = how.product(_mirror(weight, shape.groups), cols_BGTP, GRAD_A)
    return result.view(grad.shape[0], weight.shape[1] * shape.groups, *size)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, shape: Shape, how: Accumulators) -> Tensor:
        kernel: Pair = (weight.shape[2], weight.shape[3])
        cols_BGTP = _unfold(functional.pad(x, shape.padding), kernel, shape.dilation, shape.stride, shape.groups)
        if bias is not None:
            cols_BGTP = with_ones(cols_BGTP, 2)
        ctx.save_for_backward(x, weight)
        ctx.shape, ctx.how, ctx.has_bias = shape, how, bias is not None
        # in its final shape at once: nobody could change a view of it in place
        out = x.new_empty(x.shape[0], weight.shape[0], *_output_size(x, kernel, shape), dtype=torch.float32)
        out_BGOP = out.view(x.shape[0], shape.groups, weight.shape[0] // shape.groups, cols_BGTP.shape[3])
        how.product(_weights(weight, bias, shape.groups), cols_BGTP, FORWARD, out_BGOP)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _, _ = ctx.needs_input_grad
        to_x = grad_input(grad, weight, x.shape[2:], ctx.shape, ctx.how) if needs_x else None
        if not (needs_weight or needs_bias):
            return to_x, None, None, None, None
        taps_GOT = _grad_weights(grad, x, weight, ctx)
        taps = weight[0].numel()
        to_bias = taps_GOT[:, :, taps].flatten() if ctx.has_bias else None
        return to_x, taps_GOT[:, :, :taps].reshape(weight.shape), to_bias, None, None


def _grad_weights(grad: Tensor, x: Tensor, weight: Tensor, ctx: Any) -> Tensor:
    shape, groups = ctx.shape, ctx.shape.groups
    padded = functional.pad(x, shape.padding)
    kernel: Pair = (weight.shape[2], weight.shape[3])
    cols_BGTP = _unfold(padded, kernel, shape.dilation, shape.stride, groups)
    if ctx.has_bias:
        cols_BGTP = with_ones(cols_BGTP, 2)
    grad_BGOP = grad.reshape(grad.shape[0], groups, weight.shape[0] // groups, cols_BGTP.shape[3])
    grad_GOX = grad_BGOP.permute(1, 2, 0, 3).flatten(2)
    cols_GXT = cols_BGTP.permute(1, 0, 3, 2).flatten(1, 2)
    return ctx.how.product(grad_GOX, cols_GXT, GRAD_B)


def _pair(value: int | Sequence[int]) -> Pair:
    if isinstance(value, int):
        return value, value
    first, *rest = value
    return first, (rest or [first])[0]


def _padding(padding: str | int | Sequence[int], weight: Tensor, dilation: Pair, stride: Pair) -> tuple[int, ...]:
    if padding == "valid":
        padding = 0
    if padding == "same":
        if stride != (1, 1):
            raise ValueError("conv: padding='same' goes with stride 1")
        totals = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        return totals[1] // 2, totals[1] - totals[1] // 2, totals[0] // 2, totals[0] - totals[0] // 2
    if isinstance(padding, str):
        raise ValueError(f"conv: unknown padding {padding!r}; give 'same', 'valid' or numbers")
    rows, columns = _pair(padding)
    return columns, columns, rows, rows


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
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    how: Accumulators,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """What F.conv2d computes; torch's own where the accumulators are."""
    if how.is_torch:
        return functional.conv2d(x, weight, bias, stride, padding, dilation, groups)
    if x.dim() == 3:
        return convolution2d(x[None], weight, bias, how, stride, padding, dilation, groups)[0]
    if x.dim() != 4 or weight.dim() != 4:
        shapes = f"got {tuple(x.shape)} and {tuple(weight.shape)}"
        raise ValueError(f"conv2d: input and weight are of 4 dimensions, or the input of 3; {shapes}")
    left, right, top, bottom = _padding(padding, weight, _pair(dilation), _pair(stride))
    shape = Shape(_pair(stride), (left, right, top, bottom), _pair(dilation), groups)
    result: Tensor = _Convolution.apply(x, weight, bias, shape, how)
    return result


def _as_2d(value: int | Sequence[int], other: int) -> Pair:
    return other, value if isinstance(value, int) else value[0]


def convolution1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    how: Accumulators,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
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
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    accumulate: str | Accumulator = "fp32",
    backward: str | Accumulator | None = None,
    seed: int | None = None,
) -> Tensor:
    """F.conv2d with a chosen accumulator, differentiable; see `simulate.matmul`."""
    how = sums(accumulate, backward, seed)
    return convolution2d(x, weight, bias, how, stride, padding, dilation, groups)


def conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    accumulate: str | Accumulator = "fp32",
    backward: str | Accumulator | None = None,
    seed: int | None = None,
) -> Tensor:
    """F.conv1d with a chosen accumulator, differentiable; see `simulate.matmul`."""
    how = sums(accumulate, backward, seed)
    return convolution1d(x, weight, bias, how, stride, padding, dilation, groups)
