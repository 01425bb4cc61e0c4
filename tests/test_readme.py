"""The README's first block is a diff of a training loop: it runs with and without the added lines."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
RANKS = 2


def first_block() -> tuple[str, list[str]]:
    match = re.search(r"```(\w*)\n(.*?)```", README.read_text(), re.DOTALL)
    assert match is not None
    return match[1], match[2].splitlines()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def run(script: str, folder: Path) -> list[str]:
    """Run the script as every rank and return the loss that each printed."""
    path = folder / "train.py"
    path.write_text(script + "\nprint('loss', loss.item())\ndist.barrier()\ndist.destroy_process_group()\n")
    port = str(free_port())
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(RANKS)}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(path)],
            env={**common, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        texts = [rank.communicate(timeout=90)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * RANKS
    return [line for text in texts for line in text.splitlines() if line.startswith("loss")]


def test_the_first_block_is_a_diff_of_at_most_five_added_lines() -> None:
    language, lines = first_block()
    assert language == "diff"
    added = [line for line in lines if line.startswith("+")]
    assert 1 <= len(added) <= 5
    assert any("nc.attach" in line for line in added)
    assert not any(line.startswith("-") for line in lines)


@pytest.mark.parametrize("with_narrowcast", [False, True], ids=["before", "after"])
def test_the_training_loop_of_the_readme_runs_on_two_ranks(with_narrowcast: bool, tmp_path: Path) -> None:
    _, lines = first_block()
    kept = [line[1:] for line in lines if with_narrowcast or not line.startswith("+")]
    assert len(run("\n".join(kept), tmp_path)) == RANKS
