"""one_shot: everybody sends everything to everybody. One latency; for small tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowcast.collectives.algorithms.context import Call
from narrowcast.kernels import keeps_subnormals


def one_shot(call: Call, scales: list[Tensor | None] | None = None) -> None:
    """Sum over all ranks in place.

    1. Encode the whole tensor once and send it to every peer. With error feedback, what a sum before still owes (after
       a call by two_shot) was made owed by this rank's own values.
    2. Decode all W messages, our own too, and add them in float32 in rank order 0, 1, ...; a sum of finite values that
       is too large becomes the largest number, at each step, as in all algorithms. With error feedback, what a result
       of 16 bits does not hold of the finished sum every rank owes: the result's loss times gain / W.

    Bytes sent a rank: (W-1) nbytes(n). Roundings a value: 1. Passes over the data: 1 encode, W decodes.
    """
    coder, exchange, whole = call.coder(), call.exchange, (0, call.x.numel())
    size = coder.nbytes(whole)
    incoming = {peer: exchange.receive(size, peer, 0) for peer in exchange.others()}
    wire = exchange.wire(size)
    owed = None if call.residuals is None else call.residuals.owed(0, whole)
    coder.encode(call.x, whole, wire, call.noise_in(0), scales, owed)
    for peer in exchange.others():
        exchange.send(wire, peer, 0)
    total = exchange.floats(call.x.numel())
    for rank in range(exchange.world):
        coder.decode(wire if rank == exchange.rank else incoming[rank].get(), whole, total, accumulate=rank > 0)
    total = call.reduction.finish(total)
    store(call.x, total)
    if call.residuals is not None:
        call.residuals.keep(total, call.x, 0, whole, call.reduction.gain / exchange.world)
    exchange.finish()


@keeps_subnormals
def store(x: Tensor, total: Tensor) -> None:
    """Write a float32 sum into x; a finite one stays finite in 16 bits."""
    limit = torch.finfo(x.dtype).max
    x.copy_(total if x.dtype == torch.float32 else torch.where(total.isinf(), total, total.clamp(-limit, limit)))
