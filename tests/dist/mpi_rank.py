"""A rank under mpirun: the same sums as over torch.distributed, and the hash of their bits."""

from __future__ import annotations

import hashlib
import json
import sys

import torch
import torch.distributed as dist
from dist.mpi_cases import CASES, inputs
from mpi4py import MPI

import narrowcast as nc
from narrowcast.collectives.runtime.agreement import DisagreementError
from narrowcast.collectives.transports.mpi import mpi_channel


def main() -> None:
    torch.set_num_threads(1)
    channel = mpi_channel()
    found = {}
    for name, (spec, options) in CASES.items():
        tensors = inputs(channel.rank)
        work = nc.all_reduce(tensors, spec, dist.ReduceOp.AVG, async_op=True, channel=channel, step=3, **options)
        work.wait()
        found[name] = hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest(), work.sent_bytes
    try:
        nc.all_reduce(torch.ones(8 + channel.rank), "int8/16", channel=channel)
    except DisagreementError as error:
        found["disagreement"] = str(error)
    x = torch.ones(4)
    nc.all_reduce(x, "as-is", channel=channel)
    assert float(x[0]) == channel.world
    results = MPI.COMM_WORLD.gather(found)
    if channel.rank == 0:
        print("RESULT", json.dumps(results))
    channel.close()
    sys.stdout.flush()


if __name__ == "__main__":
    main()
