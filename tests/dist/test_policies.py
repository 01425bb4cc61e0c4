"""Policies that watch gradients: every rank decides alike, at the same step, whoever saw the reason for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist.models import loss, wrapped
from dist.pool import Pool
from narrowcast_research.policies import Assignment, AutoScale, GradientDiversity
from torch import nn

import narrowcast as nc
from narrowcast.parallel import TensorInfo

STEPS = 6
LOUD = 1e4
"""What one rank alone multiplies its loss by, so that its gradients exceed what eight bits can hold."""


def run(group: dist.ProcessGroup, policy: Any, loud: int | None, steps: int = STEPS) -> list[list[str]]:
    """The wires of all tensors, step by step, and equal parameters on all ranks at the end."""
    model = wrapped(group)
    handle = nc.attach(model, policy, min_values=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    wires = []
    for step in range(steps):
        optimizer.zero_grad()
        rank = dist.get_rank(group)
        (loss(model, rank, step) * (LOUD if rank == loud else 1.0)).backward()
        optimizer.step()
        wires.append([row.wire for row in handle.rows()])
    handle.check_ranks()
    handle.detach()
    return wires


def factor(group: dist.ProcessGroup, start: float, loud: int | None) -> tuple[list[list[str]], dict[str, float]]:
    policy = AutoScale("e4m3fn", start=start, growth=2)
    return run(group, policy, loud), policy.factors


@pytest.mark.parametrize("world", [2, 3])
def test_the_factor_falls_on_every_rank_where_one_of_them_overflows(pool: Pool, world: int) -> None:
    found = pool.run(world, factor, 2.0**12, world - 1)
    assert all(outcome == found[0] for outcome in found)
    wires, factors = found[0]
    # looked at in each step, decided before the next: the last step's conclusion is still to come
    assert factors == {"": 2.0 ** (12 - (STEPS - 1))}
    assert len({wire for step in wires for wire in step}) == STEPS


def test_the_factor_grows_where_nothing_overflows(pool: Pool) -> None:
    (_, factors), (_, again) = pool.run(2, factor, 16.0, None)
    assert factors == again
    assert factors[""] == pytest.approx(16 * 2.0 ** ((STEPS - 1) / 2))


def promoted(group: dist.ProcessGroup, promote: bool) -> tuple[list[list[str]], dict[str, int], list[str]]:
    model = wrapped(group)
    policy = Assignment(model, low="e4m3fn@0.0001", high="bf16", share=0.9, promote=promote)
    return run(group, policy, loud=1), policy.promoted, sorted(policy.demoted)


def test_a_tensor_that_overflows_on_one_rank_is_promoted_on_all(pool: Pool) -> None:
    found = pool.run(2, promoted, True)
    assert found[0] == found[1]
    wires, steps, demoted = found[0]
    assert demoted == ["0.weight", "2.weight"]
    assert steps == {"0.weight": 0, "2.weight": 0}
    assert wires[0].count("e4m3fn@0.0001") == 2
    assert wires[1] == ["bf16"] * 6


def test_nothing_is_promoted_where_that_is_switched_off(pool: Pool) -> None:
    wires, steps, _ = pool.run(2, promoted, False)[0]
    assert (steps, wires[-1].count("e4m3fn@0.0001")) == ({}, 2)


class Weighted(nn.Module):
    """One weight; its gradient is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def climbs(group: dist.ProcessGroup) -> tuple[list[str], list[tuple[int, int, float]]]:
    """Gradients that differ from step to step at first, and repeat from step 8 on."""
    model = wrapped(group, Weighted())
    policy = GradientDiversity(["int4/16", "int8/16", "as-is"], epoch=2, window=2, patience=2, decay=0.3)
    handle, wires = nc.attach(model, policy, min_values=0), []
    for step in range(28):
        generator = torch.Generator().manual_seed(100 * dist.get_rank(group) + (step if step < 8 else 0))
        model(torch.randn(64, generator=generator)).backward()
        wires.append(handle.rows()[0].wire)
        model.zero_grad()
    handle.detach()
    return wires, policy.history


def test_the_ladder_is_climbed_at_the_same_step_on_every_rank(pool: Pool) -> None:
    found = pool.run(2, climbs)
    assert found[0] == found[1]
    wires, history = found[0]
    diversity = [value for _, _, value in history]
    # two looks at the same gradient: 2 g^2 / (2 g)^2
    assert diversity[2:4] == pytest.approx([0.5, 0.5], abs=1e-6)
    assert min(diversity[:2]) > 0.7
    # violations at the windows that end with steps 11 and 15; the decision is taken before the next backward pass
    assert wires.index("int8/16") == 16
    # at the new rung nothing is more diverse than the repeating gradient: no violation
    assert wires[-1] == "int8/16"


def broken(group: dist.ProcessGroup) -> str:
    """A policy that raises while it looks at the mean must not leave DDP waiting."""

    class Broken(AutoScale):
        looks_at = "mean"

        def look(self, info: TensorInfo, gradient: torch.Tensor) -> tuple[float, ...]:
            raise KeyError("mine")

    model = wrapped(group)
    handle = nc.attach(model, Broken(), min_values=0)
    try:
        loss(model, dist.get_rank(group), 0).backward()
    except Exception as error:  # noqa: BLE001  the test looks at it
        return str(error)
    finally:
        handle.detach()
    return ""


def test_an_error_in_a_policy_ends_the_backward_pass(pool: Pool) -> None:
    assert all("mine" in text for text in pool.run(2, broken))
