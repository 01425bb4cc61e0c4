"""Starting the ranks of a study: hosts of a lab, processes on this machine, or mpirun; and hearing what they say."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from narrowcast import lab as labs
from narrowcast.bench import ranks
from narrowcast.lab import Job, Lab, LabError, Line, Process, Result, check_machine, syscalls
from narrowcast.study.cases import Case, Place
from narrowcast.study.execution.worker import MARK, PARENT, Tell
from narrowcast.study.file import UNLIMITED
from narrowcast.study.jobs import RankFailed, RankJob, RankMessage

WORKER = [sys.executable, "-m", "narrowcast.study.execution.worker"]
LAUNCHERS = ("auto", "lab", "local", "torchrun")
GRACE = 5.0
LONGEST = 3600.0
"""Seconds after which ranks that still run are ended."""
Output = Callable[[Line], None]


class LaunchError(RuntimeError):
    """Ranks failed: says why, in a line."""


class Launcher:
    """Starts ranks for a job and passes on what rank 0 tells, as it comes; LaunchError where a rank failed."""

    name: str
    waits = False
    """Whether ranks stand by while nothing is measured."""

    def fits(self, case: Case) -> bool:
        """Whether it can start the ranks that a measured case wants."""
        return True

    def run(self, place: Place, job: RankJob, tell: Tell) -> None:
        raise NotImplementedError

    def end(self) -> None:
        """Let ranks go that stand by."""


def choose(name: str) -> Launcher:
    """`auto` is the lab where one can be built, this machine's loopback otherwise."""
    if name == "torchrun":
        from narrowcast.study.execution.torchrun import TorchrunLauncher

        return TorchrunLauncher()
    if name not in LAUNCHERS:
        raise ValueError(f"launcher: unknown {name!r}; take {', '.join(LAUNCHERS)}")
    if name == "local":
        return LocalLauncher()
    try:
        check_machine()
    except LabError:
        if name == "lab":
            raise
        return LocalLauncher()
    return LabLauncher()


class LabLauncher(Launcher):
    """Hosts in network namespaces, on links that hold a rate."""

    name = "lab"

    def fits(self, case: Case) -> bool:
        return case.layout.hosts <= labs.MOST_HOSTS

    def run(self, place: Place, job: RankJob, tell: Tell) -> None:
        rate = None if place.rate_name == UNLIMITED else place.rate_name
        # hosts with several ranks share an interface: nobody can tell whose bytes those are
        interface = labs.INTERFACE if place.layout.per_host == 1 else None
        try:
            with (
                job_file(replace(job, interface=interface)) as file,
                Lab(place.layout.hosts, rate, gpu=place.transport == "nccl") as lab,
            ):
                listen(lambda output: self._start(lab, place, file, output), tell)
        except LabError as error:
            raise LaunchError(str(error).splitlines()[0]) from error

    def _start(self, lab: Lab, place: Place, file: Path, output: Output) -> Job:
        return lab.start(
            [*WORKER, str(file)],
            ranks_per_host=place.layout.per_host,
            launcher="mpirun" if place.transport == "mpi" else "env",
            timeout=LONGEST,
            output=output,
            grace=GRACE,
        )


class LocalLauncher(Launcher):
    """Processes on this machine, over the loopback. They end with us, whatever ends us."""

    name = "local"

    def run(self, place: Place, job: RankJob, tell: Tell) -> None:
        with job_file(job) as file, Processes() as processes:
            try:
                self._begin(processes, place, file)
            except LabError as error:  # there is no mpirun
                raise LaunchError(str(error)) from error
            listen(processes.job, tell)

    def _begin(self, processes: Processes, place: Place, file: Path) -> None:
        shared = _environment(place)
        if place.transport == "mpi":
            processes.add(0, _mpirun(place, file), shared)
            return
        for rank in range(place.layout.workers):
            processes.add(rank, [*WORKER, str(file)], {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})


def _environment(place: Place) -> dict[str, str]:
    world = str(place.layout.workers)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": world}
    name = "lo0" if sys.platform == "darwin" else "lo"
    own = {"LOCAL_WORLD_SIZE": world, "GLOO_SOCKET_IFNAME": name, PARENT: str(os.getpid())}
    return {**labs.DEFAULTS, **os.environ, **meeting, **own}


def _mpirun(place: Place, file: Path) -> list[str]:
    """A command that ends with us, whatever ends us; our own ranks see to that by themselves."""
    options = ("--oversubscribe", "--bind-to", "none", "--allow-run-as-root", "--mca", "mpi_yield_when_idle", "1")
    words = [labs.find_mpirun(), "-n", str(place.layout.workers), *options, *WORKER, str(file)]
    linux = sys.platform.startswith("linux")
    return [sys.executable, "-I", "-S", syscalls.__file__, str(os.getpid()), *words] if linux else words


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Processes:
    """Local ranks in the form in which a lab's job knows them."""

    def __init__(self) -> None:
        self._listed: list[Process] = []
        self._started: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self._sweep()

    def job(self, output: Output, longest: float = LONGEST) -> Job:
        return Job(self._listed, self._send, self._sweep, labs.Policy(longest, GRACE), output)

    def add(self, rank: int, words: list[str], env: Mapping[str, str]) -> None:
        pairs = [os.pipe() for _ in range(3)]
        started = subprocess.Popen(
            words, env=env, stdin=subprocess.DEVNULL, stdout=pairs[0][1], stderr=pairs[1][1], start_new_session=True
        )
        for _, writer in pairs[:2]:
            os.close(writer)
        self._started[started.pid] = started
        self._listed.append(Process(0, rank, started.pid, [reader for reader, _ in pairs]))
        threading.Thread(target=_report, args=(started, pairs[2][1]), daemon=True).start()

    def _send(self, pid: int, number: int) -> None:
        if self._started[pid].poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(pid, number)

    def _sweep(self) -> None:
        """Nothing is left running, neither the ranks nor what they started."""
        for pid, started in self._started.items():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            started.wait()


def _report(started: subprocess.Popen[bytes], status: int) -> None:
    """Tell the job how a process ended."""
    code = started.wait()
    with suppress(OSError):
        os.write(status, f"{code}\n".encode())
    os.close(status)


@contextmanager
def job_file(job: RankJob) -> Iterator[Path]:
    """A job for ranks to read. They remove it as soon as all have: a study that is killed then leaves no file."""
    handle, name = tempfile.mkstemp(prefix="narrowcast-study-", suffix=".json")
    try:
        with open(handle, "w") as file:
            file.write(job.to_json())
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def listen(start: Callable[[Output], Job], tell: Tell) -> None:
    """Pass on what the ranks of a job tell, until all have ended."""
    heard: queue.SimpleQueue[Line] = queue.SimpleQueue()
    errors: list[str] = []
    last_words: list[Line] = []
    running = start(heard.put)
    for line in ranks.lines_of(running, heard):
        if line.stream != "stdout" or not line.text.startswith(MARK):
            last_words = [*last_words[-20:], line]
            continue
        message = RankMessage.from_json(line.text.removeprefix(MARK))
        if isinstance(message, RankFailed):
            errors.append(message.error)
        else:
            tell(message)
    result = running.wait()
    if not result.ok:
        raise LaunchError(_why(result, errors, last_words))


CONSEQUENCES = ("Connection reset", "Connection closed", "gave up", "an earlier collective failed", "Broken pipe")
"""What ranks say when another one is gone: the reason is somewhere else."""


def first_cause(errors: Sequence[str]) -> str:
    """The first error that is not about another rank's."""
    return next((text for text in errors if not any(word in text for word in CONSEQUENCES)), errors[0])


def _why(result: Result, errors: list[str], last_words: list[Line]) -> str:
    if errors:
        return first_cause(errors)
    words = [line.text.strip() for line in last_words if line.stream == "stderr" and line.text.strip()]
    return "; ".join([result.summary(), *words[-1:]])
