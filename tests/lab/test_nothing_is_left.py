"""However a lab's owner ends, no process, interface, namespace or file of it stays."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from lab.helpers import Footprint, wait_until

from narrowcast.lab import Lab, LabError
from narrowcast.lab.connection import PACKAGE, clean, leftovers

pytestmark = pytest.mark.usefixtures("needs_lab")

OWNER = str(Path(__file__).with_name("owner.py"))


def _heed_signals() -> None:
    """As in a terminal: tests that were started with nohup or in the background are told to ignore these."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@contextmanager
def owner(end: str) -> Iterator[tuple[subprocess.Popen[str], Footprint]]:
    """A process with a lab whose ranks run, and all that belongs to it. It goes on when a line is written to it."""
    process = subprocess.Popen(
        [sys.executable, OWNER, str(PACKAGE), end],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        preexec_fn=_heed_signals,  # noqa: PLW1509  this process has one thread
    )
    with process:
        assert process.stdout is not None
        footprint = Footprint.of(int(process.stdout.readline()))
        # guard, PID 1, what carries delayed packets, two ranks with two children each; switch and two hosts
        assert (len(footprint.processes), len(footprint.namespaces)) == (9, 3)
        try:
            yield process, footprint
        finally:
            process.kill()


def assert_nothing_left(footprint: Footprint) -> None:
    assert wait_until(lambda: not footprint.left()), footprint.left()


@pytest.mark.parametrize("end", ["exit", "exception", "_exit", "abort", "rank"])
def test_after_the_owner_ends_itself(end: str) -> None:
    with owner(end) as (process, footprint):
        process.communicate("go\n", timeout=60)
        assert_nothing_left(footprint)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGHUP], ids=lambda n: n.name)
def test_after_a_signal_to_the_owner(number: signal.Signals) -> None:
    with owner("wait") as (process, footprint):
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
        os.killpg(process.pid, number)  # as the terminal does
        process.wait(60)
        assert_nothing_left(footprint)


@pytest.mark.parametrize("victim", [0, 1], ids=["guard", "PID 1"])
def test_after_kill_9_of_guard_or_pid_1(victim: int) -> None:
    with owner("wait") as (_, footprint):
        os.kill(list(footprint.processes)[victim], signal.SIGKILL)
        assert_nothing_left(footprint)


def test_a_pid_1_that_does_not_end_by_itself_is_killed() -> None:
    with owner("wait") as (process, footprint):
        os.kill(list(footprint.processes)[1], signal.SIGSTOP)
        process.kill()
        assert_nothing_left(footprint)


def test_a_lab_whose_supervisor_is_gone_says_so_and_closes() -> None:
    with Lab(2) as lab:
        job = lab.start(["sleep", "600"])
        assert lab._connection is not None
        lab._connection.guard.kill()
        assert job.wait(60).codes == (-9, -9)
        with pytest.raises(LabError, match="supervisor is gone"):
            lab.counters()


def test_a_lab_outlives_the_thread_that_opened_it() -> None:
    lab = Lab(2)
    opening = threading.Thread(target=lab.__enter__)
    opening.start()
    opening.join()
    with closing(lab):
        assert lab.run(["true"]).ok


def test_clean_removes_a_lab_without_an_owner_and_no_other() -> None:
    with Lab(2) as alive, owner("wait") as (process, footprint):
        guard = next(iter(footprint.processes))
        os.kill(guard, signal.SIGSTOP)  # it cannot do its work now
        process.kill()
        process.wait()
        assert guard in {leftover.guard for leftover in leftovers()}
        assert guard in {leftover.guard for leftover in clean()}
        assert_nothing_left(footprint)
        assert alive.run(["true"]).ok
        assert guard not in {leftover.guard for leftover in leftovers()}


def test_a_lab_leaves_no_thread_and_no_file_open() -> None:
    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    with Lab(2) as lab:
        lab.run(["true"], capture=True)
    gc.collect()  # what other tests left
    before = held()
    for _ in range(3):
        with Lab(2) as lab:
            lab.run(["true"], capture=True)
            lab.start(["sleep", "60"])
    assert all(now <= then for now, then in zip(held(), before, strict=True)), (held(), before)
