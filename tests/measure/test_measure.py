"""Measuring: one clock, one sum through a wire, one way to count bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from narrowcast.measure import DeviceClock, Timing, WireSum, count_interface, interleaved, link, link_bytes, rank_device

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


def test_candidates_may_be_timed_by_others_and_need_no_first_call() -> None:
    calls: list[tuple[str, int]] = []
    rounds: list[dict[str, list[float]]] = []

    def timed(call: Any, count: int) -> float:
        calls.append((call(), count))
        return float(len(calls))

    candidates = {"a": lambda: "a", "b": lambda: "b"}
    found = interleaved(
        candidates,
        2,
        5,
        first_calls=0,
        timed=timed,
        after_round=lambda s: rounds.append({k: [*v] for k, v in s.items()}),
    )
    assert calls == [("a", 5), ("b", 5)] * 2
    assert rounds == [{"a": [1.0], "b": [2.0]}, {"a": [1.0, 3.0], "b": [2.0, 4.0]}]
    assert found["b"].seconds == (2.0, 4.0)


def test_ranks_have_a_gpu_each_and_those_of_a_lab_share(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank_device(gpu=False) == torch.device("cpu")
    for name in ("LOCAL_RANK", "NCCL_HOSTID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no CUDA device or no NCCL here; use a machine with a GPU"):
        rank_device(gpu=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert rank_device(gpu=True) == torch.device("cuda", 0)
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(ValueError, match="rank 3 of this machine has no GPU; there are 2"):
        rank_device(gpu=True)
    monkeypatch.setenv("NCCL_HOSTID", "host3-0")
    assert rank_device(gpu=True) == torch.device("cuda", 1)


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
