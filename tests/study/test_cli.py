"""`narrowcast study`: listing, showing, SLURM scripts and errors."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from narrowcast.cli import assemble
from narrowcast.cli import study as cli
from narrowcast.cli.study import seconds_of
from narrowcast.study import Options, parse, run
from narrowcast.study.execution.progress import Tally, clock_time

RUNNER = CliRunner()


def test_ls_shows_what_comes_along_and_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    study = parse('models = ["mlp"]\ndata = ["digits"]\nwires = ["fp32", "int8/256"]\n', "mine.toml")
    run(study, Options(Path("studies/mine"), launcher="local", budget=0.0, quiet=True))
    Path("studies/a").mkdir()
    Path("studies/a/results.jsonl").write_text("{broken\n")
    rows = json.loads(RUNNER.invoke(assemble(), ["study", "ls", "--json", "-"]).stdout)
    assert [row["name"] for row in rows] == ["accuracy", "edbt18", "formats8", "quick", "studies/a", "studies/mine"]
    assert rows[-1]["what"].startswith("begun ")
    assert rows[-2]["what"].startswith("studies/a/results.jsonl:1: no JSON")


def test_a_slurm_script_starts_every_number_of_workers(tmp_path: Path) -> None:
    shown = RUNNER.invoke(assemble(), ["study", "run", "edbt18", "--sbatch", "--out", "with space"]).stdout
    script = tmp_path / "study.sh"
    script.write_text(shown)
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert "#SBATCH --nodes=4" in shown
    assert shown.count("srun --nodes=") == 3
    assert "--nnodes=2 --nproc-per-node=2" in shown
    assert "--out 'with space' --launcher torchrun" in shown


@pytest.mark.parametrize("broken, code", [("", 0), ("--launcher", 1), ("accuracy", 1)])
def test_a_slurm_script_takes_every_step_and_ends_with_1_where_one_failed(
    tmp_path: Path, broken: str, code: int
) -> None:
    shown = RUNNER.invoke(assemble(), ["study", "run", "quick", "--sbatch"]).stdout
    (tmp_path / "study.sh").write_text(shown)
    stands_for = f"""#!/bin/sh
echo "$(basename "$0") $*" >>'{tmp_path}/said'
case "$*" in *"{broken or "never"}"*) exit 1;; esac
"""
    for name in ("srun", "scontrol", "narrowcast"):
        (tmp_path / name).write_text(stands_for)
        (tmp_path / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "n", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", str(tmp_path / "study.sh")], env=env, check=False)
    assert done.returncode == code
    words = [line.split()[0] for line in (tmp_path / "said").read_text().splitlines()]
    assert words == ["scontrol", "srun", "srun", "narrowcast"]


def test_a_slurm_script_has_no_step_for_mpi_alone(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    text = 'models = ["mlp"]\ndata = ["digits"]\nwires = ["fp32", "int8/256"]\nkinds = "time"\ntransport = "mpi"\n'
    file.write_text(text)
    shown = RUNNER.invoke(assemble(), ["study", "run", str(file), "--sbatch"]).stdout
    assert "srun" not in shown
    assert "left out: cases over mpi" in shown


def test_a_study_with_failed_cases_ends_with_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "ORDERLY", set())  # this process keeps its own signals
    file = tmp_path / "mine.toml"
    grid = '[[grid]]\nkind = "predicted"\nmodels = ["alexnet"]\nclusters = ["dgx-1", "missing.toml"]\n'
    words = ["study", "run", str(file), "--out", str(tmp_path / "out"), "--launcher", "local"]
    file.write_text('wires = ["fp32", "int8/256"]\n' + grid)
    done = RUNNER.invoke(assemble(), words)
    assert done.exit_code == 1, done.output
    assert "2 of 4 cases failed" in done.output


@pytest.mark.parametrize("text, seconds", [("90s", 90.0), ("60m", 3600.0), ("1.5h", 5400.0)])
def test_a_budget_has_a_unit(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["60", "1d", "-5m", "m"])
def test_a_budget_without_one_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"90s, 60m or 1\.5h"):
        seconds_of(text)


def test_show_of_no_study_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="narrowcast study run"):
        RUNNER.invoke(assemble(), ["study", "show", "nothing"], catch_exceptions=False)


def test_the_time_to_go_is_known_once_each_kind_was_seen() -> None:
    from narrowcast.study import expand

    cases = expand(parse('models = ["mlp"]\ndata = ["digits"]\nwires = ["fp32"]\nprimary = "fp32"\n'), "lab")
    tally = Tally([*cases[0], *cases[1]], set())
    assert tally.whole_eta() == "nobody knows how long"
    for case in (*cases[0], *cases[1][:1]):
        tally.count(case, "done")
    assert not tally.whole_eta().startswith("more than")
    assert (clock_time(75), clock_time(3675)) == ("1:15", "1:01:15")
