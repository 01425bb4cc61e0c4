"""Law 8 for one tensor: what was sent + residual = what was wanted, to 1 ulp a step."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import narrowcast as nc
from narrowcast.codecs import ErrorFeedback

SPECS = [
    *(
        "onebit/64+ef",
        "sign/64+ef",
        "int4/128+sr+ef",
        "int2/64+ef",
        "ternary/512+ef",
        "qsgd2/128+ef",
        "mxfp4+ef",
        "dtree8+ef",
    ),
    *(
        "nvfp4+ef",
        "uint8/512+sr+ef",
        "e5m2+ef+aps",
        "int8/256+ef",
        "bf16+ef",
        "e4m3@1+ef",
        "posit8.1/64+ef",
        "nf4/64+ef",
        "int2/64+ef50",
        "int4+ef95",
        "int2/256+top16+ef",
        "bf16/256+top5+ef95",
    ),
]
STEPS, N = 100, 1000


def ulp(x: Tensor) -> Tensor:
    """The unit in the last place of float32."""
    return torch.ldexp(torch.ones_like(x), torch.frexp(x.abs().clamp(min=2.0**-126)).exponent - 24)


def gradient(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(N, generator=generator) * torch.exp(torch.randn(N, generator=generator))


@pytest.mark.parametrize("spec", SPECS)
def test_what_was_sent_and_the_residual_are_what_was_wanted(spec: str) -> None:
    codec = nc.codec(spec)
    assert codec.feedback
    feedback = ErrorFeedback(codec)
    sent, wanted, allowed = (torch.zeros(N, dtype=torch.float64) for _ in range(3))
    for step in range(STEPS):
        x = gradient(step)
        before = torch.zeros(N) if feedback.residual is None else feedback.residual
        y = codec.decode(feedback.encode(x, seed=step), N)
        after = feedback.residual
        assert after is not None
        kept = before * codec.decay
        forgotten, before = before.double() - kept, kept
        total = x + before
        allowed += ulp(torch.maximum(total.abs(), after.abs())).double()
        assert bool(
            ((y.double() + after - x.double() - before).abs() <= ulp(torch.maximum(total.abs(), after.abs()))).all()
        )
        sent += y
        wanted += x - forgotten
    assert feedback.residual is not None
    assert bool(((sent + feedback.residual - wanted).abs() <= allowed).all())


@pytest.mark.parametrize("spec", ["onebit/64", "int2/64", "mxfp4", "sign/64", "int4/128"])
def test_with_feedback_the_sum_of_what_was_sent_stays_near_and_without_it_does_not(spec: str) -> None:
    codec = nc.codec(spec)
    feedback = ErrorFeedback(codec)
    constant = gradient(0)
    with_memory, without = torch.zeros(N), torch.zeros(N)
    for _ in range(STEPS):
        with_memory += codec.decode(feedback.encode(constant), N)
        without += codec.decode(codec.encode(constant), N)
    exact = STEPS * constant
    assert (with_memory - exact).norm() < 0.3 * (without - exact).norm()


def test_without_loss_there_is_nothing_owed() -> None:
    feedback = ErrorFeedback(nc.codec("fp32"))
    feedback.encode(gradient(0))
    assert feedback.residual is not None
    assert not feedback.residual.any()


def test_the_argument_is_left_alone_and_any_shape_and_type_will_do() -> None:
    feedback = ErrorFeedback(nc.codec("int4/64"))
    x = gradient(1).view(10, 100).bfloat16().requires_grad_()
    before = x.detach().clone()
    feedback.encode(x)
    feedback.encode(x)
    assert torch.equal(x.detach(), before)
    assert feedback.residual is not None
    assert (feedback.residual.dtype, feedback.residual.shape) == (torch.float32, (N,))
    assert not feedback.residual.requires_grad


def test_the_first_wire_is_that_of_the_codec_and_out_is_used() -> None:
    codec = nc.codec("int4/64+sr")
    out = torch.empty(codec.nbytes(N), dtype=torch.uint8)
    wire = ErrorFeedback(codec).encode(gradient(2), seed=3, stream=4, offset=64, out=out)
    assert wire is out
    assert torch.equal(wire, codec.encode(gradient(2), seed=3, stream=4, offset=64))


def test_another_number_of_values_is_refused() -> None:
    feedback = ErrorFeedback(nc.codec("int4/64"))
    feedback.encode(torch.ones(10))
    with pytest.raises(ValueError, match="got 11 values, the residual has 10; use one ErrorFeedback for each tensor"):
        feedback.encode(torch.ones(11))


def test_a_step_that_is_lost_to_nan_leaves_the_residual_of_its_block_for_the_next() -> None:
    codec = nc.codec("int2/64")
    feedback = ErrorFeedback(codec)
    feedback.encode(gradient(3))
    assert feedback.residual is not None
    kept = feedback.residual.clone()
    broken = gradient(4)
    broken[70] = math.nan
    feedback.encode(broken)
    assert torch.equal(feedback.residual[64:128], kept[64:128])
    assert not torch.equal(feedback.residual[:64], kept[:64])
    x = gradient(5)
    y = codec.decode(feedback.encode(x), N)
    assert torch.equal((y + feedback.residual)[64:128].isfinite(), torch.ones(64, dtype=torch.bool))
