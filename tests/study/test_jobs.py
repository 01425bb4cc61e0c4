"""What the processes of a study tell one another: read back as it was, and refused where it is something else."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from narrowcast.study.cases import Case, Setting
from narrowcast.study.file import Grid, HostLayout
from narrowcast.study.jobs import (
    CaseMeasured,
    JobError,
    JobMessage,
    LinkMeasured,
    RankFailed,
    RankJob,
    RankMessage,
    SettingBegins,
    TorchrunJob,
    TrainingJob,
    TrainingResult,
)

GRID = Grid("time", models=("mlp",), data=("digits",), wires=("int8/256", "fp32"), workers=(HostLayout(2, 2),))
WIRES = (("int8/256", 1 << 16), ("fp32", None))
CASES = tuple(
    Case(*("time", "measured", "mlp", "digits", wire, "auto", HostLayout(2, 2), "1gbit", "gloo"), bytes=size, grid=GRID)
    for wire, size in WIRES
)
JOB = RankJob("lab of 2", "gloo", None, 1.0, ("fp32", "bf16"), (Setting(CASES),), "eth0")
MESSAGES: list[JobMessage] = [
    JOB,
    TorchrunJob(JOB, 29500),
    TrainingJob(replace(CASES[0], kind="accuracy", seed=3)),
    TrainingResult("x", {"accuracy": 97.5, "curve": [{"epoch": 1.0}]}),
    TrainingResult("x", error="it diverged"),
    LinkMeasured("format = 1\n"),
    SettingBegins(3),
    CaseMeasured(0, "a|b", {"steps_ms": [[1.0, 2.0]]}, None),
    RankFailed("RuntimeError: no"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_what_is_written_is_read_back_in_one_line(message: JobMessage) -> None:
    text = message.to_json()
    assert "\n" not in text
    kind = RankMessage if isinstance(message, RankMessage) else type(message)
    assert kind.from_json(text) == message


@pytest.mark.parametrize(
    "path, value, word",
    [
        (["probe_seconds"], "1", "RankJob.probe_seconds: expected float, got '1'"),
        (["transport"], None, "RankJob.transport: expected str"),
        (["settings"], {}, "RankJob.settings: expected a list"),
        (["settings", 0], 3, "RankJob.settings.0: expected an object"),
        (["settings", 0, "cases", 0, "grid", "batch"], True, "settings.0.cases.0.grid.batch: expected int, got True"),
        (["settings", 0, "cases", 1, "layout", "hosts"], "two", "settings.0.cases.1.layout.hosts: expected int"),
        (["settings", 0, "cases", 1, "speed"], 1, "cases.1: speed is unknown"),
        (["type"], "TrainingJob", "expected an object of type RankJob, got 'TrainingJob'"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_place(path: list[str | int], value: object, word: str) -> None:
    values = json.loads(JOB.to_json())
    inner = values
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(JobError) as caught:
        RankJob.from_json(json.dumps(values))
    assert word in str(caught.value)


def test_a_missing_field_and_a_text_that_is_no_json_are_refused() -> None:
    values = json.loads(JOB.to_json())
    del values["deadline"], values["name"]
    with pytest.raises(JobError, match="RankJob: deadline, name is missing"):
        RankJob.from_json(json.dumps(values))
    with pytest.raises(JobError, match="RankJob: no JSON"):
        RankJob.from_json("{")
