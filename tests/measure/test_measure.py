"""Measuring: one clock, one sum through a wire, one way to count bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from narrowcast.measure import DeviceClock, Timing, WireSum, count_interface, interleaved, link, link_bytes

COUNTERS = """Inter-|   Receive             |  Transmit
 face |bytes packets errs drop  |bytes packets errs drop
    lo: 100 1 0 0 0 0 0 0 700 2 0 0 0 0 0 0
  eth0: 100 1 0 0 0 0 0 0 5000 40 0 0 0 0 0 0
"""


@pytest.mark.parametrize("wire", ["int4/128+ef", "int8/256+sr+ef", "int8/256"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_residuals_lie_where_the_values_lie(wire: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend such as NCCL takes tensors of its own device alone: residuals on another one would raise."""
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(link, "all_reduce", lambda values, codec, **options: seen.append(options))
    add = WireSum(torch.zeros(512, device=device), wire, algorithm="two_shot")
    add()
    add((3, 1), seed=7)
    residuals = [options["residuals"] for options in seen]
    assert residuals[0] is residuals[1], "they go on from call to call"
    assert [(o["step"], o["algorithm"], o.get("seed")) for o in seen] == [
        (0, "two_shot", None),
        ((3, 1), "two_shot", 7),
    ]
    if wire.endswith("+ef"):
        assert {residuals[0].first.device.type, residuals[0].second.device.type} == {device}
    else:
        assert residuals == [None, None]


def test_candidates_take_turns_and_the_first_round_does_not_count() -> None:
    calls: list[str] = []
    found = interleaved({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=2, first_calls=3)
    assert "".join(calls) == "aaabbb" + "abab"
    assert all(len(timing.seconds) == 2 and timing.low <= timing.median <= timing.high for timing in found.values())


def test_a_timing_is_its_median_with_quartiles() -> None:
    timing = Timing((5.0, 1.0, 2.0, 4.0, 3.0))
    assert (timing.low, timing.median, timing.high) == (2.0, 3.0, 4.0)


def test_seconds_are_those_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 16.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    assert DeviceClock().timed(lambda: None, calls=3) == 2.0


def test_bytes_are_counted_at_one_interface_or_over_all_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "dev"
    file.write_text(COUNTERS)
    monkeypatch.setattr(link, "COUNTERS", file)
    before = count_interface("eth0")
    assert (before.bytes, before.packets, link_bytes()) == (5000, 40, 5000)
    file.write_text(COUNTERS.replace(" 5000 40", " 6000 45"))
    sent = count_interface("eth0") - before
    assert (sent.bytes, sent.packets, sent.overhead) == (1000, 5, 5 * link.HEADER)
    assert count_interface(None).bytes == 0
    with pytest.raises(ValueError, match="has no interface 'eth7'"):
        count_interface("eth7")
