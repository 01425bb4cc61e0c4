"""One node of the graph for an operation of torch's and all its casts: the host enters Python once each way.

A lowered model on a GPU waits for the host, and there each node in Python costs more than a launch. What is computed is
`apply_together`, torch's operation, `apply_together`, bit for bit. That is the plain form, and the rest takes it:
compilers, autocast, accumulators of ours, other operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from narrowcast.simulate.precision.casts import Casting

Gradients = Sequence[Tensor | None]


@dataclass(frozen=True)
class Convolution2d:
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int

    def forward(self, *low: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        x, weight, *bias = low
        shape = self.stride, self.padding, self.dilation, self.groups
        return torch.conv2d(x, weight, bias[0] if bias else None, *shape), ()

    def backward(self, grad: Tensor, low: Sequence[Tensor], kept: Sequence[Tensor], needed: list[bool]) -> Gradients:
        x, weight, *bias = low
        sizes = [bias[0].numel()] if bias else None
        shape = self.stride, self.padding, self.dilation, False, [0, 0], self.groups
        gradients: Gradients = torch.ops.aten.convolution_backward.default(grad, x, weight, sizes, *shape, needed)
        return gradients


@dataclass
class BatchNorm:
    running_mean: Tensor | None
    running_var: Tensor | None
    training: bool
    momentum: float
    eps: float
    implementation: int = 0
    """Which of torch's, as torch chose in `forward`."""

    def forward(self, *low: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        x, weight, bias = low
        out, mean, var, reserve, self.implementation = torch._batch_norm_impl_index(
            x, weight, bias, self.running_mean, self.running_var, self.training, self.momentum, self.eps,
            torch.backends.cudnn.enabled,
        )  # fmt: skip
        return out, (mean, var, reserve)

    def backward(self, grad: Tensor, low: Sequence[Tensor], kept: Sequence[Tensor], needed: list[bool]) -> Gradients:
        x, weight, _ = low
        mean, var, reserve = kept
        stored = self.running_mean, self.running_var, mean, var
        gradients: Gradients = torch.ops.aten._batch_norm_impl_index_backward.default(
            self.implementation, x, grad, weight, *stored, self.training, self.eps, needed, reserve
        )
        return gradients


Operation = Convolution2d | BatchNorm
"""An operation of torch's, as autograd calls it. Tensors are input, weight, perhaps bias. `forward` gives the result
and what `backward` needs besides the tensors; that gives the gradients of those asked for."""


class _Node(torch.autograd.Function):
    """The result, and the tensors as they were cast: outputs may be saved, and a second derivative finds them."""

    @staticmethod
    def forward(
        ctx: Any, run: Operation, castings: Sequence[Casting], after: Casting, step: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        low = [
            x.view_as(x) if how.forward.is_identity else how.forward(x, how.seeds[0], step)
            for x, how in zip(tensors, castings, strict=True)
        ]
        out, kept = run.forward(*low)
        ctx.run, ctx.castings, ctx.after, ctx.step = run, castings, after, step
        ctx.needed = [x.requires_grad for x in tensors]
        ctx.save_for_backward(*low, *kept)
        return after.forward(out, after.seeds[0], step), *low

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *grads_low: Tensor | None) -> tuple[Tensor | None, ...]:
        count = len(ctx.castings)
        gradients: Gradients = [None] * count
        if grad is not None:
            saved = ctx.saved_tensors  # once: a checkpoint hands them out once
            low, kept = saved[:count], saved[count:]
            arrived = ctx.after.backward(grad, ctx.after.seeds[1], ctx.step)
            gradients = ctx.run.backward(arrived, low, kept, [*ctx.needed, False][:3])
        back = []
        for total, more, how, needed in zip(gradients, grads_low, ctx.castings, ctx.needed, strict=False):
            if more is not None:  # of a second derivative
                total = more if total is None else total + more
            back.append(how.backward(total, how.seeds[1], ctx.step) if needed and total is not None else None)
        return None, None, None, None, *back


def suits(*tensors: Tensor) -> bool:
    """Whether there will be a graph, and nobody who wants to look into it or to change types on the way."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return False
    return not torch._C._is_any_autocast_enabled() and any(x.requires_grad for x in tensors)


def apply_operation(
    run: Operation, tensors: Sequence[Tensor], castings: Sequence[Casting], after: Casting, step: int
) -> Tensor:
    """`run` of the tensors under their castings, its result under `after`."""
    result: Tensor = _Node.apply(run, castings, after, step, *tensors)[0]
    return result
