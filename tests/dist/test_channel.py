"""Calls of a channel: one begins when the one before has sent all it sends, and not earlier."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from dist.pool import Crew, soon
from torch import Tensor

import narrowcast as nc
from narrowcast.collectives import irecv
from narrowcast.collectives.runtime import channel as channels
from narrowcast.collectives.runtime.channel import BrokenChannelError, Channel, channel_of
from narrowcast.collectives.runtime.messages import Exchange
from narrowcast.collectives.transports.base import TransportError
from narrowcast.collectives.transports.torch import TorchTransport
from narrowcast.collectives.work import Work

SOON, LONG = 0.2, timedelta(seconds=60)


class Alone:
    """A transport of one rank: nothing travels."""

    rank, world, closed = 0, 1, 0

    def __init__(self, shared_by_threads: bool = True) -> None:
        self.shared_by_threads = shared_by_threads

    def share(self, text: str) -> list[str]:
        return [text]

    def tell(self, place: str) -> dict[int, str]:
        return {}

    def interrupt(self) -> None: ...

    def close(self) -> None:
        self.closed += 1

    def give_up(self, note: str) -> dict[int, str]:
        return {0: note}


def two_calls(
    transport: Alone, waits: bool, uses: Sequence[Sequence[Tensor]] = ((), ()), between: int = 0
) -> tuple[bool, bool]:
    """Whether the second call began before the first had sent all, and before the first was over. waits: it should not,
    so that it is not given long for it. uses: the tensors of both. between: how many other calls are made between them.
    """
    channel, sent, over, begun = Channel(transport), threading.Event(), threading.Event(), threading.Event()
    seen: list[bool] = []

    def first(exchange: Exchange) -> None:
        seen.append(begun.wait(SOON))
        sent.set()
        exchange.all_sent()
        seen.append(begun.wait(SOON if waits else LONG.total_seconds()))
        over.set()

    works = [
        channel.submit({"call": 1}, first, tensors=uses[0]),
        *(channel.submit({"call": 3}, lambda _: None, tensors=[torch.ones(2)]) for _ in range(between)),
        channel.submit({"call": 2}, lambda _: begun.set(), tensors=uses[1]),
    ]
    for work in works:
        work.wait(LONG)
    channel.close()
    assert over.is_set()
    return seen[0], seen[1]


def test_the_next_call_begins_when_all_is_sent_and_not_before() -> None:
    assert two_calls(Alone(), waits=False) == (False, True)


X = torch.zeros(40, 3)
ARRAY = np.zeros(40)
USES = {
    "the same tensor": (True, [X], [X]),
    "a view of it": (True, [X], [torch.ones(2), X.t()[1]]),
    "one of several": (True, [torch.ones(2), X[:20]], [X[19:]]),
    "columns between each other's": (True, [X[:, 0]], [X[:, 2]]),
    "memory of numpy's": (True, [torch.from_numpy(ARRAY)], [torch.ones(2), torch.from_numpy(ARRAY[39:])]),
    "parts of one storage": (False, [X[:20]], [X[20:]]),
    "an empty part": (False, [X], [X[20:20]]),
    "another tensor": (False, [X], [X.clone()]),
}


@pytest.mark.parametrize("what", USES)
def test_a_call_waits_for_the_end_of_the_one_before_where_they_share_memory(what: str) -> None:
    waits, *uses = USES[what]
    assert two_calls(Alone(), waits, uses) == (False, not waits)


@pytest.mark.parametrize("between", [1, 3])
def test_it_waits_for_one_further_back_too(between: int) -> None:
    assert two_calls(Alone(), True, ([X], [X]), between) == (False, False)


def test_nothing_is_sent_after_all_was() -> None:
    exchange = Exchange(Alone(), 1)
    exchange.all_sent()
    with pytest.raises(RuntimeError, match="internal: a call sends after its last message"):
        exchange.send(torch.ones(4, dtype=torch.uint8), 0, 0)


def test_a_transport_for_one_thread_has_one_call_at_a_time() -> None:
    assert two_calls(Alone(shared_by_threads=False), waits=True) == (False, False)


def test_a_call_that_fails_in_its_last_steps_ends_the_channel_and_speaks_for_itself() -> None:
    channel, begun = Channel(Alone()), threading.Event()

    def first(exchange: Exchange) -> None:
        exchange.all_sent()
        assert begun.wait(LONG.total_seconds())
        raise OSError("the last bytes were lost")

    def second(_: Exchange) -> None:
        begun.set()
        raise ValueError("and the next call failed by itself")

    works = [channel.submit({"call": n}, job) for n, job in ((1, first), (2, second))]
    with pytest.raises(OSError, match="last bytes"):
        works[0].wait(LONG)
    with pytest.raises(ValueError, match="by itself"):
        works[1].wait(LONG)
    with pytest.raises(BrokenChannelError, match="earlier collective failed"):
        channel.submit({"call": 3}, lambda _: None).wait(LONG)
    channel.close()


def threads_of_channels() -> int:
    return sum(thread.name == "narrowcast-channel" for thread in threading.enumerate())


def test_closing_ends_every_thread() -> None:
    before, channel = threads_of_channels(), Channel(Alone())
    for number in range(5):
        channel.submit({"call": number}, lambda exchange: exchange.all_sent()).wait(LONG)
    assert threads_of_channels() == before + channels.THREADS
    channel.close()
    assert threads_of_channels() == before


@pytest.mark.parametrize("calls", [0, 1, 5])
def test_a_channel_that_nobody_holds_makes_its_calls_and_closes_by_itself(calls: int) -> None:
    before, transport, go, made = threads_of_channels(), Alone(), threading.Event(), list[int]()
    channel: Channel | None = Channel(transport)

    def call(number: int) -> None:
        go.wait(LONG.total_seconds())
        made.append(number)

    for number in range(calls):
        channel.submit({"call": number}, lambda _, number=number: call(number))
    weak, channel = weakref.ref(channel), None
    assert (weak() is not None) == bool(calls), "a cycle holds it, or its calls do not"
    go.set()
    assert soon(lambda: weak() is None and threads_of_channels() <= before)
    assert made == list(range(calls))
    assert transport.closed == 1


class Faulty(Alone):
    """Fails where it is told to."""

    def __init__(self, at: str, error: BaseException) -> None:
        super().__init__()
        self._at, self._error = at, error

    def act(self, where: str) -> None:
        if where in self._at.split(" and "):
            raise self._error

    def share(self, text: str) -> list[str]:
        self.act("agreement")
        return super().share(text)

    def give_up(self, note: str) -> dict[int, str]:
        self.act("giving up")
        return {0: "[" * 100000} if "a note" in self._at else super().give_up(note)


STAGES = [
    "memory",
    "agreement",
    "the call",
    "the call and giving up",
    "the call and a note",
    "agreement and giving up",
    "the call and explaining",
    "the call and a callback",
]
ERRORS = [
    TransportError("lost"),
    ValueError("mine"),
    MemoryError(),
    SystemExit(),
    KeyboardInterrupt(),
    RecursionError(),
]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("at", STAGES)
def test_whatever_fails_at_whatever_stage_every_work_ends_in_an_error(
    at: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = Faulty(at, error)
    for where, module, name in (("memory", channels, "overlap"), ("explaining", channels.agreement, "explain")):
        if where in at:
            monkeypatch.setattr(module, name, lambda *_, where=where: transport.act(where))
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    before, channel, go, x = threads_of_channels(), Channel(transport), threading.Event(), torch.ones(3)

    def call(exchange: Exchange) -> None:
        assert go.wait(LONG.total_seconds())
        exchange.all_sent()
        transport.act("the call")

    works = [channel.submit({"call": number}, call, tensors=[x]) for number in range(4)]
    for work in works:
        if "callback" in at:
            work.then(lambda _: transport.act("a callback"))
    go.set()
    for work in works if at != "memory" else works[1:]:  # the first one waits for no other
        with pytest.raises(BaseException) as raised:  # noqa: PT011  any: what is asked is that there is one
            work.wait(LONG)
        assert not isinstance(raised.value, TimeoutError), "it never came to its end"
    channel.close()
    assert threads_of_channels() <= before


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("giving_up", [False, True])
def test_a_message_ends_in_an_error_whatever_fails(error: BaseException, giving_up: bool) -> None:
    channel = Channel(Faulty("giving up" if giving_up else "", error))

    def message() -> int:
        raise error

    for _ in range(2):
        work = channel.lines.start(("send", 0, 0), message, Work())
        assert work.over.wait(LONG.total_seconds())
        assert work.exception() is not None
    channel.close()


@pytest.mark.parametrize("used", [False, True])
def test_a_call_after_closing_raises(used: bool) -> None:
    channel = Channel(Alone())
    if used:
        channel.submit({"call": 1}, lambda _: None).wait(LONG)
    channel.close()
    with pytest.raises(BrokenChannelError, match="closed"):
        channel.submit({"call": 2}, lambda _: None).wait(LONG)
    channel.close()


def test_a_callback_that_raises_is_reported_and_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: told.append(args.exc_value))
    channel, called, go = Channel(Alone()), list[str](), threading.Event()

    def bad(_: object) -> None:
        raise SystemExit if len(called) == 2 else KeyError("mine")

    for _ in range(channels.THREADS + 1):
        work = channel.submit({"call": 1}, lambda _: go.wait(LONG.total_seconds()))
        work.then(bad)
        work.then(lambda _: called.append("later"))
        go.set()
        work.wait(LONG)
        channel.submit({"call": 2}, lambda _: None).wait(LONG)
    work.then(bad)
    channel.close()
    assert called == ["later"] * 3
    assert [type(error) for error in told] == [KeyError, KeyError, SystemExit, KeyError]


def stuck(group: dist.ProcessGroup) -> tuple[list[str], list[str], float]:
    """Rank 0 makes calls that rank 1, which is there, does not make; then its process is to end."""
    nc.all_reduce(torch.ones(10), "fp32", group=group)
    if dist.get_rank(group) == 1:
        dist.barrier(group=group)
        return [], [], 0.0
    works = [
        nc.all_reduce(torch.ones(10), "fp32", group=group, async_op=True),
        nc.all_reduce(torch.ones(11), "fp32", group=group, async_op=True),
        irecv(torch.ones(10), "fp32", group_src=1, group=group, tag=1),
        irecv(torch.ones(10), "fp32", group_src=1, group=group, tag=1),
    ]
    channel = channel_of(group)
    assert soon(lambda: len(channel.started) == 3), "the sum before, and both of these"
    channels.EXIT_GRACE, channels.LAST_WORDS, began = 0.5, 30.0, time.monotonic()
    channels._at_exit()
    took = time.monotonic() - began
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("narrowcast")]
    dist.barrier(group=group)
    return [type(work.exception()).__name__ for work in works], left, took


def test_what_nobody_waits_for_is_interrupted_when_the_process_ends() -> None:
    with Crew(2, stuck, timeout=20) as crew:
        outcome = crew.outcome(0)
        assert not outcome.error, outcome.traceback
        raised, left, took = outcome.value
    # the first call has sent all, so that the second is under way, too
    assert raised == ["TransportError", "TransportError", "TransportError", "BrokenChannelError"]
    assert left == []
    assert took < 15, "they ended by themselves, before nobody waited any more"


ENDING = """
import os, sys, time
import torch, torch.distributed as dist
import narrowcast as nc

class Slow:
    def __del__(self, sleep=time.sleep):  # while the interpreter is taken down
        sleep(1.0)

child = os.fork()
rank = 0 if child == 0 else 1
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
nc.all_reduce(torch.ones(1000), "int8/256")
if rank == 0:
    slow, work = Slow(), nc.all_reduce(torch.ones(1000), "int8/256", async_op=True)
else:
    time.sleep(0.3)
    work = nc.all_reduce(torch.ones(1000), "int8/256", async_op=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_process_that_ends_with_a_call_under_way_ends_well(tmp_path: Path) -> None:
    """Rank 0 comes to its end in a call that rank 1 makes later."""
    command = [sys.executable, "-c", ENDING, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.stdout, done.returncode) == ("0\n", 0), done.stderr


def asked_by_threads(group: dist.ProcessGroup) -> int:
    make, found = channels.TorchTransport, list[Channel]()

    def slowly(chosen: dist.ProcessGroup) -> object:
        time.sleep(0.2)
        return make(chosen)

    channels.TorchTransport = slowly
    threads = [threading.Thread(target=lambda: found.append(channel_of(group))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    return len(set(map(id, found)))


def test_a_group_has_one_channel_whichever_thread_asks_first() -> None:
    with Crew(1, asked_by_threads) as crew:
        assert crew.outcome(0).value == 1


def after_its_end(group: dist.ProcessGroup) -> tuple[list[str], bool]:
    """A group that was destroyed, while somebody still holds it; then the world, in which nothing is amiss."""
    x, told = torch.ones(10), list[str]()
    part = dist.new_group(range(2))
    nc.all_reduce(x, "fp32", group=part)
    dist.destroy_process_group(part)
    for call in (
        lambda: nc.all_reduce(x, "fp32", group=part),
        lambda: nc.send(x, "fp32", group_dst=1 - dist.get_rank(group), group=part),
        lambda: channels.TorchTransport(part),
    ):
        try:
            call()
        except ValueError as error:
            told.append(str(error))
    ended = soon(lambda: threads_of_channels() == 0)
    nc.all_reduce(x, "fp32", group=group)
    return told, ended and x[0].item() == 4.0


def test_a_group_that_was_destroyed_is_refused_and_its_channel_closes() -> None:
    with Crew(2, after_its_end) as crew:
        for rank in range(2):
            outcome = crew.outcome(rank)
            assert not outcome.error, outcome.traceback
            told, right = outcome.value
            assert [text.partition("(")[0] for text in told] == ["collectives: the group was destroyed "] * 3
            assert right


def new_kinds(group: dist.ProcessGroup, count: int) -> list[int]:
    """Keys in the store after each new kind of call."""
    nc.all_reduce(torch.ones(2), "fp32", group=group)
    store, found = channel_of(group).transport._store, []
    for number in range(count):
        nc.all_reduce(torch.ones(3 + number), "fp32", group=group)
        found.append(store.num_keys())
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_new_kinds_of_calls_leave_nothing_in_the_store(world: int) -> None:
    with Crew(world, new_kinds, 60, timeout=20) as crew:
        for rank in range(world):
            outcome = crew.outcome(rank)
            assert not outcome.error, outcome.traceback
            # each rank's key of the last agreement, and of the one before where it has not come to delete it
            assert max(outcome.value[10:]) <= max(outcome.value[:10]) + 2 * world


def opened(group: dist.ProcessGroup) -> tuple[float, float]:
    """When this rank had connected, rank 1 late, and when it could go on."""
    connected, connect = 0.0, dist.ProcessGroupGloo

    def late(*arguments: object) -> object:
        nonlocal connected
        backend = connect(*arguments)
        time.sleep(0.3 * dist.get_rank(group))
        connected = time.monotonic()
        return backend

    dist.ProcessGroupGloo = late  # type: ignore[assignment,misc]
    TorchTransport(group).close()
    return connected, time.monotonic()


def test_no_rank_can_close_while_another_connects() -> None:
    with Crew(2, opened, timeout=20) as crew:
        times = [crew.outcome(rank).value for rank in range(2)]
    assert min(left for _, left in times) >= max(connected for connected, _ in times)


def connected_after(group: dist.ProcessGroup, failures: int) -> tuple[float, int]:
    """A sum, after rank 1 could not connect so many times, and how often it tried."""
    tried, connect = 0, dist.ProcessGroupGloo

    def fails(*arguments: object) -> object:
        nonlocal tried
        tried += 1
        backend = connect(*arguments)
        if dist.get_rank(group) == 1 and tried <= failures:
            raise RuntimeError("Gloo connectFullMesh failed")
        return backend

    dist.ProcessGroupGloo = fails  # type: ignore[assignment,misc]
    try:
        x = torch.ones(100)
        nc.all_reduce(x, "int8/64", group=group)
        return float(x[0]), tried
    finally:
        dist.ProcessGroupGloo = connect  # type: ignore[misc]


def test_all_ranks_try_again_where_one_cannot_connect() -> None:
    with Crew(3, connected_after, 1, timeout=20) as crew:
        found = [crew.outcome(rank) for rank in range(3)]
    assert [outcome.value for outcome in found] == [(3.0, 2)] * 3, found


def test_connecting_ends_with_what_the_rank_said() -> None:
    with Crew(3, connected_after, 9, timeout=20) as crew:
        found = [crew.outcome(rank).error for rank in range(3)]
    assert all("could not connect in 3 tries: rank 1: Gloo connectFullMesh failed" in error for error in found), found
