"""In the lab: links that hold a rate, and bytes that the interface counts."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from narrowcast.lab import LabError, gpu, launch
from narrowcast.study import Options, parse, run
from narrowcast.study.execution.results import latest, read

pytestmark = pytest.mark.usefixtures("needs_lab")

STUDY = """\
models = ["cnn"]
data = ["digits"]
batch = 8
steps = 3
repeats = 2
seconds = 1.0
probe_seconds = 0
rates = ["1gbit"]
"""


def measured(tmp_path: Path, text: str) -> list[dict[str, Any]]:
    outcome = run(parse(STUDY + text), Options(tmp_path, launcher="lab", quiet=True))
    assert outcome.failed == 0, [line.get("error") for line in read(tmp_path)]
    return list(latest(read(tmp_path)).values())


NARROW = {"data": ["fp32", "bf16", "int8/256", "int4/128", "onebit/64+ef"], "model": ["fp32", "int8/256", "dtree8"]}


@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("parallel", NARROW)
def test_bytes_at_the_interface_are_those_claimed_plus_headers_within_3_percent(
    tmp_path: Path, workers: int, parallel: str
) -> None:
    wires = json.dumps(NARROW[parallel])
    lines = measured(tmp_path, f'kinds = "time"\nwires = {wires}\nworkers = [{workers}]\nparallel = "{parallel}"\n')
    assert len(lines) == len(NARROW[parallel])
    for line in lines:
        sent = line["bytes"]
        expected = sent["claimed"] + sent["protocol"]
        assert sent["counted"] == pytest.approx(expected, rel=0.03), line["case"]
        # headers are what little comes on top of large messages, not what makes the sum come out
        assert parallel == "model" or sent["protocol"] < 0.05 * sent["claimed"] + 5000, line["case"]


@pytest.mark.slow
def test_hosts_with_two_ranks_model_parallel_and_collectives_alone(tmp_path: Path) -> None:
    grids = """
[[grid]]
kind = "time"
wires = ["fp32", "int8/256"]
algorithms = ["two_shot", "hierarchical"]
workers = ["2x2"]

[[grid]]
kind = "time"
wires = ["fp32", "int8/256"]
workers = [2]
parallel = "model"

[[grid]]
kind = "bus"
wires = ["fp32", "int8/256", "onebit/64+ef"]
workers = [2]
sizes = ["64KiB", "1MiB"]
"""
    lines = measured(tmp_path, grids)
    by_kind = {kind: [line for line in lines if line["kind"] == kind] for kind in ("time", "bus")}
    nodes = [line for line in by_kind["time"] if line["layout"] == "2x2"]
    assert {(line["wire"], line["algorithm"]) for line in nodes} == {
        ("fp32", "auto"),
        ("int8/256", "two_shot"),
        ("int8/256", "hierarchical"),
    }
    cut = {line["wire"]: line["bytes"]["claimed"] for line in by_kind["time"] if line["parallel"] == "model"}
    assert cut["int8/256"] < 0.5 * cut["fp32"]
    assert len(by_kind["bus"]) == 6
    gbps = {(line["wire"], line["bytes"]): line["bus_gbps"] for line in by_kind["bus"]}
    # a link of 1 Gb/s brings 0.125 GB/s of float32, a little more while its bucket is full, and more of it in few bits
    assert gbps["fp32", 1 << 20] < 0.14


def test_collectives_over_nccl_want_a_lab_with_a_gpu_and_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(gpu, "DEVICES", tmp_path)
    text = 'kinds = "bus"\nwires = ["fp32", "int8/256"]\nworkers = [2]\nsizes = ["64KiB"]\ntransport = "nccl"\n'
    outcome = run(parse(STUDY + text), Options(tmp_path / "out", launcher="lab", quiet=True))
    errors = [line["error"] for line in read(tmp_path / "out") if "error" in line]
    assert outcome.failed == len(errors) == 2
    assert all("a lab with GPUs needs one of NVIDIA's, and its driver" in error for error in errors)


def without_mpi() -> str | None:
    try:
        launch.find_mpirun()
    except LabError as error:
        return str(error)
    return None if importlib.util.find_spec("mpi4py") else "mpi4py is not installed"


@pytest.mark.skipif(without_mpi() is not None, reason=str(without_mpi()))
def test_the_same_study_over_mpi(tmp_path: Path) -> None:
    lines = measured(tmp_path, 'kinds = "time"\nwires = ["fp32", "int8/256"]\nworkers = [2]\ntransport = "mpi"\n')
    assert {line["wire"] for line in lines} == {"fp32", "int8/256"}
    for line in lines:
        assert line["bytes"]["counted"] == pytest.approx(line["bytes"]["claimed"] + line["bytes"]["protocol"], rel=0.03)
