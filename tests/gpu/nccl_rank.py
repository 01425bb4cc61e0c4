"""A rank of `check_nccl.py`: `nccl_rank.py bits` compares with the simulator, `nccl_rank.py fault KIND` trains until a
rank fails. On CUDA tensors over NCCL; without a GPU on the CPU over Gloo, which is how this file itself is tried.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for dist.algorithms, as pytest has it

import torch
import torch.distributed as dist
from dist.algorithms import flat_names, options, specs_for
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import narrowcast as nc
from narrowcast.collectives import Residuals
from narrowcast.simulate import World

SPECS = (
    "int8/256", "int4/128+sr+ef", "e4m3fn/128", "e5m2+aps", "dtree8+ef", "onebit/64+ef", "mxfp4", "nvfp4", "qsgd4/512",
    "bf16",
)  # fmt: skip
VALUES, STEPS = 100_003, 2
TIMEOUT = 15
"""Seconds of the group, in which everybody must hear of a fault."""
FAULT_AT = 5
"""The step at which the last rank fails."""

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
Check = tuple[str, bool]


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def values(rank: int, step: int, n: int = VALUES) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(n, generator=generator) * 10.0 ** (rank % 3 - 1)


def same(x: Tensor, wanted: Tensor) -> bool:
    return torch.equal(x.cpu().view(torch.int32), wanted.view(torch.int32))


def is_equal_everywhere(x: Tensor) -> bool:
    first = x.clone()
    dist.broadcast(first, 0)
    differ = torch.tensor([float((first.view(torch.int32) != x.view(torch.int32)).any())], device=DEVICE)
    dist.all_reduce(differ)
    return not differ.item()


def all_reduces(rank: int, world: int) -> Iterator[Check]:
    """Every algorithm and spec against the simulator, which rank 0 asks; all ranks have what rank 0 has."""
    names = [*flat_names(world), *(["hierarchical"] if world % 2 == 0 else []), "shared_scale"]
    for name in names:
        for spec in specs_for(name, SPECS, world):
            more, feedback = options(name, world), nc.codec(spec).feedback
            residuals = Residuals.zeros(VALUES, device=DEVICE) if feedback else None
            simulated, good = World(world, name, spec, **more), True
            for step in range(STEPS):
                x = values(rank, step).to(DEVICE)
                nc.all_reduce(x, spec, dist.ReduceOp.AVG, algorithm=name, step=step, residuals=residuals, **more)
                if rank == 0:
                    inputs = torch.stack([values(peer, step) for peer in range(world)])
                    good = good and same(x, simulated.all_reduce(inputs, "avg", step=step)[0])
                good = is_equal_everywhere(x) and good
            yield f"{name} {spec}", good


def others(rank: int, world: int) -> Iterator[Check]:
    """The other collectives, against encode and decode on the CPU."""
    spec, n = "int8/256", 4096
    codec = nc.codec(spec)

    def passed(x: Tensor) -> Tensor:
        return codec.decode(codec.encode(x), x.numel())

    everyones = [values(peer, 7, n * world) for peer in range(world)]
    mine, out = everyones[rank].to(DEVICE), torch.empty(n, device=DEVICE)
    nc.reduce_scatter(out, mine, spec)
    total = torch.zeros(n)
    for x in everyones:
        total += passed(x[rank * n : (rank + 1) * n])
    yield "reduce_scatter", same(out, total)
    gathered = torch.empty(n * world, device=DEVICE)
    nc.all_gather(gathered, mine[:n].clone(), spec)
    yield "all_gather", same(gathered, torch.cat([passed(x[:n]) for x in everyones]))
    nc.all_to_all(gathered, mine, spec)
    yield "all_to_all", same(gathered, torch.cat([passed(x[rank * n : (rank + 1) * n]) for x in everyones]))
    told = mine[:n].clone()
    nc.broadcast(told, spec, src=1)
    yield "broadcast", same(told, passed(everyones[1][:n]))
    if rank == 0:
        nc.send(mine[:n].clone(), spec, 1)
    elif rank == 1:
        nc.recv(out, spec, 0)
        yield "send and recv", same(out, passed(everyones[0][:n]))


class Given(nn.Module):
    """Gradients are what the input says, to the bit: a bucket has a large tensor and a small one, which stays as is."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Parameter(torch.zeros(VALUES)), nn.Parameter(torch.zeros(999))

    def forward(self, x: Tensor) -> Tensor:
        return (self.large * x[:VALUES]).sum() + (self.small * x[VALUES:]).sum()


def ddp(rank: int, world: int) -> Iterator[Check]:
    for spec in ("int8/256", "int4/128+ef"):
        model = DDP(Given().to(DEVICE), static_graph=spec == "int8/256")
        handle, simulated, good = nc.attach(model, spec), World(world, "two_shot", spec), True
        for step in range(3):
            model.zero_grad()
            model(values(rank, step, VALUES + 999).to(DEVICE)).backward()
            inputs = torch.stack([values(peer, step, VALUES + 999) for peer in range(world)])
            wanted = simulated.all_reduce(inputs[:, :VALUES].contiguous(), "avg", step=step)[0]
            total = inputs[0, VALUES:].clone()
            for x in inputs[1:]:
                total += x[VALUES:]
            large, small = model.module.large.grad, model.module.small.grad
            good = good and same(large, wanted) and same(small, total / world)
        yield f"DDP {spec}", good
        handle.detach()


def noticed(rank: int, world: int) -> Iterator[Check]:
    """What a check must notice: another seed's bits, and ranks that disagree."""
    x = values(rank, 0).to(DEVICE)
    nc.all_reduce(x, "int8/256+sr", algorithm="two_shot", step=1)
    inputs = torch.stack([values(peer, 0) for peer in range(world)])
    yield "a wrong step is noticed", not same(x, World(world, "two_shot", "int8/256+sr").all_reduce(inputs, step=2)[0])
    try:
        nc.all_reduce(torch.ones(1000, device=DEVICE), "int8/256" if rank else "int4/128")
    except nc.collectives.DisagreementError as error:
        yield "a disagreement is named", "int4/128" in str(error)
    else:
        yield "a disagreement is named", False


def check_bits(rank: int, world: int) -> None:
    for checks in (all_reduces, others, ddp, noticed):
        for what, good in checks(rank, world):
            if rank == 0 or not good or what == "send and recv":
                say(check=what, good=good, rank=rank)


def cut_link() -> None:
    """Take this host's interface down."""
    name = os.environ["GLOO_SOCKET_IFNAME"].encode()
    flags, request = 0x8914, struct.pack("16sh14s", name, 0, b"")  # SIOCSIFFLAGS
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, flags, request)


FAULTS: dict[str, Callable[[], None]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "cut off": cut_link,
}


def train(rank: int, world: int, fault: str) -> None:
    """Steps until the last rank fails, and how everybody else hears of it. "raises": it raises in its backward pass."""
    model = DDP(nn.Sequential(*(nn.Linear(512, 512) for _ in range(6))).to(DEVICE))
    handle = nc.attach(model, "int8/256")
    try:
        for step in range(10 * FAULT_AT):
            if step == FAULT_AT:
                say(step=step)
            loss = model(torch.randn(32, 512, device=DEVICE)).square().mean()
            if step == FAULT_AT and rank == world - 1:
                if fault == "raises":
                    loss.register_hook(lambda _: (_ for _ in ()).throw(ValueError("on purpose")))
                else:
                    FAULTS[fault]()
            loss.backward()
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001  that is what is looked at
        text = " ".join(str(error).split())[:300]
        say(error=type(error).__name__, text=text)
    else:
        say(error="", text="no rank noticed anything")
    handle.detach()


def begin(timeout: int) -> tuple[int, int]:
    """Join the group of the lab: this rank, and how many there are."""
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
    dist.init_process_group(
        "nccl" if DEVICE.type == "cuda" else "gloo",
        timeout=timedelta(seconds=timeout),
        device_id=DEVICE if DEVICE.type == "cuda" else None,
    )
    return dist.get_rank(), dist.get_world_size()


def main(mode: str, *arguments: str) -> None:
    if mode == "bits":
        check_bits(*begin(120))
        dist.destroy_process_group()
    else:
        train(*begin(TIMEOUT), *arguments)
        os._exit(0)  # the group of a rank that is gone does not end


if __name__ == "__main__":
    main(*sys.argv[1:])
