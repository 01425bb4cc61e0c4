"""By hand on a machine with a GPU: collectives and attach on CUDA tensors give the bits of the CPU.

    PYTHONPATH=src python tests/gpu/check_cuda.py [--quick]

Several ranks share one GPU through Gloo: values are encoded and decoded on the GPU, and the bytes of the wires travel
over the host. NCCL, which refuses several ranks on one GPU, is tried with one. Streams: check_streams.py.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import narrowcast as nc
from narrowcast import collectives
from narrowcast.collectives import Residuals
from narrowcast.kernels import native

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SPECS = ("as-is", "bf16", "int8/256", "e5m2+aps", "int4/128", "dtree8", "onebit/64", "nvfp4")


def values(rank: int, device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(100_003, generator=torch.Generator().manual_seed(rank)).to(device, dtype)


def check_all_reduce(rank: int, dtypes: tuple[torch.dtype, ...] = DTYPES) -> None:
    for dtype in dtypes:
        for spec in SPECS:
            here, there = values(rank, "cpu", dtype), values(rank, "cuda", dtype)
            nc.all_reduce(here, spec)
            nc.all_reduce(there, spec)
            assert torch.equal(here, there.cpu()), (spec, dtype)


def check_residuals_and_algorithms(rank: int) -> None:
    for algorithm in ("two_shot", "one_shot"):
        owed = {device: Residuals.zeros(100_003, device=device) for device in ("cpu", "cuda")}
        for step in range(3):
            found = {device: values(10 * step + rank, device) for device in owed}
            for device, x in found.items():
                nc.all_reduce(x, "int4/128+sr+ef", step=step, algorithm=algorithm, residuals=owed[device])
            assert torch.equal(found["cpu"], found["cuda"].cpu()), (algorithm, step)
        assert torch.equal(owed["cpu"].first, owed["cuda"].first.cpu()), algorithm
        assert torch.equal(owed["cpu"].second, owed["cuda"].second.cpu()), algorithm


def check_the_other_collectives(rank: int, world: int) -> None:
    found = []
    for device in ("cpu", "cuda"):
        x, whole = values(rank, device)[: 1000 * world], torch.empty(1000 * world, device=device)
        part, came = torch.empty(1000, device=device), torch.empty(1000, device=device)
        collectives.reduce_scatter(part, x, "int8/256")
        collectives.all_gather(whole, part, "int8/256")
        swapped = torch.empty_like(x)
        collectives.all_to_all(swapped, x, "e5m2/256")
        collectives.broadcast(x, "int4/128", src=world - 1)
        leaving = collectives.isend(part, "int8/256", (rank + 1) % world)
        collectives.recv(came, "int8/256", (rank - 1) % world)
        leaving.wait()
        found.append([t.cpu() for t in (part, whole, swapped, x, came)])
    for here, there in zip(*found, strict=True):
        assert torch.equal(here, there)


def train_sharded(world: int) -> None:
    """FSDP2, gradients and parameters through codecs."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64)).cuda()
    mesh = init_device_mesh("cuda", (world,))
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)
    handle = nc.attach(model, gradients="int4/128+sr+ef", parameters="e4m3fn/128", min_values=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(5):
        loss = model(torch.randn(4, 256, generator=generator).cuda()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    handle.check_ranks()
    handle.detach()
    assert losses[-1] < losses[0], losses


def train(device: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(256, 128).to(device))
    handle = nc.attach(model, "int8/256", min_values=0)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        x = torch.randn(4, 256, generator=generator).to(device)
        model(x).square().mean().backward()
    handle.check_ranks()
    handle.detach()
    return [p.grad.cpu() for p in model.parameters() if p.grad is not None]


def train_in_mixed_precision(wire: str | None) -> list[torch.Tensor]:
    """DDP's own mixed precision, plain or attached: bfloat16 in the pass, float32 gradients at the end."""
    torch.manual_seed(0)
    half = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    model = DistributedDataParallel(torch.nn.Linear(256, 128).cuda(), mixed_precision=half)
    handle = nc.attach(model, wire, min_values=0) if wire else None
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        model.zero_grad()
        model(torch.randn(4, 256, generator=generator).cuda()).square().mean().backward()
    torch.cuda.synchronize()
    if handle is not None:
        handle.check_ranks()
        handle.detach()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def check_mixed_precision() -> None:
    plain, lossless, few = (train_in_mixed_precision(wire) for wire in (None, "as-is", "int8/256"))
    for a, b, c in zip(plain, lossless, few, strict=True):
        assert a.dtype == b.dtype == c.dtype == torch.float32
        # two ranks: one sum, so only the order of dividing and rounding to bfloat16 can differ
        assert torch.allclose(a, b, rtol=2**-7, atol=0), "as-is"
        assert float((a - c).norm() / a.norm()) < 0.05, "int8/256"


def worker(rank: int, world: int, backend: str, port: int, quick: bool) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(0)
    dist.init_process_group(backend, rank=rank, world_size=world)
    check_all_reduce(rank, DTYPES[:1] if quick else DTYPES)
    if world > 1:
        check_residuals_and_algorithms(rank)
        check_the_other_collectives(rank, world)
    assert all(bool(g.isfinite().all()) for g in train("cuda"))
    if world == 2 and not quick:
        check_mixed_precision()
    try:
        train_sharded(world)
        sharded = "ok"
    except Exception as error:  # noqa: BLE001  torch itself may not shard over this backend
        sharded = f"{type(error).__name__}: {str(error)[:600]}"
    if rank == 0:
        print(f"{backend}, {world} ranks, FSDP2: {sharded}", flush=True)
        print(f"{backend}, {world} ranks: ok", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        address: Any = found.getsockname()
        return int(address[1])


def main() -> None:
    print("torch", torch.__version__, "native:", native.isa() if native.available() else native.load()[1], flush=True)
    print("GPU:", torch.cuda.get_device_name(0), flush=True)
    quick = "--quick" in sys.argv
    for backend, world in (("gloo", 2), ("gloo", 4), ("nccl", 1))[: 1 if quick else 3]:
        mp.spawn(worker, (world, backend, free_port(), quick), nprocs=world)


if __name__ == "__main__":
    main()
