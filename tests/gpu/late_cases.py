"""Calls on late ranks: what every rank gets must not depend on the device, nor on the way that wires take."""

from __future__ import annotations

import torch
import torch.distributed as dist
from dist.algorithms import flat_names
from gpu import late_ranks
from gpu.late_ranks import Job
from torch import Tensor

import narrowcast as nc
from narrowcast.collectives import Residuals, api, primitives
from narrowcast.collectives.algorithms import record, two_shot
from narrowcast.collectives.algorithms.context import Call, Reduction
from narrowcast.collectives.runtime.channel import Channel
from narrowcast.collectives.runtime.messages import Exchange
from narrowcast.collectives.segments import Noise, segment_ranges
from narrowcast.parallel.fsdp.sharded_rows import Rows
from narrowcast.parallel.fsdp.sharded_rows import all_gather as rows_all_gather
from narrowcast.parallel.fsdp.sharded_rows import reduce_scatter as rows_reduce_scatter

ALGORITHMS = (*flat_names(4), "hierarchical")
SPECS = ("int8/256", "int4/128+sr+ef", "e5m2+aps", "dtree8", "mxfp4")
BY_BACKEND = (("shared_scale", "int8/256"), ("native", "bf16"))
"""Sums that the backend itself does."""
STEPS = 3
SMALL_CHUNKS = 512
"""Instead of two_shot's own, so that small tensors have several."""


def values(n: int, *seed: int) -> Tensor:
    number = sum(part << (10 * place) for place, part in enumerate(seed))
    return torch.randn(n, generator=torch.Generator().manual_seed(number)) * 2.0 ** (number % 7)


def late(x: Tensor, device: torch.device) -> Tensor:
    """On a CUDA device they are there only after a while, in the order of the current stream."""
    if device.type != "cuda":
        return x.clone()
    there = x.to(device)
    found = torch.full_like(there, float("nan"))
    torch.cuda._sleep(late_ranks.CYCLES)
    return found.copy_(there)


def cuts(n: int) -> list[int]:
    return [n // 3, 1, n - n // 3 - 1]


def nodes_of(world: int) -> list[list[int]]:
    return [[rank, rank + 1] for rank in range(0, world, 2)] if world > 2 else [[rank] for rank in range(world)]


def bits(tensors: list[Tensor]) -> list[Tensor]:
    return [t.cpu().view(torch.int32 if t.dtype == torch.float32 else torch.int16) for t in tensors]


def all_reduces(spec: str, algorithm: str, n: int, device: torch.device, seed: int = 0) -> Job:
    """Some steps with other values each; by turns a tensor and a list of them."""
    codec = nc.codec(spec if record.ALGORITHMS[algorithm].residual_shots else spec.removesuffix("+ef"))

    def job(rank: int, channel: Channel) -> list[Tensor]:
        found, owed = [], Residuals.zeros(n, device=device) if codec.feedback else None
        for step in range(STEPS):
            x = late(values(n, rank, step, seed), device)
            work = api.all_reduce(
                x.split(cuts(n)) if step % 2 else x,
                codec,
                dist.ReduceOp.AVG,
                async_op=True,
                algorithm=algorithm,
                step=step,
                nodes=nodes_of(channel.world) if algorithm == "hierarchical" else None,
                residuals=owed,
                channel=channel,
            )
            assert work is not None
            work.wait()
            found.append(x.clone())
        return bits(found + ([owed.first, owed.second] if owed is not None else []))

    return job


def let_go(n: int, device: torch.device) -> Job:
    """All ranks but the first let go of their tensor at once, and take memory of its size anew."""

    def job(rank: int, channel: Channel) -> list[Tensor]:
        x = late(values(n, rank), device)
        delay(channel.stream_on(device).side)
        work = api.all_reduce(x, "int8/256", async_op=True, algorithm="one_shot", channel=channel)
        assert work is not None
        work.join()
        channel.gather(torch.zeros(1))
        if rank:
            address = x.data_ptr()
            del x, work
            taken = list[Tensor]()
            # other memory of that size may be free, too
            while len(taken) < 64 and address not in [t.data_ptr() for t in taken]:
                taken.append(torch.full((n,), float("nan"), device=device))
            return bits(taken[:0])
        work.wait()
        return bits([x.clone()])

    return job


def delay(stream: torch.cuda.Stream | None) -> None:
    if stream is not None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(4 * late_ranks.CYCLES)


def others(spec: str, n: int, device: torch.device) -> Job:
    """The parts of all-reduces by themselves, and what FSDP2 calls, with sizes that do not divide."""
    codec = nc.codec(spec.removesuffix("+ef"))

    def job(rank: int, channel: Channel) -> list[Tensor]:
        lengths = [n + 16 * number for number in range(channel.world)]
        whole, mine, target = (late(values(m, rank, m), device) for m in (sum(lengths), lengths[rank], sum(lengths)))
        total = torch.empty(lengths[rank], device=device)
        rows = Rows(channel.world, cuts(n), [codec, nc.codec("e5m2+aps"), nc.codec("as-is")], whole.dtype, Noise(1, 2))
        x, row = late(values(n * channel.world, rank, 3), device), torch.empty(n, device=device)
        gathered, told = torch.empty_like(x), late(values(n, rank, 4), device)

        def counts(unit: int, rank: int) -> list[int]:
            """As many there as back. Of units of blocks, of none at all, and of parts of a block."""
            return [unit * ((rank + peer) % 3) for peer in range(channel.world)]

        uneven = [
            (
                late(values(sum(counts(unit, rank)), rank, 5), device),
                torch.empty(sum(counts(unit, rank)), device=device),
                unit,
            )
            for unit in (512, 48, 7)
        ]

        def work(exchange: Exchange) -> None:
            def call(x: Tensor, lengths: list[int]) -> Call:
                return Call(x, codec, exchange, lengths, noise=Noise(3, 4))

            parts, sum_up = segment_ranges(lengths), call(whole, lengths)
            total.copy_(primitives.reduce_scatter(sum_up, parts, record.scales(sum_up)))
            primitives.all_gather(call(target, lengths), parts, mine)
            primitives.broadcast(call(told, [n]), 1)
            primitives.all_to_all(call(x, [n] * channel.world), call(gathered, [n] * channel.world), even=True)
            for y, z, unit in uneven:
                primitives.all_to_all(call(y, counts(unit, rank)), call(z, counts(unit, rank)))
            row.copy_(rows_reduce_scatter(rows, exchange, x, Reduction(divide=3.0)))
            rows_all_gather(rows, exchange, row, gathered)

        used = [whole, mine, target, total, x, row, gathered, told, *(part for pair in uneven for part in pair[:2])]
        channel.submit({"call": "others"}, work, used).wait()
        return bits([t.clone() for t in used])

    return job


def small_chunks() -> None:
    two_shot.CHUNK_BYTES = SMALL_CHUNKS
