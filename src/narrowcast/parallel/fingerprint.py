"""A short number for many tensors, to compare them over ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from narrowcast.collectives.runtime.channel import Channel


def digest(tensors: Iterable[Tensor]) -> Tensor:
    """32 bytes that depend on every bit of the tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        # of a copy: FSDP cannot free a storage that numpy has seen
        found.update(tensor.detach().cpu().reshape(-1).clone().view(torch.uint8).numpy().tobytes())
    return torch.frombuffer(bytearray(found.digest()), dtype=torch.uint8)


def differing(channel: Channel, mine: Tensor) -> list[int]:
    """The ranks whose digest is not that of rank 0 (collective)."""
    found = channel.gather(mine, call="check_ranks")
    return [rank for rank, theirs in enumerate(found) if not torch.equal(theirs, found[0])]
