"""A training on text: what a seed decides, what a cut changes, which runs a plan takes, and what figures show."""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from array import array
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist
from narrowcast_research.text import corpus, figure, plan, train
from narrowcast_research.text.runs import TextRun, files_in, read

WIRES = ("plain", "int8/256", "int4/128+ef")


def on_two_ranks(*commands: list[str]) -> None:
    """Trainings one after another, in one group of two processes."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
    # as torchrun says that the store is there already: a port that is free now may be another's by then
    common |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    words = [sys.executable, str(Path(__file__).with_name("text_ranks.py")), json.dumps(commands)]
    ranks = [subprocess.Popen(words, env={**common, "RANK": str(rank)}) for rank in range(2)]
    try:
        assert [rank.wait(240) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


pytestmark = pytest.mark.timeout(300)  # the runs are made first


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whole runs, one that was cut after 10 steps and went on, another seed, and one without time."""
    here = tmp_path_factory.mktemp("text")

    def words(file: str, wire: str, steps: int, *more: str) -> list[str]:
        of = ["--wire", wire, "--steps", str(steps), "--horizon", "20", "--runs", str(here / file)]
        return ["--tiny", *of, *more]

    kept, kept_ef = (["--checkpoint", str(here / file)] for file in ("kept.pt", "kept-ef.pt"))
    on_two_ranks(
        *(words("whole.jsonl", wire, 20) for wire in WIRES),
        words("cut.jsonl", "int8/256", 10, *kept),
        words("cut.jsonl", "int8/256", 20, *kept, "--resume"),
        words("cut-ef.jsonl", "int4/128+ef", 10, *kept_ef),
        words("cut-ef.jsonl", "int4/128+ef", 20, *kept_ef, "--resume"),
        words("seed.jsonl", "plain", 4, "--seed", "1"),
        words("late.jsonl", "plain", 20, "--until-seconds", "0"),
    )
    return here


def only(path: Path) -> TextRun:
    (run,) = read([path])
    return run


def losses(run: TextRun) -> list[float]:
    return [run.rows[step]["loss"] for step in range(1, run.steps + 1)]


def test_a_seed_decides_weights_and_batches_whatever_the_wire(folder: Path) -> None:
    whole = read([folder / "whole.jsonl"])
    assert [run.wire for run in whole] == list(WIRES)
    assert all(run.complete and run.steps == 20 for run in whole)
    # weights, and the batch of the first step; then the wires' own errors come in
    assert len({losses(run)[0] for run in whole}) == 1
    assert len({losses(run)[-1] for run in whole}) == len(WIRES)
    assert losses(only(folder / "seed.jsonl"))[0] != losses(whole[0])[0]
    for run in whole:
        assert losses(run)[0] == pytest.approx(math.log(256), abs=0.1)
        assert losses(run)[-1] < 4
        assert run.rows[20]["held_out"] < 4


def test_a_run_that_was_cut_goes_on_with_the_same_losses(folder: Path) -> None:
    whole = next(run for run in read([folder / "whole.jsonl"]) if run.wire == "int8/256")
    cut = only(folder / "cut.jsonl")
    assert cut.complete
    assert losses(cut) == losses(whole)
    assert cut.rows[20]["held_out"] == whole.rows[20]["held_out"]


def test_a_cut_keeps_residuals_as_their_mean(folder: Path) -> None:
    whole = next(run for run in read([folder / "whole.jsonl"]) if run.wire == "int4/128+ef")
    cut = only(folder / "cut-ef.jsonl")
    assert losses(cut)[:11] == losses(whole)[:11]
    assert losses(cut)[11:] == pytest.approx(losses(whole)[11:], abs=0.05)
    residuals = torch.load(folder / "kept-ef.pt", weights_only=True)["residuals"]
    assert residuals["embed.weight"].abs().max() > 0


def test_time_stands_still_in_the_first_steps_and_then_goes_on(folder: Path) -> None:
    for run in read(files_in([folder])):
        times = [run.rows[step]["seconds"] for step in range(1, run.steps + 1)]
        assert times[: train.START] == [0.0] * train.START
        assert times == sorted(times)
        assert run.end["start_seconds"] > 0
    resumed = only(folder / "cut.jsonl")
    assert resumed.rows[10]["seconds"] == resumed.rows[10 + train.START]["seconds"] > 0


def test_a_run_without_time_says_how_far_it_came(folder: Path) -> None:
    late = only(folder / "late.jsonl")
    assert not late.complete
    assert late.end["step"] == late.steps == train.START


def test_the_rate_rises_then_falls_to_a_tenth() -> None:
    rates = [train.rate_at(step, 100, 1.0) for step in range(1, 121)]
    assert rates[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[99:] == pytest.approx([0.1] * 21)


def test_documents_are_cleaned_and_held_out_whole() -> None:
    assert corpus.clean(" a\t b\r\n\r\n\r\n\n c\x07d ") == "a b\n\nc d"
    seen, unseen = corpus.split([*(f"text {number}" for number in range(40)), " "])
    assert unseen == ["text 10", "text 30"]
    assert sorted([*seen, *unseen]) == sorted(f"text {number}" for number in range(40))


def test_a_token_file_comes_back_and_a_changed_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "text.bin"
    corpus.save(path, array("H", [0, 1, 32767]), array("H", [5, 6]), 32768)
    text = corpus.load(path)
    assert (text.train.tolist(), text.held_out.tolist(), text.vocabulary) == ([0, 1, 32767], [5, 6], 32768)
    with pytest.raises(ValueError, match="a vocabulary of 5"):
        corpus.save(path, array("H", [5]), array("H", [0]), 5)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match="its JSON says"):
        corpus.load(path)


def write(path: Path, wire: str, seed: int, steps: int, step_seconds: float, complete: bool = True) -> None:
    """A run whose losses fall as 10 / step, held-out ones a tenth above."""
    of = {"wire": wire, "seed": seed}
    lines: list[dict[str, object]] = [{**of, "run": {"after": 0, "steps": steps}}]
    for step in range(1, steps + 1):
        held_out = {"held_out": 11 / step} if step % 50 == 0 else {}
        lines.append({**of, "step": step, "loss": 10 / step, "seconds": step * step_seconds, **held_out})
    end = {"complete": complete, "step": steps, "seconds": steps * step_seconds, "start_seconds": 10.0}
    train.append(path, [*lines, {**of, "end": end}])


def test_a_run_that_began_again_counts_once_and_a_broken_line_is_named(tmp_path: Path) -> None:
    first, second = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    write(first, "int8/256", 0, 100, 0.2, complete=False)
    write(second, "int8/256", 0, 50, 0.1)
    assert [(run.steps, run.complete) for run in read([first, second])] == [(50, True)]
    assert [(run.steps, run.complete) for run in read([second, first])] == [(50, True)]
    with first.open("a") as file:
        file.write('{"wire": "int8')
    with pytest.raises(ValueError, match=r"1\.jsonl:103: .*remove it"):
        read([first])


def test_time_to_a_loss_lies_between_two_of_them(tmp_path: Path) -> None:
    write(tmp_path / "1.jsonl", "plain", 0, 150, 0.5)
    run = only(tmp_path / "1.jsonl")
    assert run.step_seconds() == pytest.approx(0.5)
    # held-out losses are 0.22, 0.11 and 0.0733 after 25, 50 and 75 seconds
    assert run.seconds_to(0.5) == 25
    assert run.seconds_to(0.165) == pytest.approx(37.5)
    assert run.seconds_to(0.05) is None


def options(folder: Path, limit: float) -> argparse.Namespace:
    wires = ["bf16-hook", "int8/256", "int4/128+ef"]
    given = {"runs": folder / "new.jsonl", "done": [], "limit": limit, "wires": wires, "seeds": 3}
    return argparse.Namespace(**given, steps=1000, other_steps=300, tiny=False)


def test_a_plan_takes_the_longest_run_that_fits_and_none_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, taken = 0.0, []

    def run_in_lab(one: plan.Planned, arguments: argparse.Namespace, left: float) -> None:
        nonlocal now
        taken.append((one.wire, one.seed))
        seconds = plan.EXPECTED[one.wire]
        now += one.steps * (seconds + plan.HELD_OUT) + 20
        write(arguments.runs, one.wire, one.seed, one.steps, seconds)

    monkeypatch.setattr(plan.time, "monotonic", lambda: now)
    monkeypatch.setattr(plan, "run_in_lab", run_in_lab)
    left = plan.run_all(options(tmp_path, 560))
    assert taken == [("bf16-hook", 0), ("bf16-hook", 1)]
    assert now < 560
    calls = 1
    while left:
        calls, now, before = calls + 1, 0.0, len(taken)
        left = plan.run_all(options(tmp_path, 560))
        assert now < 560
        assert len(taken) > before
    assert calls == 3
    assert len(taken) == len(set(taken)) == 9


def test_a_run_that_fails_is_tried_once_a_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[plan.Planned] = []
    monkeypatch.setattr(plan, "run_in_lab", lambda one, arguments, left: taken.append(one))
    assert len(plan.run_all(options(tmp_path, 5000))) == 9
    assert len(taken) == len(set(taken)) == 9


def test_figure_and_table_show_every_wire_and_only_complete_runs(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    for seed, steps in enumerate((100, 50, 50)):
        write(file, "int8/256", seed, steps, 0.2)
        write(file, "bf16-hook", seed, steps, 0.4)
    write(file, "int4/128+ef", 0, 50, 0.1, complete=False)
    wires = figure.by_wire(read([file]), "bf16-hook")
    assert list(wires) == ["bf16-hook", "int8/256"]
    picture = ElementTree.fromstring(figure.draw(wires, "a <title>"))
    assert len(picture.findall("{*}polyline")) == 2 * 2 * 3
    losses_table, times_table = figure.tables(wires).split("\n\n")
    assert "| `int8/256` | 3 |" in losses_table
    assert "0.220 ± 0.000" in losses_table
    assert "| `bf16-hook` | 400 | 40 |" in times_table
    assert "| `int8/256` | 200 | 20 |" in times_table
    assert "(2.00x)" in times_table
    page = figure.put_into(f"before\n{figure.BEGIN}\nold\n{figure.END}\nafter\n", "new \\1")
    assert page == f"before\n{figure.BEGIN}\nnew \\1\n{figure.END}\nafter\n"
    with pytest.raises(ValueError, match="once each"):
        figure.put_into("no marks", "new")
    with pytest.raises(ValueError, match="no complete run"):
        figure.by_wire([])
