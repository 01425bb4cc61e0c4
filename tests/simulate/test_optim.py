"""Optimizers in a chosen format: torch's own bits in float32, and what each rounding is for elsewhere."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast import simulate
from narrowcast.simulate.precision import optim

PAIRS: list[tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]] = [
    (optim.SGD, torch.optim.SGD, {"lr": 0.1}),
    (optim.SGD, torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.01, "momentum": 0.9, "dampening": 0.1}),
    (optim.SGD, torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.01, "momentum": 0.9, "nesterov": True}),
    (optim.Adam, torch.optim.Adam, {"lr": 0.01, "betas": (0.8, 0.99), "weight_decay": 0.01}),
    (optim.Adam, torch.optim.Adam, {"lr": 0.01}),
    (optim.AdamW, torch.optim.AdamW, {"lr": 0.01}),
]


def train(make: Callable[[nn.Module], torch.optim.Optimizer], steps: int = 8, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(12, 33), nn.Tanh(), nn.Linear(33, 5))
    optimizer = make(model)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(16, 12)).square().mean().backward()
        optimizer.step()
    return model


def weights_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize("ours, theirs, options", PAIRS)
def test_in_float32_the_bits_are_torchs(ours: Any, theirs: Any, options: dict[str, Any], master: bool) -> None:
    mine = train(lambda m: ours(m.parameters(), **options, master=master))
    other = train(lambda m: theirs(m.parameters(), **options, foreach=False))
    assert torch.equal(weights_of(mine), weights_of(other))


@pytest.mark.parametrize("update", ["nearest", "stochastic", "kahan"])
@pytest.mark.parametrize(
    "ours, options", [(p[0], p[2]) for p in PAIRS] + [(optim.LARS, {"lr": 0.1, "weight_decay": 0.01})]
)
def test_weights_and_states_are_numbers_of_their_formats(ours: Any, options: dict[str, Any], update: str) -> None:
    kept = []

    def make(m: nn.Module) -> torch.optim.Optimizer:
        kept.append(ours(m.parameters(), **options, weights="bf16", states="e8m2", update=update, seed=1))
        return kept[0]

    model = train(make)
    assert torch.equal(weights_of(model), nc.round_to(weights_of(model), "bf16"))
    for state in kept[0].state.values():
        for name, value in state.items():
            fmt = {"compensation": "bf16", "step": None}.get(name, "e8m2")
            assert fmt is None or torch.equal(value, nc.round_to(value, fmt)), name


def small_steps(update: str, weights: str = "bf16", steps: int = 200, **options: Any) -> torch.Tensor:
    """Steps of 1/2048 from 1: below half a unit in the last place of bf16, so that nearest rounding undoes each."""
    p = nn.Parameter(torch.ones(2000))
    optimizer = optim.SGD([p], lr=2.0**-11, weights=weights, update=update, seed=2, **options)
    for _ in range(steps):
        p.grad = torch.full_like(p, -1.0)
        optimizer.step()
    return p.detach()


def test_nearest_stands_still_and_stochastic_and_kahan_do_not() -> None:
    """Zamirai et al. 2020, in one line each."""
    target = 1 + 200 / 2048
    assert torch.equal(small_steps("nearest"), torch.ones(2000))
    assert (small_steps("kahan") - target).abs().max() <= 2.0**-7
    assert abs(small_steps("stochastic").mean() - target) < 0.002
    assert torch.equal(small_steps("nearest", master=True), nc.round_to(torch.full((2000,), target), "bf16"))


def test_fixed_point_needs_stochastic_rounding() -> None:
    """Gupta et al. 2015: steps below half of 2**-8 vanish unless rounding is stochastic."""
    assert torch.equal(small_steps("nearest", "fixed8.8"), torch.ones(2000))
    assert abs(small_steps("stochastic", "fixed8.8").mean() - (1 + 200 / 2048)) < 0.003


def test_a_kahan_step_by_hand() -> None:
    p = nn.Parameter(nc.round_to(torch.randn(50), "bf16"))
    optimizer = optim.SGD([p], lr=0.1, weights="bf16", update="kahan")
    w, c = p.detach().clone(), torch.zeros(50)
    for _ in range(5):
        p.grad = torch.randn(50)
        u = nc.round_to(p.grad * -0.1, "bf16")
        y = nc.round_to(u - c, "bf16")
        t = nc.round_to(w + y, "bf16")
        c = nc.round_to(nc.round_to(t - w, "bf16") - y, "bf16")
        w = t
        optimizer.step()
        assert torch.equal(p.detach(), w)


@pytest.mark.parametrize("ours", [optim.SGD, optim.Adam, optim.AdamW, optim.LARS])
@pytest.mark.parametrize("options", [{"update": "stochastic"}, {"update": "kahan"}, {"master": True}])
def test_a_checkpoint_continues_bit_for_bit(ours: Any, options: dict[str, Any]) -> None:
    extra = {"momentum": 0.9} if ours in (optim.SGD, optim.LARS) else {}

    def make(params: Any) -> torch.optim.Optimizer:
        return ours(params, lr=0.05, weights="bf16", seed=4, **extra, **options)

    def steps(p: nn.Parameter, optimizer: torch.optim.Optimizer, which: range) -> None:
        for i in which:
            p.grad = torch.randn(30, generator=torch.Generator().manual_seed(i))
            optimizer.step()

    p = nn.Parameter(torch.ones(30))
    optimizer = make([p])
    steps(p, optimizer, range(5))
    q = nn.Parameter(p.detach().clone())
    other = make([q])
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    steps(p, optimizer, range(5, 9))
    steps(q, other, range(5, 9))
    assert torch.equal(p, q)


def test_lars_scales_each_tensor() -> None:
    w, b = nn.Parameter(torch.full((2, 2), 2.0)), nn.Parameter(torch.ones(2))
    optimizer = optim.LARS([w, b], lr=1.0, momentum=0.0, coefficient=0.01, eps=0.0)
    w.grad, b.grad = torch.full((2, 2), 4.0), torch.full((2,), 0.25)
    optimizer.step()
    assert torch.allclose(w, torch.full((2, 2), 2 - 4 * 0.01 * 4 / 8))
    assert torch.equal(b, torch.full((2,), 0.75))
    every = optim.LARS([b], lr=1.0, momentum=0.0, coefficient=0.01, eps=0.0, adapt_all=True)
    every.step()
    assert torch.allclose(b, torch.full((2,), 0.75 - 0.25 * 0.01 * 0.75 / 0.25))


def test_a_group_that_is_added_later_starts_as_the_first_did() -> None:
    made = torch.rand(4, 40, generator=torch.Generator().manual_seed(0))
    options = {"lr": 0.1, "weights": "e4m3", "update": "stochastic", "master": True, "seed": 1}
    both, later = ([nn.Parameter(row.clone()) for row in made[:2]] for _ in range(2))
    one = optim.SGD([{"params": [both[0]]}, {"params": [both[1]]}], **options)
    other = optim.SGD([later[0]], **options)
    other.add_param_group({"params": [later[1]]})
    for p, q in zip(both, later, strict=True):
        assert torch.equal(q, nc.round_to(q, "e4m3"))
        p.grad = q.grad = torch.ones(40)
    one.step()
    other.step()
    assert all(torch.equal(p, q) for p, q in zip(both, later, strict=True))
    twins = [nn.Parameter(made[2].clone()) for _ in range(2)]
    optim.SGD([{"params": [p]} for p in twins], **options)
    assert not torch.equal(*twins)


def test_stochastic_updates_are_for_codecs_and_scaled_layers_too() -> None:
    x = torch.cat([torch.full((1,), 10.0), torch.ones(255)])
    p = nn.Parameter(x.clone())
    optimizer = optim.SGD([p], lr=2.0**-11, weights="int8/256", update="stochastic", seed=2)
    for _ in range(200):
        p.grad = torch.cat([torch.zeros(1), -torch.ones(255)])
        optimizer.step()
    # a step of the codec is 10 / 127, that of the optimizer a 160th of it
    assert abs(float(p.detach()[1:].mean()) - (1 + 200 / 2048)) < 0.02
    scaled = optim.SGD([p], weights=simulate.LayerScale(nc.format("posit8.1"), sigma=3), update="stochastic", seed=2)
    assert isinstance(scaled.weights, simulate.LayerScale)
    assert (scaled.weights.sigma, scaled.weights.rounding) == (3, "stochastic")


def test_compensated_weights_warm_up_as_well() -> None:
    p = nn.Parameter(torch.full((5,), 0.3))
    posit = simulate.LayerScale(nc.format("posit8.1"), warmup=2)
    optimizer = optim.SGD([p], lr=2.0**-12, weights=posit, update="kahan")
    seen = []
    for _ in range(3):
        p.grad = torch.ones(5)
        optimizer.step()
        seen.append(bool(torch.equal(p, posit(p, step=2))))
    assert seen == [False, True, True]


def test_wrong_arguments_are_told() -> None:
    p = [nn.Parameter(torch.ones(2))]
    with pytest.raises(ValueError, match="unknown update"):
        optim.SGD(p, update="exact")
    with pytest.raises(ValueError, match="needs seed="):
        optim.Adam(p, weights="bf16", update="stochastic")
    with pytest.raises(ValueError, match="take one"):
        optim.Adam(p, weights="bf16", update="kahan", master=True)
    with pytest.raises(ValueError, match="Nesterov"):
        optim.SGD(p, nesterov=True)
    with pytest.raises(ValueError, match="onebit/64 does not round stochastically"):
        optim.SGD(p, weights="onebit/64", update="stochastic", seed=1)
    for make, message in [
        (lambda: optim.SGD(p, lr=-1.0), "SGD: lr must be zero or more, got -1.0"),
        (lambda: optim.SGD(p, lr=math.nan), "SGD: lr must be zero or more, got nan"),
        (lambda: optim.LARS(p, eps=-1.0), "LARS: eps must be zero or more"),
        (lambda: optim.AdamW(p, weight_decay=-1.0), "AdamW: weight_decay must be zero or more"),
        (
            lambda: optim.Adam(p, betas=(1.5, 2)),
            r"Adam: betas must be zero or more and below one, each, got \(1.5, 2\)",
        ),
        (lambda: optim.Adam([{"params": p, "lr": -2}]), "Adam: lr must be zero or more, got -2"),
    ]:
        with pytest.raises(ValueError, match=message):
            make()


# ---- loss scaling ----------------------------------------------------------------------------------------------------


def one_step(scaler: simulate.LossScale, grad: float) -> float:
    """A step with a gradient of `grad`, as it would arrive from a narrow backward pass; what the weight became."""
    p = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([p], lr=1.0)
    scaler.scale((p * grad).sum()).backward()
    p.grad = nc.round_to(p.grad, "e5m2")
    scaler.step(optimizer)
    scaler.update()
    return float(p.detach())


def test_a_static_scale_keeps_small_gradients_and_skips_what_is_not_finite() -> None:
    scaler = simulate.LossScale(2.0**10, dynamic=False)
    assert one_step(simulate.LossScale(1.0, dynamic=False), 2.0**-20) == 0
    assert one_step(scaler, 2.0**-20) == -(2.0**-20)
    assert one_step(scaler, 1000.0) == 0
    assert scaler.skipped
    assert scaler.get_scale() == 2.0**10


def test_a_second_step_before_update_is_refused() -> None:
    scaler, p = simulate.LossScale(4.0, dynamic=False), torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([p], lr=1.0)
    scaler.scale(p.sum()).backward()
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"step\(\) was already called"):
        scaler.step(optimizer)
    scaler.update()
    scaler.step(optimizer)


def test_a_dynamic_scale_backs_off_and_grows() -> None:
    scaler = simulate.LossScale(2.0**10, interval=3)
    one_step(scaler, 1000.0)
    assert scaler.get_scale() == 2.0**9
    for _ in range(3):
        one_step(scaler, 1.0)
    assert scaler.get_scale() == 2.0**10


def test_a_step_that_is_left_out_starts_the_count_of_good_ones_again() -> None:
    scaler = simulate.LossScale(2.0**10, interval=3)
    for grad in (1.0, 1.0, 1000.0, 1.0, 1.0):
        one_step(scaler, grad)
    assert scaler.get_scale() == 2.0**9
    one_step(scaler, 1.0)
    assert scaler.get_scale() == 2.0**10


def test_each_of_two_optimizers_gets_its_own_gradients_and_leaves_out_its_own_step() -> None:
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    one, other = (torch.optim.SGD([p], lr=1.0) for p in parameters)
    scaler = simulate.LossScale(2.0**10)
    scaler.scale((parameters[0] + 2 * parameters[1]).sum()).backward()
    scaler.unscale_(one)
    scaler.unscale_(other)
    with pytest.raises(RuntimeError, match="already called for this optimizer"):
        scaler.unscale_(other)
    scaler.step(one)
    scaler.step(other)
    scaler.update()
    assert [float(p.detach()) for p in parameters] == [-1.0, -2.0]
    parameters[0].grad, parameters[1].grad = torch.full((1,), float("inf")), torch.full((1,), 2.0**10)
    scaler.step(one)
    scaler.step(other)
    assert scaler.skipped
    scaler.update()
    assert [float(p.detach()) for p in parameters] == [-1.0, -3.0]
    assert scaler.get_scale() == 2.0**9


def test_a_loss_that_stays_nan_leaves_a_factor_that_can_be_divided_by() -> None:
    scaler = simulate.LossScale(2.0**-120)
    for _ in range(10):
        assert one_step(scaler, math.nan) == 0
    assert scaler.get_scale() == 2.0**-126
    # nothing is left of the gradient, but it is a zero
    assert one_step(scaler, 1.0) == 0
    with pytest.raises(ValueError, match="needs a finite scale > 0"):
        simulate.LossScale(math.inf)


def test_a_rising_minimum_is_never_undercut() -> None:
    """Mellempudi et al. 2019: late overflows must not push the scale down to where small gradients vanish."""
    rising = simulate.LossScale(2.0**4, minimums={0: 2.0**2, 5: 2.0**8})
    plain = simulate.LossScale(2.0**4)
    seen = []
    for step in range(10):
        for scaler in (rising, plain):
            one_step(scaler, 2.0**14)
        seen.append(rising.get_scale())
        assert rising.minimum == (2.0**8 if step >= 4 else 2.0**2)
    assert seen[:4] == [8, 4, 4, 4]
    assert seen[4:] == [256.0] * 6
    assert plain.get_scale() == 2.0


def test_a_scaler_continues_from_a_checkpoint() -> None:
    scaler = simulate.LossScale(2.0**10, interval=2)
    one_step(scaler, 1.0)
    other = simulate.LossScale()
    other.interval = 2
    other.load_state_dict(scaler.state_dict())
    one_step(other, 1.0)
    assert other.get_scale() == 2.0**11
    with pytest.raises(RuntimeError, match="comes after step"):
        other.update()
