"""`narrowcast selftest`: under torchrun on all ranks, or alone on one process."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from typing import Annotated

import torch
import torch.distributed as dist
import typer

from narrowcast import selftest as tests
from narrowcast.console import JsonPath, save
from narrowcast.measure import describe_machine, need_cuda, process_group, rank_device

TIMEOUT = timedelta(seconds=60)
"""Until a rank that hangs is noticed."""
LAST_WORD = 3.0
"""Seconds for rank 0 to speak: torchrun ends all ranks when one has failed."""


def selftest(
    quick: Annotated[bool, typer.Option("--quick", help="Three codecs instead of thirteen.")] = False,
    cpu: Annotated[bool, typer.Option("--cpu", help="Gloo on the processors, although there are GPUs.")] = False,
    json_path: JsonPath = None,
) -> None:
    """Does it work on these machines, and does it pay? Start it on every rank: torchrun ... -m narrowcast selftest.

    Kernels against the reference, every algorithm and collective against the simulator, NaN, disagreement, DDP, and a
    short bench beside the backend's own sums, in about a minute. Ends with 1 where a rank fails, and names it.
    """
    gpu = torch.cuda.is_available() and not cpu
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ or os.environ["WORLD_SIZE"] == "1":
        report = tests.run_alone(rank_device(gpu), _say, quick)
        _end(report, json_path)
    if gpu:
        need_cuda()
    with process_group(gpu, TIMEOUT):
        rank, where = dist.get_rank(), "NCCL" if gpu else "Gloo"
        at = tests.Scope(rank, dist.get_world_size(), rank_device(gpu))
        report = tests.run(at, where, _say if rank == 0 and json_path != "-" else _silent, quick)
        if report.ok:
            dist.barrier()
        if rank == 0:
            _end(report, json_path)
        if report.error:
            print(f"rank {rank}: {report.error}", file=sys.stderr, flush=True)
        if not report.ok:
            time.sleep(LAST_WORD)
            raise typer.Exit(1)


def _say(text: str) -> None:
    print(text, flush=True)


def _silent(text: str) -> None:
    pass


def _end(report: tests.Report, json_path: str | None) -> None:
    if json_path is not None:
        save({"machine": describe_machine(), **report.as_dict()}, json_path)
    if json_path != "-":
        _say(f"narrowcast selftest {report.verdict()}")
    if not report.ok or report.ranks == 1:
        raise typer.Exit(not report.ok)
