"""Casts: the values of round_to, gradients as asked for, noise that follows from what the caller knows."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

import narrowcast as nc
from narrowcast import simulate
from narrowcast.kernels.noise import derive
from narrowcast.simulate import compat
from narrowcast.simulate.precision.casts import Casting, apply_together, caster


def values() -> torch.Tensor:
    return torch.randn(257, generator=torch.Generator().manual_seed(0)) * 3


@pytest.mark.parametrize("fmt", ["e5m2", "bf16", "posit8.1", "fixed4.4", "int8", "dtree8"])
def test_a_cast_is_round_to_and_leaves_its_argument_alone(fmt: str) -> None:
    x = values()
    before = x.clone()
    assert torch.equal(simulate.cast(x, fmt), nc.round_to(x, fmt))
    assert torch.equal(x, before)
    assert simulate.cast(x, "fp32") is x


def test_straight_through_hands_the_gradient_on() -> None:
    x = values().requires_grad_()
    grad = torch.linspace(-1, 1, 257)
    simulate.cast(x, "e4m3").backward(grad)
    assert torch.equal(x.grad, grad)


def test_a_quantised_gradient_is_cast_too() -> None:
    grad = torch.linspace(-1, 1, 257)
    for backward, want in ((None, "e4m3"), ("e5m2", "e5m2")):
        x = values().requires_grad_()
        simulate.cast(x, "e4m3", gradient="quantised", backward_fmt=backward).backward(grad)
        assert torch.equal(x.grad, nc.round_to(grad, want))


def test_tensors_cast_together_are_those_cast_alone() -> None:
    """One node for all of them, but nothing of one is in another: noise, gradients, and who wants a gradient."""
    given = [values() * (i + 1) for i in range(4)]
    nothing, noisy, low = caster(None), caster("e4m3+sr"), caster("e5m2")
    castings = [
        Casting(noisy, noisy, (1, 2)),
        Casting(noisy, noisy, (3, 4)),
        Casting(low, nothing),
        Casting(nothing, low),
    ]
    wants_gradient = [True, True, False, True]
    leaves = [x.clone().requires_grad_(wants) for x, wants in zip(given, wants_gradient, strict=True)]
    results = apply_together(leaves, castings)
    assert [y.requires_grad for y in results] == wants_gradient
    alone = [apply_together([x], [how])[0] for x, how in zip(given, castings, strict=True)]
    assert all(torch.equal(y, want) for y, want in zip(results, alone, strict=True))
    assert not torch.equal(results[0] * 2, results[1])
    # the second is not used, so it has no gradient at all
    grad = torch.linspace(-1, 1, 257)
    ((results[0] + results[2] + results[3]) * grad).sum().backward()
    assert torch.equal(leaves[0].grad, nc.round_to(grad, "e4m3", rounding="stochastic", seed=2))
    assert leaves[1].grad is None
    assert torch.equal(leaves[3].grad, nc.round_to(grad, "e5m2"))


def test_a_cast_that_does_nothing_is_no_node() -> None:
    x = values().requires_grad_()
    nothing = caster(None)
    assert apply_together([x], [Casting(nothing, nothing)])[0] is x
    assert apply_together([x.detach()], [Casting(nothing, caster("e4m3"))])[0].grad_fn is None


def test_a_codec_can_be_the_format() -> None:
    x = values()
    c = nc.codec("int8/64")
    assert torch.equal(simulate.cast(x, "int8/64"), c.decode(c.encode(x), 257))
    assert torch.equal(simulate.cast(x, "e5m2@1"), nc.round_to(x, "e5m2", overflow="saturate"))
    whole = nc.codec("e5m2")
    assert torch.equal(simulate.cast(x, whole), whole.decode(whole.encode(x), 257))


def test_noise_follows_from_the_seed_alone() -> None:
    x = values()
    first = simulate.cast(x, "e4m3+sr", seed=1)
    torch.manual_seed(5)
    assert torch.equal(first, simulate.cast(x, "e4m3", rounding="stochastic", seed=1))
    assert torch.equal(first, nc.round_to(x, "e4m3", rounding="stochastic", seed=derive(1, 0)))
    assert not torch.equal(first, simulate.cast(x, "e4m3+sr", seed=2))


def test_derived_seeds_differ() -> None:
    seeds = {derive(s, *path) for s in range(20) for path in [(), (0,), (1,), (0, 0), (0, 1), (1, 0)]}
    assert len(seeds) == 120
    assert all(0 <= s < 2**64 for s in seeds)
    assert derive(2**64 - 1, 2**64 - 1) != derive(0, 0)


def test_a_quantizer_advances_in_training_and_continues_from_a_checkpoint() -> None:
    x = torch.full((400,), 0.3)
    q = simulate.Quantizer("e4m3+sr", "e5m2", seed=3)
    first, second = q(x), q(x)
    assert not torch.equal(first, second)
    saved = copy.deepcopy(q.state_dict())
    third = q(x)
    q.load_state_dict(saved)
    assert torch.equal(q(x), third)
    q.eval()
    assert torch.equal(q(x), q(x))


def test_a_quantizer_casts_the_gradient() -> None:
    x = values().requires_grad_()
    grad = torch.linspace(-1, 1, 257)
    y = simulate.Quantizer(None, "e4m3")(x)
    assert torch.equal(y, x)
    y.backward(grad)
    assert torch.equal(x.grad, nc.round_to(grad, "e4m3"))


def test_a_layers_scale_puts_posits_where_they_are_dense() -> None:
    x = values() * 2.0**-20
    scaled = simulate.LayerScale(nc.format("posit8.1"))
    error = (scaled(x) - x).abs().mean()
    assert error < 0.1 * (nc.round_to(x, "posit8.1") - x).abs().mean()
    assert scaled.scale(x) == 2.0 ** round(float(torch.log2(x.abs()).mean()))
    assert torch.equal(scaled(x), scaled(x * 1024) / 1024)
    warm = simulate.LayerScale(nc.format("posit8.1"), warmup=10)
    assert torch.equal(warm(x, step=9), x)
    assert torch.equal(warm(x, step=10), scaled(x))
    assert torch.equal(scaled(torch.zeros(3)), torch.zeros(3))
    shifted = simulate.LayerScale("posit8.1", sigma=3)
    assert shifted.format == scaled.format
    assert shifted.scale(x) == 8 * scaled.scale(x)
    assert torch.equal(shifted(x), nc.round_to(x / shifted.scale(x), "posit8.1") * shifted.scale(x))


@pytest.mark.parametrize(
    "call, word",
    [
        (lambda x: simulate.cast(x, "e4m3+sr"), "needs seed="),
        (lambda x: simulate.cast(x, "e4m3", gradient="exact"), "unknown gradient"),
        (lambda x: simulate.cast(x, "e4m3", backward_fmt="e5m2"), "goes with gradient='quantised'"),
        (lambda x: simulate.cast(x, "int8/64", rounding="stochastic"), "spec says how it rounds"),
        (lambda x: simulate.cast(x, "int8/64+ef"), "keeps no residual"),
        (lambda x: simulate.cast(x, "e44m3"), "e44m3"),
        (lambda x: simulate.cast(x, "fp32+sr", seed=1), "unknown format 'fp32'"),
        (lambda _: simulate.LayerScale("e4m3+sr"), r"unknown format 'e4m3\+sr'"),
    ],
)
def test_wrong_arguments_are_told(call: object, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        call(values())  # type: ignore[operator]


@pytest.mark.parametrize("make", [lambda: simulate.cast(values(), 3), lambda: simulate.LayerScale(3)])
def test_what_names_no_cast_is_told(make: Callable[[], object]) -> None:
    with pytest.raises(TypeError, match="cast to 3: give a format's name"):
        make()


def test_names_of_cpd_and_qtorch() -> None:
    x = values()
    before = x.clone()
    assert torch.equal(compat.float_quantize(x, 5, 2), nc.round_to(x, "e5m2"))
    assert torch.equal(compat.float_quantize(x, exp=4, man=3, rounding="nearest"), nc.round_to(x, "e4m3"))
    assert torch.equal(compat.float_quantize(x, 8, 23), x)
    assert torch.equal(compat.float_quantize(x, 3, 0, rules="cpd"), nc.round_to(x, "e3m0", rules="cpd"))
    assert torch.equal(compat.fixed_point_quantize(x, wl=8, fl=4), nc.round_to(x, "fixed4.4"))
    assert torch.equal(x, before)
    q = compat.quantizer(compat.FloatingPoint(4, 3), compat.FloatingPoint(5, 2), "nearest", "nearest")
    y = x.clone().requires_grad_()
    q(y).backward(x)
    assert torch.equal(q(x), nc.round_to(x, "e4m3"))
    assert torch.equal(y.grad, nc.round_to(x, "e5m2"))
    with pytest.raises(NotImplementedError, match="give a codec"):
        compat.quantizer(compat.BlockFloatingPoint(8))


def test_block_floating_point_shares_one_exponent() -> None:
    x = torch.tensor([[1.0, 0.3, -0.02], [64.0, -5.0, 0.4]])
    whole = compat.block_quantize(x, 8)
    assert torch.equal(whole, (x).round().clamp(-128, 127))  # the step is 2**(6 - 8 + 2) = 1
    rows = compat.block_quantize(x, 8, dim=0)
    assert torch.equal(rows[1], whole[1])
    assert torch.equal(rows[0], (x[0] * 64).round() / 64)
    assert torch.equal(compat.block_quantize(torch.zeros(3), 8), torch.zeros(3))


def test_a_caster_prints_what_it_does() -> None:
    assert str(caster("e4m3+sr")) == "e4m3+sr"
    assert str(caster(None)) == "fp32"
    assert str(caster("int8/64")) == str(nc.codec("int8/64"))
