"""Every draw of a simulated training has its own noise: no two casts, sums, steps or workers share a seed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from narrowcast import simulate
from narrowcast.simulate.precision import gemm
from narrowcast.simulate.precision.casts import Caster

SEED, STEPS, WORKERS = 7, 3, 3


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The seed of every draw, in the order in which they are made."""
    seeds: list[int] = []
    cast, product = Caster.__call__, gemm.kernels.matmul

    def casting(self: Caster, x: Tensor, seed: int = 0, step: int = 0) -> Tensor:
        if self.stochastic:
            seeds.append(seed)
        return cast(self, x, seed, step)

    def multiplying(*operands: object, seed: int | None = None, out: Tensor | None = None) -> Tensor:
        if seed is not None:
            seeds.append(seed)
        return product(*operands, seed=seed, out=out)

    monkeypatch.setattr(Caster, "__call__", casting)
    monkeypatch.setattr(gemm.kernels, "matmul", multiplying)
    return seeds


class Net(nn.Module):
    """A layer that is used twice, a product by hand, a norm, and a quantizer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm, self.cast = nn.LayerNorm(8), simulate.Quantizer("e4m3+sr", "e5m2+sr", seed=SEED)
        self.w = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.again(self.again(self.first(x)))) @ self.cast(self.w).t()


def data() -> SimpleNamespace:
    made = torch.Generator().manual_seed(0)
    x, y = torch.randn(36, 8, generator=made), torch.randint(8, (36,), generator=made)
    return SimpleNamespace(x_train=x[:18], y_train=y[:18], x_test=x[18:], y_test=y[18:])


FORMATS = {"weights": "e4m3+sr", "activations": "int8/64+sr", "gradients": "e5m2+sr", "accumulate": "bf16+sr"}
UPDATES = ["stochastic", "kahan"]


@pytest.mark.parametrize("update", UPDATES)
def test_no_two_draws_of_a_training_share_noise(drawn: list[int], update: str) -> None:
    """Workers, steps, layers, calls, directions, sums, master and optimizer: all are given one seed."""
    torch.manual_seed(0)

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        formats = {"weights": "e4m3+sr", "states": "e5m2+sr", "update": update}
        return simulate.optim.SGD(parameters, lr=0.1, momentum=0.9, seed=SEED, **formats)

    lower = FORMATS | {"master": "bf16+sr", "seed": SEED}
    run = {"steps": STEPS, "batch": 18, "optimizer": optimizer, "seed": SEED, "test_every": STEPS}
    simulate.train(Net(), data(), workers=WORKERS, spec="as-is", lower=lower, **run)
    assert len(drawn) > STEPS * WORKERS * 20
    assert max(Counter(drawn).values()) == 1


def test_a_model_that_is_never_told_its_step_draws_new_noise(drawn: list[int]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    lowered = simulate.lower(model, **FORMATS, master="bf16+sr", seed=SEED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lowered.keep_master(optimizer)
    for _ in range(STEPS):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    assert max(Counter(drawn).values()) == 1


def test_workers_share_nothing_and_a_master_is_the_same_for_all() -> None:
    """A rank's activations are its own, what all keep is not; and the same rank gives the same bits."""
    found = []
    for worker in (0, 1, 1):
        torch.manual_seed(0)
        layer = nn.Linear(64, 64)
        lowered = simulate.lower(layer, weights="e4m3+sr", master="bf16+sr", seed=SEED)
        lowered.set_step(3, worker)
        lowered.round_master()
        found.append((layer.weight.detach().clone(), layer(torch.eye(64)).detach()))
    (first, out), (second, other), (_, again) = found
    assert torch.equal(first, second)
    assert not torch.equal(out, other)
    assert torch.equal(other, again)


def test_what_a_lowered_model_knows_of_its_noise_is_kept() -> None:
    lowered = simulate.lower(nn.Linear(4, 4), weights="e4m3+sr", master="bf16+sr", seed=SEED)
    lowered.set_step(2, 5)
    lowered.round_master()
    state = lowered.state_dict()
    other = simulate.lower(nn.Linear(4, 4), weights="e4m3+sr", master="bf16+sr", seed=0)
    other.load_state_dict(state)
    assert other.state_dict() == state
    # as version 0.1 wrote it
    other.load_state_dict({"seed": 1, "step": 4, "calls": {"": 6}})
    assert other.state_dict() == {"seed": 1, "step": 4, "worker": 0, "rounds": 0, "calls": {"": 6}}
