"""Low rank in one process: against the algorithm in float64, and what every listed spec of it promises."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import narrowcast as nc
from narrowcast.codecs import KeptFactors, Law, Matrix, low_rank_specs
from narrowcast.simulate import World

WORLD, STEPS = 3, 6
ROWS, COLUMNS = 60, 45


def gradients(step: int, scale: float = 1.0) -> Tensor:
    """Of all workers: something of rank 3 that they share, and noise."""
    made = torch.Generator().manual_seed(7)
    base = torch.randn(ROWS, 3, generator=made) @ torch.randn(3, COLUMNS, generator=made)
    made.manual_seed(100 + step)
    return scale * (base + 0.2 * torch.randn(WORLD, ROWS, COLUMNS, generator=made))


def power_sgd(steps: int, start: Tensor, alternates: bool) -> list[Tensor]:
    """As the papers have it, in float64, with LAPACK's QR."""
    means, kept, on_left = [], start.double().T, False
    residual = torch.zeros(WORLD, ROWS, COLUMNS, dtype=torch.double)
    for step in range(steps):
        m = gradients(step).double() + residual
        held, _ = torch.linalg.qr(kept)
        if alternates:
            total = m.mT @ held if on_left else m @ held
            kept, on_left = total.mean(dim=0), not on_left
            mean = kept @ held.T if on_left else held @ kept.T
        else:
            p, _ = torch.linalg.qr((m @ held).mean(dim=0))
            kept = (m.mT @ p).mean(dim=0)
            mean = p @ kept.T
        residual = m - mean
        means.append(mean)
    return means


@pytest.mark.parametrize("spec", ["fp32+rank2+ef", "fp32+acp2+ef"])
def test_it_is_the_algorithm_of_its_paper(spec: str) -> None:
    world, codec = World(WORLD, spec=spec), nc.codec(spec)
    start = KeptFactors(0).of("0", Matrix(ROWS, COLUMNS), codec, torch.device("cpu")).vectors
    expected = power_sgd(STEPS, start, codec.sends_one_factor)
    for step in range(STEPS):
        mean = world.all_reduce(gradients(step), "avg", step=step)[0]
        torch.testing.assert_close(mean.double(), expected[step], atol=2e-4, rtol=0)


@pytest.mark.parametrize("spec", low_rank_specs())
def test_nothing_is_lost_but_to_the_residual(spec: str) -> None:
    world, arrived, wanted = World(WORLD, spec=spec), torch.zeros(ROWS, COLUMNS).double(), torch.zeros(1).double()
    for step in range(STEPS):
        arrived = arrived + world.all_reduce(gradients(step), "avg", step=step)[0].double()
        wanted = wanted + gradients(step).double().mean(dim=0)
    kept = world.state_dict().get("0", torch.zeros(ROWS, COLUMNS)).view(ROWS, COLUMNS)
    if nc.codec(spec).feedback:
        torch.testing.assert_close(arrived + kept, wanted, atol=1e-4, rtol=0)
    else:
        assert not kept.any()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("spec", [spec for spec in low_rank_specs() if Law.NONFINITE not in nc.codec(spec).exemptions])
def test_what_is_not_finite_arrives_and_stays_in_its_step(spec: str, value: float) -> None:
    world = World(WORLD, spec=spec)
    world.all_reduce(gradients(0), "avg", step=0)
    before = world.state_dict()
    lost = gradients(1)
    lost[1, 4, 5] = value
    assert not world.all_reduce(lost, "avg", step=1).isfinite().any()
    after = world.state_dict()
    assert after.get("0", torch.empty(0)).equal(before.get("0", torch.empty(0)))
    if not nc.codec(spec).sends_one_factor:
        assert after["0:right factor"].equal(before["0:right factor"])
    assert world.all_reduce(gradients(2), "avg", step=2).isfinite().all()


@pytest.mark.parametrize("spec", low_rank_specs())
@pytest.mark.parametrize("scale", [0.0, 1e-38, 3e37])
def test_what_is_finite_stays_finite(spec: str, scale: float) -> None:
    world = World(WORLD, spec=spec)
    for step in range(STEPS):
        assert world.all_reduce(gradients(step, scale), "avg", step=step).isfinite().all()
    # a rank that was lost comes back
    assert world.all_reduce(gradients(9, 3e37), "avg", step=9).any()


@pytest.mark.parametrize("spec", low_rank_specs())
def test_a_checkpoint_goes_on_with_the_same_bits_where_workers_are_as_many(spec: str) -> None:
    """Factors are the same on all of them; residuals are their mean, so the mean that arrives is, too."""
    world, other = World(WORLD, spec=spec), World(WORLD + 1, spec=spec)
    for step in range(3):
        world.all_reduce(gradients(step), "avg", step=step)
    other.load_state_dict(world.state_dict())
    key = next(key for key in world.state_dict() if key.endswith("factor"))
    assert other.state_dict()[key].equal(world.state_dict()[key])
    smaller = World(WORLD, spec=spec.replace("4", "3"))
    smaller.load_state_dict(world.state_dict())
    assert smaller.all_reduce(gradients(3), "avg", step=3).isfinite().all()
    assert len(smaller.state_dict()[next(k for k in smaller.state_dict() if k.endswith("factor"))]) == 3


@pytest.mark.parametrize("spec", low_rank_specs())
def test_a_sum_is_the_mean_times_the_number_of_workers(spec: str) -> None:
    mean, total = World(WORLD, spec=spec), World(WORLD, spec=spec)
    for step in range(3):
        expected = WORLD * mean.all_reduce(gradients(step), "avg", step=step)[0]
        got = total.all_reduce(gradients(step), "sum", step=step)[0]
        assert (got - expected).norm() < 0.1 * expected.norm()


def test_who_cannot_says_so() -> None:
    codec, x = nc.codec("bf16+rank4+ef"), torch.randn(8, 8)
    calls = {
        "nbytes with bf16": lambda: codec.nbytes(4),
        "+rank is for gradients": lambda: codec.encode(x),
        "World.all_gather with bf16": lambda: World(2, spec=codec).all_gather([x, x]),
        "two dimensions": lambda: World(2, spec=codec).all_reduce(torch.randn(2, 8), "avg"),
        "give matrices=": lambda: World(2, spec=codec).sent_bytes([64]),
        "write fp32 instead": lambda: nc.codec("as-is+rank2"),
        "choose one of": lambda: nc.codec("bf16+rank2+acp2"),
        "from 1 to 256": lambda: nc.codec("bf16+rank300"),
    }
    for text, call in calls.items():
        with pytest.raises(ValueError, match=text.replace("+", r"\+")):
            call()
