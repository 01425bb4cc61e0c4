"""Calls of a channel: one begins when the one before has sent all it sends, and not earlier."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest

from narrowcast.collectives.channel import BrokenChannelError, Channel
from narrowcast.collectives.exchange import Exchange

SOON, LONG = 0.2, timedelta(seconds=20)


class Alone:
    """A transport of one rank: nothing travels."""

    rank, world, closed = 0, 1, 0

    def __init__(self, shared_by_threads: bool = True) -> None:
        self.shared_by_threads = shared_by_threads

    def share(self, text: str) -> list[str]:
        return [text]

    def close(self) -> None:
        self.closed += 1

    def give_up(self, note: str) -> dict[int, str]:
        return {0: note}


def two_calls(transport: Alone) -> tuple[bool, bool]:
    """Whether the second call began before the first had sent all, and before the first was over."""
    channel, sent, over, begun = Channel(transport), threading.Event(), threading.Event(), threading.Event()
    seen = []

    def first(exchange: Exchange) -> None:
        seen.append(begun.wait(SOON))
        sent.set()
        exchange.all_sent()
        seen.append(begun.wait(SOON if not transport.shared_by_threads else LONG.total_seconds()))
        over.set()

    works = [channel.submit({"call": 1}, first), channel.submit({"call": 2}, lambda _: begun.set())]
    for work in works:
        work.wait(LONG)
    channel.close()
    assert over.is_set()
    return seen[0], seen[1]


def test_the_next_call_begins_when_all_is_sent_and_not_before() -> None:
    assert two_calls(Alone()) == (False, True)


def test_a_transport_for_one_thread_has_one_call_at_a_time() -> None:
    assert two_calls(Alone(shared_by_threads=False)) == (False, False)


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


def test_closing_ends_every_thread() -> None:
    before, channel = threading.active_count(), Channel(Alone())
    for number in range(5):
        channel.submit({"call": number}, lambda exchange: exchange.all_sent()).wait(LONG)
    assert threading.active_count() > before
    channel.close()
    assert threading.active_count() == before


@pytest.mark.parametrize("used", [False, True])
def test_a_call_after_closing_raises(used: bool) -> None:
    channel = Channel(Alone())
    if used:
        channel.submit({"call": 1}, lambda _: None).wait(LONG)
    channel.close()
    with pytest.raises(BrokenChannelError, match="closed"):
        channel.submit({"call": 2}, lambda _: None).wait(LONG)
    channel.close()
