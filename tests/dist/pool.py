"""Real processes for the tests: eight workers that stay, and short-lived ones for whatever kills them.

Workers are forked from a server that has imported torch once and nothing else, so a process costs some 50 ms. A test
sends a function of its own file and gets back what each rank returned, or what it raised.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from narrowcast.parallel import probe, seeds
from narrowcast.parallel.autopilot import pilot

WORLDS = (1, 2, 3, 4, 7, 8)
LARGEST = max(WORLDS)
GROUP_TIMEOUT = 20.0
ROOT = str(Path(__file__).parents[2])
"""pytest calls the files here tests.dist.test_x; a function is sent by that name."""

_context = multiprocessing.get_context("forkserver")
# DDP imports torch._dynamo, which takes seconds
_context.set_forkserver_preload(
    [
        "torch",
        "torch.distributed.tensor.parallel",
        "torch.distributed.pipelining",
        "torch._dynamo",
        "narrowcast.parallel",
        "narrowcast.simulate",
        "pytest",
    ]
)


@dataclass(frozen=True)
class Outcome:
    """What became of a function on one rank."""

    value: Any = None
    error: str = ""
    """The type and the text of what was raised."""
    traceback: str = ""
    seconds: float = 0.0

    @property
    def raised(self) -> str:
        """The name of the exception's type; empty where there was none."""
        return self.error.partition(":")[0]


class WorkerError(AssertionError):
    """A function failed in a worker."""


def _tensor(content: bytearray, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return torch.frombuffer(content, dtype=dtype).view(shape) if content else torch.empty(shape, dtype=dtype)


class _Pickler(pickle.Pickler):
    """Tensors by value: torch would make a shared file of each, which costs more than most of what is tested."""

    def reducer_override(self, x: Any) -> Any:
        if type(x) is not torch.Tensor or x.requires_grad or not x.is_contiguous() or x.device.type != "cpu":
            return NotImplemented
        content = x.reshape(-1).view(torch.uint8).numpy().tobytes()
        return _tensor, (bytearray(content), x.dtype, x.shape)


def _send(pipe: Connection, message: Any) -> None:
    made = io.BytesIO()
    _Pickler(made).dump(message)
    pipe.send_bytes(made.getbuffer())


def _attempt(function: Callable[..., Any], *args: Any) -> Outcome:
    began = time.monotonic()
    faulthandler.dump_traceback_later(GROUP_TIMEOUT + 20)
    try:
        value = function(*args)
    except BaseException as error:  # noqa: BLE001  the test looks at it
        text = f"{type(error).__name__}: {error}"
        return Outcome(error=text, traceback=traceback.format_exc(), seconds=time.monotonic() - began)
    finally:
        faulthandler.cancel_dump_traceback_later()
    return Outcome(value, seconds=time.monotonic() - began)


def _join(rank: int, world: int, port: int, timeout: float) -> None:
    sys.path.append(ROOT)
    # attach measures the link with 16 MB a codec: here a token of that will do
    probe.SMALL_VALUES, probe.LARGE_VALUES, probe.ROUNDS = 1 << 8, 1 << 8, 1
    pilot.LEAST = pilot.LARGEST = 1 << 13
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world, is_master=False, timeout=timedelta(seconds=60))
    store.set(f"here/{rank}", "")  # a busy machine may start one seconds after another, which no timeout below counts
    store.wait([f"here/{peer}" for peer in range(world)], timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout))


def _serve(rank: int, port: int, pipe: Connection) -> None:
    """A worker of the pool: run what comes, send back what came out."""
    _join(rank, LARGEST, port, GROUP_TIMEOUT)
    groups = {w: dist.new_group(range(w)) if w < LARGEST else dist.group.WORLD for w in WORLDS}
    _send(pipe, "ready")
    while (task := pipe.recv()) is not None:
        function, world, args = task
        seeds._COUNTS.clear()  # what a test sends is a run by itself, whatever this process did before
        _send(pipe, _attempt(function, groups[world], *args))
    groups.clear()
    dist.destroy_process_group()
    os._exit(0)


def _run_once(rank: int, world: int, port: int, timeout: float, pipe: Connection, task: tuple[Any, Any]) -> None:
    """A short-lived process: run one function in a group of its own, then shut down, and say when that was done."""
    _join(rank, world, port, timeout)
    function, args = task
    _send(pipe, _attempt(function, dist.group.WORLD, *args))
    began = time.monotonic()
    dist.destroy_process_group()
    _send(pipe, time.monotonic() - began)


def soon(true: Callable[[], bool], seconds: float = 30.0) -> bool:
    """Whether something becomes true. What is over may not be gone yet: a thread may be in the last lines of a call."""
    until = time.monotonic() + seconds
    while not true():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def _host(pipe: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    _send(pipe, store.port)
    pipe.poll(None)


class _Server:
    """The store of a group, in a process of its own: it outlives any rank, and its files are not the test's."""

    def __init__(self) -> None:
        self._pipe, theirs = _context.Pipe()
        self._process = _context.Process(target=_host, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self.port = _received(self._pipe, time.monotonic() + 100)  # the first one imports torch

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
        self._pipe.close()


def _received(pipe: Connection, until: float) -> Any:
    """The next message; None where the other side is gone."""
    if not pipe.poll(max(until - time.monotonic(), 0.0)):
        raise TimeoutError("a worker did not answer in time")
    try:
        return pipe.recv()
    except (EOFError, ConnectionResetError):
        return None


class Pool:
    """Eight workers; a function may run on the first W of them, in a group of exactly those."""

    def __init__(self) -> None:
        self._server = _Server()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(LARGEST):
            ours, theirs = _context.Pipe()
            process = _context.Process(target=_serve, args=(rank, self._server.port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        until = time.monotonic() + 100
        assert [_received(pipe, until) for pipe in self._pipes] == ["ready"] * LARGEST
        self.usable = True

    def outcomes(self, world: int, function: Callable[..., Any], *args: Any, timeout: float = 100.0) -> list[Outcome]:
        """Run `function(group, *args)` on the first `world` ranks; what became of it on each."""
        self.usable, until = False, time.monotonic() + timeout
        for pipe in self._pipes[:world]:
            _send(pipe, (function, world, args))
        found = [_received(pipe, until) for pipe in self._pipes[:world]]
        assert None not in found, f"ranks {[r for r, o in enumerate(found) if o is None]} died"
        self.usable = True
        return found

    def run(self, world: int, function: Callable[..., Any], *args: Any, timeout: float = 100.0) -> list[Any]:
        """What each rank returned; raises where one raised, and the workers are then not used again."""
        found = self.outcomes(world, function, *args, timeout=timeout)
        failed = [(rank, outcome) for rank, outcome in enumerate(found) if outcome.error]
        if failed:
            self.usable = False
            raise WorkerError("\n".join(f"rank {rank}: {outcome.traceback}" for rank, outcome in failed[:2]))
        return [outcome.value for outcome in found]

    def close(self) -> None:
        if self.usable:
            for pipe in self._pipes:
                with contextlib.suppress(OSError):
                    _send(pipe, None)
        for process in self._processes:
            process.join(5 if self.usable else 0)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()
        self._server.close()
        self.usable = False


class Crew:
    """Short-lived processes that run one function each; the test may do to them what it likes."""

    def __init__(self, world: int, function: Callable[..., Any], *args: Any, timeout: float = 20.0) -> None:
        self._server = _Server()
        self._pipes, self.processes = [], []
        for rank in range(world):
            ours, theirs = _context.Pipe()
            arguments = (rank, world, self._server.port, timeout, theirs, (function, args))
            process = _context.Process(target=_run_once, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.processes[rank].pid, number)

    def outcome(self, rank: int, within: float = 100.0) -> Outcome | None:
        """What became of the function on a rank; None where the process died first."""
        return _received(self._pipes[rank], time.monotonic() + within)

    def shut_down(self, rank: int, within: float = 60.0) -> tuple[float, int | None]:
        """How long destroy_process_group took on a rank, and the process's exit code."""
        took = _received(self._pipes[rank], time.monotonic() + within)
        self.processes[rank].join(within)
        return took, self.processes[rank].exitcode

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for process, pipe in zip(self.processes, self._pipes, strict=True):
            if process.is_alive():
                process.kill()
            process.join()
            process.close()
            pipe.close()
        self._server.close()


@contextlib.contextmanager
def made_once() -> Iterator[Callable[[], Pool]]:
    """Hands out the pool, and a new one after a failure, since ranks may then be out of step."""
    held: list[Pool] = []

    def current() -> Pool:
        if held and not held[-1].usable:
            held.pop().close()
        if not held:
            held.append(Pool())
        return held[-1]

    yield current
    for pool in held:
        pool.close()
