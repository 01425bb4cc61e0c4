"""The examples run as their first lines say, on two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torchrun import torchrun

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).parents[2]


def last_line(name: str, *arguments: str) -> dict[str, float]:
    """The JSON line that rank 0 ends with."""
    done = torchrun(str(ROOT / "examples" / name), *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_fsdp(tmp_path: Path) -> None:
    small = ["--width=64", "--layers=1", "--steps=5", "--gradients=int4/128+ef", "--parameters=e4m3fn/128"]
    found = last_line("fsdp_text.py", *small, f"--checkpoint={tmp_path / 'saved'}")
    assert found["steps"] == 5
    assert found["ratio"] > 2
    assert (tmp_path / "saved" / ".metadata").exists()


def test_a_plain_loop_that_is_watched(tmp_path: Path) -> None:
    found = last_line("watch_training.py", "--print", "--steps=5", f"--folder={tmp_path}")
    assert found["ranks"] == 2
    assert found["calls"] >= 2 * 5
