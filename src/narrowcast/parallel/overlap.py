"""When a step is over: gradients become ready, wait for one queue, and travel one after the other.

`attach(model, "auto")` and `narrowcast predict` both decide with this code. Shapes: D versions of the measurements, C
calls in the order in which they start.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SURE = 0.03
"""Two wires that differ by less are as good as one another."""


def queue(arrive_DC: Tensor, service_DC: Tensor) -> Tensor:
    """When each call is done, if calls are served one by one in the order of C.

    finish[c] = max(arrive[c], finish[c - 1]) + service[c], in closed form.
    """
    done = service_DC.cumsum(dim=-1)
    return done + (arrive_DC - (done - service_DC)).cummax(dim=-1).values


def queue_by_steps(arrive: list[float], service: list[float]) -> list[float]:
    """`queue` as it is defined, for one version: what the closed form is compared with."""
    finish, last = [], float("-inf")
    for ready, seconds in zip(arrive, service, strict=True):
        last = max(ready, last) + seconds
        finish.append(last)
    return finish


def queue_by_levels(arrive_DC: Tensor, service_DC: Tensor, inner_DC: Tensor) -> Tensor:
    """`queue` where each level of links has its own: half of `inner` inside a node, the rest outside, half inside.

    The two inner parts share a link: it cannot be done before it has moved all of them.
    """
    first = queue(arrive_DC, inner_DC / 2)
    last = queue(queue(first, service_DC - inner_DC), inner_DC / 2)
    return torch.maximum(last, arrive_DC[..., :1] + inner_DC.cumsum(dim=-1))


@dataclass(frozen=True)
class Contention:
    """How many times slower compute and collectives are while both run."""

    compute: float = 1.0
    collective: float = 1.0


@dataclass(frozen=True)
class Span:
    """What a step comes to, [D] each."""

    step: Tensor
    backward_end: Tensor
    communication: Tensor
    exposed: Tensor
    """What the step takes beyond compute: communication that nothing hides, and compute that it slows down."""


PLAIN_CONTENTION = Contention()


def step(
    compute_D: Tensor,
    backward_end_D: Tensor,
    ready_DC: Tensor,
    service_DC: Tensor,
    slow: Contention = PLAIN_CONTENTION,
    inner_DC: Tensor | None = None,
) -> Span:
    """A step of `compute_D` seconds in all, whose backward pass ends at `backward_end_D` after the step's begin.

    While calls are under way the rest of the backward pass is slower, and calls are slower until it ends. inner_DC: the
    part of each call that travels inside nodes, where calls may overtake one another there; None: one call at a time.
    """
    total = service_DC.sum(dim=-1)
    if service_DC.shape[-1] == 0:
        return Span(compute_D, backward_end_D, total, torch.zeros_like(compute_D))
    begin = ready_DC[..., :1]
    window = (backward_end_D[..., None] - begin).clamp_min(1e-12)
    stretch = 1 + (slow.compute - 1) * (total[..., None] / window).clamp_max(1.0)
    end = (begin + window * stretch)[..., 0]
    arrive, busy = begin + (ready_DC - begin) * stretch, service_DC * slow.collective
    if inner_DC is None:
        while_busy = queue(arrive, busy)[..., -1]
    else:
        while_busy = queue_by_levels(arrive, busy, inner_DC * slow.collective)[..., -1]
    over = while_busy - end
    finish = end + torch.where(over > 0, over / slow.collective, over)
    whole = torch.maximum(finish, end) + (compute_D - backward_end_D)
    return Span(whole, end, total, whole - compute_D)


@dataclass(frozen=True)
class WireDecision:
    """The answer: a wire, and why in words. `sure` is False where the measurements cannot tell."""

    wire: str
    sure: bool
    why: str
    gain: float = 1.0
    low: float = 1.0
    high: float = 1.0


def decide(steps: dict[str, Tensor], plain: str) -> WireDecision:
    """The wire with the shortest step; `plain` where the gain is small, or where the versions do not agree on one.

    steps: seconds of a step in each version [D]; the first is the best estimate.
    """
    others = [wire for wire in steps if wire != plain]
    if not others:
        return WireDecision(plain, True, "there is nothing to choose from")
    best = min(others, key=lambda wire: float(steps[wire][0]))
    gains = steps[plain] / steps[best]
    gain, (low, high) = float(gains[0]), interval(gains)
    gives = f"{best} gives {gain:.2f}x ({low:.2f}-{high:.2f}) over {plain}"
    if gain >= 1 + SURE and low > 1.0:
        return WireDecision(best, True, gives, gain, low, high)
    if gain >= 1 + SURE or high > 1 + 3 * SURE:
        return WireDecision(plain, False, f"cannot tell: {gives}; the interval holds 1", gain, low, high)
    return WireDecision(plain, True, f"leave it off: {gives}", gain, low, high)


def interval(values_D: Tensor) -> tuple[float, float]:
    """The 5 % and 95 % quantiles of the versions after the first, with the first inside."""
    first = float(values_D[0])
    if len(values_D) < 3:
        return first, first
    low, high = values_D[1:].quantile(torch.tensor([0.05, 0.95], dtype=values_D.dtype))
    return min(float(low), first), max(float(high), first)
