"""A running command: one process a rank, its output line by line, and how it ended."""

from __future__ import annotations

import json
import os
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from narrowcast.lab.connection import LabError

# After SIGTERM a rank has this long until SIGKILL; after the last exit code, output has as long to come in.
TERM_SECONDS = 2.0
TIMED_OUT = 124


class Line(NamedTuple):
    """A line that a rank wrote. `rank` is None for the launcher's own words."""

    host: int
    rank: int | None
    stream: str
    text: str

    def __str__(self) -> str:
        who = "mpirun" if self.rank is None else f"host {self.host} rank {self.rank}"
        return f"[{who}] {self.text}"


Output = Callable[[Line], None]


def show(line: Line) -> None:
    """Write a line with its prefix to our own stdout or stderr, at once."""
    to = sys.stdout if line.stream == "stdout" else sys.stderr
    to.write(f"{line}\n")
    to.flush()


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    codes: tuple[int, ...]
    """Exit code of each rank; -9 means: by signal 9."""
    failed: tuple[int, ...]
    """Ranks that ended with another code than 0 by themselves, or by `Lab.kill`, in the order in which they did."""
    ended: tuple[int, ...]
    """Ranks that the lab ended, since another failed or time was up."""
    timed_out: bool
    seconds: float
    lines: tuple[Line, ...] = ()
    """The output, where it was captured."""
    launcher: int = 0
    """Exit code of mpirun, where it started the ranks."""

    @property
    def ok(self) -> bool:
        return not any(self.codes) and not self.launcher and not self.timed_out

    @property
    def code(self) -> int:
        """One exit code, as a shell would give it: that of the rank that failed first."""
        if self.failed:
            first = self.codes[self.failed[0]]
            return first if first > 0 else 128 - first
        return TIMED_OUT if self.timed_out else self.launcher or int(not self.ok)

    def text(self, rank: int | None = None) -> str:
        """The captured output of a rank, or of all."""
        return "\n".join(line.text for line in self.lines if rank is None or line.rank == rank)

    def json_lines(self) -> list[Any]:
        """What rank 0 printed as JSON objects and lists, a line each."""
        printed = [line.text for line in self.lines if line.rank == 0 and line.stream == "stdout"]
        return [json.loads(text) for text in printed if text.startswith(("{", "["))]

    def summary(self) -> str:
        """How it ended, in a line."""
        if self.ok:
            return f"every rank ended with 0 after {self.seconds:.1f} s"
        failed = ", ".join(f"rank {rank} with {self.codes[rank]}" for rank in self.failed)
        failed = failed or (f"mpirun with {self.launcher}" if self.launcher else "no rank")
        late = " when time was up" if self.timed_out else ""
        return f"failed: {failed}; made to end{late}: {', '.join(map(str, self.ended)) or 'none'}"

    def check(self) -> Result:
        """Itself if every rank ended with 0; otherwise raise, naming who failed."""
        if self.ok:
            return self
        raise LabError("\n".join([self.summary(), *map(str, self.lines[-40:])]))


@dataclass(eq=False)
class Process:
    """A process of a job, with the reading ends of its pipes: output, errors, exit code. mpirun's ranks have no pid."""

    host: int
    rank: int | None
    pid: int | None
    pipes: list[int]
    code: int | None = None

    @property
    def streams(self) -> dict[int, str]:
        return dict(zip(self.pipes, ("stdout", "stderr", "status"), strict=True))

    def close(self) -> None:
        for fd in self.pipes:
            os.close(fd)


@dataclass(frozen=True)
class Policy:
    """When a job's ranks are ended."""

    timeout: float | None = None
    grace: float = 5.0
    keep: bool = False
    """A failed rank does not end the others."""

    def __post_init__(self) -> None:
        if self.timeout is not None and not self.timeout > 0:
            raise ValueError(f"timeout: got {self.timeout}; give seconds, more than 0, or none")
        if not self.grace >= 0:
            raise ValueError(f"grace: got {self.grace}; give seconds, 0 or more")


class Job:
    """A command under way. A thread passes its output on and ends it when its policy says so."""

    def __init__(
        self,
        processes: list[Process],
        send: Callable[[int, int], None],
        sweep: Callable[[], str | None],
        policy: Policy,
        output: Output | None,
    ) -> None:
        self.processes = processes
        self._started = [process for process in processes if process.pid is not None]
        self._sweep = sweep
        self._captured: list[Line] = []
        self._send, self._policy, self._output = send, policy, output or self._captured.append
        self._began = time.monotonic()
        self._failed: list[Process] = []
        self._ended: list[Process] = []
        self._timed_out = False
        self._end_at = None if policy.timeout is None else self._began + policy.timeout
        self._kill_at: float | None = None
        self._partial: dict[int, bytes] = {}
        self._result: Result | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._pump, name="narrowcast-lab-job", daemon=True)
        self._thread.start()

    # -- for the caller

    @property
    def running(self) -> bool:
        return self._result is None

    def wait(self, timeout: float | None = None) -> Result:
        """Wait for every rank. Ctrl-C is passed on to the ranks, which have the grace period to end."""
        try:
            self._thread.join(timeout)
        except KeyboardInterrupt:
            self.signal(signal.SIGINT)
            self._end_at = time.monotonic() + self._policy.grace
            self._thread.join(self._policy.grace + 2 * TERM_SECONDS)
            raise
        if self._error is not None:
            raise self._error
        if self._result is None:
            raise TimeoutError(f"the command still runs after {timeout} s of waiting; wait longer, or kill() it")
        return self._result

    def join(self) -> None:
        """Wait for the thread: the lab is going down, and the ranks with it."""
        self._thread.join(2 * TERM_SECONDS)

    def signal(self, number: int, rank: int | None = None) -> None:
        """Send a signal to a rank, or to all, and to what they started."""
        if rank is not None and rank not in [process.rank for process in self._started]:
            raise ValueError(f"rank: got {rank}; it is none, or mpirun started it: then use Lab.kill(host)")
        for process in self._alive():
            if process.pid is not None and rank in (None, process.rank):
                with suppress(LabError):  # the lab was closed: nobody is left
                    self._send(process.pid, number)

    def kill(self, rank: int | None = None) -> None:
        """SIGKILL to a rank, or to all."""
        self.signal(signal.SIGKILL, rank)

    # -- the thread

    def _pump(self) -> None:
        with selectors.DefaultSelector() as selector:
            for process in self.processes:
                for fd, stream in process.streams.items():
                    selector.register(fd, selectors.EVENT_READ, (process, stream))
            try:
                self._read_all(selector)
            except Exception as error:  # noqa: BLE001  the caller's output function may raise anything: wait() passes it on
                self._error = error
                self._sweep()
            for key in list(selector.get_map().values()):
                os.close(key.fd)
        self._result = self._summary()

    def _read_all(self, selector: selectors.BaseSelector) -> None:
        last_words: float | None = None
        while selector.get_map():
            for key, _ in selector.select(0.1):
                process, stream = key.data
                if not self._read(key.fd, process, stream):
                    selector.unregister(key.fd)
                    os.close(key.fd)
            now = time.monotonic()
            self._keep_time(now)
            if not self._alive():
                last_words = last_words or now + TERM_SECONDS
                if now > last_words:
                    return  # something else holds the output open

    def _read(self, fd: int, process: Process, stream: str) -> bool:
        data = os.read(fd, 1 << 16)
        if stream == "status":
            return self._read_status(process, data)
        *lines, rest = (self._partial.pop(fd, b"") + data).split(b"\n")
        if not data and rest:
            lines, rest = [rest], b""
        if rest:
            self._partial[fd] = rest
        for line in lines:
            self._output(Line(process.host, process.rank, stream, line.decode(errors="replace").rstrip("\r")))
        return bool(data)

    def _read_status(self, process: Process, data: bytes) -> bool:
        if process.code is None:
            # a rank without a code: mpirun ended it, or never started it; or it went down with the lab
            self._note(process, int(data) if data else self._launcher_code() or -signal.SIGKILL)
        return bool(data)

    def _launcher_code(self) -> int:
        return next((process.code or 0 for process in self.processes if process.rank is None), 0)

    def _note(self, process: Process, code: int) -> None:
        process.code = code
        if all(other.code is not None for other in self._started) and (broken := self._sweep()):
            self._error = LabError(broken)
        if code and process.rank is not None and process not in self._ended:
            self._failed.append(process)
            if not self._policy.keep and self._kill_at is None:
                soon = time.monotonic() + self._policy.grace
                self._end_at = soon if self._end_at is None else min(soon, self._end_at)

    def _keep_time(self, now: float) -> None:
        if self._kill_at is not None and now >= self._kill_at:
            self.kill()
            self._kill_at = now + TERM_SECONDS
        elif self._kill_at is None and self._end_at is not None and now >= self._end_at and self._alive():
            self._timed_out = self._policy.timeout is not None and now >= self._began + self._policy.timeout
            self._ended = self._alive()
            self._kill_at = now + TERM_SECONDS
            self.signal(signal.SIGTERM)

    def _alive(self) -> list[Process]:
        return [process for process in self.processes if process.code is None]

    def _summary(self) -> Result:
        ranks = [process for process in self.processes if process.rank is not None]
        return Result(
            codes=tuple(-signal.SIGKILL if process.code is None else process.code for process in ranks),
            failed=tuple(process.rank for process in self._failed if process.rank is not None),
            ended=tuple(process.rank for process in self._ended if process.rank is not None),
            timed_out=self._timed_out,
            seconds=time.monotonic() - self._began,
            lines=tuple(self._captured),
            launcher=self._launcher_code(),
        )
