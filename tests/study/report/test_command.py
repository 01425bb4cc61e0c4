"""`narrowcast report` writes what was asked for, where it was asked for, and ends with one line where it cannot."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from served import narrowcast
from study.report import made_up
from study.report.made_up import Line, Truth

from narrowcast.study.analysis.findings import Findings
from narrowcast.study.execution.results import ResultsError
from narrowcast.study.report.export import as_markdown, summary
from narrowcast.study.report.page import page

SMALL = Truth(nets=("mlp",), wires=("fp32", "int8/256"), rates=("100mbit",), workers=(2,), seeds=2)


def command(*words: object) -> subprocess.CompletedProcess[str]:
    return narrowcast("report", *words)


def refused(*words: object) -> str:
    done = command(*words)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1
    return done.stderr


@pytest.fixture
def study(tmp_path: Path) -> Path:
    return made_up.write(tmp_path / "study", made_up.study(SMALL))


def test_json_is_written_though_markdown_is_printed(study: Path, tmp_path: Path) -> None:
    done = command(study, "--markdown", "-", "--json", tmp_path / "j.json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("# narrowcast study")
    assert json.loads((tmp_path / "j.json").read_text())["study"] == "made-up"


def test_json_can_be_printed_alone(study: Path) -> None:
    assert json.loads(command(study, "--json", "-").stdout)["study"] == "made-up"


def test_results_may_be_named_by_their_file(study: Path) -> None:
    done = command(study / "results.jsonl")
    assert done.returncode == 0, done.stderr
    assert (study / "report.html").is_file()


@pytest.mark.parametrize(
    "options",
    [
        ("--markdown", "a.txt", "--csv", "a.txt"),
        ("--markdown", "-", "--csv", "-"),
        ("--json", "-", "--csv", "-"),
        ("--out", "a.txt", "--json", "./a.txt"),
        ("--csv", "study/results.jsonl"),
    ],
)
def test_two_texts_for_one_file_are_refused(options: tuple[str, ...], study: Path, tmp_path: Path) -> None:
    before = (study / "results.jsonl").read_bytes()
    words = [word if word.startswith("-") else f"{tmp_path}/{word}" for word in options]
    assert "give each its own file" in refused(study, *words)
    assert (study / "results.jsonl").read_bytes() == before
    assert not (tmp_path / "a.txt").exists()


def test_a_file_that_cannot_be_written_is_one_line(study: Path, tmp_path: Path) -> None:
    told = refused(study, "--out", tmp_path / "none" / "a.html")
    assert "a.html: cannot be written (No such file or directory); give another file" in told


@pytest.mark.parametrize(
    "kind, lost, told",
    [
        ("session", "kind", "line 1 has no kind"),
        ("session", "study", "line 1 has no study"),
        ("time", "kind", "line 2 has no kind"),
        ("time", "steps_ms", "line 2 has no steps_ms"),
        ("time", "status", "line 2 has no status"),
    ],
)
def test_a_line_that_says_nothing_is_refused(kind: str, lost: str, told: str, tmp_path: Path) -> None:
    lines = made_up.study(SMALL)
    first = next(line for line in lines if line["kind"] == kind)
    del first[lost]
    with pytest.raises(ResultsError, match=f"{told}.*; remove the line"):
        Findings.of(made_up.write(tmp_path, lines))


def test_half_a_surrogate_pair_does_no_harm(tmp_path: Path) -> None:
    lines = made_up.study(SMALL)
    for line in lines:
        line |= {key: "\ud800" + line[key] for key in ("error", "model") if line.get(key)}
    study = made_up.write(tmp_path, lines)
    findings = Findings.of(study)
    for text in (page(findings), as_markdown(findings)):
        assert text.encode("utf-8")
    done = command(study, "--markdown", tmp_path / "a.md", "--csv", tmp_path / "a.csv", "--json", tmp_path / "a.json")
    assert done.returncode == 0, done.stderr
    assert "?ModuleNotFoundError" in (study / "report.html").read_text(encoding="utf-8")


def resumed() -> list[Line]:
    """Two sessions of different sources; a case of the first was measured again in the second."""
    lines = made_up.study(SMALL)
    first, *cases = (line for line in lines if line["kind"] != "session" or line is lines[0])
    versions = {**first["versions"], "torch": "2.14.0"}
    return [first, *cases, {**first, "commit": "feedbeef", "versions": versions}, cases[0]]


def test_every_commit_and_version_is_told_with_its_cases(tmp_path: Path) -> None:
    lines = resumed()
    findings = Findings.of(made_up.write(tmp_path, lines))
    number = len(findings.cases)
    assert number == len(lines) - 3
    for text in (page(findings), as_markdown(findings)):
        assert f"0123abcd+ ({number - 1} cases), feedbeef (1 case)" in text
        assert re.search(rf"torch 2\.13\.0, python 3\.11\.7 \({number - 1} cases\), .*torch 2\.14\.0", text)
        assert "resumed once" in text
    assert [session["cases"] for session in summary(findings)["sessions"]] == [number - 1, 1]


def test_one_commit_has_no_numbers(study: Path) -> None:
    assert "<dd>0123abcd+</dd>" in page(Findings.of(study))


@pytest.mark.parametrize(
    "evil, shown",
    [
        ("[x](javascript:alert(1))", r"\[x\](javascript:alert(1))"),
        ("![i](http://e.x/a.png)", r"!\[i\](http://e.x/a.png)"),
        ("**b** `c` _d_ two_shot", r"\*\*b\*\* \`c\` \_d\_ two_shot"),
        ("<b> &lt;", "&lt;b> &amp;lt;"),
        ("a\r\n# b", "a # b"),
    ],
)
def test_markdown_takes_nothing_for_its_own(evil: str, shown: str, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"study": evil, "primary": evil}
    lines = made_up.study(SMALL, **asked)
    for line in lines:
        line |= {key: evil for key in ("model", "data") if line.get(key)}
        line |= {"wire": evil} if line.get("wire") == "int8/256" else {}
    text = as_markdown(Findings.of(made_up.write(tmp_path, lines)))
    assert text.splitlines()[0] == f"# narrowcast study: {shown}"
    assert f"Codes of {shown} on the wire" in text.splitlines()[2]
    assert evil not in text
