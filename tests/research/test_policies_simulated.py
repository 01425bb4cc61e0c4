"""Policies that watch, in a simulated world: the decisions that real ranks would take, through checkpoints too."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from narrowcast_research.policies import Assignment, AutoScale, GradientDiversity, Watch
from torch import nn

from narrowcast import data
from narrowcast.parallel import TensorInfo
from narrowcast.parallel.policy import Watching
from narrowcast.simulate import Run, train
from narrowcast.simulate.exchange import WorldWatch
from narrowcast.study.models import linear_layers, seeded

WORKERS = 3
INFO = TensorInfo("w", (40,), torch.float32)


def gradients(step: int) -> torch.Tensor:
    return torch.randn(WORKERS, 40, generator=torch.Generator().manual_seed(step)) * 10.0 ** (step % 5)


def in_rank_order(rows: list[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros_like(rows[0])
    for row in rows:
        total = total + row
    return total


def apart(policies: list[Watching], step: int) -> None:
    """What real ranks do: each has a policy of its own, and all get the same sums."""
    watches, rows = [Watch(policy, min_values=0) for policy in policies], gradients(step)
    for watch, row in zip(watches, rows, strict=True):
        watch.look(INFO, row, step, "local")
        watch.look(INFO, rows.mean(0), step, "mean")
    seen = [watch.take(step) for watch in watches]
    for watch, own in zip(watches, seen, strict=True):
        watch.give(own)
        watch.decide(step, lambda _: in_rank_order([Watch.flat(each) for each in seen]), WORKERS)


MAKERS = {
    "factor": partial(AutoScale, "e4m3fn", start=4.0, growth=3),
    "diversity": partial(GradientDiversity, ["int4/16", "int8/16", "as-is"], epoch=1, window=2, patience=1, decay=1.0),
    "assignment": lambda: Assignment(nn.ParameterDict({"w": nn.Parameter(torch.zeros(40))}), low="e4m3fn@1"),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_simulated_world_decides_as_ranks_do(make: partial[Watching]) -> None:
    together, alone = make(), [make() for _ in range(WORKERS)]
    world = WorldWatch(together, WORKERS, min_values=0)
    for step in range(12):
        apart(alone, step)
        rows = gradients(step)
        world.local(INFO, list(rows), step)
        world.mean(INFO, rows.mean(0), step)
        world.decide(step)
        states = [_plain(policy) for policy in (together, *alone)]
        assert all(state == states[0] for state in states), step
    assert _plain(together) != _plain(make())


def _plain(policy: Watching) -> str:
    return str({key: value for key, value in policy.state_dict().items() if key != "sums"})


def test_a_training_that_is_resumed_goes_on_with_what_the_policy_learnt(tmp_path: Path) -> None:
    digits = data.load("digits").normalised()

    def run(policy: AutoScale, steps: int, checkpoint: Path | None) -> Run:
        model = seeded(lambda: linear_layers((64, 16, 10)), 0)
        spec = {"*bias": "as-is", "*": policy}
        options = {"workers": 2, "batch": 64, "min_values": 0, "test_every": 99}
        return train(model, digits, spec=spec, steps=steps, checkpoint=checkpoint, **options)

    make = partial(AutoScale, "e4m3fn", start=2.0**14, growth=2)
    whole, cut, again = make(), make(), make()
    one = run(whole, 12, None)
    run(cut, 5, tmp_path / "c.pt")
    two = run(again, 12, tmp_path / "c.pt")
    assert whole.factors == again.factors != cut.factors
    for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True):
        assert torch.equal(a, b)
