"""What a link is measured with: sums through a wire, and the bytes that its interface has counted.

The kernel counts a packet when it hands it to the interface, where one header stands for as much as segmentation
offload lets through at once (up to 64 KiB). So the overhead of `packets` packets is HEADER bytes each: data and
acknowledgements alike. On top comes what Gloo adds to each of our messages.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from narrowcast.codecs import Codec, KeptFactors, Matrix, exchanged_factors, parts_of
from narrowcast.codecs import codec as codec_named
from narrowcast.collectives import Residuals, TorchTransport, all_reduce

HEADER = 14 + 20 + 32
"""Ethernet, IPv4, and TCP with its timestamps."""
FRAME = 3 * 48
"""Gloo's: a header of six words with a message, and one in each direction that says that it is ready."""
COUNTERS = Path("/proc/self/net/dev")
"""Of the network namespace that the process is in; /sys shows the machine's."""
SENT_BYTES, SENT_PACKETS = 8, 9
"""Which numbers after the name of an interface."""


class WireSum:
    """An all-reduce of one tensor through one wire, to be timed again and again.

    A codec with error feedback has its residuals, on the device of the values. options: those of `all_reduce`.
    """

    def __init__(self, values: Tensor, wire: str | Codec, *, parts: int = 1, **options: Any) -> None:
        self.codec = codec_named(wire)
        feedback = self.codec.feedback
        self.residuals = Residuals.zeros(values.numel(), device=values.device) if feedback else None
        self.values: Tensor | list[Tensor] = values if parts == 1 else [*values.tensor_split(parts)]
        self.options = options

    def __call__(self, step: Any = 0, **options: Any) -> None:
        all_reduce(self.values, self.codec, step=step, residuals=self.residuals, **self.options, **options)


class MatrixSum:
    """A sum of one square matrix by low rank, to be timed: what a rank computes for it, and all of it.

    options: those of `all_reduce`, for the sums of the factors.
    """

    def __init__(self, values: Tensor, wire: str | Codec, **options: Any) -> None:
        self.codec, self.options = codec_named(wire), options
        side = math.isqrt(values.numel())
        self._x, self._matrix = values[: side * side].clone(), Matrix(side, side)
        residuals = Residuals.zeros(side * side, device=values.device) if self.codec.feedback else None
        self._feedback = None if residuals is None else residuals.of(0, (0, side * side))
        self._factors = KeptFactors(0)

    def products(self, add: Callable[[Tensor, int], object] = lambda factor, number: None) -> Callable[[], None]:
        """All products of a call; what is returned makes the result of them. add: sums a factor, in place."""
        parts = parts_of([self._x], [self._matrix], ("",), self.codec, self._factors, self._feedback)
        steps = exchanged_factors(parts, self.codec, 1.0)
        sent = next(steps).values
        if not self.codec.sends_one_factor:
            add(sent, 0)
            sent = steps.send(sent).values

        def finish() -> None:
            add(sent, 1)
            with suppress(StopIteration):
                steps.send(sent)

        return finish

    def __call__(self, step: tuple[int, ...] = ()) -> None:
        def add(factor: Tensor, number: int) -> None:
            all_reduce(factor, self.codec.factors, step=(*step, number), **self.options)

        self.products(add)()


@dataclass(frozen=True)
class InterfaceCount:
    """What an interface has sent so far."""

    bytes: int = 0
    packets: int = 0
    messages: int = 0

    def __sub__(self, before: InterfaceCount) -> InterfaceCount:
        return InterfaceCount(self.bytes - before.bytes, self.packets - before.packets, self.messages - before.messages)

    @property
    def overhead(self) -> int:
        """Bytes that are not ours."""
        return HEADER * self.packets + FRAME * self.messages


def _counters() -> dict[str, list[int]]:
    lines = (line.partition(":") for line in COUNTERS.read_text().splitlines()[2:])
    return {name.strip(): [int(number) for number in numbers.split()] for name, _, numbers in lines}


def count_interface(interface: str | None) -> InterfaceCount:
    """The counters of an interface now; zeros where none is asked for."""
    if interface is None:
        return InterfaceCount()
    counters = _counters()
    if interface not in counters:
        raise ValueError(f"traffic: {COUNTERS} has no interface {interface!r}")
    own = counters[interface]
    return InterfaceCount(own[SENT_BYTES], own[SENT_PACKETS], TorchTransport.messages)


def link_bytes() -> int:
    """What this host has sent over all its links, headers and acknowledgements included."""
    return sum(numbers[SENT_BYTES] for name, numbers in _counters().items() if name != "lo")
