"""The report in a real browser: no error, no request, filters that filter, and nothing that shuts people out."""

from __future__ import annotations

import csv
import importlib.resources
import os
import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from served import narrowcast
from study.report import browser as chromium
from study.report import made_up
from study.report.browser import Browser
from study.report.made_up import WIRES, Truth

from narrowcast.study import Comparison, Findings, compare_page
from narrowcast.study.report import write, write_report

MISSING = "Chromium is not installed: apt-get install chromium"
# CI runs as root, where `make test` installs it: there its absence is a fault
MUST = bool(os.environ.get("CI")) and os.geteuid() == 0
pytestmark = pytest.mark.skipif(chromium.find() is None and not MUST, reason=MISSING)

# not checkVisibility(), which holds a hidden group of an SVG for visible
SEEN = "[...document.querySelectorAll('{}')].filter(e => e.getClientRects().length).length"
OPEN_ALL = "document.querySelectorAll('details').forEach(e => { e.open = true })"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    command = chromium.find()
    assert command is not None, MISSING
    with Browser(command) as running:
        running.size(1180, 900)
        yield running


@pytest.fixture
def opened(browser: Browser, page: Path) -> Browser:
    browser.scripts(True)
    browser.scheme("light")
    browser.open(page)
    return browser


def seen(browser: Browser, selector: str) -> int:
    return int(browser.run(SEEN.format(selector)))


def test_it_opens_from_a_file_without_error_or_request(opened: Browser, page: Path) -> None:
    opened.run(OPEN_ALL)
    assert opened.run("document.querySelector('h1').innerText").startswith("It depends on the link.")
    assert opened.complaints == []
    assert opened.requests == [page.resolve().as_uri()]


def test_the_verdict_is_on_the_first_screen(opened: Browser) -> None:
    for selector in ("h1", ".tiles", ".sure h2", ".setup h2"):
        bottom = opened.run(f"document.querySelector('{selector}').getBoundingClientRect().bottom")
        assert 0 < bottom < 900, selector


def test_nothing_is_wider_than_the_page(opened: Browser) -> None:
    opened.run(OPEN_ALL)
    try:
        for width in (1180, 760, 360):
            opened.size(width, 900)
            assert opened.run("document.documentElement.scrollWidth") <= width
    finally:
        opened.size(1180, 900)


@pytest.mark.parametrize("name, value", [("wire", "int8/256"), ("model", "cnn"), ("workers", "2")])
def test_a_filter_hides_its_rows_and_marks_and_brings_them_back(opened: Browser, name: str, value: str) -> None:
    opened.run(OPEN_ALL)
    marked = f'main [data-{name}="{value}"]'
    rows, others = f'main tr[data-{name}="{value}"]', f'main tr[data-{name}]:not([data-{name}="{value}"])'
    before = seen(opened, marked), seen(opened, rows), seen(opened, others)
    assert min(before) > 0
    opened.run(f"""document.querySelector('input[name="{name}"][value="{value}"]').click()""")
    assert (seen(opened, marked), seen(opened, rows), seen(opened, others)) == (0, 0, before[2])
    assert re.match(r"\d+ of \d+ rows shown", opened.run("document.getElementById('shown').innerText"))
    opened.run("document.querySelector('#filters [type=reset]').click(); new Promise(done => setTimeout(done, 50))")
    assert (seen(opened, marked), seen(opened, rows), seen(opened, others)) == before
    assert opened.complaints == []


def test_a_filter_works_by_keyboard(opened: Browser) -> None:
    opened.run("document.querySelector('input[name=wire]').focus()")
    for kind in ("keyDown", "keyUp"):
        opened.call("Input.dispatchKeyEvent", type=kind, key=" ", code="Space", windowsVirtualKeyCode=32, text=" ")
    assert opened.run("document.querySelector('input[name=wire]').checked") is False


def test_light_and_dark_follow_the_system_and_the_button(opened: Browser) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    light = opened.run(colour)
    opened.scheme("dark")
    dark = opened.run(colour)
    assert light != dark
    opened.run("document.getElementById('theme').click()")
    assert opened.run(colour) == light


def test_it_says_everything_without_scripts(browser: Browser, page: Path) -> None:
    browser.scripts(True)
    browser.open(page)
    browser.run(OPEN_ALL)
    with_scripts = seen(browser, "tr"), seen(browser, "svg[role=img]"), seen(browser, "h2, h3, p")
    browser.scripts(False)
    try:
        browser.open(page)
        # scripts of the page stay off; ours may still ask
        assert browser.run("document.getElementById('filters').hidden") is True
        browser.run(OPEN_ALL)
        assert (seen(browser, "tr"), seen(browser, "svg[role=img]"), seen(browser, "h2, h3, p")) == (
            *with_scripts[:2],
            with_scripts[2] - seen_in_the_form(browser),
        )
        assert browser.complaints == []
    finally:
        browser.scripts(True)


def seen_in_the_form(browser: Browser) -> int:
    return int(browser.run("document.querySelectorAll('#filters p').length"))


CATCH = """URL.createObjectURL = blob => { window.taken = blob; return '#' };
HTMLAnchorElement.prototype.click = function () { window.called = this.download }"""
BUTTON = "document.querySelector('{}').click(); window.taken.text()"


def test_drawings_and_tables_can_be_taken_away(opened: Browser, tmp_path: Path) -> None:
    """An SVG that needs no style sheet, a CSV with every row, and a table for LaTeX."""
    opened.scheme("dark")
    opened.run(CATCH)
    svg = opened.run(BUTTON.format("#heat .panel .take"))
    assert opened.run("window.called").endswith(".svg")
    assert ElementTree.fromstring(svg).tag.endswith("}svg")
    assert "class=" not in svg.replace("data-class", "")
    assert "var(" not in svg
    assert "rgb(0, 114, 178)" in svg, "the blue of paper, not of the dark page"
    kept = opened.run("document.querySelector('#heat table').rows.length")
    table = list(csv.reader(opened.run(BUTTON.format("#heat .takes .take")).splitlines()))
    assert len(table) == kept
    assert {len(row) for row in table} == {len(table[0])}
    tex = opened.run(BUTTON.format("#heat .takes .take + .take"))
    assert opened.run("window.called").endswith(".tex")
    body = tex[tex.index("\\midrule") : tex.index("\\bottomrule")].splitlines()[1:]
    assert len(body) == kept - 1
    assert {row.count(" & ") for row in body} == {len(table[0]) - 1}
    assert all(row.endswith(" \\\\") for row in body)
    assert not re.search(r"(?<!\\)[%#_×−–]", tex.split("\n", 1)[1])
    (tmp_path / "taken.svg").write_text(svg, encoding="utf-8")
    opened.open(tmp_path / "taken.svg")
    assert opened.run("document.querySelectorAll('text').length") > 5
    assert opened.complaints == []


LABELS_THAT_COVER = """[...document.querySelectorAll('svg[role=img]')].flatMap(svg => {
  const boxes = [...svg.querySelectorAll('text')].map(e => [e.textContent, e.getBoundingClientRect()]);
  const hit = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3;
  return boxes.flatMap(([a, one], i) =>
    boxes.slice(i + 1).filter(([, two]) => hit(one, two)).map(([b]) => a + ' | ' + b));
})"""


def test_no_label_covers_another_in_the_fonts_of_a_browser(browser: Browser, tmp_path: Path) -> None:
    """Of twenty wires; test_drawings.py reckons with widths that it only estimates."""
    truth = Truth(nets=("mlp",), wires=WIRES, rates=("100mbit", "loopback"), seeds=2)
    lines = [line for line in made_up.study(truth) if not line.get("cluster")]
    browser.scripts(True)
    browser.open(write_report(made_up.write(tmp_path, lines)))
    browser.run(OPEN_ALL)
    assert browser.run(LABELS_THAT_COVER) == []


@pytest.fixture(scope="module")
def small_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every figure and table, with few rows: axe looks at each of them for long."""
    truth = Truth(nets=("mlp",), wires=("fp32", "int8/256"), rates=("100mbit", "loopback"), seeds=2)
    grid = {"cluster": "dgx-1", "model": "alexnet"}
    lines = [line for line in made_up.study(truth) if not line.get("cluster") or grid.items() <= line.items()]
    return write_report(made_up.write(tmp_path_factory.mktemp("small"), lines))


PREDICT = "--model resnet50 --workers"
OTHERS = {
    "predict": f"predict {PREDICT} 2,8 --cluster 1gbe-tcp",
    "advise": f"advise {PREDICT} 8 --clusters 1gbe-tcp,25gbe-tcp --price 1gbe-tcp=1.5,25gbe-tcp=2",
}


def _two_studies(folder: Path) -> Path:
    """Their comparison."""
    truth = Truth(nets=("mlp",), wires=("fp32", "int8/256"), rates=("100mbit",), seeds=2)
    lines = [[line for line in made_up.study(truth, seed) if not line.get("cluster")] for seed in (1, 2)]
    first, second = (made_up.write(folder / str(i), same) for i, same in enumerate(lines))
    path = folder / "page.html"
    write(path, compare_page(Comparison.of(Findings.of(first), Findings.of(second))))
    return path


@pytest.mark.parametrize("command", [*OTHERS, "report of two"])
def test_other_pages_open_without_error_or_request_and_fit_a_phone(
    browser: Browser, tmp_path: Path, command: str
) -> None:
    path = tmp_path / "page.html"
    if command in OTHERS:
        done = narrowcast(*OTHERS[command].split(), "--html", path)
        assert done.returncode == 0, done.stderr
    else:
        path = _two_studies(tmp_path)
    browser.scripts(True)
    for scheme in ("light", "dark"):
        browser.scheme(scheme)
        browser.open(path)
        browser.run(OPEN_ALL)
        assert browser.complaints == []
        assert browser.requests == [path.resolve().as_uri()]
        assert serious_faults(browser) == []
    assert browser.run(LABELS_THAT_COVER) == []
    assert seen(browser, ".panel .take") == len(re.findall('role="img" aria-label', path.read_text()))
    browser.size(390, 900)
    try:
        assert browser.run("document.documentElement.scrollWidth") <= 390
    finally:
        browser.size(1180, 900)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(browser: Browser, small_page: Path, scheme: str) -> None:
    browser.scripts(True)
    browser.scheme(scheme)
    browser.open(small_page)
    browser.run(OPEN_ALL)
    assert serious_faults(browser) == []


def serious_faults(browser: Browser) -> list[str]:
    """What axe says of the page that is open."""
    axe = importlib.resources.files("axe_core_python") / "axe.min.js"
    browser.run(axe.read_text(encoding="utf-8"))
    violations = browser.run("axe.run(document, { resultTypes: ['violations'] }).then(found => found.violations)")
    return [
        f"{found['impact']} {found['id']}: {found['help']}: {[node['target'] for node in found['nodes'][:3]]}"
        for found in violations
        if found["impact"] in ("serious", "critical")
    ]


def test_it_prints(opened: Browser) -> None:
    opened.scheme("dark")
    paper = opened.paper()
    assert paper.startswith(b"%PDF")
    assert 3 <= len(re.findall(rb"/Type\s*/Page\b", paper)) <= 60


def test_every_drawing_has_a_name_for_screen_readers(opened: Browser) -> None:
    names = opened.run("[...document.querySelectorAll('svg[role=img]')].map(e => e.getAttribute('aria-label'))")
    assert len(names) > 50
    assert all(len(name) > 20 for name in names)
    assert len(set(names)) == len(names)
