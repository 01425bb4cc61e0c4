"""Several connections between two ranks, each of which carries a share of a large message.

TCP has as much under way on one connection as its buffers allow, and less after each loss: over a long link several are
faster than one where the buffers cannot be raised, or where packets get lost.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from narrowcast.collectives.runtime.agreement import DisagreementError
from narrowcast.collectives.transports.base import Pending

SHARED_FROM = 1 << 18
"""Bytes of a message: a smaller one takes a round trip and little more on one connection."""
MOST = 64

_COUNTS: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def use_connections(count: int, group: dist.ProcessGroup | None = None) -> None:
    """Have narrowcast open so many connections between each two ranks of a group, in host memory (Gloo).

    Every rank gives the same number, before it first attaches or calls a collective of ours on the group. A message of
    256 KiB or more is cut into as many shares. No value changes by it.
    """
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST:
        raise ValueError(f"connections: got {count!r}; give a number from 1 to {MOST}, such as 4")
    chosen = group or dist.group.WORLD
    if chosen is None:
        raise ValueError("connections: there is no process group; call torch.distributed.init_process_group first")
    _COUNTS[chosen] = count


def connections_of(group: dist.ProcessGroup) -> int:
    return _COUNTS.get(group, 1)


def agree_on_connections(store: Any, rank: int, world: int, count: int, timeout: timedelta) -> None:
    """Raise on every rank where one was given another number: it would wait for connections that nobody makes."""
    if world == 1:
        return
    keys = [f"connections/{peer}" for peer in range(world)]
    store.set(keys[rank], str(count))
    store.wait(keys, timeout)
    counts = [int(text) for text in store.multi_get(keys)]
    if len(set(counts)) > 1:
        told = ", ".join(f"rank {peer} {given}" for peer, given in enumerate(counts))
        raise DisagreementError(f"connections: ranks were given different numbers: {told}; give all of them the same")


def shares(wire: Tensor, count: int) -> Sequence[Tensor]:
    """What each connection carries of a message: the same on both sides, since both know its length."""
    return wire.tensor_split(count) if count > 1 and wire.nbytes >= SHARED_FROM else (wire,)


class Together:
    """The shares of one message."""

    def __init__(self, parts: Sequence[Pending]) -> None:
        self._parts = parts

    def wait(self) -> None:
        for part in self._parts:
            part.wait()
