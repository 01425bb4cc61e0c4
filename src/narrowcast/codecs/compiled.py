"""Codecs inside torch.compile: torch ops with fake implementations, which a compiler takes as they are.

`Codec.encode`, `decode` and `reduce` call these while a graph is traced, and only then; so does `round_to`. A codec is
named by its spec and a format by its name; make a codec outside of the compiled function.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from narrowcast.kernels import ops
from narrowcast.kernels.noise import Noise

if TYPE_CHECKING:
    from narrowcast.codecs.base import Codec

KNOWN: dict[str, Codec] = {}
"""Every codec that was made in this process, by its spec."""

NOISE = "int seed, int stream, int offset, Tensor? scale"

_lib = torch.library.Library("narrowcast", "DEF")
_lib.define(f"encode(Tensor x, str codec, {NOISE}) -> Tensor")
_lib.define(f"encode_owed(Tensor x, Tensor(a!) residual, str codec, float unit, {NOISE}) -> Tensor")
_lib.define("decode(Tensor wire, str codec, int n, ScalarType dtype) -> Tensor")
_lib.define("decode_add(Tensor wire, str codec, Tensor(a!) out) -> ()")
_lib.define(f"reduce(Tensor wires, str codec, int n, float divide, float multiply, {NOISE}) -> Tensor")


_lib.define("round_to(Tensor x, str format, str rounding, str? overflow, str rules, int? seed) -> Tensor")


def words(noise: Noise) -> tuple[int, int, int]:
    """As an op takes them: its integers are signed."""
    return _signed(noise.seed), _signed(noise.stream), noise.offset


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def _unsigned(word: int) -> int:
    return word % 2**64


def _noise(seed: int, stream: int, offset: int) -> Noise:
    return Noise(_unsigned(seed), _unsigned(stream), offset)


def _encode(x: Tensor, codec: str, seed: int, stream: int, offset: int, scale: Tensor | None) -> Tensor:
    return KNOWN[codec].encode(x, noise=_noise(seed, stream, offset), scale=scale)


def _encode_owed(
    x: Tensor, residual: Tensor, codec: str, unit: float, seed: int, stream: int, offset: int, scale: Tensor | None
) -> Tensor:
    noise = _noise(seed, stream, offset)
    return KNOWN[codec].encode(x, noise=noise, scale=scale, residual=residual, unit=unit)


def _decode(wire: Tensor, codec: str, n: int, dtype: torch.dtype) -> Tensor:
    return KNOWN[codec].decode(wire, n, dtype=dtype)


def _decode_add(wire: Tensor, codec: str, out: Tensor) -> None:
    KNOWN[codec].decode(wire, out.numel(), out=out, accumulate=True)


def _reduce(
    wires: Tensor, codec: str, n: int, divide: float, multiply: float, seed: int, stream: int, offset: int,
    scale: Tensor | None,
) -> Tensor:  # fmt: skip
    noise = _noise(seed, stream, offset)
    return KNOWN[codec].reduce(wires, n, divide=divide, multiply=multiply, noise=noise, scale=scale)


def _round_to(x: Tensor, format: str, rounding: str, overflow: str | None, rules: str, seed: int | None) -> Tensor:
    given = None if seed is None else _unsigned(seed)
    return ops.round_to(x, format, rounding=rounding, overflow=overflow, rules=rules, seed=given)


def _wire_like(tensor: Tensor, codec: str, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(KNOWN[codec].nbytes(n, dtype), dtype=torch.uint8, device=tensor.device)


def _fake_encode(x: Tensor, codec: str, *_: object) -> Tensor:
    return _wire_like(x, codec, x.numel(), x.dtype)


def _fake_encode_owed(x: Tensor, residual: Tensor, codec: str, *_: object) -> Tensor:
    return _wire_like(x, codec, x.numel())


def _fake_decode(wire: Tensor, codec: str, n: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(n, dtype=dtype, device=wire.device)


def _fake_reduce(wires: Tensor, codec: str, n: int, *_: object) -> Tensor:
    return _wire_like(wires, codec, n)


for _name, _run, _fake in (
    ("encode", _encode, _fake_encode),
    ("encode_owed", _encode_owed, _fake_encode_owed),
    ("decode", _decode, _fake_decode),
    ("decode_add", _decode_add, lambda *_: None),
    ("reduce", _reduce, _fake_reduce),
    ("round_to", _round_to, lambda x, *_: torch.empty_like(x)),
):
    _lib.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"narrowcast::{_name}", _fake, lib=_lib)
