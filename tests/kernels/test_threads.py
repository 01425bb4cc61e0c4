"""Any number of threads gives the same bytes, callers in threads included, and a forked child starts its own."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import narrowcast as nc
from narrowcast.formats.codebooks import TableFormat
from narrowcast.kernels import native, search_table
from narrowcast.kernels.plan import Plan

pytestmark = pytest.mark.usefixtures("native_library")

SPECS = ("int8/256", "int4/128+sr", "e5m2", "nvfp4", "onebit/64", "uint3/48", "dtree8", "mxfp6")
VALUES = (1 << 20) + 4099  # enough for four threads, and a part that ends within a block

FORKED = """
import os, signal, sys, torch
import narrowcast as nc

def coded():
    wire = codec.encode(x)
    return wire, codec.decode(wire, x.numel())

torch.manual_seed(0)
codec, x = nc.codec("int4/128"), torch.randn(1 << 21)
torch.set_num_threads(2)
x.clone().mul_(2)  # torch's own workers are running now
mine = coded()
child = os.fork()
if child == 0:
    signal.alarm(60)  # a child that hangs is ended, and its status shows it
    theirs = coded()
    torch.set_num_threads(1)  # torch itself would hang in a forked child
    os._exit(0 if all(torch.equal(a, b) for a, b in zip(theirs, mine)) else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""

SMALL_STACK = """
import threading, torch
import narrowcast as nc
from narrowcast.codecs import all_specs

def use_all():
    x = torch.randn(5000)
    for spec in all_specs():
        codec, residual = nc.codec(spec), torch.zeros(5000)
        wires = [codec.encode(x), codec.encode(x, residual=residual)]
        codec.decode(codec.reduce(wires, 5000, residual=residual), 5000)
    print("done")

torch.set_num_threads(1)
threading.stack_size(256 * 1024)
thread = threading.Thread(target=use_all)
thread.start()
thread.join()
"""


@pytest.mark.parametrize("spec", SPECS)
def test_every_number_of_threads_gives_the_same_bytes(spec: str) -> None:
    codec, x = nc.codec(spec), torch.randn(VALUES, generator=torch.Generator().manual_seed(1))
    noise = {"seed": 5} if spec.endswith("+sr") else {}
    wanted = codec.encode(x, **noise)
    values = codec.decode(wanted, VALUES)
    for threads in (2, 3, 4):
        torch.set_num_threads(threads)
        assert torch.equal(codec.encode(x, **noise), wanted), threads
        assert torch.equal(codec.decode(wanted, VALUES), values), threads


def test_rounding_in_threads_gives_the_same_values() -> None:
    x = torch.randn(VALUES, generator=torch.Generator().manual_seed(2))
    wanted = nc.round_to(x, "e4m3", rounding="stochastic", seed=3)
    torch.set_num_threads(3)
    assert torch.equal(nc.round_to(x, "e4m3", rounding="stochastic", seed=3), wanted)


def test_a_small_stack_is_enough() -> None:
    done = subprocess.run([sys.executable, "-c", SMALL_STACK], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_a_forked_child_starts_threads_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


class Meeting:
    """The native library, which two threads enter together: each has described the format, and neither has read it."""

    def __init__(self, library: Any, tables: list[weakref.ref[Tensor]]) -> None:
        self.library, self.tables = library, tables
        self.barrier = threading.Barrier(2, timeout=60)

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: object) -> int:
            self.barrier.wait()
            assert all(table() is not None for table in self.tables), "a table was freed before C read it"
            self.barrier.wait()
            status: int = getattr(self.library, name)(*arguments)
            return status

        return call


@pytest.mark.parametrize("what", ["encode", "round_to"])
def test_two_threads_may_use_a_format_first(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fmt = TableFormat("once", tuple(torch.randn(200, generator=torch.Generator().manual_seed(3)).tolist()))
    plan, x = Plan(fmt, block=64), torch.randn(4096, generator=torch.Generator().manual_seed(4))
    tables: list[weakref.ref[Tensor]] = []
    meeting, both_build = Meeting(native.library.require(), tables), threading.Barrier(2, timeout=60)
    build, pointer = search_table.build, native.library._pointer

    def build_together(fmt: nc.Format) -> search_table.SearchTable:
        both_build.wait()
        return build(fmt)

    def noted(tensor: Tensor, *rest: Any) -> object:
        tables.append(weakref.ref(tensor))
        return pointer(tensor, *rest)

    def run(_: int = 0) -> Tensor:
        if what == "round_to":
            return nc.round_to(x, fmt)
        wire = torch.empty(plan.layout(4096).nbytes, dtype=torch.uint8)
        native.encode(plan, x, wire)
        return wire

    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(search_table, "build", build_together)
        patch.setattr(native.library, "_pointer", noted)
        patch.setattr(native.library, "require", lambda: meeting)
        first, second = pool.map(run, range(2))
    assert torch.equal(first, second)
    assert torch.equal(first, run())
