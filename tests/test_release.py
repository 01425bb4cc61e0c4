"""A release: what it refuses, what the sdist holds, the wheel alone in an environment, and the forge's workflow."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import release
import yaml
from each import each
from fresh import Fresh

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FILES = ("pyproject.toml", "research/pyproject.toml", "CHANGELOG.md", "CITATION.cff", "src/narrowcast/__init__.py")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A clean repository that is ready: the files that have a version, with a date and an address."""
    for file in FILES:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    edit(tmp_path / "CHANGELOG.md", r"(?m)^(## \[[^\]]+\]) - .*", r"\1 - 2026-01-31")
    if "urls" not in PROJECT:
        edit(tmp_path / "pyproject.toml", r"(?m)^\[project\.scripts\]", '[project.urls]\nRepository = "x"\n\n\\g<0>')
    for command in (["init", "-q"], ["add", "."], [*NAMED, "commit", "-qm", "all"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


NAMED = ["-c", "user.name=a", "-c", "user.email=a@b"]


def edit(file: Path, pattern: str, replacement: str) -> None:
    text, count = re.subn(pattern, replacement, file.read_text(), count=1)
    assert count == 1
    file.write_text(text)


def test_versions_are_equal_everywhere() -> None:
    assert set(release.versions(ROOT).values()) == {PROJECT["version"]}


def test_a_tree_that_is_ready_is_released_and_any_fault_is_named(tree: Path) -> None:
    assert list(release.not_ready(tree)) == []
    edit(tree / "CITATION.cff", "(?m)^version: .*", "version: 9.9.9")
    edit(tree / "CHANGELOG.md", "2026-01-31", "unreleased")
    edit(tree / "pyproject.toml", r"\[project\.urls\]", "[project.gui-scripts]")
    dirty, differ, date, urls = release.not_ready(tree)
    assert "CITATION.cff" in dirty
    assert "9.9.9 in CITATION.cff" in differ
    assert "'unreleased'" in date
    assert "[project.urls]" in urls


def test_checksums_are_as_sha256sum_reads_them(tmp_path: Path) -> None:
    (tmp_path / "a.whl").write_bytes(b"wheel")
    text = release.checksums([tmp_path / "a.whl"])
    assert text == f"{hashlib.sha256(b'wheel').hexdigest()}  a.whl\n"


def built(call: str, source: Path, out: Path) -> Path:
    """An sdist or a wheel, as pip asks for it. Without a compiler: the library is no part of these tests."""
    code = f"from scikit_build_core import build; build.{call}({str(out)!r})"
    environment = {**os.environ, "PATH": release.PATH, "CXX": str(out / "no-such-compiler")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (path for path in out.iterdir() if path.is_file())
    return path


PACKAGES = {"narrowcast": ROOT, "narrowcast_research": ROOT / "research"}


@pytest.fixture(scope="module")
def sdists(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The sdist of each package, unpacked."""
    return {
        package: unpacked(built("build_sdist", source, tmp_path_factory.mktemp("sdist")))
        for package, source in PACKAGES.items()
    }


def unpacked(path: Path) -> Path:
    with tarfile.open(path) as packed:
        packed.extractall(path.parent / "unpacked", filter="data")
    (folder,) = (path.parent / "unpacked").iterdir()
    return folder


@pytest.fixture(scope="module")
def wheels(sdists: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel of each package, built from its sdist."""
    return {package: built("build_wheel", sdist, tmp_path_factory.mktemp("wheel")) for package, sdist in sdists.items()}


SOURCES = "src", "csrc", "CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff"


def committed(*paths: str) -> set[str]:
    listed = subprocess.run(["git", "ls-files", *paths], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(listed.stdout.splitlines())


@each("package, sources", [("narrowcast", SOURCES), ("narrowcast_research", ["research"])])
def test_an_sdist_holds_what_a_wheel_is_made_of_and_no_more(
    package: str, sources: list[str], sdists: dict[str, Path]
) -> None:
    held = {str(path.relative_to(sdists[package])) for path in sdists[package].rglob("*") if path.is_file()}
    assert held == {path.removeprefix("research/") for path in committed(*sources)} | {"PKG-INFO"}


@each("package, folder", [("narrowcast", "src/"), ("narrowcast_research", "research/")])
def test_a_wheel_has_every_file_of_its_package_and_nothing_of_the_other(
    package: str, folder: str, wheels: dict[str, Path]
) -> None:
    with zipfile.ZipFile(wheels[package]) as held:
        names = {name for name in held.namelist() if ".dist-info/" not in name}
    assert names == {path.removeprefix(folder) for path in committed(folder + package)}


def test_both_wheels_run_beside_what_they_ask_for_and_nothing_warns(wheels: dict[str, Path], tmp_path: Path) -> None:
    fresh = Fresh(tmp_path / "environment", *wheels.values(), extras={"cli"})
    fresh.check(PROJECT["version"], native=False)
    with pytest.raises(RuntimeError, match=f"should say '9.9.9 .*says {PROJECT['version']} False"):
        fresh.check("9.9.9", native=False)
    code = "from narrowcast import plugins; print(*plugins.loaded().commands, plugins.loaded().studies)"
    done = fresh.run("python", "-c", code)
    assert done.stdout.startswith("validate simulate "), done.stderr
    assert str(tmp_path / "environment") in done.stdout


WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
TARGETS = set(re.findall(r"^([a-z][a-z0-9-]*):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_the_workflow_runs_make_targets_that_exist() -> None:
    commands = [step["run"] for job in WORKFLOW["jobs"].values() for step in job["steps"] if "run" in step]
    targets = [target for command in commands for target in re.findall(r"""(?:^|")make ([a-z][a-z-]*)""", command)]
    assert set(targets) == {"lint", "test", "test-torch", "docs", "release"}
    assert set(targets) <= TARGETS


def test_the_workflow_tests_what_the_classifiers_say() -> None:
    jobs = WORKFLOW["jobs"]
    said = re.findall(r"Programming Language :: Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert jobs["test"]["strategy"]["matrix"]["python"] == said
    assert not any("MacOS" in one for one in PROJECT["classifiers"]), "no job runs there"
    for which in jobs["torch"]["strategy"]["matrix"]["torch"]:
        assert (ROOT / f"constraints-{which}.txt").exists()
    oldest = (ROOT / "constraints-oldest.txt").read_text()
    assert re.findall(r"^torch==(\d+\.\d+)", oldest, re.MULTILINE) == [PROJECT["dependencies"][0].partition(">=")[2]]
