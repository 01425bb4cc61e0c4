"""The docs site: one list of pages, no request to the outside, and a search that works from files."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mkdocs.config import load_config
from study.report import browser as chromium
from study.report.browser import Browser

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MUST = bool(os.environ.get("CI")) and os.geteuid() == 0
OUTSIDE = re.compile(r"""<(?:script|img|iframe|source|video)\b[^>]*\bsrc=["']?(?:https?:)?//[^"'> ]+
    | <link\b(?![^>]*\brel=["']?canonical)[^>]*\bhref=["']?(?:https?:)?//[^"'> ]+
    | @import\s+(?:url\()?["']?(?:https?:)?// | url\(["']?(?:https?:)?//""", re.VERBOSE)  # fmt: skip


def build(out: Path, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    """As `make docs`: with --quiet, mkdocs would not count warnings, and --strict would mean nothing."""
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(config), "--site-dir", str(out)],
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_a_page_without_a_place_and_a_broken_link_are_errors(tmp_path: Path) -> None:
    (tmp_path / "docs" / "design").mkdir(parents=True)
    shutil.copy(DOCS / "hooks.py", tmp_path / "docs")
    text = (ROOT / "mkdocs.yml").read_text()
    nav = "nav:\n  - Start:\n      - narrowcast: index.md\n  - Decisions: design/\n"
    (tmp_path / "mkdocs.yml").write_text(re.sub(r"(?s)nav:\n.*?(?=markdown_extensions:)", nav, text, count=1))
    (tmp_path / "docs" / "index.md").write_text(
        "# narrowcast\n\n<!-- pages: the nav of mkdocs.yml, written here when the site is built -->\n"
    )
    (tmp_path / "docs" / "design" / "001-a.md").write_text("# 001: a\n")
    (tmp_path / "docs" / "lost.md").write_text("# lost\n\n[nowhere](nowhere.md)\n")
    done = build(tmp_path / "site", tmp_path / "mkdocs.yml")
    assert done.returncode == 1
    assert "lost.md" in done.stderr.partition('not included in the "nav"')[2]
    assert "'nowhere.md'" in done.stderr
    assert "Aborted with 2 warnings" in done.stdout + done.stderr


def test_make_docs_counts_warnings() -> None:
    (line,) = [line for line in (ROOT / "Makefile").read_text().splitlines() if "mkdocs build" in line]
    assert "--strict" in line
    assert "build --quiet" not in line


def test_the_first_page_shows_every_page_once_and_in_the_order_of_the_nav(site: Path) -> None:
    config = load_config(str(ROOT / "mkdocs.yml"))
    config.plugins.on_config(config)
    assert [list(part) for part in config.nav] == [
        [name] for name in ("Start", "Guides", "Reference", "Research tools", "Results", "Decisions")
    ]
    pages = re.findall(r"[\w/-]+\.md", json.dumps(config.nav))
    assert sorted(pages) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
    shown = (site / "index.html").read_text().partition('id="pages"')[2].partition("</article>")[0]
    links = re.findall(r'<li><a href="([^"]+)\.html">', shown)
    assert links == [page.removesuffix(".md") for page in pages]


def test_no_page_is_listed_by_hand_a_second_time() -> None:
    written = [page for page in DOCS.rglob("*.md") if len(set(re.findall(r"\]\((\S+\.md)\)", page.read_text()))) > 20]
    assert written == []


def test_nothing_is_fetched_from_outside(site: Path) -> None:
    files = [path for path in site.rglob("*") if path.suffix in {".html", ".css"} and "examples" not in path.parts]
    assert len(files) > 90
    assert {str(path): found for path in files if (found := OUTSIDE.findall(path.read_text()))} == {}
    for outside in ('<script async src="https://a/b.js">', '<link rel="icon" href="//a/b">', "url(//a/b)"):
        assert OUTSIDE.search(outside), outside


@pytest.mark.skipif(chromium.find() is None and not MUST, reason="Chromium is not installed: apt-get install chromium")
def test_the_search_finds_from_a_file_and_asks_nobody(site: Path) -> None:
    command = chromium.find()
    assert command is not None
    with Browser(command) as browser:
        browser.open(site / "index.html")
        browser.run(TYPE)
        until = time.monotonic() + 60
        while not (found := browser.run(FOUND)) and time.monotonic() < until:
            time.sleep(0.1)
        assert any("low-rank.html" in link for link in found)
        assert browser.complaints == []
        assert [url for url in browser.requests if not url.startswith(("file:", "data:", "about:"))] == []


TYPE = """(() => {
  document.getElementById("__search").click();
  const field = document.querySelector("input[name=query]");
  field.focus();
  field.value = "PowerSGD";
  field.dispatchEvent(new KeyboardEvent("keyup", {bubbles: true}));
})()"""
FOUND = "[...document.querySelectorAll('.md-search-result__link')].map(link => link.href)"
