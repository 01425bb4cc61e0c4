"""Everything of a release but the upload: checks, wheels and sdists, the wheel in a fresh environment, checksums.

`make release` runs it. `--rehearse` shows what is not ready as a warning and goes on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

from fresh import Fresh

ROOT = Path(__file__).parents[1]
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
HEADING = re.compile(r"^## \[(?P<version>[^\]]+)\] - (?P<date>.+)$", re.MULTILINE)


def run(*command: object, cwd: Path = ROOT) -> str:
    """A command's output; it ends the release where the command fails."""
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env={**os.environ, "PATH": PATH}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def versions(root: Path) -> dict[str, str]:
    """The version as each file has it."""
    narrowcast = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    research = tomllib.loads((root / "research" / "pyproject.toml").read_text())["project"]
    heading = HEADING.search((root / "CHANGELOG.md").read_text())
    package = re.search(r'^__version__ = "(.+)"$', (root / "src/narrowcast/__init__.py").read_text(), re.MULTILINE)
    citation = re.search(r"^version: (.+)$", (root / "CITATION.cff").read_text(), re.MULTILINE)
    return {
        "pyproject.toml": narrowcast["version"],
        "src/narrowcast/__init__.py": package[1] if package else "none",
        "research/pyproject.toml": research["version"],
        "research/pyproject.toml, its dependency": research["dependencies"][0].partition("==")[2],
        "CHANGELOG.md, its first heading": heading["version"] if heading else "none",
        "CITATION.cff": citation[1] if citation else "none",
    }


def not_ready(root: Path) -> Iterator[str]:
    """What forbids a release of this tree."""
    if changed := run("git", "status", "--porcelain", cwd=root):
        yield f"the tree is not clean: commit or remove\n{changed.rstrip()}"
    found = versions(root)
    if len(set(found.values())) > 1:
        yield "versions differ: " + ", ".join(f"{version} in {file}" for file, version in found.items())
    heading = HEADING.search((root / "CHANGELOG.md").read_text())
    if heading is None or not re.fullmatch(r"\d{4}-\d\d-\d\d", heading["date"]):
        date = heading["date"] if heading else "missing"
        yield f"the first heading of CHANGELOG.md has no date but {date!r}: write ## [VERSION] - YYYY-MM-DD"
    if not tomllib.loads((root / "pyproject.toml").read_text())["project"].get("urls"):
        yield "pyproject.toml has no [project.urls]: add Repository, Documentation and Changelog, where users find them"


def build(folder: Path) -> list[Path]:
    """Both packages: an sdist, and the wheel that is built from it."""
    for source in (ROOT, ROOT / "research"):
        run(sys.executable, "-m", "build", "--outdir", folder / "raw", source)
    for wheel in (folder / "raw").glob("*-linux_*.whl"):
        run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", folder / "raw", wheel)
        wheel.unlink()
    return sorted((folder / "raw").iterdir())


def checksums(files: list[Path]) -> str:
    """As `sha256sum --check` reads them."""
    return "".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)


def release(out: Path, version: str) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        files = build(Path(temporary))
        run(sys.executable, "-m", "twine", "check", "--strict", *files)
        print(f"built and checked: {', '.join(file.name for file in files)}")
        wheels = [file for file in files if file.suffix == ".whl"]
        fresh = Fresh(Path(temporary) / "fresh", *wheels, extras={"cli"})
        fresh.check(version, native=True)
        if json.loads(fresh.quiet("narrowcast", "doctor", "--json", "-"))["failed_checks"]:
            sys.exit("the kernels of the wheel differ from the reference: narrowcast doctor")
        print("a fresh environment without a compiler runs them")
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        for file in files:
            shutil.copy(file, out)
        (out / "SHA256SUMS").write_text(checksums(files))
    print(f"in {out}, with SHA256SUMS; to upload: python -m twine upload {out}/*.whl {out}/*.tar.gz")


def main() -> None:
    """Refuse, or build."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("dist"), help="the folder that gets the files, emptied first")
    parser.add_argument("--rehearse", action="store_true", help="warn of what is not ready, and go on")
    arguments = parser.parse_args()
    for fault in (faults := list(not_ready(ROOT))):
        print(f"{'warning' if arguments.rehearse else 'error'}: {fault}", file=sys.stderr)
    if faults and not arguments.rehearse:
        sys.exit(1)
    release(arguments.out, versions(ROOT)["pyproject.toml"])


if __name__ == "__main__":
    main()
