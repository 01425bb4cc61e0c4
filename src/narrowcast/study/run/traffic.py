"""Bytes at an interface, and how many of them are headers.

The kernel counts a packet when it hands it to the interface, where one header stands for as much as segmentation
offload lets through at once (up to 64 KiB). So the overhead of `packets` packets is HEADER bytes each: data and
acknowledgements alike. On top comes what Gloo adds to each of our messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from narrowcast.collectives.transports.torch import TorchTransport

HEADER = 14 + 20 + 32
"""Ethernet, IPv4, and TCP with its timestamps."""
FRAME = 3 * 48
"""Gloo's: a header of six words with a message, and one in each direction that says that it is ready."""
COUNTERS = Path("/proc/self/net/dev")
"""Of the network namespace that the process is in; /sys shows the machine's."""


@dataclass(frozen=True)
class Sent:
    """What an interface has sent so far."""

    bytes: int = 0
    packets: int = 0
    messages: int = 0

    def __sub__(self, before: Sent) -> Sent:
        return Sent(self.bytes - before.bytes, self.packets - before.packets, self.messages - before.messages)

    @property
    def overhead(self) -> int:
        """Bytes that are not ours."""
        return HEADER * self.packets + FRAME * self.messages


def sent(interface: str | None) -> Sent:
    """The counters of an interface now; zeros where none is asked for."""
    if interface is None:
        return Sent()
    for line in COUNTERS.read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            fields = numbers.split()
            return Sent(int(fields[8]), int(fields[9]), TorchTransport.messages)
    raise ValueError(f"traffic: {COUNTERS} has no interface {interface!r}")
