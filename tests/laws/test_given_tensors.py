"""What callers give is refused with advice or served right, and what is written is seen by autograd: with -O too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    "options", [pytest.param([], id="plain"), pytest.param(["-O"], id="optimised", marks=pytest.mark.slow)]
)
def test_every_tensor_is_served_right_or_refused_with_advice(options: list[str]) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, *options, str(Path(__file__).with_name("given.py"))]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
