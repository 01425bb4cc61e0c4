"""The Triton matrix product in Triton's interpreter: the bits of the reference."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

RULES = (
    *("bf16", "fp16+kahan", "e5m2/3", "e4m3fn+pairwise", "e3m0", "fixed8.8", "fixed4.4+sr", "e4m3fnuz+sr+kahan"),
    *("fp32+sequential", "e5m2+mul=bf16", "bf16+fma", "e4m3+mogami+kahan", "fp16/4+outer=fp32", "bf16+sr+pairwise"),
)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("rules", [RULES[::3], *(pytest.param(RULES[i::3], marks=pytest.mark.slow) for i in (1, 2))])
def test_the_kernel_gives_the_bits_of_the_reference(rules: tuple[str, ...]) -> None:
    # a process of its own: whether kernels are interpreted is decided when triton is imported
    script = Path(__file__).with_name("matmul_interpreter.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), *rules], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == [word for rule in rules for word in (rule, "ok")]
