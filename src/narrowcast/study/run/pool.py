"""Processes that train one case after the other. A process that dies takes its case with it, and no other."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from narrowcast.study.run.worker import PARENT

TRAINER = [sys.executable, "-m", "narrowcast.study.run.accuracy"]
END_SECONDS = 5.0
Job = dict[str, Any]
Found = dict[str, Any]


@dataclass(eq=False)
class _Worker:
    process: subprocess.Popen[bytes]
    job: Job | None = None


class Pool:
    """Started when they are needed; `run` gives what they find as it comes."""

    def __init__(self, processes: int) -> None:
        self._count = processes
        self._workers: list[_Worker] = []

    def run(self, jobs: Sequence[Job], go_on: Callable[[], bool]) -> Iterator[Found]:
        """Results in the order in which trainings end; no new one begins once `go_on` says no."""
        waiting = deque(jobs)
        try:
            with selectors.DefaultSelector() as selector:
                while True:
                    self._hand_out(waiting, go_on, selector)
                    if not any(worker.job for worker in self._workers):
                        return
                    for key, _ in selector.select():
                        yield from self._hear(key.data, selector)
        finally:
            self._end()

    def _hand_out(self, waiting: deque[Job], go_on: Callable[[], bool], selector: selectors.BaseSelector) -> None:
        while waiting and go_on():
            free = next((worker for worker in self._workers if worker.job is None), None)
            if free is None:
                if len(self._workers) >= self._count:
                    return
                free = self._start(selector)
            free.job = waiting.popleft()
            assert free.process.stdin is not None
            with suppress(BrokenPipeError):  # it has died, which shows when its answer is read
                free.process.stdin.write(json.dumps(free.job).encode() + b"\n")
                free.process.stdin.flush()

    def _start(self, selector: selectors.BaseSelector) -> _Worker:
        env = {**os.environ, PARENT: str(os.getpid()), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(TRAINER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        worker = _Worker(process)
        selector.register(process.stdout, selectors.EVENT_READ, worker)  # type: ignore[arg-type]
        self._workers.append(worker)
        return worker

    def _hear(self, worker: _Worker, selector: selectors.BaseSelector) -> Iterator[Found]:
        assert worker.process.stdout is not None
        text = worker.process.stdout.readline()
        job, worker.job = worker.job, None
        if text:
            yield json.loads(text)
            return
        selector.unregister(worker.process.stdout)
        self._workers.remove(worker)
        code = worker.process.wait()
        if job is not None:
            yield {"case": job["case"], "error": f"the process that trained it ended with code {code}"}

    def _end(self) -> None:
        for worker in self._workers:
            worker.process.kill() if worker.job else None
            assert worker.process.stdin is not None
            worker.process.stdin.close()
        for worker in self._workers:
            try:
                worker.process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
            assert worker.process.stdout is not None
            worker.process.stdout.close()
        self._workers = []
