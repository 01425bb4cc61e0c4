"""A study on ranks that are there already: rank 0 runs it, the others do what it says."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from narrowcast.study import worker
from narrowcast.study.cases import Case, Place
from narrowcast.study.file import StudyFile
from narrowcast.study.launch import LaunchError, Tell

LONG = timedelta(hours=24)
"""Ranks wait for one another while rank 0 looks for what is next; when one dies, torchrun ends the others."""


def rank() -> int:
    return int(os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))


def join(study: StudyFile) -> None:
    """Make the process group; every rank, with the same study."""
    if "WORLD_SIZE" not in os.environ or "MASTER_ADDR" not in os.environ:
        raise ValueError(
            "launcher torchrun: the environment has no ranks; run torchrun --nproc-per-node N --no-python "
            "narrowcast study run FILE --launcher torchrun, or let --sbatch write the script"
        )
    wanted = {transport for grid in study.grids if grid.kind in ("time", "bus") for transport in grid.transport}
    if not torch.cuda.is_available():
        wanted -= {"nccl"}
    if "OMPI_COMM_WORLD_RANK" not in os.environ:
        wanted -= {"mpi"}
    worker.begin(sorted(wanted), LONG)


class TorchrunLauncher:
    """Rank 0's side."""

    name = "torchrun"
    waits = True

    def __init__(self) -> None:
        self._local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._ended = False

    def fits(self, case: Case) -> bool:
        return case.layout.workers == dist.get_world_size() and case.layout.per_host in (1, self._local)

    def run(self, place: Place, job: dict[str, Any], tell: Tell) -> None:
        made = {**job, "interface": None}
        _share(made)
        try:
            worker.run(made, tell)
        except Exception as error:
            raise LaunchError(f"{type(error).__name__}: {error}".replace("\n", " ")) from error

    def end(self) -> None:
        """Let the other ranks go."""
        if not self._ended:
            self._ended = True
            _share(None)


def follow() -> None:
    """The other ranks: one job after the other, until there is none."""
    while (job := _share(None)) is not None:
        _do(job)


def _do(job: dict[str, Any]) -> None:
    try:
        worker.run(job, lambda message: None)
    except Exception as error:  # noqa: BLE001  rank 0 raises the same, and records it
        sys.stderr.write(f"rank {dist.get_rank()}: {type(error).__name__}: {error}\n")


def _share(job: dict[str, Any] | None) -> dict[str, Any] | None:
    found: list[Any] = [job]
    dist.broadcast_object_list(found, 0)
    answer: dict[str, Any] | None = found[0]
    return answer
