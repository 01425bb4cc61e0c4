"""Any number of threads gives the same bytes, and a forked child does not wait for its parent's threads."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import narrowcast as nc

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
    signal.alarm(20)  # a child that hangs is ended, and its status shows it
    theirs = coded()
    torch.set_num_threads(1)  # torch itself would hang in a forked child
    os._exit(0 if all(torch.equal(a, b) for a, b in zip(theirs, mine)) else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
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


def test_a_forked_child_starts_threads_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
