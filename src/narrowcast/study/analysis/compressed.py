"""How much of what travels was really compressed: a study of tensors that are all too small for that finds nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from narrowcast.codecs import codec
from narrowcast.parallel import policy
from narrowcast.parallel.stats import TensorRow
from narrowcast.predict.model import Profile

FLOAT32_BITS = 32.0
Share = dict[str, float]
"""`values`: of all values that travel; `bytes`: of all bytes on the wire, those of compressed values."""
NONE: Share = {"values": 0.0, "bytes": 0.0}
ALL: Share = {"values": 1.0, "bytes": 1.0}


def share(rows: Sequence[TensorRow]) -> Share:
    """Of the tensors that `explain` shows."""
    packed = [row for row in rows if is_lossy(row.wire)]
    if not packed:
        return NONE
    values, sent = ([sum(map(size, some)) for some in (packed, rows)] for size in (_values, _bits))
    return {"values": values[0] / values[1], "bytes": sent[0] / sent[1]}


def _values(row: TensorRow) -> float:
    return row.numel


def _bits(row: TensorRow) -> float:
    return row.numel * row.bits_per_value


def of_message(wire: str) -> Share:
    """A collective alone sends every value by its wire."""
    return ALL if is_lossy(wire) else NONE


def of_profile(profile: Profile, wire: str, min_values: int) -> Share:
    """As `attach` would send a model's gradients."""
    rows = []
    for tensor in profile.tensors:
        info = policy.TensorInfo(tensor.name, (tensor.numel,), torch.float32)
        choice = policy.choose(wire, info, 0, min_values)
        bits = FLOAT32_BITS if choice.codec is policy.AS_IS else choice.codec.bits_per_value
        rows.append(TensorRow(tensor.name, tensor.numel, str(choice.codec), bits, choice.why))
    return share(rows)


def is_lossy(wire: str) -> bool:
    """Whether a wire is meant to compress; a spec that this version does not know is taken for one that is."""
    try:
        return not codec(wire).lossless
    except ValueError:
        return True
