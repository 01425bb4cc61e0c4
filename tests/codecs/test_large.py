"""More than 2**31 elements: offsets and sizes are 64-bit all the way. `make test-large` runs these."""

from __future__ import annotations

import pytest
import torch
from laws.inputs import normal, planes
from torch import Tensor

import narrowcast as nc

N = 2**31 + 5
PIECE = 2**24
TAIL = 2**20
pytestmark = [pytest.mark.large, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def values() -> Tensor:
    """4 GiB of bfloat16: one piece again and again, each time a little larger."""
    x = torch.zeros(N, dtype=torch.bfloat16)
    piece = normal(PIECE).bfloat16()
    for number, part in enumerate(x.split(PIECE)):
        part.copy_(piece[: len(part)] * (1 + number % 7))
    return x


@pytest.mark.parametrize(
    "spec", ["int4/128", "int4/128+sr", "e4m3fn/256", "dynamic8/4096", "onebit/64", "mxfp6", "int3/64"]
)
def test_the_tail_is_that_of_a_small_tensor(values: Tensor, spec: str) -> None:
    codec = nc.codec(spec)
    start = (N - TAIL) // codec.block * codec.block
    wire = codec.encode(values, seed=3)
    assert wire.numel() == codec.nbytes(N)
    small = codec.encode(values[start:].clone(), seed=3, offset=start)
    whole, tail = planes(codec, wire, N), planes(codec, small, N - start)
    assert torch.equal(whole.codes[-len(tail.codes) :], tail.codes)
    assert torch.equal(whole.scales[-len(tail.scales) :], tail.scales)
    wanted = codec.decode(small, N - start, dtype=torch.bfloat16)
    out = torch.zeros(N, dtype=torch.bfloat16)
    codec.decode(wire, N, out=out)
    assert torch.equal(out[start:], wanted)
    codec.decode(wire, N, out=out, accumulate=True)
    assert torch.equal(out[start:], (wanted.float() + codec.decode(small, N - start)).bfloat16())


@pytest.mark.parametrize("spec", ["int8", "e5m2"])
def test_one_scale_for_the_tensor_sees_the_last_value(values: Tensor, spec: str) -> None:
    codec = nc.codec(spec)
    kept = values[-1].clone()
    values[-1] = 1000.0
    wire = codec.encode(values)
    values[-1] = kept
    assert wire[-4:].clone().view(torch.float32).item() == torch.tensor(1000.0 / codec.plan.target).item()  # type: ignore[attr-defined]


def test_round_to_reaches_the_end(values: Tensor) -> None:
    y = nc.round_to(values, "e4m3fn", rounding="stochastic", seed=1)
    assert torch.equal(y[-5:].float(), nc.round_to(y[-5:].float(), "e4m3fn"))
    start = (N - TAIL) // 128 * 128
    assert not torch.equal(y[start:], values[start:])
    assert bool(((y[start:] - values[start:]).abs() <= values[start:].abs() / 8 + 2.0**-9).all())
