"""A cluster in a box: `Lab` builds hosts and links, starts commands on them, and cuts, heals, slows and kills hosts."""

from __future__ import annotations

import dataclasses
import itertools
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

from narrowcast.lab import launch
from narrowcast.lab.connection import Connection, LabError
from narrowcast.lab.gpu import Gpus, find_gpus
from narrowcast.lab.job import Job, Output, Policy, Process, Result, show
from narrowcast.lab.supervisor import FIRST_FD, JOB
from narrowcast.lab.topology import Call, Rates, Topology, address, call, limit, parse_rate, topology

Environment = Callable[[Mapping[str, str]], dict[str, str]]
"""A rank's variables, given those that are its alone."""


@dataclass(frozen=True)
class Counters:
    """Bytes of a host's interface since the lab began, headers included once for each packet handed to it."""

    sent: int
    received: int
    lost: int = 0
    """Packets that it sent and `loss=` took."""
    dropped: int = 0
    """Packets from or to it for which a link with a delay had no room, or which came while it was down."""


def check_machine() -> None:
    """Raise LabError where no lab can be built, and say what to do."""
    if not sys.platform.startswith("linux"):
        raise LabError(f"the lab is made of Linux network namespaces; got {platform.system()}; use a Linux machine")
    if os.geteuid() != 0:
        raise LabError(f"the lab makes network namespaces and needs root; got user {os.geteuid()}; use sudo")


class Lab:
    """Hosts as network namespaces, joined by links that hold a rate both ways.

    rate: every link's rate ("1gbit", "200mbit", ...); None for no limit.
    rates: other rates for some hosts, {2: "100mbit"}, or a list with one for each.
    racks, uplink: [[0, 1], [2, 3]] puts hosts on switches of their own, joined by links of rate `uplink`.
    delay: "50ms" from any host to any other, one way; jitter: up to so much more, "5ms"; loss: the share of packets
        (frames of the wire) that get lost, 0.001. A process carries the packets then, at several Gb/s in all.
    mtu: 1500, or 9000 for jumbo frames.
    gpu: ranks of all hosts share this machine's GPUs, and NCCL goes over the links; through MPS, which the lab starts
        (mps=False: without it ranks take turns, and their times mean nothing).

    Use it as a context manager. Whatever happens to this process, nothing is left behind.
    """

    def __init__(
        self,
        hosts: int = 4,
        rate: str | None = "1gbit",
        *,
        rates: Rates = None,
        racks: Sequence[Sequence[int]] | None = None,
        uplink: str | None = None,
        delay: str | None = None,
        jitter: str | None = None,
        loss: float = 0.0,
        mtu: int = 1500,
        gpu: bool = False,
        mps: bool = True,
    ) -> None:
        self._topology: Topology = topology(hosts, rate, rates, racks, uplink, delay, mtu, jitter, loss)
        self._gpu, self._mps = gpu, mps
        self._gpus: Gpus | None = None
        self._connection: Connection | None = None
        self._numbers = itertools.count()
        self._jobs: list[Job] = []

    @property
    def hosts(self) -> int:
        return self._topology.hosts

    def address(self, host: int) -> str:
        """A host's address. It means something inside this lab only."""
        return address(self._host(host))

    # -- building and taking down

    def __enter__(self) -> Lab:
        check_machine()
        if self._connection is not None:
            raise LabError("this lab is up already; make another one")
        self._gpus = find_gpus(self._mps) if self._gpu else None
        # ranks and MPS speak through /dev/shm
        self._connection = Connection(self.hosts, "shared" if self._gpu else "own")
        try:
            self._connection.wait_until_ready()
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill every process of the lab and take its hosts down. Returns when none is left."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        for job in self._jobs:
            job.join()

    def _build(self) -> None:
        shape = self._topology
        if shape.delay:
            self._delay()
        self._links(shape.switch([FIRST_FD + 3 * host for host in range(self.hosts)]))
        for host in range(self.hosts):
            self._links(shape.host(host), host)
        if self._gpus and self._gpus.control:
            self._ask("mps", control=self._gpus.control)

    def _delay(self) -> None:
        try:
            self._ask("delay", **vars(self._topology.delay))
        except LabError as error:
            raise LabError(
                f"delay=, jitter= and loss= need TAP devices; the kernel {platform.release()} gives none ({error}); "
                "load its module (modprobe tun), start a container with --device /dev/net/tun, or leave them out"
            ) from None
        self._widen_tcp()

    def _widen_tcp(self) -> None:
        """As the delay and the links' rates ask for."""
        self._ask("tcp", buffers=self._topology.buffers, segments=self._topology.segments)

    # -- running commands

    def start(
        self,
        command: Sequence[str],
        *,
        ranks_per_host: int = 1,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        timeout: float | None = None,
        launcher: Literal["env", "mpirun"] = "env",
        grace: float = 5.0,
        keep: bool = False,
        output: Output = show,
        capture: bool = False,
    ) -> Job:
        """Start `command` as one rank, or `ranks_per_host`, on each host, with torchrun's environment.

        env: variables for all ranks, stronger than ours. launcher: "env", or "mpirun" (Open MPI across the hosts).
        timeout: seconds until all ranks are ended. grace: when a rank fails, the others have this many seconds to end
        by themselves; keep=True leaves them alone. output: called with each `Line`, in a thread; by default lines go to
        stdout and stderr behind "[host 2 rank 2] "; capture=True puts them into the result instead.
        """
        words = launch.check_command(command, launcher, ranks_per_host, self._gpu)
        policy = Policy(timeout, grace, keep)
        number = next(self._numbers)

        def environment(own: Mapping[str, str]) -> dict[str, str]:
            return launch.environment(self.hosts, ranks_per_host, number, own, env or {})

        begin = self._begin_mpirun if launcher == "mpirun" else self._begin_ranks
        with self._all_or_none(number) as processes:
            begin(processes, words, ranks_per_host, environment, os.fspath(cwd or os.getcwd()))
        job = Job(processes, self._signal, lambda: self._sweep(number), policy, None if capture else output)
        self._jobs = [*(other for other in self._jobs if other.running), job]
        return job

    def run(self, command: Sequence[str], **options: Any) -> Result:
        """`start` with its options, then wait for all ranks."""
        return self.start(command, **options).wait()

    def _begin_ranks(
        self, processes: list[Process], command: list[str], per_host: int, environment: Environment, cwd: str
    ) -> None:
        for rank in range(self.hosts * per_host):
            gpu = self._gpus.environment(rank, per_host) if self._gpus else {}
            own = environment({**launch.rank_environment(rank, per_host), **gpu})
            processes.append(self._spawn(rank // per_host, rank, command, own, cwd))

    def _begin_mpirun(
        self, processes: list[Process], command: list[str], per_host: int, environment: Environment, cwd: str
    ) -> None:
        env = environment({})
        words = launch.mpirun(command, self.hosts, per_host, cwd)
        held: list[int] = []
        for rank in range(self.hosts * per_host):
            with _pipes() as (readers, writers):
                held += self._ask("hold", writers, job=env[JOB])["held"]
            processes.append(Process(rank // per_host, rank, None, readers))
        processes.append(self._spawn(0, None, words, {**env, launch.PIPES: " ".join(map(str, held))}, cwd))

    @contextmanager
    def _all_or_none(self, number: int) -> Iterator[list[Process]]:
        """A list for the processes of a job; where one cannot be started, the others are killed."""
        processes: list[Process] = []
        try:
            yield processes
        except BaseException:
            self._sweep(number)
            for process in processes:
                process.close()
            raise

    def _spawn(self, host: int, rank: int | None, words: list[str], env: dict[str, str], cwd: str) -> Process:
        with _pipes() as (readers, writers):
            reply = self._ask("spawn", writers, host=host, words=words, env=env, cwd=cwd)
        return Process(host, rank, reply["pid"], readers)

    # -- while it runs

    def cut(self, host: int) -> None:
        """Lose every packet from and to a host, without a word to it: its port leaves the switch, its link stays up.

        TCP keeps what it has not brought over and tries again at growing intervals, so a connection goes on after
        `heal`, up to about as long after it as the cut took.
        """
        self._links([call("unplug", f"v{self._host(host)}")])

    def heal(self, host: int) -> None:
        """Undo `cut`."""
        self._links([self._topology.plug_in(self._host(host))])

    def kill(self, host: int) -> None:
        """SIGKILL to every process on a host."""
        self._ask("kill", host=self._host(host))

    def set_rate(self, host: int, rate: str | None) -> None:
        """Change a host's rate, both ways, while packets flow."""
        old = self._topology.rates[self._host(host)]
        new = None if rate is None else parse_rate(rate)
        rates = tuple(new if h == host else r for h, r in enumerate(self._topology.rates))
        self._topology = dataclasses.replace(self._topology, rates=rates)
        if old and new:
            inside, outside = [limit("eth0", new)], [limit(f"v{host}", new)]
        else:
            inside = [call("free", "eth0")] * bool(old) + self._topology.host_limits(host)
            outside = [call("free", f"v{host}")] if old else [limit(f"v{host}", new)] if new else []
        self._links(inside, host)
        self._links(outside)
        if self._topology.delay:
            self._widen_tcp()

    def counters(self) -> list[Counters]:
        """What each host has sent and received since the lab began, as the switch's side of its link counted it."""
        counts = self._links([call("counts", f"v{host}") for host in range(self.hosts)])
        packets = self._ask("packets")["counts"] if self._topology.delay else [(0, 0)] * self.hosts
        return [Counters(sent, received, *of) for (sent, received), of in zip(counts, packets, strict=True)]

    # -- the supervisor

    def _host(self, host: int) -> int:
        if not isinstance(host, int) or host not in range(self.hosts):
            raise ValueError(f"host: got {host!r}; hosts are 0 to {self.hosts - 1}")
        return host

    def _links(self, calls: list[Call], host: int | None = None) -> list[Any]:
        return list(self._ask("links", calls=calls, host=host)["replies"])

    def _signal(self, pid: int, number: int) -> None:
        self._ask("signal", pid=pid, number=number)

    def _sweep(self, number: int) -> str:
        """Nothing, or why the lab itself is of no more use."""
        with suppress(LabError):  # the lab was closed, and nothing is left
            return str(self._ask("sweep", job=str(number))["broken"])
        return ""

    def _ask(self, do: str, fds: Sequence[int] = (), **arguments: Any) -> dict[str, Any]:
        if self._connection is None:
            raise LabError("the lab is not up; use it inside `with Lab(...) as lab:`")
        return self._connection.ask(do, fds, **arguments)


@contextmanager
def _pipes() -> Iterator[tuple[list[int], list[int]]]:
    """Reading and writing ends for stdout, stderr and the exit code; the writing ends are closed after the block."""
    pairs = [os.pipe() for _ in range(3)]
    readers, writers = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    try:
        yield readers, writers
    except BaseException:
        for fd in readers:
            os.close(fd)
        raise
    finally:
        for fd in writers:
            os.close(fd)
