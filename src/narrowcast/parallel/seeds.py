"""Seeds of what encodes in a run: each model, place and exchange has its own, also where all have one `seed=`."""

from __future__ import annotations

import hashlib
import weakref
from collections import Counter
from collections.abc import Sequence

import torch.distributed as dist

_COUNTS: weakref.WeakKeyDictionary[object, Counter[str]] = weakref.WeakKeyDictionary()
"""By the default group: ranks that join a new one, some of them in new processes, begin to count together."""


class _Nobody:
    """What is counted by without a group."""


_ALONE = _Nobody()


def seed_of(key: str) -> int:
    """A 64-bit seed that no other key has."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")


def made_before(key: str) -> int:
    """How often a key was asked for since the default group was made. Ranks that ask in one order count alike."""
    counts = _COUNTS.setdefault((dist.is_initialized() and dist.group.WORLD) or _ALONE, Counter())
    counts[key] += 1
    return counts[key] - 1


def default_group() -> dist.ProcessGroup:
    """All ranks."""
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("no process group; call torch.distributed.init_process_group first")
    return group


def own_seed(kind: str, seed: int, group: dist.ProcessGroup | Sequence[int]) -> int:
    """The seed of one more `kind` in a group, or between ranks. Made by all of them, so that they count alike."""
    key = key_of(kind, seed, group)
    return seed_of(f"{key} {made_before(key)}")


FIRST_GROUP = "0"
"""What torch calls the default group."""


def first_seed(kind: str, seed: int, world: int) -> int:
    """`own_seed` of the first of a kind on a default group of so many ranks: of simulations."""
    return seed_of(f"{kind} {seed} {list(range(world))} {FIRST_GROUP} 0")


def model_seed(seed: int, group: dist.ProcessGroup) -> int:
    """The seed of one more DDP model. The first on the default group keeps its own, as a simulation does."""
    key = key_of("DDP", seed, group)
    number = made_before(key)
    return seed if number == 0 and group is dist.group.WORLD else seed_of(f"{key} {number}")


def key_of(kind: str, seed: int, group: dist.ProcessGroup | Sequence[int]) -> str:
    """Two groups may have the same ranks, and groups of different ranks the same name."""
    if isinstance(group, dist.ProcessGroup):
        return f"{kind} {seed} {dist.get_process_group_ranks(group)} {group.group_name}"
    return f"{kind} {seed} {list(group)}"
