"""The page Start here, line by line, in one folder: from a clone to a verdict on a model of one's own."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from served import narrowcast

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "start.md").read_text()
ELSEWHERE = ("torchrun", "study run")
"""What ranks need, and what takes minutes: other tests do both."""


def lines() -> list[str]:
    shown = "\n".join(re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL))
    return [line.removeprefix("$ ") for line in shown.splitlines() if line.startswith("$ ")]


def test_every_line_of_start_here_runs_and_ends_with_a_verdict(tmp_path: Path) -> None:
    model = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert model is not None
    (tmp_path / "mine.py").write_text(model[1])
    run = [line for line in lines() if not any(words in line for words in ELSEWHERE)]
    said = {}
    for line in run:
        done = narrowcast(*shlex.split(line)[1:], folder=tmp_path)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        said[line] = done.stdout
    assert len(run) == 6
    (verdict,) = (text for line, text in said.items() if "--cluster 1gbe-tcp" in line)
    assert re.match(r"(Compress|Leave it off|Cannot tell)\. .* is predicted [\d.]+× .* with \d workers", verdict)
    assert 'name = "mine-study"' in (tmp_path / "mine-study.toml").read_text()


def test_what_trouble_quotes_is_said_somewhere() -> None:
    quoted = re.findall(r"^\| (.*?) \|", (DOCS / "trouble.md").read_text(), re.MULTILINE)
    texts = [text for cell in quoted for text in re.findall(r"`([^`]+)`", cell) if " " in text]
    source = "\n".join(path.read_text() for path in (DOCS.parent / "src").rglob("*.py"))
    # strings are cut over lines, and hold what was given
    flat = re.sub(r'"\s*\n\s*f?"', "", source)
    for text in texts:
        parts = re.split(r"\d+|'[^']*'|Sequential|\.\.\.", text)
        assert all(part.strip(" :;,=") in flat for part in parts), text
    assert len(texts) > 6
