"""`attach(model, "auto")` measures where the model is: tensors on its device, times of its clock."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from narrowcast.measure import DeviceClock
from narrowcast.parallel import auto

META, CUDA = torch.device("meta"), torch.device("cuda", 1)


class FakeGpu:
    """A GPU whose work takes as long as it is told, while the host is done at once."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now, self.waited = 0.0, 0.0
        patch.setattr(torch.cuda, "Event", lambda enable_timing: FakeEvent(self))
        patch.setattr(torch.cuda, "synchronize", self.synchronize)
        patch.setattr(torch.cuda, "current_stream", lambda device: device)

    def work(self, seconds: float) -> None:
        self.now += seconds

    def synchronize(self, device: torch.device) -> None:
        assert device == CUDA
        self.waited = self.now


class FakeEvent:
    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu, self.at = gpu, 0.0

    def record(self, stream: object) -> None:
        assert stream == CUDA, "the stream of the model's device"
        self.at = self.gpu.now

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.gpu.waited >= end.at, "the event has not happened yet"
        return 1e3 * (end.at - self.at)


class Bucket:
    def __init__(self, values: int, last: bool) -> None:
        self.values, self.last = values, last

    def buffer(self) -> Tensor:
        return torch.empty(self.values, device=META)

    def is_last(self) -> bool:
        return self.last


def test_what_is_timed_lies_on_the_models_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of NCCL has no backend for anything else, and a group with two would time the wrong one."""
    seen: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(auto.dist, "all_reduce", lambda x, group: seen.append(("as-is", x.device)))
    monkeypatch.setattr(auto, "all_reduce", lambda x, wire, *_, **__: seen.append((wire, x.device)))
    monkeypatch.setattr(auto, "agreed", lambda channel, mine: mine)
    none: Any = None
    auto.seconds_a_value(none, none, DeviceClock(META))
    assert {wire for wire, _ in seen} == {"as-is", *auto.WIRES}
    assert {device for _, device in seen} == {META}


def test_the_time_of_a_sum_is_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)
    monkeypatch.setattr(torch, "linspace", lambda *_, **__: torch.empty(0))
    long = iter([0.5, 0.25, 2.0])
    found = auto._timed(lambda x: gpu.work(next(long)), 16, 3, DeviceClock(CUDA))
    assert found.tolist() == [0.5, 0.25, 2.0]


def test_buckets_are_ready_when_the_device_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host asks for everything at once; the forward pass takes a second, each bucket half of one."""
    gpu = FakeGpu(monkeypatch)
    monkeypatch.setattr(auto, "plain_all_reduce", lambda buffer, group: None)
    none: Any = None
    times = auto.BucketTimes(none, DeviceClock(CUDA))
    for _ in range(auto.WARM_UP + auto.WATCHED):
        times.begin()
        gpu.work(1.0)
        for values, last in ((30, False), (20, True)):
            gpu.work(0.5)
            bucket: Any = Bucket(values, last)
            times.reduce(bucket)
    assert times.done
    ready, values = times.times()
    assert (ready.tolist(), values.tolist()) == ([1.5, 2.0], [30.0, 20.0])
