"""One rank of `narrowcast bench fsdp`: step times and bytes of a transformer under FSDP2; rank 0 prints JSON lines.

Started by the lab: python -m narrowcast.bench.fsdp_worker STEPS WIRE...
A wire is "plain" or what attach gets: "gradients=int8/256,parameters=e4m3fn/128".
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from narrowcast.bench.transformer import Transformer, batch, text
from narrowcast.parallel import Handle, attach

WIDTH, LAYERS, LENGTH, BATCH = 320, 8, 64, 1
WARM_UP = 1
SENT = 8
"""Which number after the name of a link in /proc/net/dev."""


def wires(wire: str) -> dict[str, str]:
    """The arguments of attach in "gradients=int8/256,parameters=e4m3fn/128"; none for "plain"."""
    if wire == "plain":
        return {}
    given = dict(part.partition("=")[::2] for part in wire.split(","))
    unknown = sorted(set(given) - {"gradients", "parameters"})
    if unknown:
        raise ValueError(f"wire {wire!r}: {unknown[0]!r} is neither 'gradients' nor 'parameters'")
    return {"gradients": "as-is", **given}


def sharded(model: Transformer, wire: str) -> Handle | None:
    """Every block a unit of its own; what `wire` says attached."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return attach(model, **wires(wire)) if wire != "plain" else None  # type: ignore[arg-type]


def link_bytes() -> int:
    """What this host has sent, as its links count it: headers and acknowledgements included.

    From /proc/net/dev, which shows the host of the process that reads it; /sys/class/net shows where it was mounted.
    """
    lines = [line.partition(":") for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
    return sum(int(counters.split()[SENT]) for name, _, counters in lines if name.strip() != "lo")


def measure(wire: str, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model, data = Transformer(WIDTH, LAYERS, LENGTH), text()
    parameters = sum(p.numel() for p in model.parameters())
    handle = sharded(model, wire)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seconds, losses, before, stats = [], [], 0, {}
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            before, stats = link_bytes(), handle.stats() if handle is not None else {}
        x = batch(data, 1000 * step + dist.get_rank(), BATCH, LENGTH)
        dist.barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
    sent = (link_bytes() - before) / steps
    counted = (handle.stats()["sent_bytes"] - stats["sent_bytes"]) / steps if handle is not None else None
    if handle is not None:
        handle.detach()
    timed = seconds[WARM_UP:]
    times = {"step": statistics.median(timed), "fastest": min(timed), "slowest": max(timed)}
    facts = {"wire": wire, "parameters": parameters, "link_bytes": sent, "payload_bytes": counted}
    return {**facts, **times, "loss": losses[-1]}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    steps = int(sys.argv[1])
    for wire in sys.argv[2:]:
        facts = measure(wire, steps)
        if dist.get_rank() == 0:
            print(json.dumps(facts), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
