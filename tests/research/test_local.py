"""Trainings by local updates: what is done is not done again, tables hold the right arithmetic, few steps are alike."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from narrowcast_research.local import jobs, language, mixing
from narrowcast_research.wires import workloads
from narrowcast_research.wires.convergence import read
from narrowcast_research.wires.workloads import Setting, WorkerLoop

from narrowcast.parallel import LocalUpdates

TINY = Setting(tiny=True, steps=3, workers=2)


@pytest.fixture(autouse=True)
def one_thread() -> object:
    """Small products on several threads of a busy machine wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_step_is_that_of_ddp_where_plain_workers_meet_after_each() -> None:
    """With SGD inside, no clipping and an outer rate of 1, a mean of weights is a step of the mean."""
    alone, together = (replace(workloads.workload("lm", 3, TINY), clip=None) for _ in range(2))
    updates = LocalUpdates(1, outer=language.average)
    local = language.LocalLoop(alone, updates, "fp32", TINY)
    local.local.optimizers = [torch.optim.SGD(model.parameters(), lr=0.0) for model in local.local.models]
    plain = WorkerLoop(replace(together, optimizer=torch.optim.SGD(together.model.parameters(), lr=0.0)), "fp32")
    for _ in range(3):
        local.step()
        plain.step()
    local.local.mean_into(alone.model)
    for ours, theirs in zip(alone.model.parameters(), together.model.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)


def test_texts_are_trained_once_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "local.jsonl"
    words = ["--out", str(out), "--tiny", "--steps", "4", "--every", "2", "--wires", "fp32", "--seeds", "1"]
    assert language.main([*words, "--limit", "0"]) == 1
    assert language.main(words) == 0
    assert language.main(words) == 0
    assert "3 of 3 trainings are done" in capsys.readouterr().out
    assert len(read([out])) == 3
    assert language.main([*words, "--table"]) == 0
    shown = capsys.readouterr().out
    assert [line.split(" | ")[1] for line in shown.splitlines()[3:]] == ["2", "2"]
    assert "| 16.0000 |" in shown


def test_pictures_are_trained_once_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in (("PICTURES", 256), ("TESTED", 64), ("SIDE", 8)):
        monkeypatch.setattr(mixing, name, size)
    out = tmp_path / "mixing.jsonl"
    words = ["--out", str(out), "--workers", "4", "--wires", "int4/128", "--steps", "12", "--seeds", "1"]
    assert mixing.main(words) == 0
    assert mixing.main([*words, "--table"]) == 0
    rows = capsys.readouterr().out.splitlines()[-5:]
    assert [row.split(" | ")[2] for row in rows] == list(mixing.KINDS)
    sent = [float(row.split(" | ")[-1].strip(" |").replace(",", "")) for row in rows]
    # of four workers: 2 * 3 / 4 messages, 1, 1, 2, and a third of each
    assert [round(x / sent[1], 2) for x in sent] == [1.5, 1.0, 1.0, 2.0, 1.5]


def test_differences_are_by_seed() -> None:
    own = {0: {"score": 3.0}, 1: {"score": None}, 2: {"score": 5.0}}
    first = {0: {"score": 2.0}, 1: {"score": 2.0}, 2: {"score": 2.0}, 3: {"score": 9.0}}
    assert jobs.differences(own, first) == [1.0, 3.0]
    assert jobs.mean_text(own, "score", 1) == "4.0 (1 of 3 lost their numbers)"
    assert jobs.difference_text(own, first, 1).startswith("+2.0 (")
