"""What fails on one rank the others hear of: they would wait for it otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from narrowcast.collectives.runtime.channel import Channel


@contextmanager
def telling(*channels: Channel | None) -> Iterator[None]:
    """Whoever waits for this rank in one of the channels raises at once, too, and names what was raised in here."""
    try:
        yield
    except Exception as error:
        for channel in channels:
            if channel is not None:
                channel.fail(error)
        raise
