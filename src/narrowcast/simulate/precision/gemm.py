"""Differentiable matrix products with a chosen accumulator, forward and backward.

A bias is one more term of each sum, the last: the product 1 * bias is rounded like the others. So its gradient is
summed by the accumulator, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from narrowcast.kernels import Accumulator, accumulator, derive
from narrowcast.kernels import matmul as kernels

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
