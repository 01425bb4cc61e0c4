"""The two halves of an all-reduce by themselves, over any list of parts (one a rank)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from narrowcast.collectives.runtime.agreement import DisagreementError
from narrowcast.collectives.runtime.shots import gather, scatter
from narrowcast.collectives.segments import Coder, Range, Scales, take
from narrowcast.kernels import Noise

if TYPE_CHECKING:
    from narrowcast.collectives.algorithms.context import Call
    from narrowcast.collectives.runtime.messages import Exchange

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
    if exchange.by_rows:
        _swap_planes(sending, receiving)
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


def _planes_of_parts(coder: Coder) -> list[list[Range]] | None:
    """Which bytes of the wire of the whole are those of each segment, plane by plane; None where one begins inside a
    block, or where a wire has no such planes.
    """
    codec, whole = coder.codec, coder.codec.planes(coder.numel, coder.dtype)
    if whole is None or any(low % codec.block for low, _ in coder.segments):
        return None

    def ends(n: int) -> list[int]:
        """Of what the first n values are in each plane."""
        of_part = codec.planes(n, coder.dtype) or ()
        return [begin + high - low for (begin, _), (low, high) in zip(whole, of_part, strict=True)]

    return [list(zip(ends(low), ends(high), strict=True)) for low, high in coder.segments]


class _PartWires:
    """Memory for the wires of all parts of a tensor, each in the planes in which it travels.

    Where every part begins with a block this is the wire of the whole, which one launch encodes or decodes.
    """

    def __init__(self, coder: Coder, exchange: Exchange) -> None:
        self._coder, parts, whole = coder, coder.segments, _planes_of_parts(coder)
        self._parts = parts if whole is None else [(0, coder.numel)]
        self._wires = [exchange.wire(coder.nbytes(part)) for part in self._parts]
        if whole is None:
            ranges = (coder.codec.planes(high - low, coder.dtype) for low, high in parts)
            self.planes = [
                [wire[low:high] for low, high in planes or [(0, wire.numel())]]
                for wire, planes in zip(self._wires, ranges, strict=True)
            ]
        else:
            self.planes = [[self._wires[0][low:high] for low, high in planes] for planes in whole]

    def encode(self, x: Tensor, noise: Noise) -> None:
        for part, wire in zip(self._parts, self._wires, strict=True):
            self._coder.encode(take(x, part), part, wire, noise)

    def decode(self, x: Tensor) -> None:
        for part, wire in zip(self._parts, self._wires, strict=True):
            self._coder.decode(wire, part, take(x, part))


def _swap_planes(sending: Call, receiving: Call) -> None:
    """`all_to_all` of parts of any size in one round of a device's backend: a message for each plane of a part, so that
    whether a rank's wire is one for all parts is its own affair.
    """
    exchange = sending.exchange
    leaving, arriving = _PartWires(sending.coder, exchange), _PartWires(receiving.coder, exchange)
    incoming = [
        exchange.receive(plane.numel(), p, ALL_TO_ALL, plane) for p in exchange.others() for plane in arriving.planes[p]
    ]
    leaving.encode(sending.x, sending.noise_in(0))
    for peer in exchange.others():
        for plane in leaving.planes[peer]:
            exchange.send(plane, peer, ALL_TO_ALL)
    for plane, own in zip(arriving.planes[exchange.rank], leaving.planes[exchange.rank], strict=True):
        plane.copy_(own)
    for one in incoming:
        one.get()
    arriving.decode(receiving.x)
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
