"""What the spec of a wire says about its bits, and how much of what travels takes it.

A spec that this version does not know stands for itself. A study of tensors that are all too small to be compressed
finds nothing, so every case records the share that was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from narrowcast.codecs import codec as codec_named
from narrowcast.parallel import TensorRow, policy
from narrowcast.predict import Profile

FLOAT32_BITS = 32.0
Share = dict[str, float]
"""`values`: of all values that travel; `bytes`: of all bytes on the wire, those of compressed values."""
NONE: Share = {"values": 0.0, "bytes": 0.0}
ALL: Share = {"values": 1.0, "bytes": 1.0}


def wire_bits(wire: str) -> float:
    """Bits a value on the wire, scales included; an unknown spec counts as 32."""
    try:
        return codec_named(wire).bits_per_value
    except ValueError:
        return FLOAT32_BITS


def code_bits(wire: str) -> float:
    """Bits of a code, scales apart: 1 for onebit/16, whose wire has 5; fewer where not every value has a code.

    Infinite for an unknown spec.
    """
    try:
        return min(codec_named(wire).code_bits, codec_named(wire).bits_per_value)
    except ValueError:
        return math.inf


def bits_name(wire: str) -> str:
    """`8 bits` for int8/256, `0.16 bits` for int2/4096+top64, `float32` for all that has 32."""
    bits = code_bits(wire)
    if math.isinf(bits):
        return wire
    return "float32" if bits == 32 else f"{bits:.2g} bit{'s' * (bits != 1)}"


def compressed_share(rows: Sequence[TensorRow]) -> Share:
    """Of the tensors that `explain` shows."""
    packed = [row for row in rows if is_lossy(row.wire)]
    if not packed:
        return NONE
    values, every = (sum(row.numel for row in some) for some in (packed, rows))
    sent, all_sent = (sum(row.numel * row.bits_per_value for row in some) for some in (packed, rows))
    return {"values": values / every, "bytes": sent / all_sent}


def message_share(wire: str) -> Share:
    """A collective alone sends every value by its wire."""
    return ALL if is_lossy(wire) else NONE


def profile_share(profile: Profile, wire: str, min_values: int) -> Share:
    """As `attach` would send a model's gradients."""
    rows = []
    for tensor in profile.tensors:
        info = policy.TensorInfo(tensor.name, tensor.shape or (tensor.numel,), torch.float32)
        choice = policy.choose(wire, info, 0, min_values)
        bits = FLOAT32_BITS if choice.codec is policy.AS_IS else choice.codec.bits_for(info.shape)
        rows.append(TensorRow(tensor.name, tensor.numel, str(choice.codec), bits, choice.why))
    return compressed_share(rows)


def is_lossy(wire: str) -> bool:
    """Whether a wire is meant to compress; a spec that this version does not know is taken for one that is."""
    try:
        return not codec_named(wire).lossless
    except ValueError:
        return True
