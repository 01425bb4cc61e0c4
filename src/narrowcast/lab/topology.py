"""What a lab looks like, checked, and the lines for `ip -batch` and `tc -batch` that build it.

    host 0: eth0 ── v0 ┐                        ┌ v2 ── eth0 :host 2
                       ├ rack0 ── core ── rack1 ┤                       one rack: no core, no uplinks
    host 1: eth0 ── v1 ┘                        └ v3 ── eth0 :host 3

Each `──` is a veth pair with a token bucket at both ends. Bridges and `v` ends are in the supervisor's network
namespace (the switch), each eth0 in its host's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from narrowcast.lab.rates import Rate, parse_delay, parse_rate

MOST_HOSTS = 250
SMALLEST_MTU, LARGEST_MTU = 576, 65535
SUBNET, HOST_NAME = "10.9.0", "host"

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
    delay: str | None
    mtu: int

    @property
    def hosts(self) -> int:
        return len(self.rates)

    def rack_of(self, host: int) -> int:
        return next(rack for rack, members in enumerate(self.racks) if host in members)

    def switch_links(self, host_namespaces: Sequence[str]) -> list[str]:
        """`ip` lines for the switch; `host_namespaces` are paths to the hosts' network namespaces."""
        lines = ["link set lo up", *self._bridges()]
        for host, namespace in enumerate(host_namespaces):
            lines.append(f"link add v{host} type veth peer name eth0 netns {namespace}")
            lines.append(self.plug_in(host))
        return lines

    def plug_in(self, host: int) -> str:
        """The `ip` line that puts a host's link into its switch."""
        return self._port(f"v{host}", f"rack{self.rack_of(host)}")

    def _port(self, link: str, bridge: str) -> str:
        return f"link set {link} master {bridge} mtu {self.mtu} addrgenmode none up"

    def _bridges(self) -> list[str]:
        several = len(self.racks) > 1
        lines = [line for name in self._bridge_names() for line in _bridge(name)]
        for rack in range(len(self.racks)) if several else ():
            lines.append(f"link add up{rack} type veth peer name down{rack}")
            lines += [self._port(f"up{rack}", f"rack{rack}"), self._port(f"down{rack}", "core")]
        return lines

    def _bridge_names(self) -> list[str]:
        return [f"rack{rack}" for rack in range(len(self.racks))] + ["core"] * (len(self.racks) > 1)

    def switch_limits(self) -> list[str]:
        """`tc` lines for the switch: the way to each host, and both ways of each uplink."""
        lines = [limit(f"v{host}", rate) for host, rate in enumerate(self.rates) if rate]
        if self.uplink:
            ends = [end for rack in range(len(self.racks)) for end in (f"up{rack}", f"down{rack}")]
            lines += [limit(end, self.uplink) for end in ends]
        return lines

    def host_links(self, host: int) -> list[str]:
        """`ip` lines for a host."""
        interface = f"link set eth0 mtu {self.mtu} addrgenmode none up"
        return ["link set lo up", f"addr add {address(host)}/24 dev eth0", interface]

    def host_limits(self, host: int) -> list[str]:
        """`tc` lines for a host: its way out, and its delay."""
        rate = self.rates[host]
        lines = [limit("eth0", rate)] if rate else []
        if self.delay:
            # the delay is inside the bucket: every packet waits its time, then for its turn
            parent = "parent 1:1" if rate else "root"
            lines.append(f"qdisc add dev eth0 {parent} handle 10: netem delay {self.delay} limit 100000")
        return lines


def _bridge(name: str) -> list[str]:
    return [f"link add {name} type bridge mcast_snooping 0", f"link set {name} addrgenmode none up"]


def limit(link: str, rate: Rate) -> str:
    """The `tc` line that sets a link's rate, or changes it while packets flow."""
    return f"qdisc replace dev {link} root handle 1: {rate.tbf}"


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
