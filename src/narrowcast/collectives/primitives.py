"""The two halves of an all-reduce by themselves, over any list of parts (one a rank)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from narrowcast.collectives.runtime.agreement import DisagreementError
from narrowcast.collectives.runtime.shots import gather, scatter
from narrowcast.collectives.segments import Range, Scales, take

if TYPE_CHECKING:
    from narrowcast.collectives.algorithms.context import Call

REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL, SIZES, BROADCAST = 0x1000, 0x2000, 0x2800, 0x2801, 0x3000
"""Message numbers of the phases, apart from each other and from the chunks of other algorithms."""


def reduce_scatter(call: Call, parts: Sequence[Range], scales: Scales = None) -> Tensor:
    """Send part p of `call.x` to rank p, encoded once; return the float32 sum of our part, added in rank order."""
    exchange, coder = call.exchange, call.coder
    mine = parts[exchange.rank]
    wires = scatter(exchange, [coder.nbytes(part) for part in parts], REDUCE_SCATTER)
    for rank in [*exchange.others(), exchange.rank]:
        part = parts[rank]
        call.encode(take(call.x, part), part, 0, scales, call.feedback(0, part), wires.leaving(rank))
        wires.send(rank)
    total = exchange.floats(mine[1] - mine[0])
    coder.sum(wires.arrived(), mine, call.reduction, total)
    exchange.finish()
    return total


def all_gather(call: Call, parts: Sequence[Range], own: Tensor, scales: Scales = None) -> Tensor:
    """Send our part `own`, encoded once, to everybody; all ranks decode every part of `call.x` from the same bytes.

    Returns our own message.
    """
    exchange, coder = call.exchange, call.coder
    wires = gather(exchange, [coder.nbytes(part) for part in parts], ALL_GATHER)
    call.encode(own, parts[exchange.rank], 1, scales, wire=wires.own)
    wires.send()
    for rank in [exchange.rank, *exchange.others()]:
        coder.decode(wires.arrived(rank), parts[rank], take(call.x, parts[rank]))
    exchange.finish()
    return wires.own


def all_to_all(sending: Call, receiving: Call, even: bool = False) -> None:
    """Part p of `sending.x` goes to rank p; part p of `receiving.x` comes from rank p. Our own part is encoded, too.

    even: all parts of all ranks have one size, and all ranks know it.
    """
    exchange, in_coder = sending.exchange, receiving.coder
    leaving, arriving = sending.coder.segments, in_coder.segments
    if even and exchange.by_rows and exchange.world > 1:
        wires = scatter(exchange, [sending.coder.nbytes(part) for part in leaving], ALL_TO_ALL)
        if wires.rows is None:
            raise RuntimeError("internal: wires of one size are no rows")
        sending.coder.encode_parts(sending.x, leaving, wires.rows, sending.noise_in(0))
        wires.send_all()
        in_coder.decode_parts(wires.arrived(), arriving, receiving.x)
        exchange.finish()
        return
    incoming = {p: exchange.receive(in_coder.nbytes(arriving[p]), p, ALL_TO_ALL) for p in exchange.others()}
    for peer in [*exchange.others(), exchange.rank]:
        wire = sending.encode(take(sending.x, leaving[peer]), leaving[peer], 0)
        if peer != exchange.rank:
            exchange.send(wire, peer, ALL_TO_ALL)
            continue
        in_coder.decode(wire, arriving[peer], take(receiving.x, arriving[peer]))
    for peer in exchange.others():
        in_coder.decode(incoming[peer].get(), arriving[peer], take(receiving.x, arriving[peer]))
    exchange.finish()


def agree_on_sizes(sending: Call, receiving: Call) -> None:
    """Tell everybody what we send to whom and expect from whom (16 W bytes to each), so that all ranks see a misfit."""
    both = (sending.coder.segments, receiving.coder.segments)
    sizes = torch.tensor([[high - low for low, high in ranges] for ranges in both])
    sent_WW, expected_WW = torch.stack(sending.exchange.gather(sizes, SIZES)).unbind(dim=1)
    for source, target in (sent_WW != expected_WW.T).nonzero().tolist():
        raise DisagreementError(
            f"all_to_all: rank {source} sends {sent_WW[source, target]} values to rank {target}, which expects "
            f"{expected_WW[target, source]}, so nothing was sent; make the split sizes of both sides equal"
        )


def broadcast(call: Call, root: int) -> None:
    """`root` encodes once and sends to everybody; all ranks, `root` too, decode the same bytes."""
    exchange, coder, whole = call.exchange, call.coder, (0, call.x.numel())
    if exchange.rank == root:
        wire = call.encode(call.x, whole, 0)
        for peer in exchange.others():
            exchange.send(wire, peer, BROADCAST)
    else:
        wire = exchange.receive(coder.nbytes(whole), root, BROADCAST).get()
    coder.decode(wire, whole, call.x)
    exchange.finish()
