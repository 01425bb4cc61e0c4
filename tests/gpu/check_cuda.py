"""By hand on a machine with a GPU: collectives and attach on CUDA tensors give the bits of the CPU.

    PYTHONPATH=src python tests/gpu/check_cuda.py

Codecs run on the CPU so far: CUDA tensors travel over the host. Several ranks share one GPU through Gloo; NCCL, which
refuses that, is tried with one rank.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import narrowcast as nc
from narrowcast.kernels import native

SPECS = ("as-is", "bf16", "int8/256", "e5m2+aps", "int4/128", "dtree8", "onebit/64", "nvfp4")


def values(rank: int, device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(100_003, generator=torch.Generator().manual_seed(rank)).to(device, dtype)


def check_all_reduce(rank: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for spec in SPECS:
            here, there = values(rank, "cpu", dtype), values(rank, "cuda", dtype)
            nc.all_reduce(here, spec)
            nc.all_reduce(there, spec)
            assert torch.equal(here, there.cpu()), (spec, dtype)


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


def worker(rank: int, world: int, backend: str, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(0)
    dist.init_process_group(backend, rank=rank, world_size=world)
    check_all_reduce(rank)
    assert all(bool(g.isfinite().all()) for g in train("cuda"))
    if world == 2:
        check_mixed_precision()
    if rank == 0:
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
    for backend, world in (("gloo", 2), ("gloo", 4), ("nccl", 1)):
        mp.spawn(worker, (world, backend, free_port()), nprocs=world)


if __name__ == "__main__":
    main()
