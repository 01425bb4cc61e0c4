"""What ranks check: each function is called by all of them, in step, and tells what this rank found."""

from __future__ import annotations

import ctypes
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from narrowcast import collectives
from narrowcast.bench import check
from narrowcast.codecs import codec as codec_named
from narrowcast.collectives import ALGORITHMS, DisagreementError, Residuals, record
from narrowcast.measure import CPU
from narrowcast.parallel import attach
from narrowcast.simulate import World

SPECS = (
    *("int8/256", "int4/128+sr+ef", "bf16", "e4m3fn/128", "e5m2+aps", "mxfp4", "onebit/64+ef", "int4/128+rot"),
    *("qsgd4/512", "dtree8+ef", "nvfp4", "int2/4096+top64+ef95", "int4/128+spike2"),
)
"""They span the kinds of codecs: a scale for a block, for a tensor, agreed by all, none; codebooks, transforms, noise,
and error feedback.
"""
QUICK = SPECS[:3]
ON_THE_WAY = "int8/256"
"""Of collectives that know no error feedback."""
STEPS = 2
EXACT = 100
"""Integers up to this are added exactly by whatever backend, in 16 bits too."""


@dataclass(frozen=True)
class Scope:
    """Where a rank stands, and how much it checks."""

    rank: int
    world: int
    device: torch.device = CPU
    specs: tuple[str, ...] = SPECS
    values: int = 20_011

    @property
    def peers(self) -> range:
        return range(self.world)


@dataclass(frozen=True)
class Found:
    """What one rank found."""

    name: str
    fault: str = ""
    """What is wrong on this rank."""
    bits: int = 0
    """A checksum of what all ranks must hold alike; 0 where they hold different things."""


Section = Callable[[Scope], Iterator[Found]]


def values(rank: int, step: int, n: int) -> Tensor:
    """What a rank has at a step: every rank can tell what the others have."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(n, generator=generator) * 10.0 ** (rank % 3 - 1)


def same(x: Tensor, wanted: Tensor) -> bool:
    """Bit for bit, wherever x is."""
    return torch.equal(x.cpu().view(torch.int32), wanted.view(torch.int32))


def checksum(x: Tensor) -> int:
    """Of all bits; torch may be here without numpy."""
    held = x.cpu().contiguous()
    return zlib.crc32(ctypes.string_at(held.data_ptr(), held.nbytes))


def compared(name: str, x: Tensor, wanted: Tensor, *, alike: bool = False) -> Found:
    """alike: every rank holds the same."""
    fault = "" if same(x, wanted) else f"{_differing(x, wanted)} of {x.numel()} values differ from the simulator"
    return Found(name, fault, checksum(x) if alike else 0)


def _differing(x: Tensor, wanted: Tensor) -> int:
    return int((x.cpu().view(torch.int32) != wanted.view(torch.int32)).sum())


def options(name: str, world: int) -> dict[str, Any]:
    """What a call by an algorithm needs beside its name."""
    size = 2 if world % 2 == 0 else 1
    nodes = tuple(tuple(range(first, first + size)) for first in range(0, world, size))
    return {"nodes": nodes} if ALGORITHMS[name].takes_nodes else {}


def takes(name: str, spec: str, world: int) -> bool:
    """Whether an algorithm takes a codec on a world of that size."""
    try:
        record.check(name, codec_named(spec), world, options(name, world).get("nodes"))
    except ValueError:
        return False
    return True


def specs_for(name: str, specs: Iterable[str], world: int) -> list[str]:
    """Those that it takes; without +ef where it keeps no residuals."""
    plain = [spec if ALGORITHMS[name].residual_shots else re.sub(r"\+ef[0-9]*$", "", spec) for spec in specs]
    return [spec for spec in dict.fromkeys(plain) if takes(name, spec, world)]


def kernels(at: Scope) -> Iterator[Found]:
    """This rank's kernels, on its own device, against the reference on its processor."""
    for spec in at.specs:
        why = check.failure(codec_named(spec), None if at.device == CPU else at.device)
        yield Found(f"kernels of {spec}", why or "")


def moves(at: Scope) -> Iterator[Found]:
    """The collectives that add nothing or scatter a sum, against the simulator; and messages from rank to rank."""
    n, world = 4096, World(at.world, spec=ON_THE_WAY)
    everyones = [values(peer, 7, n * at.world) for peer in at.peers]
    mine, out = everyones[at.rank].to(at.device), torch.empty(n, device=at.device)
    collectives.reduce_scatter(out, mine, ON_THE_WAY)
    yield compared("reduce_scatter", out, world.reduce_scatter(torch.stack(everyones))[at.rank])
    gathered = torch.empty(n * at.world, device=at.device)
    collectives.all_gather(gathered, mine[:n].clone(), ON_THE_WAY)
    arrived = world.all_gather([x[:n] for x in everyones])[at.rank]
    yield compared("all_gather", gathered, torch.cat(arrived), alike=True)
    collectives.all_to_all(gathered, mine, ON_THE_WAY)
    yield compared("all_to_all", gathered, torch.cat(world.all_to_all([x.split(n) for x in everyones])[at.rank]))
    told, source = mine[:n].clone(), at.world - 1
    collectives.broadcast(told, ON_THE_WAY, src=source)
    spoken = world.broadcast(torch.stack([x[:n] for x in everyones]), src=source)
    yield compared("broadcast", told, spoken[at.rank], alike=True)
    sent = collectives.isend(mine[:n].clone(), ON_THE_WAY, (at.rank + 1) % at.world)
    before = (at.rank - 1) % at.world
    collectives.recv(out, ON_THE_WAY, before)
    sent.wait()
    yield compared("send and recv", out, arrived[before])


def non_finite(at: Scope) -> Iterator[Found]:
    """A NaN of the last rank and an Inf of the first are non-finite on every rank, and no other block is."""
    n, block = 4096, 512
    for spec in dict.fromkeys(re.sub(r"\+ef[0-9]*", "", spec) for spec in at.specs):
        codec = codec_named(spec)
        if codec.exemptions or not codec.block or codec.block > block:
            continue
        x = values(at.rank, 3, n)
        x[0] = torch.nan if at.rank == at.world - 1 else x[0]
        x[block] = torch.inf if at.rank == 0 else x[block]
        x = x.to(at.device)
        collectives.all_reduce(x, spec, algorithm="two_shot", step=0)
        finite, fault = x.isfinite(), ""
        if finite[0] or finite[block]:
            fault = "a NaN or an Inf of one rank came out finite"
        elif not finite[2 * block :].all():
            fault = "a NaN spread into other blocks"
        yield Found(f"NaN and Inf stay so with {spec}", fault, checksum(finite))


def disagreement(at: Scope) -> Iterator[Found]:
    """Ranks that call different things raise before anything is sent, and the error names who."""
    name, last = "ranks that disagree are named", at.world - 1
    x = torch.ones(1000, device=at.device)
    try:
        collectives.all_reduce(x, "int8/256" if at.rank == last else "int4/128")
    except DisagreementError as error:
        # of two, either differs from the other
        named = f"rank {last}" in str(error) or at.world == 2
        yield Found(name, "" if named else f"rank {last} differed, and the error says: {error}")
    else:
        yield Found(name, "ranks with different specs went on, and nothing was said")


def all_reduces(at: Scope) -> Iterator[Found]:
    """Every algorithm with every spec that it takes, a few steps of error feedback too."""
    named = [(name, spec) for name in ALGORITHMS for spec in specs_for(name, at.specs, at.world)]
    for spec in dict.fromkeys(spec for _, spec in named):
        for name in (name for name, taken in named if taken == spec):
            kind = ALGORITHMS[name]
            yield (_simulated if kind.simulate is not None else _added_exactly)(at, name, spec)


def _simulated(at: Scope, name: str, spec: str) -> Found:
    more, feedback = options(name, at.world), codec_named(spec).feedback
    residuals = Residuals.zeros(at.values, device=at.device) if feedback else None
    simulated, title = World(at.world, name, spec, **more), f"all_reduce by {name} with {spec}"
    for step in range(STEPS if feedback else 1):
        x = values(at.rank, step, at.values).to(at.device)
        collectives.all_reduce(x, spec, dist.ReduceOp.AVG, algorithm=name, step=step, residuals=residuals, **more)
        inputs = torch.stack([values(peer, step, at.values) for peer in at.peers])
        found = compared(title, x, simulated.all_reduce(inputs, "avg", step=step)[0], alike=True)
        if found.fault:
            break
    return found


def _added_exactly(at: Scope, name: str, spec: str) -> Found:
    """Where the backend adds, in an order that nobody knows: of integers every order gives the same."""
    most = max(1, EXACT // at.world)
    inputs = [values(peer, 0, at.values).mul(most).round().clamp(-most, most) for peer in at.peers]
    x = inputs[at.rank].to(at.device, copy=True)
    collectives.all_reduce(x, spec, algorithm=name, step=0)
    # a sum of zeros may have either sign
    return compared(f"all_reduce by {name} with {spec}", x + 0.0, torch.stack(inputs).sum(0) + 0.0, alike=True)


class Given(nn.Module):
    """Gradients are what the input says, to the bit: a bucket has a large tensor and a small one, which stays as is."""

    SMALL = 999

    def __init__(self, large: int) -> None:
        super().__init__()
        self.large, self.small = nn.Parameter(torch.zeros(large)), nn.Parameter(torch.zeros(self.SMALL))

    def forward(self, x: Tensor) -> Tensor:
        large = self.large.numel()
        return (self.large * x[:large]).sum() + (self.small * x[large:]).sum()


def ddp(at: Scope) -> Iterator[Found]:
    """`attach` on a DDP model: what the optimizer would get."""
    whole = at.values + Given.SMALL
    for spec in ("int8/256", "int4/128+ef"):
        # as it is given to whoever has no GPU, too
        model: Any = DistributedDataParallel(Given(at.values).to(at.device), static_graph=spec == "int8/256")
        handle, simulated = attach(model, spec), World(at.world, "two_shot", spec)
        for step in range(STEPS + 1):
            model.zero_grad()
            model(values(at.rank, step, whole).to(at.device)).backward()
            inputs = torch.stack([values(peer, step, whole) for peer in at.peers])
            wanted = simulated.all_reduce(inputs[:, : at.values].contiguous(), "avg", step=step)[0]
            small = inputs[0, at.values :].clone()
            for x in inputs[1:]:
                small += x[at.values :]
            got = torch.cat([model.module.large.grad, model.module.small.grad])
            found = compared(f"DDP with {spec}", got, torch.cat([wanted, small / at.world]), alike=True)
            if found.fault:
                break
        yield found
        handle.detach()


SECTIONS: dict[str, Section] = {
    "kernels against the reference": kernels,
    "moves against the simulator": moves,
    "NaN and Inf": non_finite,
    "disagreement": disagreement,
    "DDP against the simulator": ddp,
    "all-reduces against the simulator": all_reduces,
}
"""In this order; the longest last, of which time may cut something off."""
