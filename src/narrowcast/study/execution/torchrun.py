"""A study on machines that torchrun has processes on already: each starts the ranks of one job after the other.

Rank 0's process runs the study and says what is next, through the store that torchrun brings along. Measuring happens
in a process of its own for each rank and job, as with the other launchers: a rank which fails, or leaves the others
waiting, costs its job and no more.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from narrowcast.lab import Job
from narrowcast.study.cases import Case, Place
from narrowcast.study.execution import launch
from narrowcast.study.execution.launch import GRACE, Launcher, LaunchError, Processes
from narrowcast.study.execution.worker import PARENT, Tell
from narrowcast.study.jobs import RankJob, TorchrunJob

Store = Any
"""torch.distributed's, which mypy does not see."""
LONG = timedelta(days=365)
"""Processes wait for rank 0's word as long as it takes; when one dies, torchrun ends all."""
LOOK_SECONDS = 0.5
POLL_SECONDS = 0.1
HURRIED = 1.0
JOB, FAILED, ENDED = "job {}", "job {} has failed", "job {}, rank {}"
LEFT = "rank {} has left"
"""Keys of the store."""
NO_MORE = "no more jobs"
GAVE_UP = "gave up: another rank has failed"
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""Where it is set a rank takes MASTER_PORT for a store that is there; the ranks of a job have one of their own."""


def rank() -> int:
    return int(os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))


def world() -> int:
    return int(os.environ["WORLD_SIZE"])


def join() -> Store:
    """The store that all processes share; every rank."""
    if "WORLD_SIZE" not in os.environ or "MASTER_ADDR" not in os.environ:
        raise ValueError(
            "launcher torchrun: the environment has no ranks; run torchrun --nproc-per-node N --no-python "
            "narrowcast study run FILE --launcher torchrun, or let --sbatch write the script"
        )
    os.environ.setdefault("RANK", str(rank()))
    store, *_ = next(dist.rendezvous("env://", timeout=LONG))  # type: ignore[attr-defined]
    return dist.PrefixStore("narrowcast study", store)  # type: ignore[attr-defined]


class TorchrunLauncher(Launcher):
    """Rank 0's side."""

    name = "torchrun"
    waits = True

    def __init__(self) -> None:
        self._store = join()
        self._local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._jobs = 0
        self._ended = False

    def fits(self, case: Case) -> bool:
        if case.layout.workers != world() or case.layout.per_host not in (1, self._local):
            return False
        # MPI needs ranks that mpirun has started, NCCL a GPU
        started = case.transport != "mpi" or "OMPI_COMM_WORLD_RANK" in os.environ
        return started and (case.transport != "nccl" or torch.cuda.is_available())

    def run(self, place: Place, job: RankJob, tell: Tell) -> None:
        shared = TorchrunJob(job, launch.free_port())
        self._say(shared.to_json())
        _take_part(self._store, self._jobs, shared, tell)
        endings = [_wait_for(self._store, ENDED.format(self._jobs, each)).decode() for each in range(world())]
        if errors := [text for text in endings if text]:
            raise LaunchError(launch.first_cause(errors))

    def end(self) -> None:
        """Let the other processes go. They hear it while our store is there, which may end with us."""
        if not self._ended:
            self._ended = True
            # who stops us, or has ended another process, does not wait long for us either
            seconds = HURRIED if sys.exc_info()[0] is not None else 2 * GRACE
            with suppress(dist.DistError):  # somebody is gone already
                self._say(NO_MORE)
                self._store.wait([LEFT.format(each) for each in range(1, world())], timedelta(seconds=seconds))

    def _say(self, text: str) -> None:
        self._jobs += 1
        self._store.set(JOB.format(self._jobs), text)


def follow() -> None:
    """The other processes: one job after the other, until there is none."""
    store, number = join(), 1
    try:
        while (text := _wait_for(store, JOB.format(number)).decode()) != NO_MORE:
            _take_part(store, number, TorchrunJob.from_json(text), lambda message: None)
            number += 1
    finally:
        with suppress(dist.DistError):  # the store may be gone
            store.set(LEFT.format(rank()), "")


def _wait_for(store: Store, key: str) -> bytes:
    """What is said under a key, as soon as it is. To wait in the store itself would be to hear no signal."""
    while not store.check([key]):
        time.sleep(POLL_SECONDS)
    said: bytes = store.get(key)
    return said


def _take_part(store: Store, number: int, shared: TorchrunJob, tell: Tell) -> None:
    """This rank of a job, from beginning to end; all processes are told how it went."""
    error, watch = "", _FailureWatch(store, number)
    with launch.job_file(shared.job) as file, Processes() as processes:
        env = {name: value for name, value in os.environ.items() if name != AGENT_STORE}
        env |= {"MASTER_PORT": str(shared.port), PARENT: str(os.getpid())}
        processes.add(rank(), [*launch.WORKER, str(file)], env)
        try:
            launch.listen(lambda output: watch.over(processes.job(output, LONG.total_seconds())), tell)
        except LaunchError as failure:
            error = GAVE_UP if watch.gave_up else str(failure)
            store.set(FAILED.format(number), error)
        finally:
            watch.end()
    store.set(ENDED.format(number, rank()), error)


class _FailureWatch:
    """Ends this rank of a job when another one has failed: it may wait for that forever."""

    def __init__(self, store: Store, number: int) -> None:
        self.gave_up = False
        self._store, self._number = store, number
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def over(self, job: Job) -> Job:
        self._thread = threading.Thread(target=self._look, args=(job,), daemon=True)
        self._thread.start()
        return job

    def end(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _look(self, job: Job) -> None:
        while not self._over.wait(LOOK_SECONDS):
            if self._store.check([FAILED.format(self._number)]):
                # who was told by the lost connection has something to say about it
                self.gave_up = not self._over.wait(GRACE)
                if self.gave_up:
                    job.kill()
                return
