"""Codecs inside torch.compile: what the torch ops of `kernels.ops` run and what a compiler must know of them.

`Codec.encode`, `decode` and `reduce` call `encode`, `decode` and `reduce` here while a graph is traced, and only then.
A codec is named by its spec; make it outside of the compiled function.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from narrowcast.kernels import Feedback, Finish, Noise, as_signed, as_unsigned, ops

if TYPE_CHECKING:
    from narrowcast.codecs.base import Codec

KNOWN: dict[str, Codec] = {}
"""Every codec of this process, by its spec."""


def encode(
    spec: str, x: Tensor, noise: Noise, scale: Tensor | None, feedback: Feedback | None, out: Tensor | None
) -> Tensor:
    if feedback is None:
        wire = torch.ops.narrowcast.encode(x, spec, *_words(noise), scale)
    else:
        wire = torch.ops.narrowcast.encode_owed(x, feedback.residual, spec, feedback.unit, *_words(noise), scale)
    return wire if out is None else out.copy_(wire)


def decode(spec: str, wire: Tensor, n: int, out: Tensor | None, accumulate: bool, dtype: torch.dtype) -> Tensor:
    if accumulate and out is not None:
        torch.ops.narrowcast.decode_add(wire, spec, out)
        return out
    value = torch.ops.narrowcast.decode(wire, spec, n, dtype if out is None else out.dtype)
    return value if out is None else out.copy_(value.view(out.shape))


def reduce(
    spec: str,
    wires: Tensor | Sequence[Tensor],
    n: int,
    noise: Noise,
    scale: Tensor | None,
    finish: Finish,
    out: Tensor | None,
) -> Tensor:
    if not isinstance(wires, Tensor):
        raise TypeError("reduce inside torch.compile: give wires as one tensor")
    wire = torch.ops.narrowcast.reduce(wires, spec, n, finish.divide, finish.multiply, *_words(noise), scale)
    return wire if out is None else out.copy_(wire)


def _words(noise: Noise) -> tuple[int, int, int]:
    return as_signed(noise.seed), as_signed(noise.stream), noise.offset


def _noise(seed: int, stream: int, offset: int) -> Noise:
    return Noise(as_unsigned(seed), as_unsigned(stream), offset)


def _encode(x: Tensor, codec: str, seed: int, stream: int, offset: int, scale: Tensor | None) -> Tensor:
    return KNOWN[codec].encode_with(x, _noise(seed, stream, offset), scale)


def _encode_with_residual(
    x: Tensor, residual: Tensor, codec: str, unit: float, seed: int, stream: int, offset: int, scale: Tensor | None
) -> Tensor:
    return KNOWN[codec].encode_with(x, _noise(seed, stream, offset), scale, Feedback(residual, unit))


def _decode(wire: Tensor, codec: str, n: int, dtype: torch.dtype) -> Tensor:
    return KNOWN[codec].decode(wire, n, dtype=dtype)


def _decode_add(wire: Tensor, codec: str, out: Tensor) -> None:
    KNOWN[codec].decode(wire, out.numel(), out=out, accumulate=True)


def _reduce(
    wires: Tensor, codec: str, n: int, divide: float, multiply: float, seed: int, stream: int, offset: int,
    scale: Tensor | None,
) -> Tensor:  # fmt: skip
    return KNOWN[codec].reduce_with(wires, n, _noise(seed, stream, offset), scale, finish=Finish(divide, multiply))


def _wire_like(tensor: Tensor, codec: str, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(KNOWN[codec].nbytes(n, dtype), dtype=torch.uint8, device=tensor.device)


ops.implement("encode", _encode, lambda x, codec, *_: _wire_like(x, codec, x.numel(), x.dtype))
ops.implement("encode_owed", _encode_with_residual, lambda x, residual, codec, *_: _wire_like(x, codec, x.numel()))
ops.implement("decode", _decode, lambda wire, codec, n, dtype: torch.empty(n, dtype=dtype, device=wire.device))
ops.implement("decode_add", _decode_add, lambda *_: None)
ops.implement("reduce", _reduce, lambda wires, codec, n, *_: _wire_like(wires, codec, n))
