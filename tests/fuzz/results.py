"""A study's results: whatever stands in them, a report is made or one line says which line is wrong."""

from __future__ import annotations

import copy
import json
import re
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from fuzz.base import Kind, one_line, replaced, require
from narrowcast_research.insights import insights
from study.report import made_up

from narrowcast.study.analysis.findings import Findings
from narrowcast.study.analysis.verdict import verdict_text
from narrowcast.study.execution.results import ResultsError, usable_lines
from narrowcast.study.report import write_report
from narrowcast.study.report.export import rows

JUDGED_IN, REPORTED_IN = 20, 2000
"""How many files are read for one that is judged, and for one of which a whole report is made."""
EVIL = (
    *(
        "<script>alert(1)</script>",
        '"><img src=x onerror=alert(1)>',
        "</script><script>x",
        "`x`|y\n| z",
        "\x00\x1b[31m",
    ),
    *("\u202e\ud7ff", "&lt;", "javascript:alert(1)", "]]>", "<!--", "", "\ud800"),
)
ODD = (
    0,
    -1,
    1e308,
    -1e308,
    1e-320,
    float("nan"),
    float("inf"),
    None,
    "7",
    True,
    [],
    {},
    [[]],
    [1],
    10**30,
    -0.0,
    10**400,
)
TRUTH = made_up.Truth(nets=("mlp",), wires=("fp32", "int8/256"), rates=("100mbit",), workers=(2, 4), seeds=2)
PLACE = re.compile(r"(results\.jsonl:[0-9]+: |\S*: (line [0-9]+ has no |the results have no session line))")
Path_ = tuple[Any, ...]


@cache
def _lines() -> list[dict[str, Any]]:
    """One session and some of each kind."""
    every = made_up.study(TRUTH)
    kept = {kind: [line for line in every if line["kind"] == kind] for kind in ("session", "time", "accuracy", "bus")}
    predicted = [line for line in kept["time"] if line["source"] == "predicted"][:2]
    measured = [line for line in kept["time"] if line["source"] == "measured"]
    found = [kept["session"][0], *measured, *predicted, *kept["accuracy"], *kept["bus"][:3]]
    for line in found[1:]:
        line |= {"compressed": {"values": 0.9, "bytes": 0.7}, "min_values": 10_000}
    return found


def _places(value: Any, path: Path_ = ()) -> Iterator[Path_]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _places(inner, (*path, key))
        return
    yield path
    if isinstance(value, list):
        for number, inner in enumerate(value[:2]):
            yield from _places(inner, (*path, number))


def make(source: Random) -> tuple[str, str]:
    far = "report" if source.randrange(REPORTED_IN) == 0 else "judge" if source.randrange(JUDGED_IN) == 0 else "read"
    lines = [_lines()[0], *source.sample(_lines()[1:], 3 if far == "read" else len(_lines()) - 1)]
    lines = copy.deepcopy(lines)
    for _ in range(source.choice((1, 1, 2, 5))):
        line = source.choice(lines)
        path = source.choice(list(_places(line)))
        inner: Any = line
        for key in path[:-1]:
            inner = inner[key]
        try:
            # a copy: a later change may go inside of it
            inner[path[-1]] = copy.deepcopy(source.choice(ODD + EVIL))
        except (KeyError, IndexError, TypeError):  # an earlier change took the place away
            continue
    if source.random() < 0.2:
        lines = source.sample(lines, source.randrange(1, len(lines)))
    texts = [json.dumps(line) for line in lines]
    if source.random() < 0.2:
        at = source.randrange(len(texts))
        texts[at] = replaced(texts[at], source)
    return "".join(f"{text}\n" for text in texts), far


def check(given: tuple[str, str]) -> None:
    text, far = given
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "results.jsonl").write_text(text, encoding="utf-8", errors="replace")
        try:
            USES[far](folder)
        except ResultsError as error:
            message = str(error).replace(f"{folder}/", "")
            require(PLACE.match(message), f"the message does not begin with file and line: {message}")
            one_line(message, "results")


def _report(folder: str) -> None:
    page = Path(write_report(folder)).read_text(encoding="utf-8")
    require(page.count("<script") == 2 and "<img" not in page, "the page has markup of the results")


def _judge(folder: str) -> None:
    verdict_text(folder)
    findings = Findings.of(folder)
    insights(findings)
    rows(findings)


USES = {"read": usable_lines, "judge": _judge, "report": _report}
KIND = Kind("results", 4, make, check)
