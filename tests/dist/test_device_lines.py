"""`send` and `recv` where a device's backend carries wires: in one order, on connections of their own, and never late.

Ranks are threads over the transport that keeps NCCL's rules (tests/gpu/late_ranks.py); there are no streams on a CPU.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from dist.test_channel import LONG
from gpu.late_cases import values
from gpu.late_ranks import Job, LateTransport, run
from torch import Tensor

from narrowcast.collectives import DisagreementError, api, p2p
from narrowcast.collectives.runtime.channel import Channel
from narrowcast.collectives.runtime.streams import Way
from narrowcast.collectives.transports.base import TransportError
from narrowcast.collectives.transports.torch import TorchTransport

CPU = torch.device("cpu")
SPECS = ("int8/256", "int4/128+sr", "dtree8", "as-is")
SIZES = (1000, 3, 257, 6003)


@pytest.fixture(autouse=True)
def _channels_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are threads, so that a group cannot say which channel is meant: the tests give it instead."""
    monkeypatch.setattr(api, "channel_of", lambda group: group)


def isend(channel: Any, x: Tensor, spec: str, peer: int, tag: int = 0) -> Any:
    return api.isend(x, spec, group=channel, group_dst=peer, tag=tag, step=tag)


def irecv(channel: Any, x: Tensor, spec: str, peer: int, tag: int = 0) -> Any:
    return api.irecv(x, spec, group=channel, group_src=peer, tag=tag)


def crossing(spec: str) -> Job:
    """Messages of several tags and sizes to all others, at once and both ways, and taken in another order."""

    def job(rank: int, channel: Channel) -> list[Tensor]:
        others = [peer for peer in range(channel.world) if peer != rank]
        got = {(peer, tag): torch.zeros(n) for peer in others for tag, n in enumerate(SIZES)}
        works = [isend(channel, values(len(got[key]), rank, *key), spec, *key) for key in got]
        works += [irecv(channel, got[key], spec, *key) for key in sorted(got, reverse=True)]
        for work in works:
            work.wait(LONG)
        return [got[key] for key in sorted(got)]

    return job


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("world", [2, 3])
def test_the_way_of_a_message_changes_no_bit(world: int, spec: str) -> None:
    plain = run(world, CPU, Way.PLAIN, crossing(spec))
    for way in (Way.ROUNDS, Way.STAGED):
        for rank, (found, wanted) in enumerate(zip(run(world, CPU, way, crossing(spec)), plain, strict=True)):
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), (way, rank)


def counted(monkeypatch: pytest.MonkeyPatch, name: str, seen: Callable[..., object]) -> list[Any]:
    """What `seen` says of each call of a method of the transport."""
    found, method = list[Any](), getattr(LateTransport, name)

    def watched(self: LateTransport, *args: Any) -> Any:
        found.append(seen(*args))
        return method(self, *args)

    monkeypatch.setattr(LateTransport, name, watched)
    return found


def test_no_value_goes_through_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    carried = counted(monkeypatch, "carry", lambda wire, source, target: (source, target, wire.numel()))
    on_host = counted(monkeypatch, "isend", lambda wire, peer, tag: wire.numel())
    run(2, CPU, Way.ROUNDS, crossing("fp32"))
    # of each message the receiver's header, and the sender's with its number
    assert sorted(on_host) == sorted(2 * len(SIZES) * [32, 32 + 8])
    both = sorted((source, 1 - source, 4 * n) for source in (0, 1) for n in SIZES for _ in "sr")
    assert sorted(carried) == both


@pytest.mark.parametrize("in_turn", [True, False])
def test_both_ranks_take_messages_in_the_order_of_the_sender(in_turn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the backend brings each to whoever asked first: the last ones, here."""
    if not in_turn:
        monkeypatch.setattr(p2p.DeviceLine, "receive", _at_once)

    def job(rank: int, channel: Channel) -> list[float]:
        tensors = [torch.full((40,), float(tag * (1 - rank))) for tag in range(4)]
        move = isend if rank == 0 else irecv
        for work in [move(channel, x, "fp32", 1 - rank, tag) for tag, x in enumerate(tensors)]:
            work.wait(LONG)
        return [float(x[0]) for x in tensors]

    received = run(2, CPU, Way.ROUNDS, job)[1]
    assert (received == [0.0, 1.0, 2.0, 3.0]) == in_turn


def _at_once(self: p2p.DeviceLine, nbytes: int, number: int, tag: int) -> Tensor:
    """`DeviceLine.receive` without its turn: those with the highest tags are quickest."""
    threading.Event().wait(0.05 * (3 - number))
    with self._turn:
        wire = torch.empty(nbytes, dtype=torch.uint8)
        self._transport.carry(wire, self._source, self._target).wait()
    return wire


def test_a_message_that_nobody_takes_yet_holds_up_neither_others_nor_collectives() -> None:
    def job(rank: int, channel: Channel) -> list[float]:
        x, late, early = torch.ones(40), torch.zeros(300), torch.zeros(40)
        works = [isend(channel, torch.full((300,), 3.0), "fp32", 1, 1)] if rank == 0 else []
        for _ in range(2):
            api.all_reduce(x, "fp32", channel=channel)
        if rank == 0:
            works.append(isend(channel, torch.full((40,), 4.0), "fp32", 1, 2))
            isend(channel, torch.zeros(1), "fp32", 1, 3).wait(LONG)
        else:
            irecv(channel, early, "fp32", 0, 2).wait(LONG)
            irecv(channel, torch.zeros(1), "fp32", 0, 3).wait(LONG)
            works.append(irecv(channel, late, "fp32", 0, 1))
        for work in works:
            work.wait(LONG)
        return [float(t[0]) for t in (x, late, early)]

    assert run(2, CPU, Way.ROUNDS, job) == [[4.0, 0.0, 0.0], [4.0, 3.0, 4.0]]


def test_ranks_that_disagree_are_told_and_the_next_message_comes() -> None:
    def job(rank: int, channel: Channel) -> float:
        x = torch.full((64,), 5.0 * (1 - rank))
        move = isend if rank == 0 else irecv
        with pytest.raises(DisagreementError, match=r"nothing was sent"):
            move(channel, x, "int8/256" if rank else "bf16", 1 - rank).wait(LONG)
        move(channel, x, "bf16", 1 - rank).wait(LONG)
        return float(x[0])

    assert run(2, CPU, Way.ROUNDS, job) == [5.0, 5.0]


def test_a_message_that_fails_ends_those_that_wait_for_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    carry, failed = LateTransport.carry, threading.Event()

    def broken(self: LateTransport, wire: Tensor, source: int, target: int) -> Any:
        if self.rank == 1 and not failed.is_set():
            failed.set()
            raise TransportError("the cable is cut")
        return carry(self, wire, source, target)

    def job(rank: int, channel: Channel) -> list[str]:
        sizes = list(enumerate(SIZES))
        if rank == 0:
            works = [isend(channel, torch.ones(n), "fp32", 1, tag) for tag, n in sizes]
        else:
            works = [irecv(channel, torch.zeros(n), "fp32", 0, tag) for tag, n in sizes]
        for work in works:
            work.join()
        return [str(work.exception()) for work in works if work.exception() is not None]

    monkeypatch.setattr(LateTransport, "carry", broken)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpu.late_ranks.PATIENCE", 2.0)
        _, receiver = run(2, CPU, Way.ROUNDS, job)
    assert len(receiver) == len(SIZES)
    assert any("the cable is cut" in text for text in receiver)


def test_parts_of_equal_size_need_no_look_at_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """`all_to_all` of whole tensors: once ranks agree on the call, its messages are all that travels."""
    on_host = counted(monkeypatch, "isend", lambda wire, peer, tag: wire.numel())

    def job(rank: int, channel: Any) -> Tensor:
        x, y = values(1024, rank), torch.zeros(1024)
        for _ in range(3):
            api.all_to_all(y, x, "int8/256", channel)
        return y

    found = run(2, CPU, Way.ROUNDS, job)
    wanted = run(2, CPU, Way.PLAIN, job)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert on_host.count(2 * 2 * 8) == 0


def test_a_line_keeps_to_one_device() -> None:
    """A message has one number, whatever device its tensor lies on."""
    lines, stream = p2p.Lines(Ready()), SimpleNamespace(device=CPU, another=lambda: stream)
    lines.on_device(None, 0, 1, stream)
    with pytest.raises(ValueError, match="from rank 0 to rank 1 lie on cpu here, got a tensor on meta; move it to cpu"):
        lines.on_device(None, 0, 1, SimpleNamespace(device=torch.device("meta")))


class Ready:
    """A channel that takes messages."""

    def refusal(self) -> None:
        return None


class MeetsInTheStore:
    """What NCCL does before its first message: the target waits for what the source writes."""

    class Options:
        def __init__(self, **_: object) -> None: ...

    def __init__(self, store: Any, *_: object) -> None:
        self._store = store

    def send(self, *_: object) -> Any:
        time.sleep(0.3)  # as its id takes a while: the other line's target waits by then
        self._store.set("id", "of the source")
        return dist.Work()

    def recv(self, *_: object) -> Any:
        self._store.get("id")
        return dist.Work()


def _send_to_each_other(group: dist.ProcessGroup) -> None:
    transport, rank = TorchTransport(group, timedelta(seconds=60)), dist.get_rank(group)
    wire, lines = torch.zeros(1, dtype=torch.uint8), [(1 - rank, rank), (rank, 1 - rank)]
    with mock.patch.object(dist, "ProcessGroupNCCL", MeetsInTheStore, create=True):
        both = [threading.Thread(target=transport.carry, args=(wire, *line), daemon=True) for line in lines]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join(30)  # far from the timeout, at which neither would wait any more
    assert not any(thread.is_alive() for thread in both)


def test_two_ranks_that_send_to_each_other_meet_at_once(pool: Any) -> None:
    pool.run(2, _send_to_each_other)
