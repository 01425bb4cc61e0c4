"""Calls of every native kernel, each drawn anew: hard values, odd sizes and places, any bytes for a wire."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

import torch
from sanitize.guarded import Guard
from torch import Tensor

from narrowcast.codecs import Codec, all_specs, codec
from narrowcast.codecs.cast import Cast
from narrowcast.formats import all_formats
from narrowcast.kernels import native, ops
from narrowcast.kernels.matmul import matmul
from narrowcast.kernels.matmul.accumulator import accumulator

SIZES = (0, 1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 255, 257, 511, 513, 1000, 4099, 20_011)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HARD = (0.0, -0.0, 1e-45, 2.0**-126, 2.0**-100, 3.4e38, -3.4e38, float("inf"), float("-inf"), float("nan"), 65504.0)
RULES = (
    "bf16",
    "fp16+kahan",
    "e5m2+fma",
    "e4m3+sr",
    "fp32+pairwise",
    "fp16/3",
    "fixed8.8",
    "e4m3fn+saturate",
    "bf16+mogami",
)
WORLD = 3


@dataclass(frozen=True)
class Call:
    """What is called, in words, and the call."""

    words: str
    run: Callable[[], object]


@cache
def _codecs() -> list[Codec]:
    """What native kernels run, with blocks that do not divide what a tile holds."""
    more = (
        "int8/48",
        "int4/16+sr",
        "int3/1024",
        "e3m2/80",
        "nf4/4096",
        "uint5/96",
        "onebit/16",
        "sign/112",
        "int8/16384",
    )
    found = [codec(spec) for spec in (*all_specs(), *more)]
    return [one for one in found if _is_native(one)]


def _is_native(one: Codec) -> bool:
    if isinstance(one, Cast):
        return str(one) != "as-is"  # one of the others, by the type of its values
    plan = getattr(one, "plan", None)
    return plan is not None and native.why_not(plan) is None


def _values(n: int, source: Random) -> Tensor:
    draw = torch.Generator().manual_seed(source.getrandbits(32))
    x = torch.randn(n, generator=draw) * 2.0 ** source.randrange(-120, 120)
    for _ in range(source.randrange(6) if n else 0):
        x[source.randrange(n)] = source.choice(HARD)
    return x


def _bytes(size: int, source: Random) -> Tensor:
    return torch.tensor(list(source.randbytes(size)), dtype=torch.uint8)


def _wire(found: Codec, x: Tensor, source: Random) -> Tensor:
    """Of values, with a few bits wrong, or any bytes."""
    if source.random() < 0.5:
        return _bytes(found.nbytes(x.numel()), source)
    wire = found.encode(x)
    for _ in range(source.randrange(4) if wire.numel() else 0):
        wire[source.randrange(wire.numel())] ^= 1 << source.randrange(8)
    return wire


def encode(source: Random, guard: Guard) -> Call:
    found, n, dtype = source.choice(_codecs()), source.choice(SIZES), source.choice(DTYPES)
    x = guard.copy(_values(n, source).to(dtype), source.randrange(4))
    out = guard.empty([found.nbytes(n)], torch.uint8, source.randrange(9))
    seed = source.getrandbits(40)
    return Call(f"encode {found} of {n} {dtype}", lambda: found.encode(x, seed=seed, out=out))


def encode_with_residual(source: Random, guard: Guard) -> Call:
    found, n, dtype = source.choice(_codecs()), source.choice(SIZES), source.choice(DTYPES)
    x = guard.copy(_values(n, source).to(dtype), source.randrange(4))
    residual = guard.copy(_values(n, source).nan_to_num(), source.randrange(4))
    out = guard.empty([found.nbytes(n)], torch.uint8, source.randrange(9))
    unit = source.choice((1.0, 1024.0, 2.0**-20))
    return Call(f"encode {found} with a residual, {n}", lambda: found.encode(x, residual=residual, unit=unit, out=out))


def decode(source: Random, guard: Guard) -> Call:
    found, n, dtype = source.choice(_codecs()), source.choice(SIZES), source.choice(DTYPES)
    wire = guard.copy(_wire(found, _values(n, source), source), source.randrange(9))
    out = guard.copy(torch.ones(n, dtype=dtype), source.randrange(4))
    add = source.random() < 0.5
    return Call(f"decode {found} of {n} {dtype}, {add=}", lambda: found.decode(wire, n, out=out, accumulate=add))


def reduce(source: Random, guard: Guard) -> Call:
    found, n, dtype = source.choice(_codecs()), source.choice(SIZES[1:]), source.choice(DTYPES)
    wires = [guard.copy(_wire(found, _values(n, source), source)) for _ in range(WORLD)]
    decoded = guard.empty([n], dtype, source.randrange(4))
    options: dict[str, Any] = {"divide": 3.0, "multiply": 0.5, "decoded": decoded}
    if source.random() < 0.5:
        options["residual"] = guard.copy(_values(n, source).nan_to_num(), source.randrange(4))
    return Call(f"reduce {found} of {n} {dtype}", lambda: found.reduce(wires, n, **options))


def round_to(source: Random, guard: Guard) -> Call:
    rounding = source.choice(("nearest", "stochastic"))
    formats = [one for one in all_formats() if native.why_not_round(one, rounding, "ieee") is None]
    fmt, n, dtype = source.choice(formats), source.choice(SIZES), source.choice(DTYPES)
    x = guard.copy(_values(n, source).to(dtype), source.randrange(4))
    out = x if source.random() < 0.3 else guard.empty([n], dtype, source.randrange(4))
    seed, overflow = source.getrandbits(30), source.choice(tuple(fmt.overflows))
    options = {"rounding": rounding, "overflow": overflow, "seed": seed, "out": out}
    return Call(f"round_to {fmt.name} of {n} {dtype}, {rounding}", lambda: ops.round_to(x, fmt, **options))


def product(source: Random, guard: Guard) -> Call:
    batch, m, n, k = (source.choice(sizes) for sizes in ((1, 2), (1, 3, 17), (1, 5, 16, 33), (0, 1, 7, 64, 129)))
    rule = accumulator(source.choice(RULES))
    a, b = (_values(batch * m * k, source).view(batch, m, k), _values(batch * k * n, source).view(batch, k, n))
    left = guard.copy(a.mT.contiguous()).mT if source.random() < 0.3 else guard.copy(a)
    right = guard.copy(b.mT.contiguous()).mT if source.random() < 0.3 else guard.copy(b)
    return Call(f"matmul {rule} of {batch} x {m} x {k} x {n}", lambda: matmul(left, right, rule, seed=5))


KINDS = (encode, encode_with_residual, decode, reduce, round_to, product)
