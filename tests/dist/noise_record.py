"""Every random number that a piece of code draws, written down: who drew it, and for which values."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from narrowcast.kernels import ops
from narrowcast.kernels.noise import NO_NOISE, Noise


class Draw(NamedTuple):
    """Philox's key, its stream, the indices first to last, and the values that were rounded with these bits."""

    seed: int
    stream: int
    first: int
    last: int
    values: bytes
    where: str


def _fingerprint(*tensors: Any) -> bytes:
    found = hashlib.sha256()
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            found.update(tensor.detach().cpu().contiguous().clone().view(-1).view(torch.uint8).numpy().tobytes())
    return found.digest()


@contextmanager
def recorded(draws: list[Draw]) -> Iterator[None]:
    """Write down what codecs and `round_to` draw in this process, in all of its threads."""
    encode, reduce, rounder, encode_rows = ops.encode, ops.reduce, ops.Rounder.__call__, ops.encode_rows

    def note(noise: Noise, n: int, where: str, *values: Any) -> None:
        draws.append(Draw(noise.seed, noise.stream, noise.offset, noise.offset + n, _fingerprint(*values), where))

    def encoding(plan: Any, x: Tensor, wire: Tensor, noise: Noise = NO_NOISE, *more: Any) -> None:
        if getattr(plan, "stochastic", False):
            scale, feedback = more
            note(noise, x.numel(), "encode", x, scale, *(feedback or ()))
        encode(plan, x, wire, noise, *more)

    def encoding_rows(
        plan: Any, x: Tensor, per: int, wires: Tensor, noise: Noise = NO_NOISE, feedback: Any = None, pitch: int = 0
    ) -> None:
        if getattr(plan, "stochastic", False):
            for row in range(len(wires)):
                begin = row * (pitch or per)
                note(noise.after(begin), per, "encode", x[begin : begin + per])
        encode_rows(plan, x, per, wires, noise, feedback, pitch)

    def reducing(plan: Any, wires: Any, n: int, wire: Tensor, noise: Noise = NO_NOISE, *more: Any) -> None:
        if getattr(plan, "stochastic", False):
            note(noise, n, "reduce", *wires)
        reduce(plan, wires, n, wire, noise, *more)

    def rounding(self: ops.Rounder, x: Tensor, seed: int | None = None, out: Tensor | None = None) -> Tensor:
        if self.rounding == "stochastic" and seed is not None:
            note(Noise(seed), x.numel(), "round_to", x)
        return rounder(self, x, seed, out)

    with (
        mock.patch.object(ops, "encode", encoding),
        mock.patch.object(ops, "encode_rows", encoding_rows),
        mock.patch.object(ops, "reduce", reducing),
        mock.patch.object(ops.Rounder, "__call__", rounding),
    ):
        yield


def shared(draws: Iterable[Draw]) -> list[tuple[Draw, Draw]]:
    """Pairs that share random numbers. The same values rounded again with the same bits (replicas that gather the same
    parameters, nodes that encode the same sum) are one encoding, not two."""
    streams: dict[tuple[int, int], list[Draw]] = defaultdict(list)
    for draw in draws:
        if draw.last > draw.first:
            streams[draw.seed, draw.stream].append(draw)
    found = []
    for members in streams.values():
        members.sort(key=lambda draw: (draw.first, draw.last))
        furthest = members[0]
        for draw in members[1:]:
            if draw.first < furthest.last and draw[2:5] != furthest[2:5]:
                found.append((furthest, draw))
            if draw.last > furthest.last:
                furthest = draw
    return found
