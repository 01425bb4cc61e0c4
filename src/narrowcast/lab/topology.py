"""What a lab looks like, checked: rates and delays of links, and the calls of `Netlink` that build it.

    host 0: eth0 ── v0 ┐                        ┌ v2 ── eth0 :host 2
                       ├ rack0 ── core ── rack1 ┤                       one rack: no core, no uplinks
    host 1: eth0 ── v1 ┘                        └ v3 ── eth0 :host 3

Each `──` is a veth pair with a token bucket at both ends; with a delay, two TAP devices (see delay.py) instead of the
host's pair. Bridges and `v` ends are in the supervisor's network
namespace (the switch), each eth0 in its host's own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from narrowcast.lab.delay import FORWARDED, LARGEST_MTU_DELAYED, Delay

UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
RATE = re.compile(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)")
DELAY = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s)")
SLOWEST, FASTEST = 10**6, 10**11
SECONDS, LONGEST = {"us": 1e-6, "ms": 1e-3, "s": 1.0}, 10.0
MOST_LOSS = 0.5
# More than TCP can announce is of no use to it.
MOST_BUFFERS = 1 << 30
# The part of the delay that a packet may take on its link: larger packets are fewer, and so is the forwarder's work.
PACKET_PART = 1 / 10

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


def parse_delay(text: str | None, what: str = "delay") -> float:
    """`"1ms"` -> 0.001 seconds; None is none."""
    if text is None:
        return 0.0
    match = DELAY.fullmatch(text) if isinstance(text, str) else None
    seconds = float(match[1]) * SECONDS[match[2]] if match else 2 * LONGEST
    if seconds > LONGEST:
        raise ValueError(
            f"{what}: got {text!r}; give a number and a unit (us, ms or s), up to {LONGEST:g}s, such as '500us'"
        )
    return seconds


MOST_HOSTS = 250
SMALLEST_MTU, LARGEST_MTU = 576, 65535
SUBNET, HOST_NAME = "10.9.0", "host"

Call = dict[str, Any]
"""A method of `Netlink` as `do`, the link's name, and what else it is to know."""
Rates = Mapping[int, str | None] | Sequence[str | None] | None


def address(host: int) -> str:
    return f"{SUBNET}.{host + 1}"


def host_name(host: int) -> str:
    return f"{HOST_NAME}{host}"


@dataclass(frozen=True)
class Topology:
    """Hosts with a rate each (None: no limit), in racks whose uplinks may be slower."""

    rates: tuple[Rate | None, ...]
    racks: tuple[tuple[int, ...], ...]
    uplink: Rate | None
    delay: Delay
    mtu: int

    @property
    def hosts(self) -> int:
        return len(self.rates)

    def rack_of(self, host: int) -> int:
        return next(rack for rack, members in enumerate(self.racks) if host in members)

    def switch(self, host_namespaces: Sequence[int]) -> list[Call]:
        """What makes the switch; `host_namespaces` are open files, the hosts' network namespaces."""
        calls = [call("set_up", "lo"), *self._bridges()]
        for host, namespace in enumerate(host_namespaces):
            # where packets take their time, the forwarder has made both ends
            pair = [] if self.delay else [call("add_pair", f"v{host}", peer="eth0", namespace=namespace)]
            calls += [*pair, self.plug_in(host)]
        return calls + self._switch_limits()

    def plug_in(self, host: int) -> Call:
        """Put a host's link into its switch."""
        return self._port(f"v{host}", f"rack{self.rack_of(host)}")

    def _port(self, link: str, bridge: str) -> Call:
        return call("set_up", link, mtu=self.mtu, master=bridge)

    def _bridges(self) -> list[Call]:
        racks = range(len(self.racks))
        several = len(racks) > 1
        names = [f"rack{rack}" for rack in racks] + ["core"] * several
        calls = [call(do, name) for name in names for do in ("add_bridge", "set_up")]
        for rack in racks if several else ():
            calls.append(call("add_pair", f"up{rack}", peer=f"down{rack}"))
            calls += [self._port(f"up{rack}", f"rack{rack}"), self._port(f"down{rack}", "core")]
        return calls

    def _switch_limits(self) -> list[Call]:
        """The way to each host, and both ways of each uplink."""
        calls = [limit(f"v{host}", rate) for host, rate in enumerate(self.rates) if rate]
        if self.uplink:
            ends = [end for rack in range(len(self.racks)) for end in (f"up{rack}", f"down{rack}")]
            calls += [limit(end, self.uplink) for end in ends]
        return calls

    def host(self, host: int) -> list[Call]:
        """What makes a host."""
        interface = call("add_address", "eth0", address=address(host), prefix=24), call("set_up", "eth0", mtu=self.mtu)
        return [call("set_up", "lo"), *interface, *self.host_limits(host)]

    def host_limits(self, host: int) -> list[Call]:
        """A host's way out."""
        rate = self.rates[host]
        return [limit("eth0", rate)] if rate else []

    @property
    def buffers(self) -> int:
        """Bytes that TCP may have under way: twice what the fastest link carries until an answer can be there."""
        there_and_back = 2 * (self.delay.seconds + self.delay.jitter)
        fastest = max(self._bits)
        return min(round(2 * fastest / 8 * there_and_back), MOST_BUFFERS)

    @property
    def segments(self) -> int:
        """Frames that TCP sends as one packet at least. By itself it makes packets of 1 ms: two frames on a slow link,
        or with many connections on one."""
        largest = min(self._bits) / 8 * self.delay.seconds * PACKET_PART
        return max(2, round(min(largest, LARGEST_PACKET) / self.mtu))

    @property
    def _bits(self) -> list[float]:
        return [rate.bits_per_second if rate else FORWARDED for rate in self.rates]


def call(do: str, name: str, **arguments: Any) -> Call:
    return {"do": do, "name": name, **arguments}


def limit(link: str, rate: Rate) -> Call:
    """Set a link's rate, or change it while packets flow."""
    return call("limit", link, **rate.bucket)


def topology(
    hosts: int,
    rate: str | None,
    rates: Rates = None,
    racks: Sequence[Sequence[int]] | None = None,
    uplink: str | None = None,
    delay: str | None = None,
    mtu: int = 1500,
    jitter: str | None = None,
    loss: float = 0.0,
) -> Topology:
    """Check what a caller asks for."""
    if isinstance(hosts, bool) or not isinstance(hosts, int) or not 1 <= hosts <= MOST_HOSTS:
        raise ValueError(f"hosts: got {hosts!r}; give a number from 1 to {MOST_HOSTS}")
    if uplink is not None and racks is None:
        raise ValueError(f"uplink: got {uplink!r} without racks; say which hosts share one: racks=[[0, 1], [2, 3]]")
    if not isinstance(mtu, int) or mtu not in range(SMALLEST_MTU, LARGEST_MTU + 1):
        raise ValueError(f"mtu: got {mtu!r}; give a number from {SMALLEST_MTU} to {LARGEST_MTU}, such as 1500 or 9000")
    late = Delay(parse_delay(delay), parse_delay(jitter, "jitter"), _loss(loss))
    if late and mtu > LARGEST_MTU_DELAYED:
        raise ValueError(f"mtu: got {mtu} with a delay, jitter or loss; give {LARGEST_MTU_DELAYED} or less")
    return Topology(
        rates=_host_rates(hosts, rate, rates),
        racks=_racks(hosts, racks),
        uplink=None if uplink is None else parse_rate(uplink, "uplink"),
        delay=late,
        mtu=mtu,
    )


def _loss(share: float) -> float:
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= MOST_LOSS:
        raise ValueError(f"loss: got {share!r}; give the share of packets that get lost, from 0 to {MOST_LOSS}: 0.001")
    return float(share)


def _host_rates(hosts: int, rate: str | None, rates: Rates) -> tuple[Rate | None, ...]:
    texts: list[str | None] = [rate] * hosts
    if isinstance(rates, Mapping):
        strangers = [host for host in rates if host not in range(hosts)]
        if strangers:
            raise ValueError(f"rates: got host {strangers[0]!r}; hosts are 0 to {hosts - 1}")
        texts = [rates.get(host, rate) for host in range(hosts)]
    elif rates is not None:
        if isinstance(rates, str) or not isinstance(rates, Sequence) or len(rates) != hosts:
            raise ValueError(f"rates: got {rates!r}; give one for each of {hosts} hosts, or a dict: {{2: '100mbit'}}")
        texts = list(rates)
    return tuple(None if text is None else parse_rate(text) for text in texts)


def _racks(hosts: int, racks: Sequence[Sequence[int]] | None) -> tuple[tuple[int, ...], ...]:
    if racks is None:
        return (tuple(range(hosts)),)
    lists = isinstance(racks, Sequence) and all(isinstance(rack, Sequence) for rack in racks)
    named = [host for rack in racks for host in rack] if lists else []
    if len(named) != hosts or set(named) != set(range(hosts)) or not all(racks):
        raise ValueError(f"racks: got {racks!r}; name each host 0 to {hosts - 1} once, in no empty rack")
    return tuple(tuple(rack) for rack in racks)
