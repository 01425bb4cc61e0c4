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

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import narrowcast as nc
from narrowcast.selftest import SECTIONS, Scope, same, values
from narrowcast.simulate import World

SPECS = (
    "int8/256", "int4/128+sr+ef", "e4m3fn/128", "e5m2+aps", "dtree8+ef", "onebit/64+ef", "mxfp4", "nvfp4", "qsgd4/512",
    "bf16",
)  # fmt: skip
VALUES = 100_003
TIMEOUT = 15
"""Seconds of the group, in which everybody must hear of a fault."""
FAULT_AT = 5
"""The step at which the last rank fails."""

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
Check = tuple[str, bool]


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def is_equal_everywhere(x: Tensor) -> bool:
    first = x.clone()
    dist.broadcast(first, 0)
    differ = torch.tensor([float((first.view(torch.int32) != x.view(torch.int32)).any())], device=DEVICE)
    dist.all_reduce(differ)
    return not differ.item()


def noticed(rank: int, world: int) -> Iterator[Check]:
    """What a check must notice: another seed's bits."""
    x = values(rank, 0, VALUES).to(DEVICE)
    nc.all_reduce(x, "int8/256+sr", algorithm="two_shot", step=1)
    inputs = torch.stack([values(peer, 0, VALUES) for peer in range(world)])
    yield "a wrong step is noticed", not same(x, World(world, "two_shot", "int8/256+sr").all_reduce(inputs, step=2)[0])


def check_bits(rank: int, world: int) -> None:
    at = Scope(rank, world, DEVICE, SPECS, VALUES)
    for section in SECTIONS.values():
        for found in section(at):
            alike = is_equal_everywhere(torch.tensor([found.bits], device=DEVICE)) if found.bits else True
            if rank == 0 or found.fault or not alike:
                say(check=found.name, good=not found.fault and alike, rank=rank)
    for what, good in noticed(rank, world):
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
