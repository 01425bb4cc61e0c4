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


def job_of(case: Case) -> TrainingJob:
    """What a training needs to know."""
    grid = case.grid
    assert grid is not None
    assert case.seed is not None
    return TrainingJob(
        *(case.id, case.model, case.data, case.wire, case.algorithm, case.seed),
        *(grid.batch, grid.epochs, grid.lr, grid.examples, grid.tests, grid.min_values),
        *(case.layout.workers, case.layout.nodes),
    )


def run_job(job: TrainingJob) -> dict[str, Any]:
    """Train, and say how it went: the result fields of a line."""
    began = time.perf_counter()
    examples = datasets.load(job.data, job.examples, job.tests)
    model = models.build(job.model, examples, job.seed)
    batch = job.batch * job.workers
    steps = max(1, round(job.epochs * (len(examples.x_train) // batch)))
    nodes = job.nodes if job.algorithm == "hierarchical" else None
    run = train(
        model,
        examples,
        workers=World(job.workers, job.algorithm, nodes=nodes, seed=job.seed),
        spec=job.wire,
        min_values=job.min_values,
        steps=steps,
        batch=batch,
        # to zero in a straight line: the last steps then settle, and runs can be compared
        lr=lambda step: job.lr * (1 - step / steps),
        seed=job.seed,
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
    job: TrainingJob | None = None


class TrainingPool:
    """Processes that are started when they are needed; `run` gives results as they come."""

    def __init__(self, processes: int) -> None:
        self._count = processes
        self._workers: list[_Process] = []

    def run(self, jobs: Sequence[TrainingJob], go_on: Callable[[], bool]) -> Iterator[TrainingResult]:
        """Results in the order in which trainings end; no new one begins once `go_on` says no."""
        waiting = deque(jobs)
        try:
            with selectors.DefaultSelector() as selector:
                while True:
                    self._hand_out(waiting, go_on, selector)
                    if not any(worker.job for worker in self._workers):
                        return
                    for key, _ in selector.select():
                        yield from self._result_of(key.data, selector)
        finally:
            self._end()

    def _hand_out(
        self, waiting: deque[TrainingJob], go_on: Callable[[], bool], selector: selectors.BaseSelector
    ) -> None:
        while waiting and go_on():
            free = next((worker for worker in self._workers if worker.job is None), None)
            if free is None:
                if len(self._workers) >= self._count:
                    return
                free = self._start(selector)
            free.job = waiting.popleft()
            assert free.process.stdin is not None
            with suppress(BrokenPipeError):  # it has died, which shows when its result is read
                free.process.stdin.write(f"{free.job.to_json()}\n".encode())
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
        job, worker.job = worker.job, None
        if text:
            yield TrainingResult.from_json(text)
            return
        selector.unregister(worker.process.stdout)
        self._workers.remove(worker)
        code = worker.process.wait()
        if job is not None:
            yield TrainingResult(job.case, error=f"the process that trained it ended with code {code}")

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


def main() -> None:
    end_with_parent()
    torch.set_num_threads(1)
    for text in sys.stdin:
        job = TrainingJob.from_json(text)
        try:
            result = TrainingResult(job.case, run_job(job))
        except Exception as error:  # noqa: BLE001  whatever it is, it belongs to this case alone
            result = TrainingResult(job.case, error=f"{type(error).__name__}: {error}".replace("\n", " "))
        sys.stdout.write(result.to_json() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
