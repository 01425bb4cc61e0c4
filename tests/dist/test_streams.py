"""Wires on a device, without one: ranks as threads, a late transport, and calls that the caller itself posts.

There are no streams on a CPU, but rounds have their order and their lateness, and staged wires their copies. The same
cases run on a GPU, behind sleeping streams: tests/gpu/check_streams.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
from dist.pool import soon
from dist.test_channel import LONG, Alone, Faulty, threads_of_channels
from gpu import late_cases as cases
from gpu.late_ranks import Job, LateTransport, run
from torch import Tensor

import narrowcast as nc
from narrowcast.collectives import (
    AllReduce,
    Flat,
    PreparedCall,
    Reduction,
    Residuals,
    primitives,
    segments,
    start_together,
)
from narrowcast.collectives.algorithms import two_shot
from narrowcast.collectives.algorithms.context import Call
from narrowcast.collectives.algorithms.two_shot import device_rounds
from narrowcast.collectives.prepared import signature_text
from narrowcast.collectives.runtime.channel import BrokenChannelError, Channel
from narrowcast.collectives.runtime.messages import Exchange
from narrowcast.collectives.runtime.streams import DeviceStream, Way
from narrowcast.formats import TableFormat, register, unregister

CPU = torch.device("cpu")
N = 6003


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_shot, "CHUNK_BYTES", cases.SMALL_CHUNKS)


def same(found: list[list[Tensor]], wanted: list[list[Tensor]]) -> bool:
    return all(
        torch.equal(a, b) for one, other in zip(found, wanted, strict=True) for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("way", [Way.ROUNDS, Way.STAGED])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("spec", cases.SPECS)
def test_the_way_of_the_wires_changes_no_bit(spec: str, world: int, way: Way) -> None:
    for algorithm in cases.ALGORITHMS:
        job = cases.all_reduces(spec, algorithm, N, CPU)
        assert same(run(world, CPU, way, job), run(world, CPU, Way.PLAIN, job)), algorithm


@pytest.mark.parametrize("way", [Way.ROUNDS, Way.STAGED])
@pytest.mark.parametrize("algorithm, spec", cases.BY_BACKEND)
def test_sums_of_the_backend_take_the_same_ways(algorithm: str, spec: str, way: Way) -> None:
    job = cases.all_reduces(spec, algorithm, N, CPU)
    assert same(run(4, CPU, way, job), run(4, CPU, Way.PLAIN, job))


@pytest.mark.parametrize("way", [Way.ROUNDS, Way.STAGED])
@pytest.mark.parametrize("spec", cases.SPECS)
def test_parts_of_an_all_reduce_and_what_fsdp_calls_take_the_same_ways(spec: str, way: Way) -> None:
    job = cases.others(spec, 1001, CPU)
    assert same(run(3, CPU, way, job), run(3, CPU, Way.PLAIN, job))


@pytest.mark.parametrize(
    "spec, unit, launches", [("int8/256", 512, 1), ("bf16", 7, 1), ("int8/256", 48, 3), ("nvfp4", 512, 3)]
)
def test_parts_of_whole_blocks_are_one_launch_each_way(spec: str, unit: int, launches: int) -> None:
    """To experts, whose counts differ from rank to rank."""
    made = {"encode": 0, "decode": 0}

    def counted(name: str) -> Callable[..., None]:
        real = getattr(segments.Coder, name)

        def count(self: segments.Coder, *args: Any, **options: Any) -> None:
            made[name] += 1
            real(self, *args, **options)

        return count

    def job(rank: int, channel: Channel) -> list[Tensor]:
        lengths = [unit * (1 + (rank + peer) % 2) for peer in range(channel.world)]
        x, y = torch.randn(sum(lengths)), torch.empty(sum(lengths))

        def work(exchange: Exchange) -> None:
            primitives.all_to_all(*(Call(z, nc.codec(spec), exchange, lengths) for z in (x, y)))

        channel.submit({"call": "parts"}, work, [x, y]).wait()
        return []

    with mock.patch.multiple(segments.Coder, encode=counted("encode"), decode=counted("decode")):
        run(3, CPU, Way.ROUNDS, job)
    assert made == {"encode": 3 * launches, "decode": 3 * launches}


@pytest.mark.parametrize("spec", [*cases.SPECS, "nvfp4", "e4m3@1", "e2m1fn@1", "as-is", "uint8/512"])
def test_a_rank_without_parts_has_no_wires(spec: str) -> None:
    """An expert without tokens."""
    coder = segments.Coder(nc.codec(spec.removesuffix("+ef")), [0, 0], torch.float32)
    assert primitives._planes_of_parts(coder) in (None, [[(0, 0)], [(0, 0)]], [[(0, 0), (0, 0)]] * 2)


def test_what_ranks_compare_is_what_it_shows() -> None:
    """Equal numbers may be written in two ways, and a caller's own values may be of any kind."""
    codec = nc.codec("int8/256")
    texts = {signature_text("all_to_all", codec, 1, torch.float32, n=n) for n in (1, True, 1.0, [1], {"a": 1})}
    assert len(texts) == 5


MEMBERS = (
    ("int8/256", "two_shot", 6003),
    ("as-is", "one_shot", 40),
    ("int4/128+sr+ef", "two_shot", 3001),
    ("e5m2+aps", "two_shot", 700),
    ("dtree8", "two_shot", 2500),
    ("int4/128+sr+ef", "one_shot", 130),
)


def together(at_once: bool) -> Job:
    """Calls of several kinds, for some steps, each by itself or all as one; their results and residuals."""

    def job(rank: int, channel: Channel) -> list[Tensor]:
        codecs = [nc.codec(spec) for spec, _, _ in MEMBERS]
        residuals = [Residuals.zeros(n) if c.feedback else None for c, (_, _, n) in zip(codecs, MEMBERS, strict=True)]
        results: list[Tensor] = []
        for step in range(3):
            tensors = [cases.values(n, rank, step, number) for number, (_, _, n) in enumerate(MEMBERS)]
            calls = []
            for number, (codec, (_, algorithm, n)) in enumerate(zip(codecs, MEMBERS, strict=True)):
                kind = AllReduce.of(codec, [n], torch.float32, channel.world, Reduction(2.0), algorithm=algorithm)
                calls.append(PreparedCall(kind, Flat([tensors[number]]), (step, number), residuals[number]))
            works = [start_together(channel, part) for part in ([calls] if at_once else [[call] for call in calls])]
            for work in works:
                work.wait(LONG)
            results += tensors
        return cases.bits(results + [t for r in residuals if r is not None for t in (r.first, r.second)])

    return job


@pytest.mark.parametrize("way", [Way.ROUNDS, Way.PLAIN])
@pytest.mark.parametrize("world", [2, 3])
def test_calls_that_travel_together_compute_what_each_does_by_itself(world: int, way: Way) -> None:
    assert same(run(world, CPU, way, together(True)), run(world, CPU, Way.PLAIN, together(False)))


def test_calls_that_travel_together_take_two_calls_of_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    swaps: list[int] = []
    swap = LateTransport.swap
    monkeypatch.setattr(LateTransport, "swap", lambda self, *args: [swap(self, *args), swaps.append(self.rank)][0])
    run(2, CPU, Way.ROUNDS, together(True))
    # and two for the scales of e5m2+aps, which all ranks agree on: its own messages
    assert len(swaps) == 2 * 3 * 3


def test_a_device_takes_few_rounds_and_more_for_a_long_wire() -> None:
    large = 100 << 20
    assert device_rounds(4, 4, 2) == 1
    assert device_rounds(large, large // 4, 4) == 2
    assert device_rounds(large, large // 2, 4) == 4
    assert device_rounds(large, large // 8, 8) == 1
    rounds = [device_rounds(n, n // 4, 4) for n in range(4, 1 << 31, 1 << 24)]
    assert rounds == sorted(rounds)
    assert max(rounds) == two_shot.MAX_CHUNKS


@pytest.mark.parametrize("count", [1, 3])
def test_a_call_takes_two_calls_of_the_backend_a_round(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    swaps: list[int] = []
    swap = LateTransport.swap
    monkeypatch.setattr(LateTransport, "swap", lambda self, *args: [swap(self, *args), swaps.append(self.rank)][0])
    monkeypatch.setattr(two_shot, "device_rounds", lambda *_: count)
    monkeypatch.setattr(segments, "_CODERS", {})
    job = cases.all_reduces("int8/256", "two_shot", N, CPU)
    assert same(run(2, CPU, Way.ROUNDS, job), run(2, CPU, Way.PLAIN, job))
    assert len(swaps) == 2 * cases.STEPS * 2 * count


@pytest.mark.parametrize("nodes", [[[0], [1]], [[0, 1]]])
def test_nodes_of_one_rank_and_one_node_of_all_make_no_empty_rounds(nodes: list[list[int]]) -> None:
    def job(rank: int, channel: Channel) -> list[Tensor]:
        x = cases.values(3000, rank)
        nc.all_reduce(x, "int8/256", channel=channel, algorithm="hierarchical", nodes=nodes)
        return cases.bits([x])

    assert same(run(2, CPU, Way.ROUNDS, job), run(2, CPU, Way.PLAIN, job))


def test_parts_of_very_different_lengths_are_not_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = dict.fromkeys(range(4), 0)
    swap = LateTransport.swap

    def count(self: LateTransport, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]) -> object:
        sent[self.rank] += sum(wire.numel() for wire, _ in sends)
        return swap(self, sends, receives)

    monkeypatch.setattr(LateTransport, "swap", count)
    lengths = [1 << 20, 16, 16, 16]

    def job(rank: int, channel: Channel) -> int:
        def work(exchange: Exchange) -> None:
            x = torch.ones(sum(lengths))
            call = Call(x, nc.codec("int8/256"), exchange, lengths)
            primitives.all_gather(call, segments.segment_ranges(lengths), torch.ones(lengths[rank]))
            primitives.reduce_scatter(call, segments.segment_ranges(lengths))

        done = channel.submit({"call": "both"}, work, [torch.ones(3)])
        done.wait(LONG)
        return done.sent_bytes

    assert run(4, CPU, Way.ROUNDS, job) == list(sent.values())


def test_a_codec_that_is_registered_anew_is_not_the_old_one() -> None:
    def job(rank: int, channel: Channel) -> list[Tensor]:
        x = torch.linspace(-1, 1, 4096)
        nc.all_reduce(x, "anew/64", channel=channel, algorithm="two_shot")
        return [x]

    for table in ((-1.0, 0.0, 0.5, 1.0), (-1.0, -0.25, 0.0, 1.0)):
        register(TableFormat("anew", table))
        try:
            codec, x = nc.codec("anew/64"), torch.linspace(-1, 1, 4096)
            total = 2 * codec.decode(codec.encode(x), 4096)
            assert torch.equal(run(2, CPU, Way.PLAIN, job)[0][0], codec.decode(codec.encode(total), 4096))
        finally:
            unregister("anew")


@pytest.mark.parametrize("n", [0, 1, 100, 2000])
def test_rounds_of_ranks_without_a_shard_stay_in_order(n: int) -> None:
    """Where a tensor is so small that some shards or chunks are empty, ranks skip messages, each other ones."""
    for algorithm in cases.ALGORITHMS:
        job = cases.all_reduces("int8/256", algorithm, max(n, 3), CPU)
        assert same(run(4, CPU, Way.ROUNDS, job), run(4, CPU, Way.PLAIN, job)), algorithm


def test_rounds_out_of_the_order_of_sending_are_noticed() -> None:
    """A device's backend would wait for ever: some ranks do one round first, others another."""

    def job(rank: int, channel: Channel) -> None:
        def swap(exchange: Exchange) -> None:
            for index in (5, 7, 5):
                exchange.receive(8, 1 - rank, index)
                exchange.send(exchange.wire(8), 1 - rank, index)

        channel.submit({"call": "swap"}, swap, [torch.ones(3)]).wait(LONG)

    with pytest.raises((AssertionError, RuntimeError), match=r"a round that has started|another rank gave up"):
        run(2, CPU, Way.ROUNDS, job)


def test_a_round_that_is_not_waited_for_is_noticed() -> None:
    job = cases.all_reduces("int8/256", "two_shot", N, CPU)
    assert not same(run(2, CPU, Way.ROUNDS, job, careful=False), run(2, CPU, Way.PLAIN, job))


def channel_with(way: Way, transport: Alone | None = None) -> Channel:
    """One rank, whose transport carries the memory of the processor as that of a device would be."""
    channel = Channel(transport or Alone())
    channel.streams[CPU] = DeviceStream(CPU, way)
    return channel


def runner_of(channel: Channel, call: str, waits: bool = False) -> str:
    """Whose thread runs a call: "caller" or "channel"."""
    names: list[str] = []
    tensors = [torch.ones(3)]
    work = channel.submit({"call": call}, lambda _: names.append(threading.current_thread().name), tensors, waits=waits)
    work.wait(LONG)
    return "channel" if names == ["narrowcast-channel"] else "caller"


def test_a_thread_that_cannot_start_is_an_error_and_the_next_call_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    channel = channel_with(Way.STAGED)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", mock.Mock(side_effect=RuntimeError("can't start new thread")))
        with pytest.raises(RuntimeError, match="can't start"):
            runner_of(channel, "a")
    assert runner_of(channel, "a") == "channel"
    channel.close()


def test_a_call_that_does_not_come_back_from_posting_holds_up_no_end() -> None:
    transport = Alone()
    channel, begun, end = channel_with(Way.ROUNDS, transport), threading.Event(), threading.Event()
    assert runner_of(channel, "a") == "channel"

    def run(_: object) -> None:
        begun.set()
        end.wait(100)

    posting = threading.Thread(target=lambda: channel.submit({"call": "a"}, run, [torch.ones(3)], waits=False))
    posting.start()
    assert begun.wait(LONG.total_seconds())
    interrupted: list[bool] = []
    transport.interrupt = lambda: interrupted.append(True)
    start = time.monotonic()
    channel.close(timedelta(seconds=0.1))
    assert interrupted
    assert time.monotonic() - start < 50
    end.set()
    posting.join()


def test_what_the_device_carries_is_posted_by_the_caller_once_ranks_have_agreed_on_it() -> None:
    channel = channel_with(Way.ROUNDS)
    assert [runner_of(channel, "a") for _ in range(3)] == ["channel", "caller", "caller"]
    assert [runner_of(channel, "b") for _ in range(2)] == ["channel", "caller"]
    assert runner_of(channel, "a") == "caller"
    # another device's backend is not connected yet: that takes the other ranks
    channel.streams[CPU] = DeviceStream(CPU, Way.ROUNDS)
    assert [runner_of(channel, "a") for _ in range(2)] == ["channel", "caller"]
    assert [runner_of(channel, "waits", waits=True) for _ in range(2)] == ["channel", "channel"]
    channel.close()


@pytest.mark.parametrize("way", [Way.PLAIN, Way.STAGED])
def test_where_the_host_moves_the_bytes_the_channels_threads_do_it(way: Way) -> None:
    channel = channel_with(way)
    assert [runner_of(channel, "a") for _ in range(3)] == ["channel"] * 3
    channel.close()


def test_behind_a_call_of_the_threads_a_call_keeps_its_place() -> None:
    channel, go, order = channel_with(Way.ROUNDS), threading.Event(), list[str]()
    runner_of(channel, "a")

    def slow(_: Exchange) -> None:
        assert go.wait(LONG.total_seconds())
        order.append("slow")

    works = [
        channel.submit({"call": "slow"}, slow),
        channel.submit({"call": "a"}, lambda _: order.append("a"), [torch.ones(3)], waits=False),
    ]
    assert order == [], "submit returns at once"
    go.set()
    for work in works:
        work.wait(LONG)
    assert order == ["slow", "a"]
    assert runner_of(channel, "a") == "caller"
    channel.close()


def test_a_callback_comes_from_the_caller_who_posted_and_may_close_the_channel() -> None:
    before, channel, threads = threads_of_channels(), channel_with(Way.ROUNDS), list[str]()
    runner_of(channel, "a")
    work = channel.submit({"call": "a"}, lambda _: None, [torch.ones(3)], waits=False)
    assert work.is_completed()
    work.then(lambda _: threads.append(threading.current_thread().name))
    work.then(lambda _: channel.close())
    assert threads == [threading.current_thread().name]
    with pytest.raises(BrokenChannelError, match="closed"):
        channel.submit({"call": "a"}, lambda _: None, [torch.ones(3)], waits=False).wait(LONG)
    assert soon(lambda: threads_of_channels() <= before)


@pytest.mark.parametrize("giving_up", [False, True])
def test_an_error_of_a_call_that_the_caller_posted_is_the_works_and_ends_the_channel(giving_up: bool) -> None:
    channel = channel_with(Way.ROUNDS, Faulty("giving up" if giving_up else "", OSError("no store")))
    runner_of(channel, "a")

    def fail(_: Exchange) -> None:
        raise ValueError("mine")

    work = channel.submit({"call": "a"}, fail, [torch.ones(3)], waits=False)
    with pytest.raises(ValueError, match="mine"):
        work.wait(LONG)
    with pytest.raises(BrokenChannelError, match="earlier collective failed"):
        channel.submit({"call": "a"}, lambda _: None, [torch.ones(3)], waits=False).wait(LONG)
    channel.close()


def test_an_interrupt_while_the_caller_posts_is_raised_there() -> None:
    channel = channel_with(Way.ROUNDS)
    runner_of(channel, "a")

    def interrupted(_: Exchange) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        channel.submit({"call": "a"}, interrupted, [torch.ones(3)], waits=False)
    channel.close()


def test_what_the_caller_posts_runs_as_in_a_thread_of_the_channel() -> None:
    """Autocast is off, so that no bit depends on who runs a call; inference mode is the caller's."""
    channel, seen = channel_with(Way.ROUNDS), list[tuple[bool, bool]]()

    def look(_: Exchange) -> None:
        seen.append((torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled()))

    for inference in (False, True):
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16), torch.inference_mode(inference):
                channel.submit({"call": "a"}, look, [torch.ones(3)], waits=False).wait(LONG)
    channel.close()
    assert seen == [(False, False)] * 2 + [(False, True)] * 2


def mixture(rank: int, channel: Channel) -> list[Tensor]:
    """Calls that callers post between calls of the threads, and ranks that are late by turns."""
    results, works = list[Tensor](), []
    for number in range(12):
        if number % 4 == rank:
            time.sleep(0.01)
        x = cases.values(500, rank, number)
        results.append(x)
        works.append(nc.all_reduce(x, "int8/256", async_op=True, algorithm="two_shot", channel=channel))
        if number % 3 == 2:
            results += channel.gather(cases.values(5, rank, number))
        if number % 5 == 4:
            for work in works:
                work.wait()
    for work in works:
        work.wait()
    return cases.bits(results)


def test_calls_of_callers_and_of_threads_keep_one_order_on_all_ranks() -> None:
    expected = run(3, CPU, Way.PLAIN, mixture)
    for _ in range(3):
        assert same(run(3, CPU, Way.ROUNDS, mixture), expected)
