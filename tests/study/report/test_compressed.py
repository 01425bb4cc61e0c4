"""Where nothing was compressed there is no finding, whatever the numbers look like; and shares are told."""

from __future__ import annotations

from pathlib import Path

import pytest
from study.report import made_up
from study.report.made_up import Line, Truth

from narrowcast.cli.study import tables
from narrowcast.codecs import all_specs
from narrowcast.study.analysis.findings import Findings
from narrowcast.study.analysis.verdict import Answer, judge, verdict_text
from narrowcast.study.execution.results import usable_lines
from narrowcast.study.report.export import as_csv, as_markdown, rows, summary
from narrowcast.study.report.page import page
from narrowcast.study.report.sections import Support, insights
from narrowcast.study.spec_bits import is_lossy

NOTHING = "nothing was compressed: no finding"
WIRES = ("fp32", "int8/256", "onebit/64+ef")
SMALL = Truth(nets=("mlp", "cnn"), wires=WIRES, rates=("100mbit", "1gbit"), workers=(2,), seeds=3)


def with_share(share: float, *, wires: tuple[str, ...] = WIRES, nets: tuple[str, ...] = ("mlp", "cnn")) -> list[Line]:
    """A study in which so much was compressed by the wires that are meant to."""
    lines = [line for line in made_up.study(SMALL) if line.get("cluster") is None and line["kind"] != "bus"]
    for line in lines:
        if line["kind"] != "session":
            own = share if line["wire"] in wires and line["model"] in nets else 1.0
            line["compressed"] = dict.fromkeys(("values", "bytes"), own if is_lossy(line["wire"]) else 0.0)
    return lines


def same_as_plain(lines: list[Line]) -> list[Line]:
    """As it is where nothing was compressed: every training gives the baseline's bits."""
    plain = {(line["model"], line.get("seed")): line for line in lines if line.get("wire") == "fp32"}
    for line in lines:
        if line["kind"] == "accuracy":
            line["accuracy"] = plain[line["model"], line["seed"]]["accuracy"]
    return lines


def test_a_study_that_compressed_nothing_finds_nothing(tmp_path: Path) -> None:
    made_up.write(tmp_path, same_as_plain(with_share(0.0)))
    findings, text = Findings.of(tmp_path), verdict_text(tmp_path)
    assert judge(findings).answer is Answer.UNKNOWN
    assert text.startswith(f"Cannot tell. With int8/256 {NOTHING}; every tensor has fewer than min_values values")
    assert f"mlp on digits, 4 workers: {NOTHING}." in text
    assert {insight.support for insight in insights(findings)} == {Support.UNKNOWN}
    assert all(row.get("speedup") is None for row in rows(findings) if row["wire"] != "fp32")
    assert all(row.get("p_equal") is None and row.get("conclusion") is None for row in rows(findings))
    for shown in (text, page(findings), as_markdown(findings), as_csv(findings)):
        assert "equal within" not in shown
        assert "&lt; 0.001" not in shown
        assert "< 0.001" not in shown
    assert page(findings).count(NOTHING) > 4
    assert len(summary(findings)["verdict"]["nothing_compressed"]) == 4 + 2


def test_of_several_networks_only_those_count_that_were_compressed(tmp_path: Path) -> None:
    made_up.write(tmp_path, with_share(0.0, nets=("cnn",)))
    verdict = judge(Findings.of(tmp_path))
    assert {step.model for step in verdict.settings} == {"mlp"}
    assert {row.model for row in verdict.accuracies} == {"mlp"}
    assert verdict.answer is Answer.UNKNOWN, "whether accuracy is kept by the other one, nobody knows"
    assert "Nothing was compressed: no finding in 2 step times; every" in verdict_text(tmp_path)


@pytest.mark.parametrize("share, told", [(0.31, True), (0.5, False), (0.9, False), (None, False)])
def test_less_than_half_is_told(share: float | None, told: bool, tmp_path: Path) -> None:
    lines = with_share(share or 0.9)
    if share is None:  # as lines were before they said
        for line in lines:
            line.pop("compressed", None)
    made_up.write(tmp_path, lines)
    text, shown = verdict_text(tmp_path), page(Findings.of(tmp_path))
    assert ("Less than half of the values were compressed in 6 comparisons" in text) is told
    assert ("31 % of the values compressed" in text) is told
    assert ("31 % of the values compressed" in shown) is told
    assert NOTHING not in text


@pytest.mark.parametrize("plain", [spec for spec in all_specs() if not is_lossy(spec)])
def test_a_wire_that_is_meant_to_compress_nothing_is_compared(plain: str, tmp_path: Path) -> None:
    lines = with_share(0.9)
    for line in lines:
        if line.get("wire") == "int8/256":
            line |= {"wire": plain, "case": line["case"].replace("int8/256", f"{plain} again"), "compressed": None}
            line["compressed"] = {"values": 0.0, "bytes": 0.0}
        elif line.get("wire") == "fp32":
            line |= {"wire": "bf16", "case": line["case"].replace("fp32", "bf16")}
            line["compressed"] = {"values": 0.9, "bytes": 0.9}
        line |= {"primary": plain, "baseline": "bf16"} if line["kind"] == "session" else {}
    made_up.write(tmp_path, lines)
    verdict = judge(Findings.of(tmp_path))
    assert len(verdict.settings) == 4
    assert len(verdict.accuracies) == 2
    assert verdict.untouched == []


def test_a_baseline_that_compressed_nothing_is_no_baseline(tmp_path: Path) -> None:
    lines = with_share(0.9)
    for line in lines:
        if line.get("wire") == "fp32":
            line |= {"wire": "bf16", "case": line["case"].replace("fp32", "bf16")}
        line |= {"baseline": "bf16"} if line["kind"] == "session" else {}
    made_up.write(tmp_path, lines)
    verdict = judge(Findings.of(tmp_path))
    assert (verdict.settings, verdict.accuracies, verdict.answer) == ([], [], Answer.UNKNOWN)


def test_the_tables_of_the_command_say_so_too(tmp_path: Path) -> None:
    made_up.write(tmp_path, with_share(0.0))
    times, accuracies = tables(usable_lines(tmp_path))
    for table, column in ((times, 10), (accuracies, 7)):
        cells, wires = (list(map(str, table.columns[at].cells)) for at in (column, 6 if table is times else 3))
        assert {cell == "nothing compressed" for wire, cell in zip(wires, cells, strict=True) if wire != "fp32"} == {
            True
        }
        assert "nothing compressed" not in [cell for wire, cell in zip(wires, cells, strict=True) if wire == "fp32"]


def test_wires_are_compared_among_the_same_min_values(tmp_path: Path) -> None:
    lines = with_share(0.9)
    again = [
        {**line, "min_values": 0, "case": f"{line['case']}|min_values 0"} for line in lines if line["kind"] != "session"
    ]
    made_up.write(tmp_path, [*lines, *again])
    verdict = judge(Findings.of(tmp_path))
    assert sorted({step.min_values for step in verdict.settings}) == [0, 10_000]
    assert len(verdict.settings) == 2 * 4
    assert [row.difference.seeds for row in verdict.accuracies if row.difference] == [3] * 4
    assert "min_values 0" in page(Findings.of(tmp_path))
