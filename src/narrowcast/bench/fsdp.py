"""FSDP2 training steps on rate-limited links: plain, and gradients and parameters through codecs, all in one run.

What is trained is a small decoder-only transformer on bytes. A rank, as the lab starts it:
python -m narrowcast.bench.fsdp STEPS WIRE...
A wire is "plain" or what attach gets: "gradients=int8/256,parameters=e4m3fn/128".
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from narrowcast.codecs import codec as codec_named
from narrowcast.data import help_text
from narrowcast.lab import Lab
from narrowcast.measure import link_bytes, run_rank, until_all_done
from narrowcast.parallel import Handle, attach

HEADS = 4
WIDTH, LAYERS, LENGTH, BATCH = 320, 8, 64, 1
WARM_UP = 1
WIRES = (
    "plain",
    "gradients=int8/256",
    "gradients=int4/128+ef",
    "parameters=e4m3fn/128",
    "gradients=int8/256,parameters=e4m3fn/128",
)
STEPS = 10

TARGETS = {("200mbit", WIRES[-1]): (3.5, 2.5)}
"""How many times fewer bytes and faster steps we promise on 4 hosts, by rate and wire."""


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a norm: 12 width² parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class Transformer(nn.Module):
    """Bytes in, the next byte out."""

    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, x_BL: Tensor) -> Tensor:
        """The loss of predicting every byte but the first."""
        hidden = self.embed(x_BL[:, :-1]) + self.place(torch.arange(x_BL.shape[1] - 1))
        for block in self.blocks:
            hidden = block(hidden)
        return cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), x_BL[:, 1:].flatten())


def batch(data: Tensor, seed: int, size: int, length: int) -> Tensor:
    """Pieces of length + 1 bytes from places that the seed decides."""
    starts = torch.randint(len(data) - length - 1, (size,), generator=torch.Generator().manual_seed(seed))
    return torch.stack([data[start : start + length + 1] for start in starts.tolist()])


def run(hosts: int, rate: str | None, wires: Sequence[str] = WIRES, steps: int = STEPS) -> Iterator[dict[str, Any]]:
    """A row for each wire: the median step and what the link of rank 0 carried, beside plain FSDP2 where it was run."""
    for wire in wires:
        for spec in attach_arguments(wire).values():
            codec_named(spec)
    with Lab(hosts, rate) as lab:
        command = [sys.executable, "-m", __name__, str(steps), *wires]
        done = lab.run(command, capture=True, timeout=1800).check()
    plain: dict[str, Any] | None = None
    for row in done.json_lines():
        plain = row if row["wire"] == "plain" else plain
        yield row | comparison(row, plain, hosts, rate)


def comparison(row: dict[str, Any], plain: dict[str, Any] | None, hosts: int, rate: str | None) -> dict[str, Any]:
    if plain is None:
        return {"fewer_bytes": None, "speedup": None, "target": None, "met": None}
    fewer, faster = plain["link_bytes"] / row["link_bytes"], plain["step"] / row["step"]
    target = TARGETS.get((str(rate), row["wire"])) if hosts == 4 else None
    met = None if target is None else fewer >= target[0] and faster >= target[1]
    return {"fewer_bytes": fewer, "speedup": faster, "target": target, "met": met}


def attach_arguments(wire: str) -> dict[str, str]:
    """The arguments of attach in "gradients=int8/256,parameters=e4m3fn/128"; none for "plain"."""
    if wire == "plain":
        return {}
    arguments = dict(part.partition("=")[::2] for part in wire.split(","))
    unknown = sorted(set(arguments) - {"gradients", "parameters"})
    if unknown:
        raise ValueError(f"wire {wire!r}: {unknown[0]!r} is neither 'gradients' nor 'parameters'")
    return {"gradients": "as-is", **arguments}


def shard(model: Transformer, wire: str) -> Handle | None:
    """Every block a unit of its own; what `wire` says attached."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return attach(model, **attach_arguments(wire)) if wire != "plain" else None  # type: ignore[arg-type]


def measure(wire: str, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model, data = Transformer(WIDTH, LAYERS, LENGTH), help_text()
    parameters = sum(p.numel() for p in model.parameters())
    handle = shard(model, wire)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seconds, losses, before, stats = [], [], 0, {}
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            before, stats = link_bytes(), handle.stats() if handle is not None else {}
        x = batch(data, 1000 * step + dist.get_rank(), BATCH, LENGTH)

        def train(x: Tensor = x) -> None:
            optimizer.zero_grad()
            loss = model(x)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())

        seconds.append(until_all_done(train))
    sent = (link_bytes() - before) / steps
    counted = (handle.stats()["sent_bytes"] - stats["sent_bytes"]) / steps if handle is not None else None
    if handle is not None:
        handle.detach()
    timed = seconds[WARM_UP:]
    times = {"step": statistics.median(timed), "fastest": min(timed), "slowest": max(timed)}
    facts = {"wire": wire, "parameters": parameters, "link_bytes": sent, "payload_bytes": counted}
    return {**facts, **times, "loss": losses[-1].item()}


if __name__ == "__main__":
    run_rank(lambda: (measure(wire, int(sys.argv[1])) for wire in sys.argv[2:]))
