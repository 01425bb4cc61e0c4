"""Seeds of what encodes in a run: every model, place and exchange has its own, also where all were given the same."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

import torch.distributed as dist

_MADE: Counter[str] = Counter()


def seed_of(key: str) -> int:
    """A 64-bit seed that no other key has."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")


def made_before(key: str) -> int:
    """How many times this process has asked for a key before. Ranks that ask in the same order count alike."""
    _MADE[key] += 1
    return _MADE[key] - 1


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


def model_seed(seed: int, group: dist.ProcessGroup) -> int:
    """The seed of one more DDP model. The first on the default group keeps what it was given, as a simulation does."""
    key = key_of("DDP", seed, group)
    number = made_before(key)
    return seed if number == 0 and group is dist.group.WORLD else seed_of(f"{key} {number}")


def key_of(kind: str, seed: int, group: dist.ProcessGroup | Sequence[int]) -> str:
    """Two groups may have the same ranks, and groups of different ranks the same name."""
    if isinstance(group, dist.ProcessGroup):
        return f"{kind} {seed} {dist.get_process_group_ranks(group)} {group.group_name}"
    return f"{kind} {seed} {list(group)}"
