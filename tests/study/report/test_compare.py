"""Two studies beside one another: what both have, with differences and intervals; what one has; what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from drawings import covered, drawings, outside, sticking_out
from served import narrowcast
from study.report import made_up
from study.report.made_up import Line, Truth
from study.report.test_report import parsed

from narrowcast.study import Comparison, Findings, compare_page, comparison_facts

WIRES = ("fp32", "int8/256", "int4/128+ef", "onebit/64+ef")
FIRST = Truth(nets=("mlp", "cnn"), wires=WIRES, rates=("100mbit", "loopback"), workers=(2,), loss={})
SECOND = Truth(nets=("mlp",), wires=(*WIRES, "fp16"), rates=("100mbit", "loopback"), slow_codec=40.0, workers=(2, 4))


def _lines(truth: Truth, seed: int, name: str, **asked: object) -> list[Line]:
    return [line for line in made_up.study(truth, seed, study=name, **asked) if not line.get("cluster")]


def findings(folder: Path, lines: list[Line]) -> Findings:
    return Findings.of(made_up.write(folder, lines))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    room = tmp_path_factory.mktemp("two")
    first = made_up.write(room / "a", _lines(FIRST, 7, "before"))
    return first, made_up.write(room / "b", _lines(SECOND, 9, "after | <b>"))


@pytest.fixture(scope="module")
def both(folders: tuple[Path, Path]) -> tuple[Findings, Findings]:
    return Findings.of(folders[0]), Findings.of(folders[1])


def _counted(of: Findings) -> int:
    return len(of.steps) + len(of.accuracies) + len(of.buses)


def test_every_cell_is_in_both_or_in_one_or_refused_and_in_one_place_only(both: tuple[Findings, Findings]) -> None:
    made = Comparison.of(*both)
    pairs = [*made.steps, *made.accuracies, *made.buses, *made.refused]
    assert len(pairs) + len(made.only_a) == _counted(both[0])
    assert len(pairs) + len(made.only_b) == _counted(both[1])
    assert {finding.model for finding in made.only_a} == {"cnn"}
    assert {(f.wire, f.workers) for f in made.only_b if f.kind == "time"} == {
        *((wire, 4) for wire in SECOND.wires),
        ("fp16", 2),
    }
    for pair in pairs:
        for name in ("kind", "model", "data", "wire", "algorithm", "workers", "rate_name", "transport"):
            assert getattr(pair.a, name) == getattr(pair.b, name)


def test_turned_round_gains_are_inverse_and_differences_negative(both: tuple[Findings, Findings]) -> None:
    there, back = Comparison.of(*both), Comparison.of(*both[::-1])
    returned = {pair.a.line["case"]: pair for pair in back.steps}
    for pair in there.steps:
        other = returned[pair.b.line["case"]]
        assert pair.gain.value == pytest.approx(1 / other.gain.value)
        assert pair.faster is None or other.faster is not pair.faster
    differences = {(p.a.model, p.a.wire): p.difference.mean for p in there.accuracies}
    assert differences == {(p.a.model, p.a.wire): pytest.approx(-p.difference.mean) for p in back.accuracies}
    assert there.faster_and_slower == back.faster_and_slower[::-1]


def test_what_is_known_to_be_slower_and_less_accurate_is_found(both: tuple[Findings, Findings]) -> None:
    """The second study's codecs are forty times slower, and its one bit loses 2.6 points."""
    made = Comparison.of(*both)
    assert all(pair.faster is False for pair in made.steps if pair.a.wire != "fp32")
    assert made.answer == "after / <b> is slower"
    conclusions = {pair.a.wire: pair.difference.conclusion.value for pair in made.accuracies}
    assert conclusions["onebit/64+ef"] == "lost"
    step = next(pair for pair in made.steps if pair.a.wire == "int8/256")
    assert step.gain.value == pytest.approx(step.a.time.value / step.b.time.value)
    assert step.gain.low < step.gain.value < step.gain.high


def test_a_study_beside_its_copy_differs_nowhere(tmp_path: Path, both: tuple[Findings, Findings]) -> None:
    made = Comparison.of(both[0], findings(tmp_path, _lines(FIRST, 7, "before")))
    assert made.answer == "Cannot tell"
    assert made.names == ("before (A)", "before (B)")
    assert {pair.gain.value for pair in made.steps} == {1.0}
    assert {pair.difference.mean for pair in made.accuracies} == {0.0}
    assert (made.only_a, made.only_b, made.refused) == ([], [], [])


@pytest.mark.parametrize(
    "kind, name, value, why",
    [
        ("time", "batch", 32, "16 samples a step in A, 32 in B"),
        ("accuracy", "epochs", 4, "8 epochs in A, 4 in B"),
        ("accuracy", "seed", None, "no seed was trained in both"),
        ("session", "margin", 0.5, "the margins differ: 1 point in A, 0.5 points in B"),
        ("time", "compressed", {"values": 0.0}, "nothing was compressed: no finding"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_the_reason(
    kind: str, name: str, value: object, why: str, tmp_path: Path, both: tuple[Findings, Findings]
) -> None:
    lines = _lines(FIRST, 8, "other")
    for line in lines:
        if line["kind"] == kind:
            line[name] = line["seed"] + 100 if name == "seed" else value
            line |= {"case": f"{line['case']}|{line.get('seed')}"} if "case" in line else {}
    made = Comparison.of(both[0], findings(tmp_path, lines))
    assert {one.why for one in made.refused} == {why}
    assert {one.a.kind for one in made.refused} == {"time" if kind == "time" else "accuracy"}
    assert why in compare_page(made)


def test_the_page_is_well_formed_asks_for_nothing_and_can_be_read(both: tuple[Findings, Findings]) -> None:
    made = Comparison.of(*both)
    text = compare_page(made)
    found = parsed(text)
    assert (found.faults, found.open, found.loads) == ([], [], [])
    assert len(found.ids) == len(set(found.ids))
    assert {reference.removeprefix("#") for reference in found.refers} <= set(found.ids)
    assert made.words in "".join(found.text)
    for svg in drawings(text):
        assert (covered(svg), sticking_out(svg), outside(svg)) == ([], [], [])
    assert len(drawings(text)) == 3
    data = text.partition('id="data">')[2].partition("</script>")[0]
    assert json.loads(data) == comparison_facts(made)


def test_the_command_writes_the_page_and_the_same_as_json(folders: tuple[Path, Path], tmp_path: Path) -> None:
    before, after = (folder / "results.jsonl" for folder in folders)
    done = narrowcast("report", *folders, "--json", tmp_path / "c.json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("after / <b> is slower. Of 8 measured step times in both")
    page = folders[0] / "comparison.html"
    facts = json.loads((tmp_path / "c.json").read_text())
    assert json.loads(re.findall('id="data">(.*?)</script>', page.read_text(), re.DOTALL)[0]) == facts
    assert facts["headline"] in done.stdout
    assert before.exists()
    assert after.exists()
    assert not (folders[0] / "report.html").exists()
    printed = narrowcast("report", after, before, "--out", tmp_path / "c.html", "--json", "-")
    assert json.loads(printed.stdout)["a"] == "after | <b>"


@pytest.mark.parametrize(
    "words, told",
    [
        (("{a}", "{a}/results.jsonl"), "are one study; give two"),
        (("{a}", "{b}", "--csv", "x.csv"), "--csv is of one study; of two take --json"),
        (("{a}", "{b}", "--out", "{b}/results.jsonl"), "give each its own file"),
        (("{a}", "{c}"), "have no cell in common: before has mlp, cnn with fp32, int8/256"),
        (("{a}", "{a}/none"), "there are no results"),
    ],
)
def test_the_command_refuses_with_one_line(
    words: tuple[str, ...], told: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    strange = Truth(nets=("lstm-text",), wires=("fp32", "int8/256"), rates=("1gbit",), workers=(2,), seeds=2)
    lines = [line for line in _lines(strange, 1, "strange") if line["kind"] != "bus"]
    named = {"a": folders[0], "b": folders[1], "c": made_up.write(tmp_path / "c", lines)}
    done = narrowcast("report", *(word.format(**named) for word in words), folder=tmp_path)
    assert done.returncode != 0
    assert told in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "x.csv").exists()
