"""torchrun in tests: two ranks, and none of them left where it takes too long.

On a busy machine ranks take a minute to start: its tests have `pytest.mark.timeout(300)`.
"""

from __future__ import annotations

import os
import subprocess
import sys

GRACE = 20.0


def torchrun(*words: str, timeout: float = 200.0) -> subprocess.CompletedProcess[str]:
    """How it ended, with what it wrote. words: more options of torchrun, the script, its arguments."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *words]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()  # it ends its ranks, as SIGKILL would not
        output, errors = process.communicate(timeout=GRACE)
        raise AssertionError(f"not done after {timeout} s: {output[-1500:]}\n{errors[-1500:]}") from None
    finally:
        process.kill()
    return subprocess.CompletedProcess(command, process.returncode, output, errors)
