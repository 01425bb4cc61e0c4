"""simulate.train(local=...) gives the weights that `nc.LocalSGD` gives on real processes, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from dist.pool import Pool
from dist.test_simulate_train import SEED, adam, data, net, state_bits
from torch import nn
from torch.nn import functional as F

import narrowcast as nc
from narrowcast.parallel import LocalUpdates, seeds
from narrowcast.parallel.local_sgd import local_sgd
from narrowcast.simulate import Batches, World, train
from narrowcast.simulate.settings import seed_of

STEPS, BATCH, WORLD = 13, 24, 4
SPARSE = "int2/64+top16+ef95"
CASES: dict[str, tuple[object, LocalUpdates]] = {
    "blocking": ("fp32", LocalUpdates(3)),
    "streaming": ("int4/128+ef", LocalUpdates(4, fragments=3, delay=2)),
    "sparse": (SPARSE, LocalUpdates(4, fragments=2, delay=3, merge=0.25)),
    "noise": ("int8/64+sr+ef", LocalUpdates(3, fragments=3)),
    "low rank": ("bf16+rank2+ef", LocalUpdates(4, fragments=2, delay=1)),
    "ring": ("int4/64+ef", LocalUpdates(3, mixing="ring", variance_every=2)),
    "pairs": ("e3m0/64", LocalUpdates(3, mixing="pairs", fragments=2, delay=1)),
    "exponential": ({"*.bias": "as-is", "*": "int8/64+sr"}, LocalUpdates(2, mixing="exponential")),
    "one scale": ("e4m3", LocalUpdates(4, mixing="ring", consensus=0.5)),
    "plain ring": ("fp32", LocalUpdates(4, mixing="ring")),
    "fewer later": ("int4/64", LocalUpdates(2, mixing={0: "all", 2: "exponential", 4: "ring"}, delay=1)),
}


def real(group: dist.ProcessGroup, cases: list[str]) -> list[tuple[dict[str, bytes], dict[str, float]]]:
    found, rank, examples = [], dist.get_rank(group), data()
    for name in cases:
        spec, updates = CASES[name]
        batches, model = Batches(len(examples.x_train), BATCH, WORLD, SEED), net().train()
        optimizer = adam(list(model.parameters()))
        # as if these ranks were all, and this the first object of a program
        with mock.patch.object(local_sgd, "own_seed", lambda kind, seed, _: seeds.first_seed(kind, seed, WORLD)):
            local = nc.LocalSGD(*(model, optimizer), spec=spec, local=updates, group=group, min_values=50, seed=SEED)
        for step in range(STEPS):
            indices = batches.indices(step, rank)
            torch.manual_seed(seed_of(SEED, step, rank))
            optimizer.zero_grad()
            F.cross_entropy(model(examples.x_train[indices]), examples.y_train[indices]).backward()
            optimizer.step()
        found.append((state_bits(model), local.stats()))
        local.close()
    return found


def first_of_its_kind(group: dist.ProcessGroup) -> bool:
    seeds._COUNTS.clear()
    torch.manual_seed(0)
    made = nc.LocalSGD(nn.Linear(4, 4), every=1, spec="int8/64", seed=SEED)
    found = made._sender._seed
    made.close()
    return found == seeds.first_seed("LocalSGD", SEED, dist.get_world_size())


def test_the_first_object_on_the_default_group_has_the_noise_of_a_simulation(pool: Pool) -> None:
    assert all(pool.run(8, first_of_its_kind))


def simulated(name: str, model: nn.Module | None = None, **more: Any) -> nc.simulate.Run:
    spec, updates = CASES[name]
    options: dict[str, Any] = {"steps": STEPS, "batch": BATCH, "seed": SEED, "min_values": 50, "test_every": 5, **more}
    return train(model or net(), data(), workers=WORLD, spec=spec, local=updates, optimizer=adam, **options)


def test_the_simulation_has_the_bits_of_processes(pool: Pool) -> None:
    """One call for all cases: what costs is the way there."""
    # by ranks, by cases
    ranks = pool.run(WORLD, real, list(CASES))
    for number, name in enumerate(CASES):
        run = simulated(name)
        assert run.local is not None
        for rank, model in enumerate(run.local.models):
            bits, stats = ranks[rank][number]
            assert state_bits(model) == bits, (name, rank)
            if run.local.updates.looks_every:
                assert stats["variance"] == run.local.variance > 0, name


@pytest.mark.parametrize("name", ["streaming", "pairs", "fewer later"])
def test_a_run_that_was_cut_goes_on_with_the_same_bits(tmp_path: Path, name: str) -> None:
    whole, path = simulated(name), tmp_path / "run.pt"
    simulated(name, checkpoint=path, checkpoint_every=1, after_step=lambda run: setattr(run, "stop", run.step == 7))
    parts = simulated(name, checkpoint=path)
    assert parts.step == whole.step == STEPS
    assert state_bits(parts.model) == state_bits(whole.model)
    losses = [[(r["step"], r["loss"]) for r in run.log.of_kind("step")] for run in (whole, parts)]
    assert losses[0] == losses[1]
    with pytest.raises(ValueError, match=r"of another run: .*local was"):
        simulated("ring", checkpoint=path)


def test_the_mean_of_all_workers_is_what_is_tested() -> None:
    run = simulated("ring")
    assert run.local is not None
    for name, value in run.model.named_parameters():
        mean = torch.stack([dict(model.named_parameters())[name] for model in run.local.models]).mean(0)
        assert torch.allclose(value, mean, atol=1e-6)
    assert [record["step"] for record in run.log.of_kind("variance")] == [2, 8]
    assert run.accuracy is not None


def test_a_thousand_workers() -> None:
    updates = LocalUpdates(2, mixing="pairs", variance_every=1, outer=lambda a: torch.optim.SGD(a, lr=1.0))
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    examples = data()
    for key in ("x_train", "y_train"):
        setattr(examples, key, getattr(examples, key).repeat(12, *[1] * (getattr(examples, key).dim() - 1)))
    run = train(model, examples, workers=1000, spec="int8/64", local=updates, batch=1000, steps=4, min_values=1)
    assert run.local is not None
    assert len(run.local.models) == 1000
    looks = [record["variance"] for record in run.log.of_kind("variance")]
    assert looks[0] > 0
    assert len(looks) == 2


def test_what_has_no_place_beside_local_updates_is_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"nodes": 2}, "nodes= with local="),
        ({"error_every": 2}, "error_every= with local="),
        ({"lower": {"forward": "e4m3"}}, "lower= with local="),
        ({"spec": "auto"}, 'local= and spec="auto"'),
    ]
    for given, text in cases:
        with pytest.raises(ValueError, match=text):
            train(net(), data(), **{"workers": WORLD, "local": LocalUpdates(3), "steps": 1, "batch": BATCH, **given})
    run = simulated("blocking", steps=1)
    with pytest.raises(AttributeError, match="this run has local updates"):
        _ = run.exchange
    assert isinstance(run.world, World)
