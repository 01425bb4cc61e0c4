"""Whole studies, with real processes: measured, simulated and predicted, failing, killed and taken up again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from lab.helpers import family, wait_until
from lab.test_mpi import missing as without_mpi
from study.nets import OWN_STUDY
from torchrun import torchrun

from narrowcast.study import Options, datasets, expand, load, parse, run
from narrowcast.study.execution import accuracy
from narrowcast.study.execution.results import latest, read
from narrowcast.study.execution.worker import PARENT

pytestmark = pytest.mark.timeout(300)  # each study starts several processes, which import torch

NETS = Path(__file__).with_name("nets.py")
OWN = OWN_STUDY + "seconds = 0.5\nseeds = 2\nepochs = 2\n"
MPI = 'kinds = "time"\ntransport = "mpi"\nworkers = [2]\nprobe_seconds = 0\n'
COMMAND = [sys.executable, "-c", "from narrowcast.cli import main; main()", "study", "run"]


def cases(folder: Path) -> dict[str, dict[str, Any]]:
    return latest(read(folder))


def each_once(folder: Path) -> bool:
    counts = Counter(line["case"] for line in read(folder) if "case" in line)
    return max(counts.values()) == 1


@pytest.mark.slow
def test_a_study_of_ones_own_network_and_data_on_the_loopback(tmp_path: Path) -> None:
    study = parse(OWN + 'workers = [2]\nrates = ["10mbit"]\nprobe_seconds = 1\n', "own.toml")
    outcome = run(study, Options(tmp_path, launcher="local", quiet=True))
    assert (outcome.total, outcome.failed, outcome.left) == (2 + 2 + 4, 0, 0)
    assert each_once(tmp_path)
    found = cases(tmp_path)
    measured = found[f"time|{NETS}:net|{NETS}:rows|int8/256|auto|2|loopback|gloo|data"]
    assert [len(repeat) for repeat in measured["steps_ms"]] == [3, 3]
    (start,) = {line["start"] for line in found.values() if line["source"] == "measured"}
    assert start == f"{read(tmp_path)[0]['started']} 1"
    assert measured["parameters"] == 32 * 400 + 400 + 400 * 4 + 4
    shares = {(line["source"], line["wire"], line["compressed"]["values"]) for line in found.values()}
    share = 32 * 400 / measured["parameters"]
    assert shares == {
        (source, wire, share if wire == "int8/256" else 0.0)
        for source in ("measured", "simulated", "predicted")
        for wire in ("fp32", "int8/256")
    }
    parts = measured["breakdown_ms"]
    assert set(parts) == {"forward", "backward", "encode", "wire", "decode", "update"}
    # the matrix in 8 bits and a scale for each 256 values, the rest as it is; half of it twice
    assert measured["bytes"]["claimed"] == pytest.approx(12800 * (1 + 4 / 256) + 4 * 2004, rel=0.01)
    assert measured["bytes"]["plain"] == 4 * measured["parameters"]
    assert measured["bytes"]["counted"] is None
    low, high = measured["predicted_interval_ms"]
    assert 0 < low <= measured["predicted_ms"] <= high
    predicted = [line for line in found.values() if line["source"] == "predicted"]
    steps = {line["wire"]: line["step_ms"] for line in predicted}
    # 59 kB as they are take at least 47 ms at 10 Mb/s, beside which what the processors do is little
    assert steps["fp32"] > 47
    assert steps["int8/256"] < steps["fp32"]
    trained = [line for line in found.values() if line["kind"] == "accuracy"]
    assert all(len(line["curve"]) == 2 and 0 <= line["accuracy"] <= 100 for line in trained)
    assert {line["wire"]: bool(line["layers"]) for line in trained} == {"fp32": False, "int8/256": True}
    session = read(tmp_path)[0]
    assert (session["kind"], session["launcher"], session["text"]) == ("session", "local", study.text)


@pytest.mark.slow
def test_a_wire_that_fails_is_recorded_and_takes_no_other_down(tmp_path: Path) -> None:
    text = OWN + 'workers = [3]\nalgorithms = ["tree"]\nprobe_seconds = 0\nkinds = "time"\n'
    outcome = run(parse(text), Options(tmp_path, launcher="local", quiet=True))
    assert (outcome.done, outcome.failed) == (1, 1)
    status = {line["wire"]: line["status"] for line in cases(tmp_path).values()}
    assert status == {"fp32": "done", "int8/256": "failed"}
    assert next(line["start"] for line in cases(tmp_path).values() if line["wire"] == "fp32").endswith(
        " 2"
    )  # by itself
    failed = next(line for line in cases(tmp_path).values() if line["status"] == "failed")
    assert "power-of-two" in failed["error"]
    assert "steps_ms" not in failed


def test_a_training_with_hierarchical_sums_is_one_of_hosts_with_several_ranks() -> None:
    text = OWN + 'workers = ["2x2"]\nkinds = "accuracy"\nalgorithms = ["hierarchical"]\n'
    case = next(case for case in expand(parse(text), "local")[0] if case.wire == "int8/256")
    found = accuracy.run_job(case)
    assert (case.algorithm, len(found["curve"])) == ("hierarchical", 2)


@pytest.mark.parametrize("rows, told", [("without_tests", "0 rows in x_test"), ("with_too_few_labels", "3 in y_train")])
def test_data_of_ones_own_without_whole_rows_are_refused(rows: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        datasets.load(f"{NETS}:{rows}")


def test_a_training_that_fails_is_recorded_with_its_error(tmp_path: Path) -> None:
    nets = OWN.replace(f'models = ["{NETS}:net"]', f'models = ["{NETS}:broken", "{NETS}:net_for"]')
    text = nets.replace("seeds = 2", "seeds = 1") + 'kinds = "accuracy"\n'
    outcome = run(parse(text), Options(tmp_path, launcher="local", quiet=True))
    assert (outcome.done, outcome.failed) == (2, 2)
    errors = {line["error"] for line in cases(tmp_path).values() if line["status"] == "failed"}
    assert len(errors) == 1
    assert "this network cannot be made" in errors.pop()


def test_a_killed_study_goes_on_where_it_was_and_has_every_case_once(tmp_path: Path) -> None:
    file, folder = tmp_path / "own.toml", tmp_path / "out"
    file.write_text(OWN.replace(":net", ":slow").replace("seeds = 2", "seeds = 6") + 'kinds = "accuracy"\n')
    command = [*COMMAND, str(file), "--out", str(folder), "--launcher", "local"]
    first = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        assert wait_until(lambda: (folder / "results.jsonl").exists() and len(cases(folder)) >= 3, 120)
        started = family(first.pid)
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    assert wait_until(lambda: not any(_alive(pid) for pid in started)), "a process outlived the study"
    before = set(cases(folder))
    assert 3 <= len(before) < 12
    done = subprocess.run([*command, "--json", "-"], capture_output=True, text=True, check=True, timeout=150)
    assert each_once(folder)
    assert len(cases(folder)) == 12
    assert before < set(cases(folder))
    assert [line["kind"] for line in read(folder)].count("session") == 2
    facts = json.loads(done.stdout)
    assert (facts["done"], facts["failed"], facts["left"]) == (12, 0, 0)
    assert Path(facts["report"]).is_file()
    assert facts["verdict"]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(without_mpi() is not None, reason=str(without_mpi()))
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)], ids=lambda n: n.name
)
def test_a_study_over_mpi_that_is_ended_leaves_neither_process_nor_file(tmp_path: Path, number: signal.Signals) -> None:
    file, said, left = tmp_path / "own.toml", tmp_path / "said", tmp_path / "t"
    left.mkdir()
    file.write_text(OWN.replace("seconds = 0.5", "seconds = 60").replace("steps = 3", "steps = 1000000") + MPI)
    command = [*COMMAND, str(file), "--out", str(tmp_path / "out"), "--launcher", "local"]
    env = {**os.environ, "TMPDIR": str(left)}
    with said.open("w") as log:
        study = subprocess.Popen(command, stderr=log, stdout=log, env=env, preexec_fn=_heed_hangups)  # noqa: PLW1509
    try:
        assert wait_until(lambda: ":net on " in said.read_text(), 80), said.read_text()
        started = family(study.pid)
        assert len(started) == 4, "the study, mpirun and two ranks"
    finally:
        study.send_signal(number)
        study.wait(30)
    assert study.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 130)
    wait_until(lambda: not any(_alive(pid) for pid in started))
    outlived = [pid for pid in started if _alive(pid)]
    for pid in outlived:  # they would go on measuring beside the next test
        os.kill(pid, signal.SIGKILL)
    assert not outlived
    assert not list(left.glob("narrowcast*"))


def _heed_hangups() -> None:
    """As in a terminal: tests that were started with nohup are told to ignore them."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def test_a_used_up_budget_leaves_the_rest_for_the_next_call(tmp_path: Path) -> None:
    study = parse(OWN + 'kinds = "accuracy"\n')
    outcome = run(study, Options(tmp_path, launcher="local", budget=0.0, quiet=True))
    assert (outcome.done, outcome.left) == (0, 4)
    outcome = run(study, Options(tmp_path, launcher="local", quiet=True))
    assert (outcome.done, outcome.left) == (4, 0)


def test_a_folder_with_another_version_of_the_file_is_refused(tmp_path: Path) -> None:
    options = Options(tmp_path, launcher="local", budget=0.0, quiet=True)
    run(parse(OWN), options)
    with pytest.raises(ValueError, match="give --out another folder"):
        run(parse(OWN + "lr = 0.2\n"), options)


CLASH = """
[[grid]]
kind = "time"
rates = ["100mbit"]
[[grid]]
kind = "time"
rates = ["1gbit"]
seconds = 0.7
"""


def test_what_is_refused_leaves_the_folder_to_the_file_that_is_put_right(tmp_path: Path) -> None:
    options = Options(tmp_path, launcher="local", budget=0.0, quiet=True)
    with pytest.raises(ValueError, match="seconds"):
        run(parse(OWN + CLASH), options)
    assert run(parse(OWN + CLASH.replace("0.7", "0.5")), options).done == 0


def test_what_cannot_be_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "x"):
        with pytest.raises(ValueError, match="cannot be the folder of a study; give --out another one"):
            run(parse(OWN), Options(folder, launcher="local", budget=0.0, quiet=True))


def test_a_process_that_waits_for_its_next_job_hears_signals(tmp_path: Path) -> None:
    """The first rank never comes to speak."""
    code = (
        "import torch.distributed as d; from narrowcast.study.execution import torchrun as t; print('up', flush=True); "
    )
    code += f"t._wait_for(d.FileStore({str(tmp_path / 'store')!r}, 2), 'never')"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as waiting:
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == b"up\n"
        waiting.send_signal(signal.SIGINT)
        assert waiting.wait(20) not in (0, None)


@pytest.mark.slow
def test_under_torchrun_rank_0_writes_what_other_ranks_need_is_left_out_and_a_failing_rank_stops_nobody(
    tmp_path: Path,
) -> None:
    file, folder = tmp_path / "own.toml", tmp_path / "out"
    grids = f"""
workers = [2, 4]
rates = ["100mbit"]
probe_seconds = 0
[[grid]]
kind = "time"
models = ["{NETS}:broken_on_rank_1"]
wires = ["fp32"]
workers = [2]
[[grid]]
kind = "time"
transport = ["gloo", "mpi"]
[[grid]]
kind = "accuracy"
workers = [2]
seeds = 1
"""
    file.write_text(OWN + grids)
    done = torchrun("--no-python", *COMMAND, str(file), "--out", str(folder), "--launcher", "torchrun")
    assert done.returncode == 1, done.stderr[-3000:]
    assert each_once(folder)
    measured = [line for line in cases(folder).values() if line["kind"] == "time"]
    assert {(line["workers"], line["rate_name"], line["rate"]) for line in measured} == {(2, "cluster", None)}
    assert [line["status"] for line in measured] == ["failed", "done", "done"]
    assert "rank 1 cannot make it" in measured[0]["error"]
    others = "2 workers over mpi, 4 workers over gloo, 4 workers over mpi"
    assert f"left out: 6 cases with {others}; torchrun has none" in done.stderr
    assert len([line for line in cases(folder).values() if line["kind"] == "accuracy"]) == 2


@pytest.mark.slow
def test_the_paper_grid_is_predicted_whole(tmp_path: Path) -> None:
    study = load("edbt18")
    outcome = run(study, Options(tmp_path, launcher="local", only=("predicted",), budget=60, quiet=True))
    lines = [line for line in cases(tmp_path).values() if line.get("cluster") and line["data"] != "cifar10"]
    assert len(lines) == 5 * 4 * 2 * 2 * 6
    assert outcome.failed == 0
    step = {tuple(line["case"].split("|")[1:8]): line["step_ms"] for line in lines}
    slow, fast = (
        step["alexnet", "imagenet", wire, "auto", "16", "p2.16xlarge", "mpi"] for wire in ("fp32", "qsgd4/512")
    )
    # QSGD's figure 4 has 2.7 times for AlexNet on 16 devices; a prediction from its link must come near
    assert 2.0 < slow / fast < 3.5


def test_a_rank_of_mpirun_whose_study_is_gone_ends_at_once() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    own = {PARENT: str(gone.pid), "OMPI_COMM_WORLD_RANK": "0"}
    code = "from narrowcast.study.execution.worker import end_with_parent; end_with_parent(); print('goes on')"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | own, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "is gone" in done.stderr
