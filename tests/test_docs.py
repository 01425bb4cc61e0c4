"""What the pages show is run: python blocks in order, one namespace a page, and every `$ narrowcast` line.

`<!-- no-run: reason -->` on the line before a block takes it out, and must say why.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from served import narrowcast

ROOT = Path(__file__).parents[1]
PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if page.exists()]
ALL_PAGES = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]

BLOCK = re.compile(
    r"^(?P<indent> *)```(?P<language>[\w-]+)[^\n]*\n(?P<text>.*?)^(?P=indent)```\s*?$", re.MULTILINE | re.DOTALL
)
NO_RUN = re.compile(r"<!--\s*no-run\b:?\s*(?P<reason>(?:(?!-->).)*?)\s*-->\s*\Z", re.DOTALL)
COMMAND = re.compile(r"^\$ (narrowcast (?:.*\\\n)*.*)", re.MULTILINE)
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    line: int
    no_run: str | None
    """Why the block is not run; None where it is."""


def blocks(page: str) -> list[Block]:
    found = []
    for match in BLOCK.finditer(page):
        mark = NO_RUN.search(page[: match.start()])
        line = page[: match.start("text")].count("\n") + 1
        text = re.sub(f"^{match['indent']}", "", match["text"], flags=re.MULTILINE)
        found.append(Block(match["language"], text, line, mark["reason"] if mark else None))
    return found


def run_python(page: str, name: str) -> None:
    """Run a page's python blocks in order in one namespace; a traceback shows the page and its line."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.language == "python" and block.no_run is None:
            exec(compile("\n" * (block.line - 1) + block.text, name, "exec"), namespace)


def commands(page: str) -> list[str]:
    shown = [block.text for block in blocks(page) if block.language in {"console", "sh"} and block.no_run is None]
    return [command for text in shown for command in COMMAND.findall(text)]


def run_command(command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a line as a shell would, with this interpreter's narrowcast first on the path."""
    script = cwd / "bin" / "narrowcast"
    script.parent.mkdir(exist_ok=True)
    call = "import sys; from narrowcast.cli import main; sys.argv[0] = 'narrowcast'; sys.exit(main())"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{call}" "$@"\n')
    script.chmod(0o755)
    path = f"{script.parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


SHELL = re.compile(r"[|&;<>$`\\]")
"""In a line that a shell must take apart."""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


LONG = {"narrowcast codecs --table dettmers2016"}
SHOWN_COMMANDS = sorted({command for page in PAGES for command in commands(page.read_text())})


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_python(page.read_text(), name_of(page))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("command", [pytest.param(c, marks=[pytest.mark.slow] * (c in LONG)) for c in SHOWN_COMMANDS])
def test_commands_run(command: str, tmp_path: Path) -> None:
    needs_shell = SHELL.search(command)
    done = run_command(command, tmp_path) if needs_shell else narrowcast(*shlex.split(command)[1:], folder=tmp_path)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_block_that_is_not_run_says_why(page: Path) -> None:
    assert [block.line for block in blocks(page.read_text()) if block.no_run == ""] == []


@pytest.mark.parametrize("page", ALL_PAGES, ids=name_of)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    targets = LINK.findall(BLOCK.sub("", page.read_text()))
    assert [target for target in targets if not (page.parent / target).exists()] == []


MADE_UP = """
```python
x = 1
```

<!-- no-run: needs two hosts -->
```python
raise AssertionError("must not run")
```

- in a list:

  ```python
  x += 1
  assert x == 2
  ```

```console
$ narrowcast --help
$ narrowcast codecs \\
    --table dettmers2016
usage: narrowcast
$ ls
```

<!-- no-run -->
```sh
$ narrowcast study
```
"""


def test_blocks_are_found_with_their_marks() -> None:
    found = blocks(MADE_UP)
    assert [block.language for block in found] == ["python", "python", "python", "console", "sh"]
    assert [block.no_run for block in found] == [None, "needs two hosts", None, None, ""]
    assert commands(MADE_UP) == ["narrowcast --help", "narrowcast codecs \\\n    --table dettmers2016"]
    run_python(MADE_UP, "made-up.md")


def test_a_block_that_fails_is_caught_at_its_line() -> None:
    with pytest.raises(AssertionError) as caught:
        run_python(MADE_UP.replace("x == 2", "x == 3"), "made-up.md")
    last = caught.traceback[-1]
    assert (str(last.path).endswith("made-up.md"), last.lineno + 1) == (True, 14 + 1)


def test_a_command_that_fails_is_caught(tmp_path: Path) -> None:
    assert run_command("narrowcast no-such-command | cat", tmp_path).returncode != 0
    done = narrowcast("no-such-command", folder=tmp_path)
    assert (done.returncode, "No such command" in done.stderr) == (2, True)
    done = narrowcast("study", "show", "nothing", folder=tmp_path)
    assert (done.returncode, "narrowcast study run" in done.stderr) == (2, True)
