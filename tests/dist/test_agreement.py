"""Law 11: ranks that disagree find out, all of them, before bytes move, and hear who differs."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import deque
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist.models import error_of, loss, wrapped
from dist.pool import Crew, Outcome, Pool
from hypothesis import given
from hypothesis import strategies as st

import narrowcast as nc
from narrowcast.collectives.runtime import agreement, watchdog
from narrowcast.collectives.runtime.agreement import DisagreementError, Failure
from narrowcast.collectives.runtime.channel import channel_of
from narrowcast.collectives.runtime.watchdog import PATIENCE, StartedCall
from narrowcast.collectives.transports.base import TransportError
from narrowcast.collectives.transports.torch import GAVE_UP, TorchTransport

TIMEOUT = 4.0


def bytes_moved(group: dist.ProcessGroup) -> list[int]:
    """Counts what leaves through the group's transport from now on."""
    transport, sent = channel_of(group).transport, []
    isend = transport.isend

    def counting(wire: torch.Tensor, peer: int, tag: int) -> object:
        sent.append(wire.numel())
        return isend(wire, peer, tag)

    transport.isend = counting
    return sent


def differing(group: dist.ProcessGroup, what: str) -> tuple[str, int]:
    """Rank 1 calls something else; then all call the same thing."""
    odd = dist.get_rank(group) == 1
    x, sent = torch.ones(64), bytes_moved(group)
    message = ""
    try:
        if what == "spec":
            nc.all_reduce(x, "int8/32" if odd else "int8/16", group=group)
        elif what == "size":
            nc.all_reduce(x[: 60 if odd else 64], "int8/16", group=group)
        elif what == "segments":
            nc.all_reduce([x[:32], x[32:]] if odd else [x[:16], x[16:]], "int8/16", group=group)
        elif what == "dtype":
            nc.all_reduce(x.bfloat16() if odd else x, "int8/16", group=group)
        elif what == "op":
            nc.all_reduce(x, "int8/16", dist.ReduceOp.AVG if odd else dist.ReduceOp.SUM, group)
        elif what == "algorithm":
            nc.all_reduce(x, "int8/16", group=group, algorithm="ring" if odd else "two_shot")
        elif what == "accumulator":
            nc.all_reduce(x, "int8/16", group=group, algorithm="ring", accumulator="low" if odd else "float32")
        elif what == "seed":
            nc.all_reduce(x, "int8/16+sr", group=group, step=0, seed=7 if odd else 3)
        elif what == "nodes":
            nc.all_reduce(x, "int8/16", group=group, nodes=[[0], [1], [2]] if odd else [[0, 1, 2]])
        elif what == "inner":
            nc.all_reduce(x, "int8/16", group=group, nodes=[[0, 1, 2]], inner="bf16" if odd else "as-is")
        elif what == "call":
            if odd:
                nc.broadcast(x, "int8/16", group_src=0, group=group)
            else:
                nc.all_reduce(x, "int8/16", group=group)
        elif what == "src":
            nc.broadcast(x, "int8/16", group_src=1 if odd else 0, group=group)
        elif what == "version":
            old, agreement.VERSION = agreement.VERSION, "0.9" if odd else agreement.VERSION
            try:
                nc.all_reduce(x[:50], "int8/16", group=group)
            finally:
                agreement.VERSION = old
    except agreement.DisagreementError as error:
        message = str(error)
    before = sum(sent)
    assert torch.equal(x, torch.ones(64)), "the tensor changed"
    y = torch.ones(8)
    nc.all_reduce(y, "as-is", group=group)
    assert float(y[0]) == dist.get_world_size(group), "the channel does not work afterwards"
    del channel_of(group).transport.isend
    return message, before


DIFFERENCES = {
    "spec": "spec='int8/32' (others 'int8/16')",
    "size": "numel=60 (others 64)",
    "segments": "segments=[32, 32] (others [16, 48])",
    "dtype": "dtype='bfloat16' (others 'float32')",
    "op": "op=",
    "algorithm": "algorithm='ring' (others 'two_shot')",
    "accumulator": "accumulator='low' (others 'float32')",
    "seed": "seed=7 (others 3)",
    "nodes": "nodes=[[0], [1], [2]] (others [[0, 1, 2]])",
    "inner": "inner='bf16' (others 'as-is')",
    "call": "call='broadcast' (others 'all_reduce')",
    "src": "src=1 (others 0)",
    "version": "version='0.9' (others '2')",
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_every_rank_hears_who_differs_in_what_before_a_byte_moves(pool: Pool, what: str) -> None:
    for message, sent in pool.run(3, differing, what):
        assert message.startswith("ranks disagree about this call, so nothing was sent; rank 1: ")
        assert DIFFERENCES[what] in message
        assert "rank 0:" not in message
        assert "rank 2:" not in message
        assert sent == 0


def splits(group: dist.ProcessGroup) -> str:
    """Rank 1 expects one value more from rank 0 than that sends."""
    rank = dist.get_rank(group)
    arriving = [4, 4, 4] if rank != 1 else [5, 4, 4]
    options = {"output_split_sizes": arriving, "input_split_sizes": [4, 4, 4]}
    try:
        nc.all_to_all(torch.zeros(sum(arriving)), torch.ones(12), "int8/16", group, **options)
    except agreement.DisagreementError as error:
        message = str(error)
    y = torch.zeros(3)
    nc.all_to_all(y, torch.full((3,), float(rank)), "as-is", group)
    assert y.tolist() == [0.0, 1.0, 2.0]
    return message


def test_all_to_all_compares_the_sizes_of_every_pair(pool: Pool) -> None:
    for message in pool.run(3, splits):
        assert message.startswith("all_to_all: rank 0 sends 4 values to rank 1, which expects 5, so nothing was sent")


def different_policies(group: dist.ProcessGroup) -> str:
    """attach with another spec on one rank: it raises on both, and both can attach again."""
    rank = dist.get_rank(group)
    model, told = wrapped(group), ""
    try:
        nc.attach(model, "int8/256" if rank else "int8/128", min_values=1)
    except agreement.DisagreementError as error:
        told = str(error)
    handle = nc.attach(model, "int8/256", min_values=1)
    loss(model, rank, 1).backward()
    handle.detach()
    return told


def test_ranks_that_attach_different_specs_hear_of_it_and_may_attach_again(pool: Pool) -> None:
    for told in pool.run(2, different_policies):
        assert told.startswith("ranks disagree about this call")
        assert "spec='int8/" in told


def different_schedules(group: dist.ProcessGroup) -> list[str]:
    """Schedules that part ways at step 2."""
    rank = dist.get_rank(group)
    model = wrapped(group)
    handle = nc.attach(model, nc.schedule({0: "int8/256", 2: "int8/64" if rank else "int8/128"}), min_values=1)
    told = [error_of(lambda step=step: loss(model, rank, step).backward()) for step in range(3)]
    handle.detach()
    return told


def test_a_disagreement_in_training_is_raised_by_backward(pool: Pool) -> None:
    for told in pool.run(2, different_schedules):
        assert told[:2] == ["", ""]
        assert "DisagreementError: ranks disagree about this call" in told[2]


def warm(group: dist.ProcessGroup) -> None:
    """Two calls that every rank knows from now on."""
    for spec, n in (("int8/16", 5000), ("int8/32", 50)):
        nc.all_reduce(torch.ones(n), spec, group=group)
    nc.all_reduce([torch.ones(40)] * 3, "e5m2+aps", group=group)
    nc.all_reduce([torch.ones(40)] * 2, "e5m2+aps", group=group)
    nc.all_reduce(torch.ones(40), "bf16", group=group, algorithm="native")
    nc.all_reduce(torch.ones(80), "bf16", group=group, algorithm="native")


def known_in_another_order(group: dist.ProcessGroup, kind: str) -> None:
    warm(group)
    odd = dist.get_rank(group) == 1
    if kind == "sizes":
        nc.all_reduce(torch.ones(50 if odd else 5000), "int8/32" if odd else "int8/16", group=group)
    elif kind == "exponents":
        nc.all_reduce([torch.ones(40)] * (2 if odd else 3), "e5m2+aps", group=group)
    elif kind == "native":
        nc.all_reduce(torch.ones(80 if odd else 40), "bf16", group=group, algorithm="native")
    elif kind == "new":
        nc.all_reduce(torch.ones(777 if odd else 5000), "int8/16", group=group)
    elif kind == "nothing" and not odd:
        nc.all_reduce(torch.ones(777), "int8/16", group=group)
    elif kind == "nothing, known" and not odd:
        nc.all_reduce(torch.ones(50), "int8/32", group=group)


def outcomes(kind: str, world: int = 3, timeout: float = TIMEOUT) -> list[Outcome]:
    with Crew(world, known_in_another_order, kind, timeout=timeout) as crew:
        found = [crew.outcome(rank) for rank in range(world)]
    assert None not in found, "a rank died"
    assert max(outcome.seconds for outcome in found) < timeout + 15
    return found


@pytest.mark.parametrize("kind", ["sizes", "exponents", "native", "new"])
def test_known_calls_in_different_orders_end_in_an_error_that_names_who_differs(kind: str) -> None:
    for outcome in outcomes(kind, timeout=30 * PATIENCE):
        assert outcome.error.startswith("DisagreementError: ranks were in different calls; rank 1: "), outcome.error
        assert "Make all ranks call the same, in the same order" in outcome.error
        assert outcome.seconds < 10 * PATIENCE, "it took the timeout to find out"


@pytest.mark.parametrize("kind", ["nothing", "nothing, known"])
def test_a_rank_that_does_not_call_is_missed_within_the_timeout(kind: str) -> None:
    first, idle, last = outcomes(kind)
    assert not idle.error
    for outcome in (first, last):
        assert outcome.raised in ("TimeoutError", "TransportError")
        assert outcome.seconds < TIMEOUT + 6
    if kind == "nothing":
        assert "ranks [1]" in first.error


def lone(group: dist.ProcessGroup, call: str, then: str) -> tuple[str, float]:
    """Rank 0 makes a call of a handle that the others do not make; they train on, or are done."""
    rank, model = dist.get_rank(group), wrapped(group)
    handle = nc.attach(model, "int4/128+ef", min_values=1)
    for step in range(2):
        loss(model, rank, step).backward()
    dist.barrier(group=group)
    began = time.monotonic()
    if rank == 0:
        told = error_of(getattr(handle, call))
    else:
        told = error_of(lambda: loss(model, rank, 2).backward()) if then == "train" else ""
    return told, time.monotonic() - began


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("call", ["state_dict", "check_ranks"])
def test_a_collective_call_on_one_rank_alone_fails_everywhere_in_seconds_and_is_named(call: str, world: int) -> None:
    with Crew(world, lone, call, "train", timeout=30 * PATIENCE) as crew:
        for rank in range(world):
            outcome = crew.outcome(rank)
            assert not outcome.error, outcome.traceback
            told, seconds = outcome.value
            assert "DisagreementError: ranks were in different calls; " in told
            assert f"Collective: all_reduce and {call}; every rank has to call each" in told
            assert seconds < 10 * PATIENCE, "it took the timeout to find out"


def test_where_the_others_are_done_the_lone_call_is_named_too() -> None:
    with Crew(2, lone, "state_dict", "end", timeout=20) as crew:
        told, _ = crew.outcome(0).value
    assert "state_dict, which every rank has to call: ranks [1] did not come to this call" in told


def late(group: dist.ProcessGroup) -> float:
    """Rank 1 comes to three calls later than anybody's patience: one made differently, a new one, that again."""
    odd, x = dist.get_rank(group) == 1, torch.ones(50)
    for size in (20 if odd else 30, 50, 50):
        if odd:
            time.sleep(PATIENCE + 3 * watchdog.EVERY)
        with contextlib.suppress(DisagreementError):
            nc.all_reduce(x[:size], "fp32", group=group)
    return float(x[0])


def test_a_rank_that_is_late_is_waited_for() -> None:
    with Crew(2, late, timeout=40) as crew:
        for rank in range(2):
            outcome = crew.outcome(rank)
            assert not outcome.error, outcome.traceback
            assert outcome.value == 4.0


class Meanwhile:
    """A store in which rank 1 comes to a call, differs and gives up, after so many looks of rank 0."""

    def __init__(self, looks: int) -> None:
        self._store, self._left = dist.HashStore(), looks
        self.set, self.get = self._store.set, self._store.get

    def check(self, keys: list[str]) -> bool:
        found, self._left = self._store.check(keys), self._left - 1
        if not self._left:
            self.set("call/0/1", "other")
            self.set(GAVE_UP, "1")
        return found


@pytest.mark.parametrize("looks", range(1, 8))
def test_a_rank_that_came_and_then_gave_up_is_heard_not_missed(looks: int) -> None:
    transport = TorchTransport.__new__(TorchTransport)
    transport._store, transport._backend, transport._shared = Meanwhile(looks), None, 0
    transport.rank, transport.world, transport._timeout = 0, 2, timedelta(seconds=60)
    assert transport.share("mine") == ["mine", "other"]


class Told:
    """A channel and its transport, of which the other ranks say what they are told to."""

    rank, world = 0, 2

    def __init__(self, texts: dict[int, str], places: dict[int, object], over: int = 0) -> None:
        long_ago, ended, running = time.monotonic() - 2 * PATIENCE, threading.Event(), threading.Event()
        ended.set()
        self.started = deque(
            StartedCall(n, text, ended if n <= over else running, long_ago) for n, text in texts.items()
        )
        self.transport: Any = self
        self._places = places
        self.left: list[Failure] = []
        self.parted: DisagreementError | None = None

    def tell(self, place: str) -> dict[int, str]:
        self.left.append(Failure.read(place))
        return {r: p if isinstance(p, str) else Failure(*p, "", own=False).to_text() for r, p in self._places.items()}

    def part(self, error: DisagreementError) -> None:
        self.parted = error


A, B = '{"call": "a"}', '{"call": "b"}'
PLACES = {
    "in the same call": ({1: A}, {1: (1, A)}, None),
    "in another": ({1: A}, {1: (1, B)}, "rank 1: call='b' (others 'a')"),
    "in another, and one is in ours": ({1: A}, {1: (1, A), 2: (1, B)}, "rank 2: call='b'"),
    "in one that we were in before": ({1: A, 2: B}, {1: (1, A)}, None),
    "in another than we were in before": ({1: A, 2: B}, {1: (1, B)}, "rank 1: call='b'"),
    "further than we are": ({1: A}, {1: (2, B)}, None),
    "in one that we forgot": ({7: A}, {1: (3, B)}, None),
    "nowhere yet": ({1: A}, {}, None),
    "of another version": ({1: A}, {1: "what?"}, None),
}


@pytest.mark.parametrize("where", PLACES)
def test_who_waits_for_long_parts_with_ranks_in_other_calls_and_with_no_others(where: str) -> None:
    texts, places, told = PLACES[where]
    channel = Told(texts, places, over=max(texts) - 1)
    watchdog.look(channel)
    assert [(place.call, place.text) for place in channel.left] == [(max(texts), texts[max(texts)])]
    assert (channel.parted is None) == (told is None)
    assert told is None or told in str(channel.parted)


def test_nobody_is_told_of_a_call_that_is_over_or_has_just_begun() -> None:
    channel = Told({1: A}, {1: (1, B)}, over=1)
    watchdog.look(channel)
    channel.started.append(StartedCall(2, A, threading.Event(), time.monotonic()))
    watchdog.look(channel)
    assert channel.left == []


def test_a_store_that_does_not_answer_is_asked_again_ever_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one does not on a busy machine; each look at one that is gone leaves a thread behind."""
    now, asked, channel = 1000.0, list[float](), Told({1: A}, {1: (1, B)})
    channel.started[0].since = now - 60
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now)
    tell, dog = channel.tell, watchdog.Watchdog(lambda: [channel])

    def late(place: str) -> dict[int, str]:
        asked.append(now - 1000.0)
        if len(asked) < 4:
            raise TimeoutError("no answer")
        return tell(place)

    channel.tell = late  # type: ignore[method-assign]
    for _ in range(30):
        dog._look_at_all()
        now += watchdog.EVERY
        if channel.parted is not None:
            break
    assert asked == [0.0, 1.0, 3.0, 7.0]
    assert channel.parted is not None
    assert not dog._deaf


def test_each_channel_says_once_that_its_call_waits(caplog: pytest.LogCaptureFixture) -> None:
    """Calls of two channels have the same numbers."""
    channels = [Told({1: '{"call": "state_dict"}'}, {}) for _ in range(2)]
    for channel in [*channels, *channels]:
        watchdog.look(channel)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "state_dict waits for other ranks",
        "state_dict waits for other ranks",
    ]


NOTE = {"call": 3, "text": '{"call": "a"}', "error": "OSError: no", "own": True}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
NOTES = st.one_of(
    st.text(),
    JSON.map(json.dumps),
    st.fixed_dictionaries({}, optional={name: JSON | st.just(value) for name, value in NOTE.items()}).map(json.dumps),
    st.fixed_dictionaries({name: st.just(value) for name, value in NOTE.items()}, optional={"x": JSON}).map(json.dumps),
)


@given(NOTES)
def test_a_note_is_read_or_refused_by_a_value_error_and_every_error_can_be_explained(text: str) -> None:
    error = TransportError("closed")
    found = agreement.explain(error, {0: text, 1: json.dumps(NOTE)})
    assert "rank 1 failed with OSError: no" in str(found)
    alone = agreement.explain(error, {0: text})
    try:
        failure = Failure.read(text)
    except ValueError:
        assert "rank 0 left a note that cannot be read: " in str(alone)
    else:
        assert Failure.read(failure.to_text()) == failure


@pytest.mark.parametrize("text", ["[" * 10**6, '{"a":' * 10**5, "9" * 5000, "\ud800", "x" * (agreement.LONGEST + 1)])
def test_notes_that_are_too_much_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="it is"):
        Failure.read(text)


def test_a_note_with_a_field_more_is_read() -> None:
    assert Failure.read(json.dumps({**NOTE, "new": [1]})) == Failure(**NOTE)
