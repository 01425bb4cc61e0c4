"""Sums that the backend itself does: `native` for 16- and 32-bit floats, `shared_scale` for integers."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.collectives.algorithms.context import Call
from narrowcast.collectives.algorithms.cost import Cost, Placement
from narrowcast.collectives.algorithms.record import Algorithm, Order, Setting, register
from narrowcast.collectives.algorithms.workers import Workers
from narrowcast.collectives.segments import store
from narrowcast.kernels import TINY, blocks, saturate

LARGEST = torch.finfo(torch.float32).max
MAX_SHARED = 127
"""The largest int8: the sum of one value from each rank must not pass it."""


def run_native(call: Call) -> None:
    """Cast to the codec's type and let the backend add, in its own order and precision (no promise of equal runs).

    One more value travels: NaN from a rank that has a value that is not finite. Without it, what the backend's sum made
    infinite is the type's largest number.

    Bytes sent a rank: 2 (W-1)/W times the type's size (as backends do it), and one to each peer. Roundings a value:
    about W.
    """
    dtype, n = call.codec.stored_dtype(call.x.dtype), call.x.numel()
    assert dtype is not None
    wire = torch.zeros(n + 1, dtype=dtype, device=call.x.device)
    wire[:n] = saturate(call.x, dtype)
    # finite - finite is 0, whatever is not gives NaN
    wire[n] = (wire[:n] - wire[:n]).sum()
    call.exchange.meet()
    call.exchange.all_sum_(wire)
    call.exchange.sent_bytes += _backend_bytes(n * wire.itemsize, call.exchange.world)
    total, limit = wire[:n].float(), torch.finfo(dtype).max
    # where sums of other sign met after each had left the type, nothing is known but that both were too large
    total = torch.where(wire[n].isnan(), total, total.nan_to_num(0.0, limit, -limit))
    store(call.x, call.reduction.finish(total))


def _backend_bytes(nbytes: int, world: int) -> int:
    """Sent by each rank when the backend adds so many bytes by a ring."""
    return 2 * (world - 1) * nbytes // world


def check_native(codec: Codec, world: int) -> None:
    if codec.stored_dtype(torch.float32) is None:
        raise ValueError(f"all_reduce: algorithm 'native' takes as-is, fp32, bf16 or fp16, got {codec}")


def native_bytes(setting: Setting) -> list[int]:
    coder, world = setting.coder, setting.world
    return [_backend_bytes(coder.codec.nbytes(coder.numel, coder.dtype), world) + world - 1] * world


def native_cost(ranks: Placement) -> Cost:
    """A ring, or between nodes with NCCL a double tree where that is quicker."""
    tree = (ranks.double_tree(),) if ranks.nccl and ranks.nodes > 1 else ()
    return Cost((ranks.ring("all_reduce"),), encodes=0, decodes=0, roundings=ranks.world, otherwise=tree)


def run_shared_scale(call: Call) -> None:
    """Integers under one scale for all ranks, with headroom, so that the backend's integer sum is exact.

    1. MAX over ranks of each block's largest magnitude (as int32: a NaN is larger than anything and survives).
    2. scale = MAX / floor(127 / W); every rank rounds its values to int8.
    3. The backend adds int8, exactly, in any order. Decode: sum * scale.

    Bytes sent a rank: 2 (W-1)/W (n + 4 n/block), and one to each peer. Roundings a value: 1, but only 127/W levels a
    sign.
    """
    exchange, world = call.exchange, call.exchange.world
    x_NB = blocks.as_blocks(call.x.float(), call.codec.block)
    top_N = _bits_of_largest(x_NB)
    exchange.meet()
    exchange.all_max_(top_N)
    scale_N = _scales(top_N, world)
    total_NB = _integers(x_NB, scale_N, world).to(torch.int8)
    exchange.all_sum_(total_NB)
    exchange.sent_bytes += _backend_bytes(total_NB.numel() + 4 * len(top_N), world)
    store(call.x, call.reduction.finish(_values(total_NB.float(), scale_N, call.x.numel())))


def _bits_of_largest(x_NB: Tensor) -> Tensor:
    return x_NB.abs().amax(dim=1).view(torch.int32)


def _scales(top_N: Tensor, world: int) -> Tensor:
    """From the bits of each block's largest magnitude on all ranks; NaN where one is not finite."""
    top_N, levels = top_N.view(torch.float32), float(MAX_SHARED // world)
    scale_N = torch.where(top_N >= TINY, top_N / torch.full_like(top_N, levels), 0.0)
    return torch.where(top_N.isfinite(), scale_N, torch.nan)


def _integers(x_NB: Tensor, scale_N: Tensor, world: int) -> Tensor:
    """Zeros in blocks that are lost."""
    levels = MAX_SHARED // world
    t_NB = torch.where(scale_N.isnan()[:, None], 0.0, x_NB * blocks.inverse(scale_N)[:, None])
    return t_NB.round_().clamp_(-levels, levels)


def _values(total_NB: Tensor, scale_N: Tensor, n: int) -> Tensor:
    return (total_NB * scale_N[:, None]).flatten()[:n].clamp(-LARGEST, LARGEST)


def simulate_shared_scale(workers: Workers) -> None:
    """The sum of integers is exact, in any order."""
    world, block = workers.world, workers.coder.codec.block
    tops = [_bits_of_largest(blocks.as_blocks(row.float(), block)) for row in workers.x_Wn]
    scale_N = _scales(torch.stack(tops).amax(dim=0), world)
    total_NB = torch.zeros(len(scale_N), block, dtype=torch.float32, device=workers.x_Wn.device)
    for row in workers.x_Wn:
        total_NB += _integers(blocks.as_blocks(row.float(), block), scale_N, world)
    store(workers.out, workers.reduction.finish(_values(total_NB, scale_N, workers.whole[1])))


def check_shared_scale(codec: Codec, world: int) -> None:
    if not codec.is_block_int8 or world > MAX_SHARED:
        raise ValueError(
            f"all_reduce: 'shared_scale' takes int8/BLOCK and up to {MAX_SHARED} ranks, got {codec} on {world} ranks"
        )


def shared_scale_bytes(setting: Setting) -> list[int]:
    block, world = setting.coder.codec.block, setting.world
    count = -(-setting.coder.numel // block)
    return [_backend_bytes(count * block + 4 * count, world) + world - 1] * world


def shared_scale_cost(ranks: Placement) -> Cost:
    """Two sums of the backend, one after the other: of the scales, and of the integers."""
    one = native_cost(ranks)
    twice = [tuple(replace(stage, steps=2 * stage.steps) for stage in stages) for stages in (one.stages, one.otherwise)]
    return Cost(twice[0], encodes=1.0, decodes=1.0, roundings=1, otherwise=twice[1])


register(
    Algorithm(
        "shared_scale",
        "int8 under one scale for all ranks, added by the backend",
        bytes_sent="2 (W-1)/W (n + 4 n/block), and W - 1",
        roundings="1, with 127/W levels a sign",
        phases="none",
        order=Order.EXACT,
        run=run_shared_scale,
        simulate=simulate_shared_scale,
        sent_bytes=shared_scale_bytes,
        cost=shared_scale_cost,
        check_codec=check_shared_scale,
    )
)
register(
    Algorithm(
        "native",
        "a cast, and the backend's own all-reduce",
        bytes_sent="2 (W-1)/W times the type's size, and W - 1",
        roundings="about W",
        phases="none",
        order=Order.BACKEND,
        run=run_native,
        simulate=None,
        sent_bytes=native_bytes,
        cost=native_cost,
        check_codec=check_native,
    )
)
