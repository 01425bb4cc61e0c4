"""The process that owns a lab: PID 1 of a pid namespace, whose network namespace is the switch.

    owner (Lab) ── socket ── PID 1 ── every rank, and every namespace as an open file
         └─ guard, outside: watches owner and PID 1

PID 1 ends when the owner closes the socket. However the owner ends, the guard has it end, and kills it if it does not.
The kernel then kills every process of the pid namespace and, with the last reference, takes down the namespaces, links
and mounts. None has a name, so none can be left behind. PID 1 is also killed if the guard dies.
"""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from narrowcast.lab import syscalls
from narrowcast.lab.connection import MessageSocket
from narrowcast.lab.delay import Counts, Delay
from narrowcast.lab.delay import start as start_forwarder
from narrowcast.lab.gpu import end_mps, start_mps
from narrowcast.lab.netlink import Netlink
from narrowcast.lab.topology import HOST_NAME, address, host_name

JOB = "NARROWCAST_LAB_JOB"
# Where a process of the lab finds the hosts' namespaces: host i's three from /proc/1/fd/{FIRST_FD + 3i} on.
FIRST_FD = 100
# A process that shows no environment for longer than this has none, and is nobody's.
STARTING_SECONDS = 0.5
# PID 1 has this long to end by itself when the owner is gone.
END_SECONDS = 4
NAMESPACES = ("net", "uts", "mnt")
HOST_FLAGS = syscalls.NEWNET | syscalls.NEWUTS | syscalls.NEWNS

# In every host, for mpirun: start a command on another host as ssh would.
AGENT = "/dev/shm/narrowcast-agent"
AGENT_TEXT = f"""#!/bin/sh
at=$(({FIRST_FD} + 3 * ${{1#{HOST_NAME}}}))
shift
exec {shlex.quote(sys.executable)} -I -S {shlex.quote(syscalls.__file__)} enter $at /bin/sh -c "$*"
"""
# Settings of a host's own TCP. One congestion control, whatever the machine's default (every kernel allows reno in a
# namespace), and no memory of earlier connections: a run must not depend on the one before.
SYSCTLS = {"tcp_congestion_control": "reno", "tcp_no_metrics_save": "1"}


def _namespaces() -> list[int]:
    return [os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in NAMESPACES]


def _enter(namespaces: list[int]) -> None:
    for fd in namespaces:
        syscalls.setns(fd)


class Supervisor:
    """Serves the owner's requests, one at a time; a request is a method's name and its arguments."""

    def __init__(self, channel: MessageSocket, hosts: int, memory: str) -> None:
        self._channel = channel
        self._status: dict[int, tuple[subprocess.Popen[bytes], int]] = {}
        self._held: dict[str, list[int]] = {}
        self._mps: str | None = None
        self._forwarder, self._packets, self._broken = 0, Counts(0), ""
        self._home = _namespaces()
        if memory == "shared":
            syscalls.mount("tmpfs", "/dev/shm", "tmpfs")
        self._hosts = [self._make_host(host, hosts, memory) for host in range(hosts)]

    def _make_host(self, host: int, hosts: int, memory: str) -> list[int]:
        """Go into new namespaces, furnish them, keep them open, come back."""
        syscalls.unshare(HOST_FLAGS)
        socket.sethostname(host_name(host))
        if memory == "own":
            syscalls.mount("tmpfs", "/dev/shm", "tmpfs")
        else:
            syscalls.mount("sysfs", "/sys", "sysfs")  # NCCL asks there how fast eth0 is
        Path(AGENT).write_text(AGENT_TEXT)
        Path(AGENT).chmod(0o755)
        _name_hosts(hosts)
        _set_tcp()
        opened = _namespaces()
        _enter(self._home)
        kept = [FIRST_FD + 3 * host + k for k in range(3)]
        for fd, to in zip(opened, kept, strict=True):
            os.dup2(fd, to, inheritable=False)
            os.close(fd)
        return kept

    # -- requests

    def links(self, calls: list[dict[str, Any]], host: int | None = None) -> dict[str, Any]:
        """Call methods of `Netlink` in a host, or in the switch; the replies are what they return."""
        with contextlib.closing(self._netlink(host)) as netlink:
            return {"replies": [getattr(netlink, call.pop("do"))(**call) for call in calls]}

    def _netlink(self, host: int | None) -> Netlink:
        """A socket belongs to the namespace in which it was made, wherever its process goes."""
        if host is None:
            return Netlink()
        try:
            syscalls.setns(self._hosts[host][0])
            return Netlink()
        finally:
            syscalls.setns(self._home[0])

    def delay(self, **settings: float) -> dict[str, Any]:
        """Join every host to the switch by a link on which packets take their time."""
        namespaces = [host[0] for host in self._hosts]
        self._forwarder, self._packets = start_forwarder(namespaces, self._home[0], Delay(**settings))
        return {}

    def tcp(self, buffers: int, segments: int) -> dict[str, Any]:
        """What the hosts' TCP may have under way, in bytes, and how many frames it sends as one packet at least."""
        for host in self._hosts:
            _widen_tcp(host[0], self._home[0], buffers, segments)
        return {}

    def packets(self) -> dict[str, Any]:
        """Of each host's packets: how many were lost as they should, and how many found no room."""
        return {"counts": [list(self._packets.of(host)) for host in range(len(self._hosts))]}

    def mps(self, control: str) -> dict[str, Any]:
        """Start MPS beside the hosts. It is a descendant of PID 1 as the ranks are, and ends with it."""
        self._mps = control
        try:
            start_mps(control)
        except subprocess.SubprocessError as error:
            return {"error": f"cannot start MPS: {error}"}
        return {}

    def spawn(self, host: int, words: list[str], env: dict[str, str], cwd: str, fds: list[int]) -> dict[str, Any]:
        """Start a process on a host, in a session of its own; its exit code will be written to the third of `fds`."""
        out, err, status = fds
        try:
            process = subprocess.Popen(
                words,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                preexec_fn=self._entering(host, cwd),  # noqa: PLW1509  PID 1 has one thread
            )
        except (OSError, subprocess.SubprocessError) as error:
            os.close(status)
            return {"error": f"cannot start {words[0]!r} in {cwd}: {error}"}
        finally:
            os.close(out)
            os.close(err)
        self._status[process.pid] = process, status
        return {"pid": process.pid}

    def signal(self, pid: int, number: int) -> dict[str, Any]:
        """Send a signal to a process that `spawn` started and to what it started; nothing where it has ended."""
        if pid in self._status:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, number)
        return {}

    def kill(self, host: int) -> dict[str, Any]:
        """SIGKILL to every process on a host, whoever started it."""
        here = os.fstat(self._hosts[host][0]).st_ino
        return {"killed": [pid for pid in syscalls.processes() if pid != 1 and _network(pid) == here and _kill(pid)]}

    def hold(self, job: str, fds: list[int]) -> dict[str, Any]:
        """Keep files open until the job ends: its processes find them as /proc/1/fd/N."""
        self._held.setdefault(job, []).extend(fds)
        return {"held": fds}

    def sweep(self, job: str) -> dict[str, Any]:
        """Kill what a job left running, and close what was held for it."""
        mark, killed = f"{JOB}={job}", []
        for fd in self._held.pop(job, ()):
            os.close(fd)
        until = time.monotonic() + STARTING_SECONDS
        while time.monotonic() < until:
            pids = list(syscalls.processes())
            marked = [pid for pid in pids if mark in syscalls.environment(pid) and _kill(pid)]
            killed += marked
            if not marked and not any(map(_is_starting, pids)):
                break
            time.sleep(0.001)
        return {"killed": killed, "broken": self._broken}

    # -- the loop

    def serve(self) -> None:
        """Answer requests and reap children, until the owner is gone."""
        wake, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(waker)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        requests = self._channel.fileno()
        while True:
            ready, _, _ = select.select([requests, wake], [], [])
            if wake in ready:
                os.read(wake, 4096)
            self._reap()
            if requests in ready and not self._answer():
                return

    def end(self) -> None:
        """MPS ends once its ranks have, so they go first; whatever stays then goes with PID 1."""
        if self._mps:
            for host in range(len(self._hosts)):
                self.kill(host)
            end_mps(self._mps)

    def _answer(self) -> bool:
        request = self._channel.receive()
        if request is None:
            return False
        message, fds = request
        method: Callable[..., dict[str, Any]] = getattr(self, message.pop("do"))
        try:
            if self._broken and method not in (self.signal, self.kill, self.sweep):
                raise OSError(self._broken)
            reply = method(**message, **({"fds": fds} if fds else {}))
        except OSError as error:
            reply = {"error": str(error)}
        self._channel.send(reply)
        return True

    def _reap(self) -> None:
        """Take leave of every child that has ended, orphans of ranks included."""
        while True:
            try:
                pid, state = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._report(pid, os.waitstatus_to_exitcode(state))

    def _report(self, pid: int, code: int) -> None:
        if pid == self._forwarder:
            self._break(code)
        if pid not in self._status:
            return
        process, status = self._status.pop(pid)
        process.returncode = code  # or Popen would look for a child that is no more
        with contextlib.suppress(BrokenPipeError):  # the job was given up
            os.write(status, f"{code}\n".encode())
        os.close(status)

    def _break(self, code: int) -> None:
        """The links are gone with what carried them: a rank would wait for the others until its own time is up."""
        self._broken = f"the process that carries the lab's delayed packets ended with {code}, and the links with it; "
        self._broken += "every rank was killed; open a new lab"
        for host in range(len(self._hosts)):
            self.kill(host)

    def _entering(self, host: int, cwd: str = "/") -> Callable[[], None]:
        def enter() -> None:
            _enter(self._hosts[host])
            os.chdir(cwd)  # entering a mount namespace leads to its root

        return enter


def _network(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return None


def _is_starting(pid: int) -> bool:
    """A process between fork and the end of exec shows no environment: whose it is cannot be seen yet."""
    return pid != 1 and not syscalls.environment(pid) and syscalls.started(pid) is not None


def _kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _name_hosts(hosts: int) -> None:
    """An /etc/hosts of this mount namespace alone: its file is in the private /dev/shm."""
    named = [(address(host), host_name(host)) for host in range(hosts)]
    # torch asks for the name behind the IPv6 spelling of an address, and warns where there is none
    mapped = [(f"::ffff:{at}", f"mapped-{name}") for at, name in named]
    table = Path("/dev/shm/narrowcast-hosts")
    table.write_text("".join(f"{at} {name}\n" for at, name in [("127.0.0.1", "localhost"), *named, *mapped]))
    syscalls.mount(str(table), "/etc/hosts", flags=syscalls.MS_BIND)


def _set_tcp() -> None:
    for name, value in SYSCTLS.items():
        Path("/proc/sys/net/ipv4", name).write_text(value)


def _widen_tcp(namespace: int, home: int, most: int, segments: int) -> None:
    """A sender may have as much under way as the delay asks for, and a receiver may hold as much; in large packets."""
    try:
        syscalls.setns(namespace)
        for name in ("tcp_rmem", "tcp_wmem"):
            file = Path("/proc/sys/net/ipv4", name)
            least, first, largest = file.read_text().split()
            file.write_text(f"{least} {first} {max(int(largest), most)}")
        Path("/proc/sys/net/ipv4/tcp_min_tso_segs").write_text(str(segments))
    finally:
        syscalls.setns(home)


def _be_first(channel: MessageSocket, hosts: int, memory: str) -> None:
    """PID 1: say that the hosts stand, or why they cannot; then serve."""
    try:
        syscalls.die_with_parent()
        syscalls.mount("none", "/", flags=syscalls.MS_REC | syscalls.MS_PRIVATE)
        syscalls.mount("proc", "/proc", "proc")
        supervisor = Supervisor(channel, hosts, memory)
    except OSError as error:
        channel.send({"error": str(error)})
        return
    channel.send({"ready": True})
    supervisor.serve()
    supervisor.end()


def _watch(owner: int, first: int, to_owner: socket.socket) -> None:
    """The guard: wait until the owner or PID 1 ends, and leave no PID 1 behind."""
    ended = os.pidfd_open(first)
    select.select([owner, ended], [], [])
    with contextlib.suppress(OSError):  # the owner closed it
        to_owner.shutdown(socket.SHUT_RDWR)  # which has PID 1 end by itself
    select.select([ended], [], [], END_SECONDS)
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)


def main() -> None:
    """argv: the mark, the owner's pid and start time (for `lab clean`), the socket's number, hosts, their `Memory`."""
    _, _, owner_pid, _, number, hosts, memory = sys.argv
    owner = os.pidfd_open(os.getppid())
    if os.getppid() != int(owner_pid):
        return  # the owner died first
    # an owner with many open files hands over a high number, where the hosts' namespaces will be
    low = os.dup(int(number))
    os.close(int(number))
    to_owner = socket.socket(fileno=low)
    channel = MessageSocket(to_owner)
    try:
        syscalls.unshare(HOST_FLAGS | syscalls.NEWPID)
    except OSError as error:
        channel.send({"error": str(error)})
        return
    first = os.fork()
    if first == 0:
        _be_first(channel, int(hosts), memory)
        os._exit(0)
    _watch(owner, first, to_owner)
