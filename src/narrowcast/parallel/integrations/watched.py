"""What can be watched: a handle of `attach`, a `LocalSGD`, a `HookState`."""

from __future__ import annotations

from typing import Protocol

from narrowcast.parallel.timeline import Event


class Watched(Protocol):
    """Counters since the beginning, and the last calls."""

    def stats(self) -> dict[str, float]: ...
    def events(self) -> list[Event]: ...
