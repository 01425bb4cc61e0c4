"""The report is one well-formed file that asks for nothing, says what is missing, and escapes what users wrote."""

from __future__ import annotations

import csv
import functools
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from served import narrowcast
from study.report import made_up
from study.report.made_up import Line, Truth

from narrowcast.study.analysis.findings import Findings
from narrowcast.study.analysis.verdict import headline, judge
from narrowcast.study.report import write_report
from narrowcast.study.report.export import COLUMNS, as_csv, as_markdown, rows
from narrowcast.study.report.page import LARGEST, SECTIONS

VOID = {"meta", "input", "line", "rect", "circle", "polygon", "polyline", "path"}
FIGURES = [make.__name__ for makers in SECTIONS.values() for *_, make in makers]
SMALL = Truth(nets=("mlp",), wires=("fp32", "int8/256"), rates=("100mbit",), workers=(2,), seeds=2)


class Strict(HTMLParser):
    """Counts what a browser would silently mend."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.faults: list[str] = []
        self.ids: list[str] = []
        self.loads: list[str] = []
        self.refers: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if len(found) < len(attrs):
            self.faults.append(f"<{tag}> has an attribute twice")
        self.ids += [found["id"] or ""] if "id" in found else []
        self.loads += [found[name] or "" for name in ("src", "data", "srcset", "action") if name in found]
        self.loads += [found["href"] or ""] if tag == "link" else []
        self.refers += [(found.get(name) or "") for name in ("href", "aria-labelledby") if name in found]
        if tag not in VOID or (tag == "rect" and not (self.get_starttag_text() or "").endswith("/>")):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}> at {self.getpos()}")

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@functools.cache
def parsed(text: str) -> Strict:
    parser = Strict()
    parser.feed(text)
    parser.close()
    return parser


def report(folder: Path, lines: list[Line]) -> str:
    return write_report(made_up.write(folder, lines)).read_text()


def test_it_is_well_formed_and_ids_are_unique(page: Path) -> None:
    found = parsed(page.read_text())
    assert found.faults == []
    assert found.open == []
    assert len(found.ids) == len(set(found.ids))
    assert {reference.removeprefix("#") for reference in found.refers} <= set(found.ids)


def test_it_asks_for_nothing(page: Path) -> None:
    text = page.read_text()
    assert parsed(text).loads == []
    assert not re.search(r"https?:|@import|//[a-z]", text.split('<script type="application/json"')[0])
    assert re.findall(r"url\((?!#)", text) == []


def test_it_is_small(page: Path) -> None:
    assert page.stat().st_size < LARGEST


def test_every_figure_is_there_with_its_sentence_and_its_table(page: Path) -> None:
    text = page.read_text()
    sections = re.findall(r'<section class="figure".*?</section>', text, re.DOTALL)
    assert len(sections) == len(FIGURES)
    for section in sections:
        assert re.search(r'<p class="proves">[^<]{40,}', section)
        assert "<svg viewBox" in section
        assert section.count("<table") == 1


def test_the_first_screen_has_the_verdict_the_set_up_and_how_sure(page: Path, folder: Path) -> None:
    top = page.read_text().split("<nav")[0].split("<body>")[1]
    words = "".join(parsed(top).text)
    assert headline(judge(Findings.of(folder))) in words
    for needed in ("How sure", "Set-up", "2 cores", "torch 2.13.0", "0123abcd+", "5 paired seeds", "2 cases failed"):
        assert needed in words


def test_the_same_results_give_the_same_file(folder: Path, page: Path) -> None:
    before = page.read_text()
    assert write_report(folder).read_text() == before


def test_what_users_wrote_is_escaped(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><b id='x'>\"&"
    lines = made_up.study(SMALL, study=evil, text=evil, machine={"cpu": evil, "cores": 1})
    for line in lines:
        line |= {key: evil for key in ("model", "data", "error") if key in line}
    text = report(tmp_path, lines)
    found = parsed(text)
    assert found.faults == []
    assert text.count("<script") == 2
    assert "alert(1)</script>" not in text
    assert "<b id=" not in text
    assert len(found.ids) == len(set(found.ids))


def _without(*kinds: str) -> list[Line]:
    return [line for line in made_up.study(SMALL) if line["kind"] not in kinds]


@pytest.mark.parametrize(
    "lines, left_out",
    [
        (_without("time", "accuracy", "bus"), 11),
        (_without("time"), 8),
        (_without("accuracy"), 5),
        (_without("bus"), 2),
        ([made_up.session()], 11),
    ],
)
def test_a_figure_without_data_is_not_drawn_and_the_reason_is_told(
    lines: list[Line], left_out: int, tmp_path: Path
) -> None:
    text = report(tmp_path, lines)
    figures = re.findall(r'<section class="figure".*?</section>', text, re.DOTALL)
    (listed,) = re.findall(r'<h2 id="absent">.*?</section>', text, re.DOTALL)
    reasons = re.findall(r"<li><b>([^<]+):</b> ([^<]+)\.</li>", listed)
    assert len(reasons) == left_out
    # bytes on the wire are a table, and no figure
    assert len(figures) == len(FIGURES) - len([head for head, _ in reasons if head != "Bytes on the wire"])
    assert not re.search(r"</h2>(<h2|<section><h2)", text), "a heading with nothing below it"
    assert parsed(text).faults == []
    assert {reference.removeprefix("#") for reference in parsed(text).refers} <= set(parsed(text).ids)


def test_few_data_make_a_report_and_no_error(tmp_path: Path) -> None:
    """One repeat of one step, one seed, no breakdown, no predictions, no layers, unknown wires."""
    lines = made_up.study(replace(SMALL, seeds=1))
    for line in lines:
        if "steps_ms" in line:
            line["steps_ms"] = [[line["steps_ms"][0][0]]]
        for name in (
            ("breakdown_ms", "bytes", "predicted_ms", "predicted_interval_ms") if line["kind"] == "time" else ()
        ):
            line.pop(name, None)
        line |= {"layers": [], "curve": []} if line["kind"] == "accuracy" else {}
        line |= {"wire": "no-such-wire"} if line.get("wire") == "int8/256" and line["kind"] == "bus" else {}
    assert "Cannot tell" in report(tmp_path, lines)


def test_infinite_ratios_are_null_in_the_results_and_do_no_harm(tmp_path: Path) -> None:
    lines = made_up.study(SMALL)
    for line in lines:
        for layer in line.get("layers") or ():
            layer["snr_db"] = None if layer["name"] == "fc.bias" else layer["snr_db"]
    assert "fc.weight" in report(tmp_path, lines)


def test_a_study_that_is_too_large_loses_rows_and_says_so(tmp_path: Path) -> None:
    lines = made_up.study()
    grid = [line for line in lines if line.get("source") == "predicted"]
    for copy in range(3):
        lines += [{**line, "model": f"{line['model']}-{copy}", "case": f"{line['case']}|{copy}"} for line in grid]
    text = report(tmp_path, lines)
    assert len(text.encode()) < LARGEST
    assert "to keep the file small" in text


def test_predictions_are_marked_as_such(page: Path) -> None:
    (section,) = re.findall(r'<section class="figure" id="elsewhere".*?</section>', page.read_text(), re.DOTALL)
    assert "Predicted, not measured" in section
    assert 'class="ht"' in section


def test_failed_cases_are_listed_with_their_errors(page: Path) -> None:
    words = "".join(parsed(page.read_text()).text)
    assert "2 cases of 740 failed" in words
    assert "no module <mpi4py> & friends" in words


def test_bytes_that_do_not_agree_are_pointed_out(tmp_path: Path) -> None:
    lines = made_up.study(SMALL)
    for line in lines:
        if line["kind"] == "time" and line["wire"] == "int8/256" and line.get("bytes"):
            line["bytes"]["counted"] *= 1.2
    text = report(tmp_path, lines)
    assert "too far" in text
    assert re.search(r"In 1 of 2 settings the bytes", text)


def test_the_data_inside_can_be_read_back(page: Path, folder: Path) -> None:
    text = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert text is not None
    data = json.loads(text[1])
    assert data["verdict"]["headline"] == headline(judge(Findings.of(folder)))
    assert len(data["insights"]) == 11


def test_csv_has_a_row_for_each_setting(folder: Path) -> None:
    findings = Findings.of(folder)
    found = list(csv.DictReader(as_csv(findings).splitlines()))
    assert tuple(found[0]) == COLUMNS
    assert len(found) == len(rows(findings)) == len(findings.steps) + len(findings.accuracies) + 72 + 2
    one = next(row for row in found if row["wire"] == "int8/256" and row["kind"] == "time")
    assert float(one["speedup_low"]) <= float(one["speedup"]) <= float(one["speedup_high"])


def test_markdown_has_the_verdict_and_whole_tables(folder: Path) -> None:
    findings = Findings.of(folder)
    lines = as_markdown(findings).splitlines()
    assert f"**{headline(judge(findings))}**" in lines
    bars = [len(re.findall(r"(?<!\\)\|", line)) for line in lines if line.startswith("|")]
    assert set(bars) == {3, 4, 9, 11}
    assert not any("<mpi4py>" in line for line in lines)


def test_the_command_writes_all_four(folder: Path, tmp_path: Path) -> None:
    names = {"--out": "a.html", "--markdown": "a.md", "--csv": "a.csv", "--json": "a.json"}
    words = [word for option, name in names.items() for word in (option, str(tmp_path / name))]
    done = narrowcast("report", folder, *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("It depends on the link.")
    assert all((tmp_path / name).stat().st_size > 1000 for name in names.values())
    tables = json.loads((tmp_path / "a.json").read_text())["tables"]
    assert set(tables) == {"time", "accuracy", "bus", "failed"}


@pytest.mark.parametrize("option, start", [("--markdown", "# narrowcast study"), ("--csv", "kind,source,status")])
def test_a_dash_prints_it_alone(folder: Path, tmp_path: Path, option: str, start: str) -> None:
    done = narrowcast("report", folder, "--out", tmp_path / "a.html", option, "-", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(start)
    assert [path.name for path in tmp_path.iterdir()] == ["a.html"]


def test_the_command_refuses_a_folder_without_results(tmp_path: Path) -> None:
    done = narrowcast("report", tmp_path)
    assert done.returncode != 0
    assert "there are no results" in done.stderr
    assert "Traceback" not in done.stderr
