"""Link rates and delays: strict strings, and the token bucket (tbf) that holds a rate."""

from __future__ import annotations

import re
from dataclasses import dataclass

UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
RATE = re.compile(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)")
DELAY = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s)")
SLOWEST, FASTEST = 10**6, 10**11
NANOSECONDS, LONGEST = {"us": 10**3, "ms": 10**6, "s": 10**9}, 100 * 10**9

# A packet may be as large as the kernel's segmentation offload makes it. A smaller bucket would have tbf cut it into
# frames one by one, which costs a core at 1 Gbit/s.
LARGEST_PACKET = 1 << 16
# What may pass at once after a pause, in time on the link: longer than a timer can be late, or the link stands still.
# Packets at more than 1 Gbit/s keep a core busy, and timers are later there.
BURST_SECONDS, FAST_BURST_SECONDS, FAST = 1e-3, 3e-3, 10**9
QUEUE_SECONDS = 50e-3


@dataclass(frozen=True)
class Rate:
    """A link's rate, both ways. Bits count whole Ethernet frames, as the kernel counts them."""

    text: str
    bits_per_second: float

    @property
    def burst(self) -> int:
        """Bytes that the bucket holds."""
        seconds = FAST_BURST_SECONDS if self.bits_per_second > FAST else BURST_SECONDS
        return max(2 * LARGEST_PACKET, round(self.bits_per_second / 8 * seconds))

    @property
    def queue(self) -> int:
        """Bytes that may wait; what comes on top is lost, as in a switch."""
        return self.burst + max(16 * LARGEST_PACKET, round(self.bits_per_second / 8 * QUEUE_SECONDS))

    @property
    def bucket(self) -> dict[str, int]:
        """What `Netlink.limit` needs to know of it."""
        return {"rate": round(self.bits_per_second / 8), "burst": self.burst, "queue": self.queue}

    def __str__(self) -> str:
        return self.text


def parse_rate(text: str, what: str = "rate") -> Rate:
    """`"200mbit"` -> Rate. Strict: a link that runs at another rate than the one meant is worse than an error."""
    match = RATE.fullmatch(text) if isinstance(text, str) else None
    bits = float(match[1]) * UNITS[match[2]] if match else 0.0
    if not SLOWEST <= bits <= FASTEST:
        raise ValueError(
            f"{what}: got {text!r}; give a number and a unit (kbit, mbit or gbit) without a space, from 1mbit to "
            f"100gbit, such as '200mbit', '1gbit' or '2.5gbit', or None for a link without a limit"
        )
    return Rate(text, bits)


def parse_delay(text: str) -> int:
    """`"1ms"` -> 1000000 nanoseconds."""
    match = DELAY.fullmatch(text) if isinstance(text, str) else None
    nanoseconds = round(float(match[1]) * NANOSECONDS[match[2]]) if match else LONGEST + 1
    if nanoseconds > LONGEST:
        raise ValueError(
            f"delay: got {text!r}; give a number and a unit (us, ms or s), up to 100s, such as '500us' or '1ms'"
        )
    return nanoseconds
