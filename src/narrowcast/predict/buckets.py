"""When DDP's buckets are ready, and which calls `attach` makes for a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from narrowcast.codecs import codec as codec_named
from narrowcast.parallel.ddp import buckets as ddp
from narrowcast.parallel.policy import MIN_VALUES
from narrowcast.predict.model import TensorTime

BUCKET_BYTES = ddp.BUCKET_BYTES


@dataclass(frozen=True)
class Bucket:
    """Gradients that travel together, ready when the last of them is."""

    values: int
    ready: float
    small: int
    """How many of the values are in tensors too small to be compressed."""


@lru_cache(maxsize=256)
def buckets(
    tensors: tuple[TensorTime, ...],
    first_bytes: int = ddp.FIRST_BYTES,
    bucket_bytes: int = BUCKET_BYTES,
    value_bytes: int = 4,
    min_values: int = MIN_VALUES,
) -> tuple[Bucket, ...]:
    """The buckets that DDP makes of tensors in the order in which they get ready."""
    gradients = [torch.empty(t.numel * value_bytes, dtype=torch.uint8, device="meta") for t in tensors]
    assigned = ddp.assign_buckets(gradients, [first_bytes, bucket_bytes])
    return tuple(_closed([tensors[number] for number in bucket], min_values) for bucket in assigned)


def _closed(held: Sequence[TensorTime], min_values: int) -> Bucket:
    small = sum(t.numel for t in held if t.numel < min_values)
    return Bucket(sum(t.numel for t in held), max(t.ready for t in held), small)


@dataclass(frozen=True)
class CallPlan:
    """One collective: so many values with one codec, no earlier than `ready`."""

    values: int
    ready: float
    wire: str


def calls(buckets: tuple[Bucket, ...], wire: str, split: bool = True) -> tuple[CallPlan, ...]:
    """What `attach` starts: small tensors as they are, in a call of their own; one call a bucket for lossless wires."""
    if not split or codec_named(wire).lossless:
        return tuple(CallPlan(b.values, b.ready, wire) for b in buckets)
    found = []
    for bucket in buckets:
        parts = ((bucket.values - bucket.small, wire), (bucket.small, "fp32"))
        found += [CallPlan(values, bucket.ready, name) for values, name in parts if values]
    return tuple(found)


@lru_cache(maxsize=65536)
def nbytes(wire: str, values: int) -> int:
    """Bytes of so many float32 values on the wire."""
    return 4 * values if wire == "as-is" else codec_named(wire).nbytes(values)
