"""Trainings over slow links, as a command: every method runs in a lab, what is done is not done again."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest
from narrowcast_research import slow_links

LIKE = slow_links.LinkRun("", "", 2, "100mbit", "1ms", every=4, fragments=2, late=1, steps=8, tiny=True)


def row(run: slow_links.LinkRun, wall: float) -> dict[str, object]:
    sent = {"bytes_per_parameter_and_step": 0.5, "alone": 0.01, "wall": wall}
    return {"run": asdict(run), **sent, "share": 0.01 * run.steps / wall, "loss": [5.0, 4.0]}


def test_methods_differ_in_what_they_exchange_and_nothing_else() -> None:
    runs = slow_links.planned(LIKE)
    assert len({(run.method, run.wire) for run in runs}) == len(runs) == 7
    assert {(run.hosts, run.rate, run.delay, run.steps) for run in runs} == {(2, "100mbit", "1ms", 8)}
    assert {(run.every, run.fragments, run.late) for run in runs if run.method == "blocking"} == {(4, 1, 0)}
    assert {(run.every, run.fragments, run.late) for run in runs if run.method == "streaming"} == {(4, 2, 1)}


def test_a_table_has_a_row_for_each_run() -> None:
    runs = slow_links.planned(LIKE)
    lines = slow_links.table([row(run, 0.1) for run in runs]).splitlines()
    assert len(lines) == len(runs) + 2
    assert lines[2] == "| ddp | `int8/256` | 10 | 12 | 80.0% | 0.5000 |"


@pytest.mark.skipif(os.geteuid() != 0, reason="a lab needs root")
def test_what_is_in_the_file_is_not_done_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "runs.jsonl"
    left = slow_links.planned(LIKE)[-1]
    done = [row(run, 0.1) for run in slow_links.planned(LIKE)[:-1]]
    out.write_text("".join(json.dumps(one) + "\n" for one in done))
    setting = ["--hosts=2", "--delay=1ms", "--every=4", "--fragments=2", "--late=1", "--steps=8", "--tiny", "--out"]
    slow_links.main([*setting, str(out)])
    said = capsys.readouterr()
    assert said.err == f"{left.method} {left.wire} ...\n"
    lines = slow_links.read(out)
    assert [line["run"] for line in lines] == [asdict(run) for run in slow_links.planned(LIKE)]
    assert lines[-1]["bytes_per_parameter_and_step"] > 0
    assert lines[-1]["share"] > 0
