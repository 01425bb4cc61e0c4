"""Bytes at an interface, and how many of them are headers.

The kernel counts a packet when it hands it to the interface, where one header stands for as much as segmentation
offload lets through at once (up to 64 KiB). So the overhead of `packets` packets is HEADER bytes each: data and
acknowledgements alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

HEADER = 14 + 20 + 32
"""Ethernet, IPv4, and TCP with its timestamps."""
COUNTERS = Path("/proc/self/net/dev")
"""Of the network namespace that the process is in; /sys shows the machine's."""


@dataclass(frozen=True)
class Sent:
    """What an interface has sent so far."""

    bytes: int = 0
    packets: int = 0

    def __sub__(self, before: Sent) -> Sent:
        return Sent(self.bytes - before.bytes, self.packets - before.packets)


def sent(interface: str | None) -> Sent:
    """The counters of an interface now; zeros where none is asked for."""
    if interface is None:
        return Sent()
    for line in COUNTERS.read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            fields = numbers.split()
            return Sent(int(fields[8]), int(fields[9]))
    raise ValueError(f"traffic: {COUNTERS} has no interface {interface!r}")
