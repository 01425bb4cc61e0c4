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


def test_lightning_spawned_on_one_process_and_fabric(tmp_path: Path) -> None:
    output(sys.executable, "tests/extras/spawn_lightning.py", str(tmp_path))
    found = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert found["one"]["steps"] == 0
    assert "one process: nothing travels" in found["one"]["explained"]
    # 64 examples, batches of 8, two ranks
    for how in ("spawn", "strategy", "fork"):
        assert (found[how]["steps"], found[how]["ratio"] > 3) == (4, True), how
    assert found["fabric"]["ratio"] > 3


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


def test_accelerate_goes_on_from_what_was_saved_without_it_and_back(tmp_path: Path) -> None:
    for found in by_rank("resume_accelerate.py", "without", tmp_path):
        assert all(value.abs().max() > 0 for value in found["before"].values())
        assert found["ratio"]["compiled"] > 3
    assert not (tmp_path / "plain" / "narrowcast.pt").exists()
    assert (tmp_path / "ours" / "narrowcast.pt").exists()


ONE = """
from accelerate import Accelerator
from narrowcast.parallel.integrations.accelerate import attach
import torch
accelerator = Accelerator(cpu=True)
model = accelerator.prepare(torch.nn.Linear(16, 33))
handle = attach(accelerator, model, "int4/64+ef")
handle.load_state_dict({"weight": torch.ones(33, 16)})
accelerator.save_state(folder)
handle.load_state_dict({})
accelerator.load_state(folder)
assert handle.state_dict()["weight"].sum() == 33 * 16
print(handle.explain())
"""


def test_accelerate_on_one_process_has_nothing_to_do(tmp_path: Path) -> None:
    assert "one process: nothing travels" in output(sys.executable, "-c", f"folder = {str(tmp_path)!r}\n{ONE}")


def test_accelerate() -> None:
    found = last_line(*TORCHRUN, "examples/accelerate_ddp.py")
    # every second pass communicates
    assert found["steps"] == 16
    assert found["ratio"] > 5
    assert found["residuals_kept"]


@pytest.mark.parametrize("how", [[], ["--compile"]], ids=["plain", "compiled"])
def test_trainer(how: list[str], tmp_path: Path) -> None:
    example = ("examples/transformers_trainer.py", f"--folder={tmp_path}")
    found = last_line(*TORCHRUN, *example, *how)
    # a step is two passes, of which the second communicates
    assert found["steps"] == 12
    assert found["ratio"] > 6
    assert (tmp_path / "checkpoint-12" / "narrowcast.pt").exists()
    if not how:
        assert last_line(*TORCHRUN, *example, "--steps=16", "--resume")["steps"] == 4


def test_trainer_on_one_process_has_nothing_to_do(tmp_path: Path) -> None:
    found = last_line(sys.executable, "examples/transformers_trainer.py", f"--folder={tmp_path}", "--steps=2")
    assert found["steps"] == 0


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_trainer_goes_on_with_what_is_owed(tmp_path: Path, how: str) -> None:
    for found in by_rank("resume_transformers.py", how, tmp_path):
        assert len(found["saved"]) == 4
        assert all(value.abs().max() > 0 for value in found["saved"].values())
        assert same(found["again"], found["saved"])
        assert not any(value.any() for value in found["without"].values())
        # a step is two passes: with FSDP2 sharded by hand each is reduced, with DDP the second alone
        assert found["steps"]["steps"] == (4 if how == "ddp" else 8)
    assert not (tmp_path / "plain" / "checkpoint-4" / "narrowcast.pt").exists()


def test_torchtitan(tmp_path: Path) -> None:
    found = last_line(*TORCHRUN, "tests/extras/titan_cpu.py", str(tmp_path))
    # its loss comes in pieces, each a backward pass
    assert found["steps"] >= 4
    assert found["gradient_plain_bytes"] / found["gradient_sent_bytes"] > 7
    assert found["parameter_plain_bytes"] / found["parameter_sent_bytes"] > 1.9
    assert found["compressed_share"] > 0.99


def test_tensorboard(tmp_path: Path) -> None:
    last_line(*TORCHRUN, "examples/watch_training.py", "--steps=10", f"--folder={tmp_path}")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(tmp_path))
    read.Reload()
    assert [event.step for event in read.Scalars("narrowcast/ratio")] == [5, 10]
    assert all(event.value > 3 for event in read.Scalars("narrowcast/ratio"))
    assert read.Scalars("narrowcast/sent_bytes_per_step")[-1].value > 0
