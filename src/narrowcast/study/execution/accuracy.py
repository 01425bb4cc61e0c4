"""The trainings of a study, in the simulator: as many workers as on the cluster, and the same bits.

A pool of processes trains one case after the other; one that dies takes its case with it, and no other. A process of
it: python -m narrowcast.study.execution.accuracy, a job in and a result out, a line each.
"""

from __future__ import annotations

import os
import selectors
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from narrowcast.simulate import Record, Run, World, train
from narrowcast.study import datasets, models
from narrowcast.study.cases import Case
from narrowcast.study.execution.worker import PARENT, end_with_parent
from narrowcast.study.jobs import TrainingJob, TrainingResult
from narrowcast.study.spec_bits import compressed_share

PROCESS = [sys.executable, "-m", "narrowcast.study.execution.accuracy"]
END_SECONDS = 5.0
LOOKS = 4
"""How often in a training the error of each layer is measured."""


def run_job(case: Case) -> dict[str, Any]:
    """Train, and say how it went: the result fields of a line."""
    began, how, seed, workers = time.perf_counter(), case.how, case.seed or 0, case.layout.workers
    examples = datasets.load(case.data, how.examples, how.tests)
    model = models.build(case.model, examples, seed)
    batch = how.batch * workers
    steps = max(1, round(how.epochs * (len(examples.x_train) // batch)))
    nodes = case.layout.nodes if case.algorithm == "hierarchical" else None
    run = train(
        model,
        examples,
        workers=World(workers, case.algorithm, nodes=nodes, seed=seed),
        spec=case.wire,
        min_values=case.min_values,
        steps=steps,
        batch=batch,
        # to zero in a straight line: the last steps then settle, and runs can be compared
        lr=lambda step: how.lr * (1 - step / steps),
        seed=seed,
        error_every=max(1, steps // LOOKS),
    )
    return {**_facts(run, examples.positions), "seconds": time.perf_counter() - began}


def _facts(run: Run, positions: int) -> dict[str, Any]:
    curve = [
        {"epoch": record["epoch"], "accuracy": 100 * record["accuracy"] / positions, "loss": record["loss"]}
        for record in run.history
    ]
    return {
        "accuracy": curve[-1]["accuracy"],
        "loss": curve[-1]["loss"],
        "epochs": run.epoch,
        "steps_per_epoch": run.batches.steps_per_epoch,
        "curve": curve,
        "layers": _layers(run),
        "compressed": compressed_share(run.exchange.rows()),
    }


def _layers(run: Run) -> list[dict[str, Any]]:
    """The mean over the looks, of every layer that lost something."""
    values = {row.name: row.numel for row in run.exchange.rows()}
    looks: dict[str, list[Record]] = {}
    for record in run.log.of_kind("error"):
        if record["relative_error"]:
            looks.setdefault(record["name"], []).append(record)
    return [{"name": name, "values": values[name], **_mean(records)} for name, records in looks.items()]


def _mean(looks: list[Record]) -> dict[str, float | None]:
    keys = ("bias", "snr_db", "flushed", "saturated")
    known = {key: [look[key] for look in looks if look[key] is not None] for key in keys}
    return {key: statistics.fmean(values) if values else None for key, values in known.items()}


@dataclass(eq=False)
class _Process:
    """A process, and the training that it is at."""

    process: subprocess.Popen[bytes]
    case: Case | None = None


class TrainingPool:
    """Processes that are started when they are needed; `run` gives results as they come."""

    def __init__(self, processes: int) -> None:
        self._count = processes
        self._workers: list[_Process] = []

    def run(self, cases: Sequence[Case], go_on: Callable[[], bool]) -> Iterator[TrainingResult]:
        """Results in the order in which trainings end; no new one begins once `go_on` says no."""
        waiting = deque(cases)
        try:
            with selectors.DefaultSelector() as selector:
                while True:
                    self._hand_out(waiting, go_on, selector)
                    if not any(worker.case for worker in self._workers):
                        return
                    for key, _ in selector.select():
                        yield from self._result_of(key.data, selector)
        finally:
            self._end()

    def _hand_out(self, waiting: deque[Case], go_on: Callable[[], bool], selector: selectors.BaseSelector) -> None:
        while waiting and go_on():
            free = next((worker for worker in self._workers if worker.case is None), None)
            if free is None:
                if len(self._workers) >= self._count:
                    return
                free = self._start(selector)
            free.case = waiting.popleft()
            assert free.process.stdin is not None
            with suppress(BrokenPipeError):  # it has died, which shows when its result is read
                free.process.stdin.write(f"{TrainingJob(free.case).to_json()}\n".encode())
                free.process.stdin.flush()

    def _start(self, selector: selectors.BaseSelector) -> _Process:
        env = {**os.environ, PARENT: str(os.getpid()), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(PROCESS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        worker = _Process(process)
        selector.register(process.stdout, selectors.EVENT_READ, worker)  # type: ignore[arg-type]
        self._workers.append(worker)
        return worker

    def _result_of(self, worker: _Process, selector: selectors.BaseSelector) -> Iterator[TrainingResult]:
        assert worker.process.stdout is not None
        text = worker.process.stdout.readline()
        case, worker.case = worker.case, None
        if text:
            yield TrainingResult.from_json(text)
            return
        selector.unregister(worker.process.stdout)
        self._workers.remove(worker)
        code = worker.process.wait()
        if case is not None:
            yield TrainingResult(case.id, error=f"the process that trained it ended with code {code}")

    def _end(self) -> None:
        for worker in self._workers:
            worker.process.kill() if worker.case else None
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


def main() -> None:
    end_with_parent()
    torch.set_num_threads(1)
    for text in sys.stdin:
        case = TrainingJob.from_json(text).case
        try:
            result = TrainingResult(case.id, run_job(case))
        except Exception as error:  # noqa: BLE001  whatever it is, it belongs to this case alone
            result = TrainingResult(case.id, error=f"{type(error).__name__}: {error}".replace("\n", " "))
        sys.stdout.write(result.to_json() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
