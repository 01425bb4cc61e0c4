"""Wires: any bytes, and wires with a few bits wrong, through every codec."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from random import Random

import torch
from fuzz.base import Kind, require
from torch import Tensor

from narrowcast.codecs import Codec, Law, all_specs, codec

SIZES = (0, 1, 2, 3, 7, 15, 16, 17, 31, 33, 63, 65, 127, 129, 255, 257, 300)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HARD = (0.0, -0.0, 1.0, 1e-45, 2.0**-126, 2.0**-100, 3.4e38, float("inf"), float("-inf"), float("nan"), 65504.0, 1e-8)


@dataclass(frozen=True)
class Wire:
    """Bytes for so many values of a codec; `extra` more or less than they should be."""

    spec: str
    n: int
    dtype: torch.dtype
    bytes: bytes
    extra: int = 0


@dataclass(frozen=True)
class Facts:
    """What the checks ask of a codec, asked once."""

    codec: Codec
    block: int
    keeps_nonfinite: bool
    keeps_finite: bool

    def size(self, n: int, dtype: torch.dtype) -> int:
        return self.codec.nbytes(n, dtype)


@cache
def _facts(spec: str) -> Facts:
    found = codec(spec)
    exempt = found.exemptions
    return Facts(found, found.block, Law.NONFINITE not in exempt, Law.FINITE not in exempt)


@cache
def _specs() -> list[str]:
    more = ("int4/16+sr", "e5m2+aps", "int8/1024", "nf4/4096", "qsgd2/512+l2", "uint3/48", "posit6.0/32")
    return list(dict.fromkeys([*all_specs(), *(str(codec(spec)) for spec in more)]))


def make(source: Random) -> Wire:
    spec = source.choice(_specs())
    found = _facts(spec)
    n, dtype = source.choice(SIZES), source.choice(DTYPES)
    extra = source.choice((-1, 1, 64)) if source.random() < 0.05 else 0
    right = found.size(n, dtype)
    size = max(0, right + extra)
    how = source.randrange(4)
    if how == 0:
        data = bytes([source.choice((0, 0x7F, 0x80, 0xFF))]) * size
    elif how == 1 or extra or not n:
        data = source.randbytes(size)
    else:
        data = _with_bits_wrong(found.codec, n, dtype, source)
    return Wire(spec, n, dtype, data, size - right)


def _with_bits_wrong(found: Codec, n: int, dtype: torch.dtype, source: Random) -> bytes:
    draw = torch.Generator().manual_seed(source.getrandbits(32))
    x = torch.randn(n, generator=draw) * 2.0 ** source.randrange(-110, 110)
    for _ in range(source.randrange(4)):
        x[source.randrange(n)] = source.choice(HARD)
    data = bytearray(found.encode(x.to(dtype)).numpy().tobytes())
    for _ in range(source.randrange(4) if data else 0):
        data[source.randrange(len(data))] ^= 1 << source.randrange(8)
    return bytes(data)


def check(wire: Wire) -> None:
    found = _facts(wire.spec)
    data = torch.frombuffer(bytearray(wire.bytes or b"\0"), dtype=torch.uint8)[: len(wire.bytes)]
    if wire.extra:
        _refused(found.codec, data, wire)
        return
    values = found.codec.decode(data, wire.n, dtype=wire.dtype)
    require(values.shape == (wire.n,) and values.dtype is wire.dtype, f"{wire.spec}: {values.shape}, {values.dtype}")
    _law_5(found, values.float())


def _refused(found: Codec, data: Tensor, wire: Wire) -> None:
    try:
        found.decode(data, wire.n, dtype=wire.dtype)
    except ValueError:
        return
    require(False, f"{wire.spec}: {data.numel()} bytes were taken for {wire.n} values")


def _law_5(found: Facts, values: Tensor) -> None:
    """Whatever was decoded, encoded once more: non-finite stays so, and touches its own block alone."""
    back = found.codec.decode(found.codec.encode(values), values.numel())
    good, still = values.isfinite(), back.isfinite()
    if found.keeps_nonfinite:
        require(not bool((still > good).any()), f"{found.codec}: a non-finite value came back finite")
    if found.keeps_finite and not bool(still.all()):
        whose = torch.arange(values.numel()) // (found.block or max(1, values.numel()))
        touched = torch.isin(whose, whose[~good])
        require(not bool((~still & ~touched).any()), f"{found.codec}: a block of finite values came back non-finite")


KIND = Kind("wires", 48, make, check)
