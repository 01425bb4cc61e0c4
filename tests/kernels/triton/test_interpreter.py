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


PARTS = {"codecs": 8, "fused": 5, "wide": 2, "words": 4, "sums": 8, "rows": 8}
PARTS |= {"rounding": 1, "cpd": 1, "finite": 4, "low-rank": 1}
"""Into how many parts the codecs of each group are dealt out: the first is always run, the others in the long form."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "group, part, parts",
    [
        pytest.param(group, part, parts, marks=[pytest.mark.slow] * bool(part), id=f"{group}-{part}")
        for group, parts in PARTS.items()
        for part in range(parts)
    ],
)
def test_every_kernel_equals_the_reference(group: str, part: int, parts: int) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), group, str(part), str(parts)],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        check=False,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
