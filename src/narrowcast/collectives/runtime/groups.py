"""What a group of torch.distributed is: whether it still is one, how long it waits, what moves its CUDA tensors."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist


def check_group(group: dist.ProcessGroup) -> None:
    """Refuse one that was destroyed: whoever still holds it could go on, on connections that nobody closes."""
    if group not in dist.distributed_c10d._world.pg_map:
        raise ValueError("collectives: the group was destroyed (destroy_process_group); make a new one")


def group_timeout(group: dist.ProcessGroup | None) -> timedelta:
    """The timeout of a user's group: ours takes it over."""
    chosen = group or dist.group.WORLD
    for device in ("cpu", "cuda"):
        try:
            found = chosen._get_backend(torch.device(device)).options._timeout  # type: ignore[union-attr]
        except (RuntimeError, AttributeError):
            continue
        if isinstance(found, timedelta):
            return found
    return timedelta(minutes=30)


def has_nccl(group: dist.ProcessGroup) -> bool:
    """Whether NCCL moves the CUDA tensors of a group."""
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        return False
    try:
        found = group._get_backend(torch.device("cuda"))
    except RuntimeError:  # none for CUDA tensors
        return False
    return isinstance(found, dist.ProcessGroupNCCL)
