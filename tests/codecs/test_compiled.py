"""Codecs are torch ops where torch.compile wants them, and give the same bytes there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import narrowcast as nc

OPS = torch.ops.narrowcast
N = 1001


def normal(seed: int = 0) -> Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("spec", ["int8/256", "nvfp4", "bf16"])
def test_opcheck(spec: str) -> None:
    codec, x = nc.codec(spec), normal()
    wire = codec.encode(x)
    torch.library.opcheck(OPS.encode.default, (x, spec, 1, 2, 16, None))
    torch.library.opcheck(OPS.encode_owed.default, (x, torch.zeros(N), spec, 2.0, 1, 2, 16, None))
    torch.library.opcheck(OPS.decode.default, (wire, spec, N, torch.bfloat16))
    torch.library.opcheck(OPS.decode_add.default, (wire, spec, x.clone()))
    torch.library.opcheck(OPS.reduce.default, (torch.stack([wire, wire]), spec, N, 2.0, 1.0, 1, 2, 16, None))


@pytest.mark.parametrize("spec", ["int8/256", "int4/128+sr", "e5m2", "bf16"])
def test_a_compiled_function_gives_the_same_values(spec: str) -> None:
    codec = nc.codec(spec)

    def through(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        wire = codec.encode(2 * x, seed=2**64 - 1, stream=5, residual=residual)
        total = codec.reduce(torch.stack([wire, wire]), N, seed=1, divide=2.0)
        out = torch.ones(N)
        codec.decode(wire, N, out=out, accumulate=True)
        return wire, codec.decode(total, N) + 1, out

    compiled = torch.compile(through, fullgraph=True, backend="aot_eager")
    residuals = torch.zeros(N), torch.zeros(N)
    for step in range(2):
        for got, wanted in zip(compiled(normal(step), residuals[0]), through(normal(step), residuals[1]), strict=True):
            assert torch.equal(got, wanted)
        assert torch.equal(*residuals)


@pytest.mark.parametrize("spec", ["int8/256", "int2/64+top16", "fp32/64+mstop4", "int4/64+spike2", "int4/64+rot"])
def test_sizes_may_change(spec: str) -> None:
    codec = nc.codec(spec)

    def through(x: Tensor) -> Tensor:
        return codec.decode(codec.encode(x), len(x))

    torch._dynamo.reset()
    compiled = torch.compile(through, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (64, 130, N):
        assert torch.equal(compiled(normal()[:n]), through(normal()[:n]))


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_round_to_is_an_op_too(rounding: str) -> None:
    x, seed = normal()[: N - 1].view(25, 40), 2**64 - 1 if rounding == "stochastic" else None
    signed = -1 if seed is not None else None
    torch.library.opcheck(OPS.round_to.default, (x, "e4m3fn", rounding, None, "ieee", signed))
    torch.library.opcheck(OPS.round_to.default, (x.t().to(torch.bfloat16), "e5m2", rounding, "inf", "ieee", signed))

    fmt = nc.format("e3m0")

    def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.zeros_like(x)
        nc.round_to(x, fmt, out=out)
        return nc.round_to(2 * x, "e4m3fn", rounding=rounding, seed=seed) + 1, out

    compiled = torch.compile(rounded, fullgraph=True, backend="aot_eager")
    for got, wanted in zip(compiled(x), rounded(x), strict=True):
        assert torch.equal(got, wanted)


def test_a_compiled_round_to_refuses_what_round_to_refuses() -> None:
    compiled = torch.compile(lambda x: nc.round_to(x, "e4m3fn", rounding="stochastic"), backend="aot_eager")
    with pytest.raises(ValueError, match="needs seed="):
        compiled(normal())
