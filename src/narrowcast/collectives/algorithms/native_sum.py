"""Sums that the backend itself does: `native` for 16- and 32-bit floats, `shared_scale` for integers."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.collectives.algorithms.context import Call
from narrowcast.collectives.algorithms.one_shot import store
from narrowcast.kernels import TINY, blocks, saturate

MAX_SHARED = 127
"""The largest int8: the sum of one value from each rank must not pass it."""


def native(call: Call, scales: list[Tensor | None] | None = None) -> None:
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
    world = call.exchange.world
    call.exchange.sent_bytes += 2 * (world - 1) * n * wire.itemsize // world
    total, limit = wire[:n].float(), torch.finfo(dtype).max
    # where sums of other sign met after each had left the type, nothing is known but that both were too large
    total = torch.where(wire[n].isnan(), total, total.nan_to_num(0.0, limit, -limit))
    store(call.x, call.reduction.finish(total))


def shared_scale(call: Call, scales: list[Tensor | None] | None = None) -> None:
    """Integers under one scale for all ranks, with headroom, so that the backend's integer sum is exact.

    1. MAX over ranks of each block's largest magnitude (as int32: a NaN is larger than anything and survives).
    2. scale = MAX / floor(127 / W); every rank rounds its values to int8.
    3. The backend adds int8, exactly, in any order. Decode: sum * scale.

    Bytes sent a rank: 2 (W-1)/W (n + 4 n/block), and one to each peer. Roundings a value: 1, but only 127/W levels a
    sign.
    """
    codec, world = call.codec, call.exchange.world
    levels = MAX_SHARED // world
    n = call.x.numel()
    x_NB = blocks.as_blocks(call.x.float(), codec.block)
    top_N = x_NB.abs().amax(dim=1).view(torch.int32)
    call.exchange.meet()
    call.exchange.all_max_(top_N)
    top_N = top_N.view(torch.float32)
    scale_N = torch.where(top_N >= TINY, top_N / torch.full_like(top_N, levels), 0.0)
    scale_N = torch.where(top_N.isfinite(), scale_N, torch.nan)
    t_NB = torch.where(scale_N.isnan()[:, None], 0.0, x_NB * blocks.inverse(scale_N)[:, None])
    total_NB = t_NB.round().clamp(-levels, levels).to(torch.int8)
    call.exchange.all_sum_(total_NB)
    call.exchange.sent_bytes += 2 * (world - 1) * (total_NB.numel() + 4 * len(top_N)) // world
    value = (total_NB.float() * scale_N[:, None]).flatten()[:n]
    store(call.x, call.reduction.finish(value.clamp(-torch.finfo(torch.float32).max, torch.finfo(torch.float32).max)))


def check_native(codec: Codec) -> None:
    if codec.stored_dtype(torch.float32) is None:
        raise ValueError(f"all_reduce: algorithm 'native' takes as-is, fp32, bf16 or fp16, got {codec}")


def check_shared_scale(codec: Codec, world: int) -> None:
    if not codec.is_block_int8 or world > MAX_SHARED:
        raise ValueError(
            f"all_reduce: 'shared_scale' takes int8/BLOCK and up to {MAX_SHARED} ranks, got {codec} on {world} ranks"
        )
