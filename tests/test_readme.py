"""The README's two recipes run as they stand, on two ranks that torchrun starts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from each import each
from torchrun import torchrun

README = Path(__file__).parent.parent / "README.md"


def recipes() -> list[str]:
    """Whole programs: the Python blocks that make a process group."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    return [block for block in blocks if "init_process_group" in block]


def test_there_is_one_recipe_for_ddp_and_one_for_fsdp2() -> None:
    ddp, fsdp = recipes()
    assert "DDP(model)" in ddp
    assert "torch.autocast(device.type, torch.bfloat16)" in ddp
    assert "fully_shard" in fsdp
    for program in (ddp, fsdp):
        assert program.count("nc.attach") == 1
        assert '"nccl" if cuda' in program


@pytest.mark.timeout(300)
@each("number", [0, 1])
def test_a_recipe_runs_on_two_ranks_as_it_stands(number: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(recipes()[number])
    done = torchrun(str(tmp_path / "train.py"))
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = done.stdout.splitlines()
    assert " % of " in line
    assert " times fewer bits" in line


def test_the_first_screen_says_how_to_install_and_what_to_type() -> None:
    screen = "\n".join(README.read_text().splitlines()[:25])
    for words in (
        "\nmake study ",
        "\nmake test ",
        "pip install narrowcast",
        "pip install -e",
        "torchrun --nproc-per-node",
    ):
        assert words in screen
