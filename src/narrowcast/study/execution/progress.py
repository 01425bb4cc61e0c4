"""How far a study is: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from narrowcast.study.cases import Case

LINE_SECONDS = 5.0
"""Plain lines come at most this often, failures apart."""


def kind_of(case: Case) -> str:
    return "predicted" if case.source == "predicted" else case.kind


def clock_time(seconds: float) -> str:
    """`75` -> "1:15"."""
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


class Tally:
    """What is done, what is left, and how long that will take, kind by kind."""

    def __init__(self, cases: Sequence[Case], done: set[str]) -> None:
        self.total = Counter(kind_of(case) for case in cases)
        self.done = Counter(kind_of(case) for case in cases if case.id in done)
        self.failed: Counter[str] = Counter()
        self._began = time.monotonic()
        self._new: Counter[str] = Counter()
        self._spent: Counter[str] = Counter()
        self._since = self._began

    def count(self, case: Case, status: str) -> None:
        kind, now = kind_of(case), time.monotonic()
        self._new[kind] += 1
        self._spent[kind] += now - self._since  # type: ignore[assignment]
        self._since = now
        (self.done if status == "done" else self.failed)[kind] += 1

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._began

    def left(self, kind: str) -> int:
        return self.total[kind] - self.done[kind] - self.failed[kind]

    def eta(self, kind: str) -> float | None:
        """Seconds, at the pace so far; None where nothing of this kind has been seen."""
        if not self.left(kind):
            return 0.0
        return self.left(kind) * self._spent[kind] / self._new[kind] if self._new[kind] else None

    def whole_eta(self) -> str:
        each = [self.eta(kind) for kind in self.total]
        known = sum(seconds for seconds in each if seconds is not None)
        if None not in each:
            return clock_time(known)
        return f"more than {clock_time(known)}" if round(known) else "nobody knows how long"

    def line(self) -> str:
        parts = [f"{kind} {self.done[kind]}/{self.total[kind]}" for kind in self.total]
        failed = f", {sum(self.failed.values())} failed" if self.failed else ""
        return f"{', '.join(parts)}{failed}; {clock_time(self.elapsed)} so far, {self.whole_eta()} to go"


class Progress:
    """Shows a tally; a context manager."""

    def __init__(self, name: str, cases: Sequence[Case], done: set[str], quiet: bool = False) -> None:
        self.name, self.tally, self._quiet = name, Tally(cases, done), quiet
        self._live: Any = None
        self._now, self._last = "", 0.0

    def __enter__(self) -> Progress:
        if not self._quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=True), get_renderable=self._table, refresh_per_second=2)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def doing(self, what: str) -> None:
        """What runs now."""
        self._now = what
        if self._live is None:
            self._say(f"{self.name}: {what}; {self.tally.line()}", soon=True)

    def ended(self, case: Case, status: str, error: str = "") -> None:
        self.tally.count(case, status)
        if status == "failed":
            self.note(f"failed: {case.id}: {error}")
        elif self._live is None:
            self._say(f"{self.name}: {self.tally.line()}", soon=False)

    def note(self, text: str) -> None:
        """Something that stays on the screen."""
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            self._say(f"{self.name}: {text}", soon=True)

    def _say(self, text: str, soon: bool) -> None:
        now = time.monotonic()
        if self._quiet or not (soon or now - self._last >= LINE_SECONDS):
            return
        self._last = now
        sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def _table(self) -> Any:
        from rich import box
        from rich.table import Table

        tally = self.tally
        table = Table(title=f"study {self.name}", title_justify="left", box=box.SIMPLE, caption_justify="left")
        for column in ("cases", "done", "failed", "of", "to go"):
            table.add_column(column, justify="left" if column == "cases" else "right")
        for kind in tally.total:
            eta = tally.eta(kind)
            counts = (tally.done[kind], tally.failed[kind], tally.total[kind])
            table.add_row(kind, *map(str, counts), "?" if eta is None else clock_time(eta))
        table.caption = f"{self._now}\n{clock_time(tally.elapsed)} so far, {tally.whole_eta()} to go"
        return table
