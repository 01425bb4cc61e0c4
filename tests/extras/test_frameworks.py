"""Frameworks that are too heavy for every test run: their examples, and resuming. `make test-extras` installs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.extras


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
State = dict[str, Tensor]


def output(*words: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=110, env=environment, check=False, cwd=ROOT)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def last_line(*words: str) -> dict[str, float]:
    return json.loads([line for line in output(*words).splitlines() if line.startswith("{")][-1])


def by_rank(script: str, how: str, folder: Path) -> list[dict[str, State]]:
    """What each of two ranks of a script of this folder saved."""
    output(*TORCHRUN, str(Path(__file__).parent / script), how, str(folder))
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def same(ours: State, theirs: State) -> bool:
    return list(ours) == list(theirs) and all(torch.equal(ours[name], value) for name, value in theirs.items())


@pytest.mark.parametrize("how", [[], ["--hook"]], ids=["callback", "strategy"])
def test_lightning(how: list[str]) -> None:
    found = last_line(sys.executable, "examples/lightning_ddp.py", "--devices=2", *how)
    # 512 examples, batches of 16, two ranks, two epochs
    assert found["steps"] == 32
    assert found["ratio"] > 5
    assert found["loss"] < 30


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_lightning_goes_on_with_what_is_owed(tmp_path: Path, how: str) -> None:
    for found in by_rank("resume_lightning.py", how, tmp_path):
        assert len(found["before"]) == 4
        assert all(value.abs().max() > 0 for value in found["before"].values())
        # from a checkpoint that was written while fit ran, and from one after it
        assert same(found["during"], found["before"])
        assert same(found["later"], found["before"])


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_accelerate_goes_on_with_what_is_owed(tmp_path: Path, how: str) -> None:
    for found in by_rank("resume_accelerate.py", how, tmp_path):
        assert len(found["before"]) == 4
        assert all(value.abs().max() > 0 for value in found["before"].values())
        assert not any(value.any() for value in found["fresh"].values())
        assert same(found["after"], found["before"])


def test_accelerate_hands_its_loss_scaler_on(tmp_path: Path) -> None:
    """Else residuals of an old loss scale would be added to gradients of a new one."""
    for found in by_rank("resume_accelerate.py", "scaler", tmp_path):
        assert len(found["plain"]) == 4
        assert same(found["scaled"], found["plain"])


def test_accelerate() -> None:
    found = last_line(*TORCHRUN, "examples/accelerate_ddp.py")
    # every second pass communicates
    assert found["steps"] == 16
    assert found["ratio"] > 5
    assert found["residuals_kept"]


def test_tensorboard(tmp_path: Path) -> None:
    last_line(*TORCHRUN, "examples/watch_training.py", "--steps=10", f"--folder={tmp_path}")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(tmp_path))
    read.Reload()
    assert [event.step for event in read.Scalars("narrowcast/ratio")] == [5, 10]
    assert all(event.value > 3 for event in read.Scalars("narrowcast/ratio"))
    assert read.Scalars("narrowcast/sent_bytes_per_step")[-1].value > 0
