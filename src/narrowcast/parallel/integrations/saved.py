"""Residuals as a file of their own in a framework's checkpoint folder: there where something is owed, and missed by
nobody where nothing is. So a checkpoint goes on with narrowcast or without, whether it was made with it or not.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch
import torch.distributed as dist

from narrowcast.parallel.handle import Handle
from narrowcast.parallel.residuals import WholeResiduals
from narrowcast.parallel.stats import TensorRow

log = logging.getLogger("narrowcast")

FILE = "narrowcast.pt"


def save(handle: Handle, path: Path, writes: bool) -> None:
    """Collective. writes: whether this process writes to the folder, which is there."""
    state = WholeResiduals(handle, writes).state_dict()
    if state:
        torch.save(state, path)
    elif writes:
        path.unlink(missing_ok=True)  # of an earlier checkpoint of this name, whose parameters are gone


def load(handle: Handle, path: Path, device: torch.device) -> bool:
    """Collective; returns whether there was something. device: where the process group has its tensors."""
    if not _everywhere(path, device):
        if any(_feeds_back(row) for row in handle.rows()):
            log.warning("%s is not there: the checkpoint has no residuals, error feedback begins anew", path)
        return False
    WholeResiduals(handle, writes=False).load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return True


def _feeds_back(row: TensorRow) -> bool:
    return "+ef" in row.wire


def _everywhere(path: Path, device: torch.device) -> bool:
    """Whether all processes see the file. Where some do, all raise: loading is collective."""
    seen = path.is_file()
    if not (dist.is_available() and dist.is_initialized()):
        return seen
    count, world = torch.tensor([float(seen)], device=device), dist.get_world_size()
    dist.all_reduce(count)
    if 0 < count.item() < world:
        raise RuntimeError(
            f"narrowcast: {int(count.item())} of {world} processes see {path}, and this one does"
            f"{'' if seen else ' not'}; copy it to the same folder of every machine, as the rest of the checkpoint"
        )
    return bool(count.item())
