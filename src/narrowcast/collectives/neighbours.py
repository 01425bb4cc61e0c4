"""A message to some ranks and one from some: what averaging with neighbours sends.

It is a call of a channel, which all ranks make, those without neighbours too: so its kind is agreed once, and its
messages have their place among the others. But each rank waits for its sources alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.collectives.prepared import signature_text
from narrowcast.collectives.runtime.channel import Channel
from narrowcast.collectives.runtime.messages import Exchange
from narrowcast.collectives.segments import Coder, Times, host_waits
from narrowcast.collectives.work import Work
from narrowcast.kernels import Noise


@dataclass(frozen=True)
class NeighbourMessage:
    """A flat tensor for all targets alike, and the memory for what arrives.

    Its wire is encoded once and goes to each target as a whole, so a rank sends `nbytes(n)` times its targets. The
    values are rounded once. own: what the targets will see, since the sender decodes its bytes, too.
    """

    x: Tensor
    codec: Codec
    segments: tuple[int, ...]
    targets: tuple[int, ...]
    sources: tuple[int, ...]
    own: Tensor
    theirs: list[Tensor]

    @classmethod
    def of(
        cls, x: Tensor, codec: Codec, segments: Sequence[int], targets: Sequence[int], sources: Sequence[int]
    ) -> NeighbourMessage:
        """With memory for the results, where there is somebody to talk to."""
        theirs = [torch.empty_like(x) for _ in sources]
        return cls(x, codec, tuple(segments), tuple(targets), tuple(sources), torch.empty_like(x), theirs)


def start_message(channel: Channel, message: NeighbourMessage, noise: Noise, times: Times) -> Work:
    """Submit it. noise: of the call, the same on all ranks."""
    x, codec = message.x, message.codec
    text = signature_text("neighbours", codec, x.numel(), x.dtype, segments=list(message.segments))
    run = partial(_run, message, noise, times)
    memory = [x, message.own, *message.theirs]
    return channel.submit(text, run, memory, waits=host_waits((codec,), x.device, x.dtype))


def _run(message: NeighbourMessage, noise: Noise, times: Times, exchange: Exchange) -> None:
    x, whole = message.x, (0, message.x.numel())
    coder = Coder.of(message.codec, message.segments, x.dtype, times)
    size = coder.nbytes(whole)
    incoming = [exchange.receive(size, peer, 0) for peer in message.sources]
    if message.targets:
        wire = exchange.wire(size)
        coder.encode(x, whole, wire, noise_of_sender(noise, exchange.rank), coder.scales(x))
        for peer in message.targets:
            exchange.send(wire, peer, 0)
        exchange.all_sent()
        coder.decode(wire, whole, message.own)
    else:
        exchange.all_sent()
    for arriving, out in zip(incoming, message.theirs, strict=True):
        coder.decode(arriving.get(), whole, out)
    exchange.finish()


def noise_of_sender(noise: Noise, rank: int) -> Noise:
    """Each sender draws by itself."""
    return noise.derive(rank, 0)


def as_seen(x: Tensor, codec: Codec, segments: Sequence[int], noise: Noise, rank: int) -> Tensor:
    """What a message's targets see: for simulations."""
    coder, out = Coder(codec, segments, x.dtype), torch.empty_like(x)
    coder.passage(x, (0, x.numel()), noise_of_sender(noise, rank), coder.scales(x), out)
    return out
