"""What a lab looks like, checked, and the calls of `Netlink` that build it.

    host 0: eth0 ── v0 ┐                        ┌ v2 ── eth0 :host 2
                       ├ rack0 ── core ── rack1 ┤                       one rack: no core, no uplinks
    host 1: eth0 ── v1 ┘                        └ v3 ── eth0 :host 3

Each `──` is a veth pair with a token bucket at both ends. Bridges and `v` ends are in the supervisor's network
namespace (the switch), each eth0 in its host's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from narrowcast.lab.rates import Rate, parse_delay, parse_rate

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
    delay: int | None
    """In nanoseconds."""
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
            calls += [call("add_pair", f"v{host}", peer="eth0", namespace=namespace), self.plug_in(host)]
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
        """A host's way out, and its delay."""
        rate = self.rates[host]
        calls = [limit("eth0", rate)] if rate else []
        if self.delay:
            # the delay is inside the bucket: every packet waits its time, then for its turn
            calls.append(call("delay", "eth0", nanoseconds=self.delay, limited=rate is not None))
        return calls


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
) -> Topology:
    """Check what a caller asks for."""
    if isinstance(hosts, bool) or not isinstance(hosts, int) or not 1 <= hosts <= MOST_HOSTS:
        raise ValueError(f"hosts: got {hosts!r}; give a number from 1 to {MOST_HOSTS}")
    if uplink is not None and racks is None:
        raise ValueError(f"uplink: got {uplink!r} without racks; say which hosts share one: racks=[[0, 1], [2, 3]]")
    if mtu not in range(SMALLEST_MTU, LARGEST_MTU + 1):
        raise ValueError(f"mtu: got {mtu!r}; give a number from {SMALLEST_MTU} to {LARGEST_MTU}, such as 1500 or 9000")
    return Topology(
        rates=_host_rates(hosts, rate, rates),
        racks=_racks(hosts, racks),
        uplink=None if uplink is None else parse_rate(uplink, "uplink"),
        delay=None if delay is None else parse_delay(delay),
        mtu=mtu,
    )


def _host_rates(hosts: int, rate: str | None, rates: Rates) -> tuple[Rate | None, ...]:
    texts: list[str | None] = [rate] * hosts
    if isinstance(rates, Mapping):
        strangers = sorted(set(rates) - set(range(hosts)))
        if strangers:
            raise ValueError(f"rates: got host {strangers[0]!r}; hosts are 0 to {hosts - 1}")
        texts = [rates.get(host, rate) for host in range(hosts)]
    elif rates is not None:
        if isinstance(rates, str) or len(rates) != hosts:
            raise ValueError(f"rates: got {rates!r}; give one for each of {hosts} hosts, or a dict: {{2: '100mbit'}}")
        texts = list(rates)
    return tuple(None if text is None else parse_rate(text) for text in texts)


def _racks(hosts: int, racks: Sequence[Sequence[int]] | None) -> tuple[tuple[int, ...], ...]:
    if racks is None:
        return (tuple(range(hosts)),)
    if sorted(host for rack in racks for host in rack) != list(range(hosts)) or not all(racks):
        raise ValueError(f"racks: got {racks!r}; name each host 0 to {hosts - 1} once, in no empty rack")
    return tuple(tuple(rack) for rack in racks)
