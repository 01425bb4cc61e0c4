"""Law 6 for Triton: in its interpreter, on CPU tensors, every kernel gives the bytes and values of the reference.

The interpreter computes as numpy does: it shows no contraction, no approximate division and no race. test_ptx.py looks
at the instructions, and tests/gpu/check_and_bench.py runs on a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).with_name("interpreted.py")


GROUPS = ("codecs-0", "fused", "wide", "words", "sums-0", "rows-0", "rounding", "cpd", "finite", "low-rank")
SECOND_HALVES = ("codecs-1", "sums-1", "rows-1")
"""The same checks of every other listed codec."""


@pytest.mark.parametrize("group", [*GROUPS, *(pytest.param(one, marks=pytest.mark.slow) for one in SECOND_HALVES)])
def test_every_kernel_equals_the_reference(group: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), group],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        check=False,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
