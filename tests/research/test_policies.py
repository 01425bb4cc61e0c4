"""The rules of policies that watch, by hand-made gradients; real ranks are in tests/dist."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from narrowcast_research.policies import Assignment, AutoScale, GradientDiversity, Watch
from torch import nn

from narrowcast.parallel import TensorInfo, schedule
from narrowcast.parallel.policy import choose, watcher_of

INFO = TensorInfo("w", (4, 8), torch.float32)
BIG = TensorInfo("big", (200, 100), torch.float32)


def see(policy: Any, gradient: torch.Tensor, step: int, info: TensorInfo = INFO) -> None:
    """One step of a world of one."""
    watch = Watch(policy, min_values=0)
    watch.look(info, gradient, step, policy.looks_at)
    watch.decide(step, lambda numbers: numbers, 1)


# ---- gradient diversity ----------------------------------------------------------------------------------------------


def muppet(gradients: list[torch.Tensor], window: int, patience: int) -> list[int]:
    """The rule of the paper's code, written down once more: the rung after each epoch."""
    rung, violations, largest, rungs = 0, 0, 0.0, []
    norm, total = 0.0, torch.zeros(4, 8, dtype=torch.float64)
    for epoch, g in enumerate(gradients, 1):
        norm, total = norm + g.double().square().sum().item(), total + g.double()
        if epoch % window == 0 and rung < 2:
            diversity = norm / total.square().sum().item()
            largest = max(largest, diversity)
            if largest / diversity > 1 + 1.5 * math.exp(-0.1 * epoch):
                violations += 1
            if violations >= patience:
                rung, violations, largest = rung + 1, 0, 0.0
            norm, total = 0.0, torch.zeros(4, 8, dtype=torch.float64)
        rungs.append(rung)
    return rungs


def test_diversity_climbs_exactly_where_the_rule_says() -> None:
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(60, 4, 8, generator=generator)
    # ever less noise around a common direction: diversity falls from about 1 to 1 / 3
    gradients = [noise[0] + noise[n] * 2 ** (2 - n / 4) for n in range(60)]
    policy = GradientDiversity(["int4/16", "int8/16", "as-is"], epoch=1)
    rungs = []
    for step, gradient in enumerate(gradients):
        see(policy, gradient, step)
        rungs.append(policy.rung)
    assert rungs == muppet(gradients, 3, 2)
    assert set(rungs) >= {0, 1}


def test_diversity_looks_once_an_epoch_and_not_at_the_top() -> None:
    policy = GradientDiversity(["int4/16", "as-is"], epoch=5)
    assert [step for step in range(12) if policy.due(step)] == [4, 9]
    policy.rung = 1
    assert not policy.due(4)


def test_diversity_survives_a_gradient_of_zeros_and_one_that_is_not_finite() -> None:
    policy = GradientDiversity(["int4/16", "as-is"], epoch=1, window=1)
    for step, value in enumerate((0.0, math.nan, math.inf)):
        see(policy, torch.full((4, 8), value), step)
    assert (policy.rung, policy.history) == (0, [])


def test_diversity_goes_on_from_a_checkpoint() -> None:
    generator = torch.Generator().manual_seed(3)
    gradients = [1 + torch.randn(4, 8, generator=generator) * 2 ** (3 - n / 4) for n in range(40)]
    whole, first, second = (GradientDiversity(["int4/16", "int8/16", "as-is"], epoch=1) for _ in range(3))
    for step, gradient in enumerate(gradients):
        see(whole, gradient, step)
        see(first if step < 20 else second, gradient, step)
        if step == 19:
            second.load_state_dict(first.state_dict())
    assert second.history == whole.history
    assert second.rung == whole.rung > 0


@pytest.mark.parametrize("options, word", [({"ladder": ["int8/16"], "epoch": 1}, "two wires"), ({"epoch": 0}, "steps")])
def test_a_ladder_that_leads_nowhere_is_refused(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        GradientDiversity(**{"ladder": ["int4/16", "as-is"], **options})


# ---- the automatic factor --------------------------------------------------------------------------------------------


def test_the_factor_halves_at_once_and_doubles_slowly() -> None:
    policy = AutoScale("e4m3fn", start=4.0, growth=10, threshold=0.1)
    quiet, loud = torch.full((10, 10), 1.0), torch.full((10, 10), 1.0)
    loud.view(-1)[:11] = 448 / 4  # exactly the largest value: it counts as being at the limit
    see(policy, loud, 0)
    assert policy.factor() == 2.0
    for step in range(1, 10):
        see(policy, quiet, step)
    assert policy.factor() == 2.0
    assert str(policy(INFO, 0)) == "e4m3fn@0.5"
    see(policy, quiet, 10)
    see(policy, quiet, 11)
    assert str(policy(INFO, 0)) == "e4m3fn@0.25"


def test_a_share_at_the_threshold_is_not_over_it() -> None:
    policy = AutoScale("e4m3fn", threshold=0.25, growth=1)
    gradient = torch.ones(4, 8)
    gradient.view(-1)[:8] = 1000.0
    see(policy, gradient, 0)
    assert policy.factor() == 2.0


def test_each_tensor_may_have_its_own_factor() -> None:
    policy = AutoScale("e5m2", start=1.0, growth=1, per_tensor=True)
    see(policy, torch.full((4, 8), 1e6), 0)
    see(policy, torch.full((200, 100), 1e-6), 0, BIG)
    assert (policy.factor("w"), policy.factor("big")) == (0.5, 2.0)


def test_the_factor_stays_a_number_that_a_spec_can_hold() -> None:
    policy = AutoScale("e4m3fn", start=2.0**59, growth=1)
    for step in range(5):
        see(policy, torch.zeros(4, 8), step)
    assert policy.factor() == 2.0**60
    assert float(str(policy(INFO, 0)).partition("@")[2]) == 2.0**-60


# ---- assignment ------------------------------------------------------------------------------------------------------


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 30), nn.Linear(30, 20), nn.Linear(20, 2))


def test_the_largest_tensors_are_demoted_first() -> None:
    # 300, 30, 600, 20, 40, 2 values: 992 in all
    assert Assignment(model(), share=0.6).demoted == {"1.weight"}
    assert Assignment(model(), share=0.61).demoted == {"1.weight", "0.weight"}
    assert Assignment(model(), share=1.0).demoted == {name for name, _ in model().named_parameters()}


def test_a_tensor_is_promoted_for_good_where_it_overflows() -> None:
    policy = Assignment(model(), low="e4m3fn@1", high="bf16", share=0.6)
    info = TensorInfo("1.weight", (20, 30), torch.float32)
    gradient = torch.full((20, 30), 448.0)
    see(policy, gradient, 0, info)
    assert str(policy(info, 1)) == "e4m3fn@1"
    gradient[0, 0] = 449.0
    see(policy, gradient, 1, info)
    assert str(policy(info, 2)) == "bf16"
    see(policy, torch.zeros(20, 30), 2, info)
    assert policy.promoted == {"1.weight": 1}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_counts_as_overflow(value: float) -> None:
    policy = Assignment(model(), low="e4m3fn@1", share=0.6)
    see(policy, torch.full((20, 30), value), 0, TensorInfo("1.weight", (20, 30), torch.float32))
    assert policy.promoted == {"1.weight": 0}


def test_a_wire_that_never_overflows_is_refused() -> None:
    with pytest.raises(ValueError, match="never overflows"):
        Assignment(model(), low="int8/256")


# ---- how they fit into policies --------------------------------------------------------------------------------------


def test_the_part_that_decides_on_a_tensor_is_found_inside() -> None:
    inner = AutoScale()
    policy = schedule({0: "as-is", 10: {"head*": "as-is", "*": inner}})
    head = TensorInfo("head.weight", (4, 8), torch.float32)
    assert [watcher_of(policy, info, step) for info, step in ((INFO, 0), (head, 10), (INFO, 10))] == [None, None, inner]


def test_small_tensors_stay_as_they_are_and_are_not_looked_at() -> None:
    policy = AutoScale(start=1.0, growth=1)
    assert choose(policy, INFO, 0).why == "has 32 values, under 10000"
    watch = Watch(policy)
    watch.look(INFO, torch.full((4, 8), 1e9), 0, "local")
    watch.decide(0, lambda numbers: numbers, 1)
    assert policy.factors == {}
