"""Rates, delays and topologies are checked before anything is built; no root needed."""

from __future__ import annotations

from typing import Any

import pytest

from narrowcast.lab import Lab
from narrowcast.lab.topology import LARGEST_PACKET, parse_rate, topology


@pytest.mark.parametrize(
    "text, bits", [("1gbit", 1e9), ("200mbit", 2e8), ("10gbit", 1e10), ("2.5gbit", 2.5e9), ("1500kbit", 1.5e6)]
)
def test_a_rate_is_a_number_and_a_unit(text: str, bits: float) -> None:
    rate = parse_rate(text)
    assert (rate.bits_per_second, str(rate)) == (bits, text)
    assert rate.bucket == {"rate": bits / 8, "burst": rate.burst, "queue": rate.queue}


@pytest.mark.parametrize(
    "text",
    ["1Gbit", "1 gbit", "1gb", "1gbps", "gbit", "0mbit", "-1gbit", "1e3mbit", "", "1gbit ", "1tbit", "500gbit", 1],
)
def test_a_wrong_rate_says_what_it_got_and_what_to_write(text: Any) -> None:
    with pytest.raises(ValueError, match=r"rate: got .*kbit, mbit or gbit.*'200mbit'") as caught:
        Lab(2, text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["1mbit", "100mbit", "1gbit", "10gbit", "100gbit"])
def test_the_bucket_holds_the_largest_packet_and_the_queue_more(text: str) -> None:
    rate = parse_rate(text)
    assert LARGEST_PACKET < rate.burst < rate.queue


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"hosts": 0}, "hosts: got 0"),
        ({"hosts": 251}, "hosts: got 251"),
        ({"hosts": True}, "hosts: got True"),
        ({"rates": {4: "1gbit"}}, "rates: got host 4; hosts are 0 to 3"),
        ({"rates": ["1gbit"]}, "one for each of 4 hosts"),
        ({"rates": "1gbit"}, "one for each of 4 hosts"),
        ({"rates": {1: "fast"}}, "rate: got 'fast'"),
        ({"racks": [[0, 1], [2]]}, "racks: got"),
        ({"racks": [[0, 1], [1, 2, 3]]}, "racks: got"),
        ({"racks": [[0, 1, 2, 3], []]}, "racks: got"),
        ({"rates": {7: "1gbit", "0": "1gbit"}}, "rates: got host 7"),
        ({"rates": 5}, "one for each of 4 hosts"),
        ({"racks": [[0, 1], [2, "3"]]}, "racks: got"),
        ({"racks": 2}, "racks: got 2"),
        ({"mtu": 1500.0}, "mtu: got 1500.0"),
        ({"uplink": "1gbit"}, "uplink: got '1gbit' without racks"),
        ({"racks": [[0, 1], [2, 3]], "uplink": "quick"}, "uplink: got 'quick'"),
        ({"delay": "1"}, "delay: got '1'.*us, ms or s"),
        ({"delay": "1 ms"}, "delay: got '1 ms'"),
        ({"delay": "11s"}, "delay: got '11s'.*up to 10s"),
        ({"jitter": "fast"}, "jitter: got 'fast'.*us, ms or s"),
        ({"loss": 1}, "loss: got 1; .*share of packets"),
        ({"loss": "1%"}, "loss: got '1%'"),
        ({"delay": "1ms", "mtu": 65535}, "mtu: got 65535 with a delay.* give 65521 or less"),
    ],
)
def test_a_wrong_topology_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Lab(**{"hosts": 4, **wrong})


def test_one_slow_host_by_dict_or_by_list() -> None:
    by_dict = topology(3, "1gbit", {2: "100mbit"})
    assert by_dict == topology(3, None, ["1gbit", "1gbit", "100mbit"])
    assert [str(rate) for rate in by_dict.rates] == ["1gbit", "1gbit", "100mbit"]
    assert topology(2, "1gbit", {0: None}).rates[0] is None


def calls(do: str, made: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {call["name"]: call for call in made if call["do"] == do}


def test_a_link_without_a_limit_has_no_bucket() -> None:
    free = topology(2, None)
    assert calls("limit", free.switch([100, 103]) + free.host(0)) == {}


def test_every_link_is_limited_at_both_ends() -> None:
    racks = topology(4, "1gbit", racks=[[0, 1], [2, 3]], uplink="500mbit")
    ends = calls("limit", racks.switch([100, 103, 106, 109]))
    assert set(ends) == {"v0", "v1", "v2", "v3", "up0", "down0", "up1", "down1"}
    assert {end: call["rate"] for end, call in ends.items()} == {
        end: (5e8 if end[0] in "ud" else 1e9) / 8 for end in ends
    }
    assert all(set(calls("limit", racks.host(host))) == {"eth0"} for host in range(4))


def test_a_delay_replaces_the_pairs_and_leaves_the_limits() -> None:
    plain, late = topology(2, "1gbit"), topology(2, "1gbit", delay="1ms")
    assert calls("add_pair", plain.switch([100, 103]))
    assert not calls("add_pair", late.switch([100, 103]))
    assert calls("limit", late.switch([100, 103])) == calls("limit", plain.switch([100, 103]))
    assert late.host(0) == plain.host(0)


def test_buffers_hold_twice_what_is_under_way() -> None:
    assert topology(2, "1gbit", rates={1: "100mbit"}, delay="50ms").buffers == 2 * 0.1 * 1e9 / 8
    assert topology(2, "1gbit").buffers == 0
    assert topology(2, None, delay="10s").buffers == 1 << 30


def test_packets_are_large_where_the_delay_hides_the_time_that_they_take() -> None:
    assert topology(2, "100mbit", delay="50ms").segments == round(100e6 / 8 * 5e-3 / 1500)
    assert topology(2, "10gbit", delay="50ms", mtu=9000).segments == round(65536 / 9000)
    assert topology(2, "1mbit", delay="1ms").segments == 2
