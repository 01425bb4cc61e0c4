"""Every reproduction in its quick form: what the paper states shows, and does not when the rule is switched off."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from narrowcast_research import models, reproductions
from narrowcast_research.policies import Assignment, AutoScale, GradientDiversity
from narrowcast_research.reproductions import __main__ as plain
from narrowcast_research.reproductions import base, mogami
from narrowcast_research.reproductions.base import Options, spread
from narrowcast_research.reproductions.engine import Store, reproduce
from narrowcast_research.reproductions.figure import line_chart
from narrowcast_research.reproductions.pictures import crop_flip, crop_flip_cut
from typer.testing import CliRunner

from narrowcast.cli import assemble
from narrowcast.simulate import training
from narrowcast.simulate.precision.casts import LayerScale
from narrowcast.simulate.precision.loss_scale import LossScale
from narrowcast.study.models import linear_layers, parameters_of


def quick(name: str, out: Path) -> dict[str, Any]:
    """`narrowcast simulate NAME --quick`."""
    done = CliRunner().invoke(assemble(), ["simulate", name, "--quick", "--out", str(out), "--json", "-"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def refuted(report: dict[str, Any]) -> list[str]:
    return [claim["text"] for claim in report["claims"] if not claim["holds"]]


SWITCHED_OFF: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "muppet": ("the rule", lambda patch: patch.setattr(GradientDiversity, "decide", lambda *_: None)),
    "fp8-lm": ("too small, adapts", lambda patch: patch.setattr(AutoScale, "decide", lambda *_: None)),
    "lee-assignment": ("promotes on overflow", lambda patch: patch.setattr(Assignment, "decide", lambda *_: None)),
    "mellempudi-loss-scale": ("dynamic, minimum rises", lambda patch: patch.setattr(LossScale, "minimum", 0.0)),
    "lu-posit": ("posit8.1, scaled by layer", lambda patch: patch.setattr(LayerScale, "scale", lambda *_: 1.0)),
    "mogami": (
        "bit patterns added",
        lambda patch: patch.setitem(mogami.RULES, "bit patterns added", "fp32+sequential"),
    ),
}
"""The row that needs the rule, and how to take the rule away."""


BEGUN = ("aps-rivals",)
LONG = ("pure16", "aps-cifar10", "dettmers-mnist", "muppet", "fp8-lm", *BEGUN)


@pytest.mark.parametrize("name", BEGUN)
def test_a_long_one_begins_and_is_cut_by_its_budget(name: str, tmp_path: Path) -> None:
    report = reproduce(reproductions.named(name), Options(quick=True, out=tmp_path, budget=0.3))
    assert report.missing > 0
    assert report.columns


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in LONG else []) for name in reproductions.HOMES],
)
def test_what_the_paper_states_shows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = quick(name, tmp_path)
    assert report["missing"] == 0
    assert report["claims"]
    assert refuted(report) == []
    # what is finished is not run again
    monkeypatch.setattr(type(reproductions.named(name)), "run", None)
    assert quick(name, tmp_path)["cells"] == report["cells"]
    monkeypatch.undo()
    if name in SWITCHED_OFF:
        row, switch_off = SWITCHED_OFF[name]
        forget(tmp_path / name / "cells.jsonl", row)
        switch_off(monkeypatch)
        assert refuted(quick(name, tmp_path)) != []


def forget(store: Path, row: str) -> None:
    """Take a row out of what is finished."""
    lines = store.read_text().splitlines()
    left = [line for line in lines if json.loads(line)["cell"]["row"] != row]
    assert len(left) < len(lines)
    store.write_text("".join(line + "\n" for line in left))


class Ticking:
    """A clock on which each look takes a second: a budget is then a number of steps, however fast the machine is."""

    def __init__(self) -> None:
        self._now = 0.0

    def monotonic(self) -> float:
        self._now += 1
        return self._now


def test_a_run_that_is_cut_by_its_budget_goes_on_to_the_same_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cells, and the training inside a cell: the budget ends it in the middle."""
    for module in (base, training):
        monkeypatch.setattr(module, "time", Ticking())
    whole = reproduce(reproductions.named("lee-assignment"), Options(quick=True, out=tmp_path / "whole"))
    calls, report = 0, None
    while report is None or report.missing:
        report = reproduce(
            reproductions.named("lee-assignment"), Options(quick=True, out=tmp_path / "cut", budget=25.0)
        )
        calls += 1
        assert calls < 200
    assert calls > 3
    accuracy = [[cell["result"]["accuracy"] for cell in found.cells] for found in (whole, report)]
    assert accuracy[0] == accuracy[1]
    assert not list((tmp_path / "cut").rglob("*.pt"))


def test_a_line_that_was_cut_off_is_run_again(tmp_path: Path) -> None:
    quick("aps-roundoff", tmp_path)
    store = tmp_path / "aps-roundoff" / "cells.jsonl"
    store.write_text(store.read_text()[:-20])
    assert quick("aps-roundoff", tmp_path)["missing"] == 0


def test_a_report_says_where_each_cell_was_run(tmp_path: Path) -> None:
    """Not where the report was written: cells are brought from other machines."""
    store = tmp_path / "aps-roundoff" / "cells.jsonl"
    here = quick("aps-roundoff", tmp_path)["notes"][-1]
    assert f"torch {torch.__version__}" in here
    lines = [json.loads(line) for line in store.read_text().splitlines()]
    lines[0]["where"] = "a GPU far away"
    del lines[1]["where"]
    store.write_text("".join(json.dumps(line) + "\n" for line in lines))
    notes = quick("aps-roundoff", tmp_path)["notes"]
    for told in (
        "1 cells: a GPU far away",
        "1 cells: a machine that was not recorded",
        f"{len(lines) - 2} cells: {here}",
    ):
        assert told in notes


def test_processes_with_one_folder_share_the_cells(tmp_path: Path) -> None:
    """One holds a cell; another leaves it alone, runs the rest, and says that one is missing."""
    found, options = reproductions.named("lee-assignment"), Options(quick=True, out=tmp_path)
    cells = found.cells(options)
    other = Store(tmp_path / found.name, found, options)
    with other.claimed(cells[0]) as ours:
        assert ours
        report = reproduce(found, options)
    assert report.missing == 1
    assert [line["cell"] for line in report.cells] == cells[1:]
    with other.claimed(cells[1]) as ours:
        assert not ours, "it was finished by the other"
    assert reproduce(found, options).missing == 0
    assert not list(tmp_path.rglob("*.lock"))


def test_the_command_without_a_name_lists_them() -> None:
    done = CliRunner().invoke(assemble(), ["simulate", "--json", "-"])
    assert [line["name"] for line in json.loads(done.stdout)] == list(reproductions.HOMES)


@pytest.mark.parametrize(
    "arguments, word", [(["nothing"], "there are aps-cifar10"), (["muppet", "--model", "x"], "no option --model")]
)
def test_a_wrong_name_or_option_is_refused(arguments: list[str], word: str) -> None:
    done = CliRunner().invoke(assemble(), ["simulate", *arguments])
    assert word in str(done.exception)


@pytest.mark.parametrize(
    "option, value, word",
    [
        ("--device", "cud", "there is no device 'cud'; take --device cpu or cuda"),
        ("--device", "meta", "there is no device 'meta'"),
        ("--device", "cuda:0", "--device cuda:0, but torch sees no GPU here"),
        ("--out", "a file/runs", "cannot keep anything in --out .*name another folder"),
    ],
)
def test_a_wrong_device_or_folder_is_told(
    tmp_path: Path, option: str, value: str, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "a file").write_text("")
    done = CliRunner().invoke(assemble(), ["simulate", "lee-assignment", "--quick", option, value])
    assert isinstance(done.exception, ValueError)
    assert re.search(word, str(done.exception))


def test_the_plain_command_needs_no_library(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain.main(["aps-roundoff", "--quick", "--out", str(tmp_path), "--json", str(tmp_path / "r.json")])
    shown = capsys.readouterr()
    assert "agrees: the ring is worst" in shown.out
    assert json.loads((tmp_path / "r.json").read_text())["missing"] == 0


def test_full_runs_ask_for_their_data(tmp_path: Path) -> None:
    options = Options(root=tmp_path, out=tmp_path / "runs")
    with pytest.raises(RuntimeError, match="narrowcast data get cifar10"):
        reproduce(reproductions.named("aps-cifar10"), options)


# ---- the parts -------------------------------------------------------------------------------------------------------


def test_a_figure_is_xml_that_holds_its_numbers(tmp_path: Path) -> None:
    report = quick("aps-roundoff", tmp_path)
    path = Path(next(note for note in report["notes"] if note.startswith("figure: ")).removeprefix("figure: "))
    root = ElementTree.fromstring(path.read_text())
    described = "".join(root.itertext())
    for cell in report["cells"]:
        assert f"{cell['result']['error']:.4g}" in described
    shutil.rmtree(tmp_path)


def test_a_figure_escapes_what_it_is_given() -> None:
    ElementTree.fromstring(line_chart("a < b & c", "x", "y", {"<me>": [(1, 2), (2, 3)]}, {1: "one", 2: "two"}))


def test_models_have_the_sizes_of_the_papers() -> None:
    assert parameters_of(models.davidnet()) == 6_573_120
    assert parameters_of(models.resnet18()) == 11_173_962
    assert parameters_of(linear_layers()) == 784 * 1024 + 1024 + 1024 * 1024 + 1024 + 10 * 1024 + 10


def test_crops_are_windows_of_the_mirrored_picture() -> None:
    x = torch.arange(6 * 2 * 12 * 12, dtype=torch.float32).view(6, 2, 12, 12)
    found = crop_flip(x, torch.Generator().manual_seed(1))
    padded = torch.nn.functional.pad(x, (4, 4, 4, 4), mode="reflect")
    windows = padded.unfold(2, 12, 1).unfold(3, 12, 1)
    for n in range(6):
        choices = windows[n].permute(1, 2, 0, 3, 4).reshape(-1, 2, 12, 12)
        assert any(torch.equal(found[n], w) or torch.equal(found[n], w.flip(-1)) for w in choices)
    assert torch.equal(found, crop_flip(x, torch.Generator().manual_seed(1)))
    assert not torch.equal(found, crop_flip(x, torch.Generator().manual_seed(2)))


def test_a_square_is_cut_out_of_every_channel() -> None:
    found = crop_flip_cut(torch.ones(5, 3, 32, 32), torch.Generator().manual_seed(0))
    assert [(picture == 0).sum().item() for picture in found] == [3 * 64] * 5


def test_a_statement_is_open_as_long_as_figures_are_missing(tmp_path: Path) -> None:
    report = reproduce(reproductions.named("muppet"), Options(quick=True, out=tmp_path, budget=0))
    assert report.missing == 3
    assert {claim.verdict for claim in report.claims} == {"open"}


def test_spread_says_how_many_runs() -> None:
    assert [spread([1.0]), spread([1.0, 2.0, 3.0]), spread([])] == ["1.00 (1)", "2.00 ± 1.00 (3)", ""]
