"""What ranks have to know of each other: whether they hold the same tensors, and that one of them failed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from narrowcast.collectives import Channel, agreement

FACTORS = "kept factors of low rank"
"""As `check_ranks` names them."""


def local_part(tensor: Tensor) -> Tensor:
    """The part that this rank holds; a write into it is a write into the tensor."""
    with torch.no_grad():
        local = getattr(tensor, "to_local", None)
        return local() if local is not None else tensor.detach()


def digest(tensors: Iterable[Tensor]) -> Tensor:
    """32 bytes that depend on every bit of the tensors."""
    sha = hashlib.sha256()
    for tensor in tensors:
        # of a copy: FSDP cannot free a storage that numpy has seen
        sha.update(tensor.detach().cpu().reshape(-1).clone().view(torch.uint8).numpy().tobytes())
    return torch.frombuffer(bytearray(sha.digest()), dtype=torch.uint8)


def ranks_that_differ(channel: Channel, own: Tensor) -> list[int]:
    """The ranks whose digest is not that of rank 0 (collective)."""
    return _different(channel.gather(own, call="check_ranks"))


def _different(digests: Sequence[Tensor]) -> list[int]:
    return [rank for rank, other in enumerate(digests) if not torch.equal(other, digests[0])]


def check_same(channel: Channel, kept: Mapping[str, Iterable[Tensor]], who: str = "ranks") -> None:
    """Raise where a rank has other tensors than rank 0 (collective). kept: what they are, and the tensors."""
    parts = {what: digest(tensors) for what, tensors in kept.items()}
    for what, digests in zip(parts, zip(*_gathered(channel, parts), strict=True), strict=True):
        if different := _different(digests):
            raise RuntimeError(f"check_ranks: the {what} of {who} {different} differ from those of {who[:-1]} 0")


def _gathered(channel: Channel, parts: Mapping[str, Tensor]) -> list[list[Tensor]]:
    """Of each rank all parts."""
    everyones = channel.gather(torch.cat(list(parts.values())), call="check_ranks")
    return [list(own.chunk(len(parts))) for own in everyones]


def agree(channel: Channel, call: str, policy: str) -> None:
    """Raise on every rank where the policies differ (collective): one that leaves a step to the backend, while another
    does not, would wait for ever.
    """
    channel.submit({"version": agreement.VERSION, "call": call, "policy": policy}, lambda _: None).wait()


@contextmanager
def propagate_errors(*channels: Channel | None) -> Iterator[None]:
    """Whoever waits for this rank in one of the channels raises at once, too, and names what was raised in here."""
    try:
        yield
    except Exception as error:
        for channel in channels:
            if channel is not None:
                channel.fail(error)
        raise
