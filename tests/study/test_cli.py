"""`narrowcast study`: listing, showing, SLURM scripts and errors."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from narrowcast.cli import app
from narrowcast.study import Options, parse, run
from narrowcast.study.cli import seconds_of
from narrowcast.study.progress import Tally, spoken

RUNNER = CliRunner()


def test_ls_shows_what_comes_along_and_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    study = parse('models = ["mlp"]\ndata = ["digits"]\nwires = ["fp32"]\n', "mine.toml")
    run(study, Options(Path("studies/mine"), launcher="local", budget=0.0, quiet=True))
    rows = json.loads(RUNNER.invoke(app, ["study", "ls", "--json", "-"]).stdout)
    assert [row["name"] for row in rows] == ["accuracy", "edbt18", "formats8", "quick", "studies/mine"]
    assert rows[-1]["what"].startswith("begun ")


def test_a_slurm_script_starts_every_number_of_workers(tmp_path: Path) -> None:
    shown = RUNNER.invoke(app, ["study", "run", "edbt18", "--sbatch", "--out", "with space"]).stdout
    script = tmp_path / "study.sh"
    script.write_text(shown)
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert "#SBATCH --nodes=4" in shown
    assert shown.count("srun --nodes=") == 3
    assert "--nnodes=2 --nproc-per-node=2" in shown
    assert "--out 'with space' --launcher torchrun" in shown


@pytest.mark.parametrize("text, seconds", [("90s", 90.0), ("60m", 3600.0), ("1.5h", 5400.0)])
def test_a_budget_has_a_unit(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["60", "1d", "-5m", "m"])
def test_a_budget_without_one_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"90s, 60m or 1\.5h"):
        seconds_of(text)


def test_show_of_no_study_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="narrowcast study run"):
        RUNNER.invoke(app, ["study", "show", "nothing"], catch_exceptions=False)


def test_the_time_to_go_is_known_once_each_kind_was_seen() -> None:
    from narrowcast.study import expand

    cases = expand(parse('models = ["mlp"]\ndata = ["digits"]\nwires = ["fp32"]\n'), "lab")
    tally = Tally([*cases[0], *cases[1]], set())
    assert tally.whole_eta().startswith("more than")
    for case in (*cases[0], *cases[1][:1]):
        tally.count(case, "done")
    assert not tally.whole_eta().startswith("more than")
    assert (spoken(75), spoken(3675)) == ("1:15", "1:01:15")
