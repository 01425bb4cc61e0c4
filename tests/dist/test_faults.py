"""Faults and their outcome: a dead, stopped, cut-off or failing rank ends in an error in time, never in a hang."""

from __future__ import annotations

import gc
import hashlib
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from dist import emulation, lab_rank
from dist.models import error_of, loss, wrapped
from dist.pool import Crew, soon

import narrowcast as nc
from narrowcast.collectives.segments import Coder
from narrowcast.collectives.transports.base import TransportError
from narrowcast.collectives.transports.torch import ask_within
from narrowcast.lab import Lab, LabError, Line, check_machine

TIMEOUT, PATIENT = 4.0, 60.0
"""Of groups: one that is to pass, and one that is not."""
PROMPT = 10.0
"""Far below the timeout, and long enough for a busy machine: a fault that the others were told of."""


def at_encode(number: int, act: object) -> None:
    """Do something when this process encodes for the n-th time: in the middle of a bucket."""
    encode, count = Coder.encode, [0]

    def counting(self: Coder, *args: object, **kwargs: object) -> None:
        count[0] += 1
        if count[0] == number:
            act()
        encode(self, *args, **kwargs)

    Coder.encode = counting


def out_of_memory() -> None:
    """torch raises RuntimeError, as its backends do where a connection closes."""
    torch.empty(1 << 60, dtype=torch.uint8)


NO_MEMORY = "can't allocate memory: you tried to allocate 1152921504606846976 bytes"


def training(group: dist.ProcessGroup, fault: str) -> tuple[str, float]:
    """Backward passes; rank 1 has its fault in the second one. What the failing one raised, and after which time."""
    rank = dist.get_rank(group)
    model = wrapped(group)
    handle = nc.attach(model, "int8/64", min_values=1, algorithm="two_shot")
    loss(model, rank, 0).backward()
    if rank == 1:
        acts = {
            "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
            "memory": out_of_memory,
        }
        at_encode(3, acts[fault])
    began = time.monotonic()
    try:
        loss(model, rank, 1).backward()
    except RuntimeError as error:
        return str(error), time.monotonic() - began
    finally:
        handle.detach()
    return "", 0.0


def ends_well(crew: Crew, rank: int) -> bool:
    """Whether destroy_process_group returned at once and the process ended by itself."""
    took, code = crew.shut_down(rank)
    return took < PROMPT and code == 0


@pytest.mark.parametrize("world", [2, 4])
def test_when_a_rank_is_killed_in_a_bucket_the_others_raise_at_once_and_can_shut_down(world: int) -> None:
    with Crew(world, training, "kill", timeout=PATIENT) as crew:
        assert crew.outcome(1) is None
        for rank in set(range(world)) - {1}:
            error, seconds = crew.outcome(rank).value
            assert "Connection" in error
            assert seconds < PROMPT
            assert ends_well(crew, rank)
        crew.processes[1].join(60)
        assert crew.processes[1].exitcode == -signal.SIGKILL


def test_when_a_rank_stops_the_others_raise_after_the_timeout_and_can_shut_down() -> None:
    with Crew(3, training, "stop", timeout=TIMEOUT) as crew:
        took = []
        for rank in (0, 2):
            error, seconds = crew.outcome(rank).value
            # they wait for its bytes, or already for it to agree to the next bucket's call
            assert any(text in error for text in ("Timed out", "Connection", "ranks [1] made no such call"))
            assert seconds < 2 * TIMEOUT
            took.append(seconds)
            assert ends_well(crew, rank)
        assert max(took) > TIMEOUT - 0.5  # who came later waited less: the first to raise ends the other's wait
        crew.signal(1, signal.SIGCONT)
        assert crew.outcome(1).value[0]
        assert ends_well(crew, 1)


def test_when_a_rank_runs_out_of_memory_it_raises_and_the_others_hear_of_it_at_once() -> None:
    with Crew(3, training, "memory", timeout=PATIENT) as crew:
        errors = []
        for rank in range(3):
            error, seconds = crew.outcome(rank).value
            assert NO_MEMORY in error
            assert seconds < PROMPT
            errors.append(error)
        assert ["rank 1 failed with RuntimeError" in error for error in errors] == [True, False, True]
        assert all(ends_well(crew, rank) for rank in range(3))


def summing(group: dist.ProcessGroup, fault_at: int) -> tuple[str, float]:
    """Plain calls; rank 1 runs out of memory in one of them."""
    if dist.get_rank(group) == 1:
        at_encode(fault_at, out_of_memory)
    began = time.monotonic()
    try:
        for _ in range(20):
            nc.all_reduce(torch.ones(1000), "int8/64", group=group)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "", 0.0


def test_a_call_that_fails_on_one_rank_fails_on_all_and_names_it() -> None:
    with Crew(3, summing, 7, timeout=PATIENT) as crew:
        first, guilty, last = (crew.outcome(rank).value for rank in range(3))
    assert NO_MEMORY in guilty[0]
    assert "rank 1" not in guilty[0]
    for error, seconds in (first, last):
        assert error.startswith("RuntimeError: rank 1 failed with RuntimeError: ")
        assert NO_MEMORY in error
        assert seconds < PROMPT


def out_of_step(group: dist.ProcessGroup) -> list[str]:
    """What calls of every kind end in after one that failed on this rank."""
    other = 1 - dist.get_rank(group)
    if other == 0:
        at_encode(1, out_of_memory)
    found = []
    for call in (
        lambda: nc.all_reduce(torch.ones(1000), "int8/64", group=group),
        lambda: nc.all_reduce(torch.ones(1000), "int8/64", group=group),
        lambda: nc.send(torch.ones(10), "fp32", group_dst=other, group=group),
        lambda: nc.recv(torch.ones(10), "fp32", group_src=other, group=group),
    ):
        try:
            call()
        except RuntimeError as error:
            found.append(type(error).__name__)
    return found


def test_after_a_failure_every_call_says_so() -> None:
    with Crew(2, out_of_step, timeout=PATIENT) as crew:
        for rank in range(2):
            assert crew.outcome(rank).value[1:] == ["BrokenChannelError"] * 3


def bereft(group: dist.ProcessGroup) -> tuple[str, float]:
    """Rank 1 dies between two calls; the next one is of a new kind, which is first compared through the store."""
    nc.all_reduce(torch.ones(10), "fp32", group=group)
    dist.barrier(group=group)
    if dist.get_rank(group) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        nc.all_reduce(torch.ones(11), "fp32", group=group)
    except TransportError as error:
        return str(error), time.monotonic() - began
    return "", 0.0


def test_a_rank_that_died_before_a_new_kind_of_call_is_missed_at_once() -> None:
    with Crew(3, bereft, timeout=PATIENT) as crew:
        for rank in (0, 2):
            error, seconds = crew.outcome(rank).value
            assert (
                "all_reduce, which every rank has to call: ranks [1] did not come to this call, and one is gone"
                in error
            )
            assert seconds < PROMPT


def unheard(group: dist.ProcessGroup) -> list[str]:
    """Rank 0 waits for a message that nobody sends, which closes the connections; then both sum."""
    nc.all_reduce(torch.ones(10), "fp32", group=group)
    found, store = [], dist.distributed_c10d._get_default_store()
    if dist.get_rank(group) == 0:
        found.append(error_of(lambda: nc.recv(torch.empty(5), "fp32", group_src=1, group=group)))
        store.set("waited", "")
    else:
        store.wait(["waited"], timedelta(seconds=PATIENT))
    return [*found, error_of(lambda: nc.all_reduce(torch.ones(10), "fp32", group=group))]


def test_a_message_that_does_not_come_ends_the_channel() -> None:
    with Crew(2, unheard, timeout=2.0) as crew:
        first, second = (crew.outcome(rank).value for rank in range(2))
    assert first[0].startswith("TransportError: ")
    assert first[1].startswith("BrokenChannelError: an earlier collective failed")
    assert second[0].startswith("TransportError: ")


def interrupted(group: dist.ProcessGroup, where: str) -> tuple[str, float]:
    """Rank 0 is in a call that rank 1 does not make, when the signal comes."""
    rank = dist.get_rank(group)
    model = wrapped(group)
    handle = nc.attach(model, "int8/64", min_values=1)
    loss(model, rank, 0).backward()
    nc.all_reduce(torch.ones(10), "int8/64", group=group)
    dist.barrier(group=group)
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        if where == "wait":  # nothing but the signal ends it
            store.wait(["interrupted"], timedelta(seconds=PATIENT))
        else:
            time.sleep(1.0)
        return "", 0.0
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    try:
        if where == "wait":
            nc.all_reduce(torch.ones(10), "int8/64", group=group)
        else:
            loss(model, rank, 1).backward()
        time.sleep(1.0)
    except (KeyboardInterrupt, RuntimeError) as error:
        return type(error).__name__, time.monotonic() - began
    finally:
        store.set("interrupted", "")
        handle.detach()
    return "", 0.0


def test_ctrl_c_ends_a_rank_that_waits_at_once() -> None:
    with Crew(2, interrupted, "wait", timeout=PATIENT) as crew:
        raised, seconds = crew.outcome(0).value
        assert raised == "KeyboardInterrupt"
        assert seconds < PROMPT
        assert crew.outcome(1).error == ""
        assert all(ends_well(crew, rank) for rank in range(2))


def test_ctrl_c_in_a_backward_pass_ends_it_within_the_timeout() -> None:
    """There torch waits where Python hears no signals; the other rank's end, or the timeout, wakes it."""
    with Crew(2, interrupted, "backward", timeout=TIMEOUT) as crew:
        raised, seconds = crew.outcome(0).value
        assert raised in ("KeyboardInterrupt", "RuntimeError")
        assert seconds < 2 * TIMEOUT
        assert crew.outcome(1).error == ""
        assert all(ends_well(crew, rank) for rank in range(2))


def test_a_store_that_does_not_answer_is_given_up() -> None:
    never, began = threading.Event(), time.monotonic()
    with pytest.raises(TimeoutError, match=r"did not answer within 0.2 s"):
        ask_within(lambda: never.wait(60), 0.2)
    assert time.monotonic() - began < 30
    never.set()
    with pytest.raises(ZeroDivisionError):
        ask_within(lambda: 1 // 0, 60.0)


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def counted() -> tuple[int, int, int]:
    gc.collect()
    return threading.active_count(), len(os.listdir("/proc/self/fd")), resident()


def cycles(group: dist.ProcessGroup, count: int) -> list[tuple[int, int, int]]:
    """Attach, train a step, detach; counted after some rounds, in the middle, and at the end."""
    rank = dist.get_rank(group)
    model, found = wrapped(group), []
    for number in range(count):
        handle = nc.attach(model, "int4/128+ef", min_values=1)
        loss(model, rank, number).backward()
        handle.detach()
        if number in (19, count // 2, count - 1):
            soon(lambda: not found or counted()[0] <= found[0][0])
            found.append(counted())
    return found


@pytest.mark.parametrize("count", [60, pytest.param(200, marks=pytest.mark.slow)])
def test_many_attach_and_detach_cycles_leave_no_threads_memory_or_file_handles(count: int) -> None:
    with Crew(2, cycles, count, timeout=PATIENT) as crew:
        for rank in range(2):
            outcome = crew.outcome(rank, within=100)
            assert not outcome.error, outcome.traceback
            (threads, files, memory), _, (threads_end, files_end, memory_end) = outcome.value
            assert threads_end <= threads
            assert files_end <= files + 2
            assert memory_end < memory + (8 << 20)


SCRIPT, LAB_STEPS = lab_rank.__file__, 7


@pytest.fixture
def needs_lab() -> None:
    try:
        check_machine()
    except LabError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))


class Cutting:
    """Collects the output of the ranks."""

    def __init__(self) -> None:
        self.lines: dict[int, list[str]] = {0: [], 1: []}

    def __call__(self, line: Line) -> None:
        if line.rank is not None and line.stream == "stdout":
            self.lines[line.rank].append(line.text)

    def said(self, text: str) -> bool:
        return all(text in lines for lines in self.lines.values())

    def last(self, rank: int, start: str) -> str:
        return next((text for text in reversed(self.lines[rank]) if text.startswith(start)), "")


def run_in_lab(go: Path, timeout: float, cut_for: float | None) -> Cutting:
    """Two hosts; one is cut off before a step begins, and heals in the middle of it, or not at all."""
    source, watch = str(Path(nc.__file__).parents[1]), Cutting()
    with Lab(2, "1gbit") as lab:
        command = [sys.executable, SCRIPT, str(timeout), str(LAB_STEPS), str(go)]
        job = lab.start(command, output=watch, env={"PYTHONPATH": source}, timeout=100, keep=True)
        assert soon(lambda: watch.said(f"step {lab_rank.CUT_AFTER}"), 60), watch.lines
        lab.cut(1)
        go.touch()
        if cut_for is not None:
            assert soon(lambda: watch.said(f"begin {lab_rank.CUT_AFTER + 1}"), 60), watch.lines
            time.sleep(cut_for)
            assert f"step {lab_rank.CUT_AFTER + 1}" not in watch.lines[0], "the link was not cut"
            lab.heal(1)
        job.wait(100)
    return watch


@pytest.mark.usefixtures("needs_lab")
def test_a_host_that_is_cut_off_and_healed_in_time_completes_the_step_bit_equal(tmp_path: Path) -> None:
    digest = hashlib.sha256()
    for step in range(LAB_STEPS):
        xs = [lab_rank.values(rank, step) for rank in range(2)]
        total = emulation.all_reduce("two_shot", emulation.Setting(nc.codec("int8/256"), [xs[0].numel()]), xs)
        digest.update(total.numpy().tobytes())
    watch = run_in_lab(tmp_path / "go", 60, cut_for=1.0)
    assert [watch.last(rank, "hash") for rank in range(2)] == [f"hash {digest.hexdigest()}"] * 2


@pytest.mark.usefixtures("needs_lab")
def test_a_host_that_stays_cut_off_makes_every_rank_raise_within_the_timeout(tmp_path: Path) -> None:
    watch = run_in_lab(tmp_path / "go", TIMEOUT, cut_for=None)
    for rank in range(2):
        raised = watch.last(rank, "raised after")
        assert raised, watch.lines
        assert float(raised.split()[2]) < TIMEOUT + 5
        assert watch.last(rank, "ended"), "destroy_process_group did not return"
