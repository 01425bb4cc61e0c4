"""The examples for frameworks that are too heavy for every test run; `make test-extras` installs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.extras


def last_line(*words: str) -> dict[str, float]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=110, env=environment, check=False, cwd=ROOT)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1])


@pytest.mark.parametrize("how", [[], ["--hook"]], ids=["callback", "strategy"])
def test_lightning(how: list[str]) -> None:
    found = last_line(sys.executable, "examples/lightning_ddp.py", "--devices=2", *how)
    # 512 examples, batches of 16, two ranks, two epochs
    assert found["steps"] == 32
    assert found["ratio"] > 5
    assert found["loss"] < 30


def test_accelerate() -> None:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "examples/accelerate_ddp.py"]
    found = last_line(sys.executable, *words)
    # every second pass communicates
    assert found["steps"] == 16
    assert found["ratio"] > 5
    assert found["residuals_kept"]


def test_tensorboard(tmp_path: Path) -> None:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "examples/watch_training.py"]
    last_line(sys.executable, *words, "--steps=10", f"--folder={tmp_path}")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(tmp_path))
    read.Reload()
    assert [event.step for event in read.Scalars("narrowcast/ratio")] == [5, 10]
    assert all(event.value > 3 for event in read.Scalars("narrowcast/ratio"))
    assert read.Scalars("narrowcast/sent_bytes_per_step")[-1].value > 0
