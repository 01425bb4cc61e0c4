"""An environment that holds a wheel and what its metadata asks for, and nothing else: no compiler, no other package.

What it asks for is linked from the environment that runs this: nothing is fetched, and a requirement that the metadata
forgets is missing here as it would be on a user's machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def requirements(dist: metadata.Distribution, extras: set[str]) -> Iterator[Requirement]:
    """What a distribution needs on this machine, with these extras."""
    for line in dist.requires or ():
        one = Requirement(line)
        if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in extras | {""}):
            yield one


def closure(installed: dict[str, metadata.Distribution], extras: set[str]) -> list[metadata.Distribution]:
    """Everything that must be there beside what is installed."""
    found: dict[str, metadata.Distribution] = {}
    todo = [(dist, frozenset(extras)) for dist in installed.values()]
    seen = set(todo)
    for dist, wanted in todo:
        for one in requirements(dist, set(wanted)):
            name = canonicalize_name(one.name)
            if name not in installed:
                found[name] = found.get(name) or metadata.distribution(name)
                if (entry := (found[name], frozenset(one.extras))) not in seen:
                    seen.add(entry)
                    todo.append(entry)
    return list(found.values())


def link(dist: metadata.Distribution, place: Path) -> None:
    """Put a distribution's packages into site-packages, as links."""
    for top in {file.parts[0] for file in dist.files or () if file.parts[0] not in ("..", "__pycache__")}:
        source, target = Path(str(dist.locate_file(top))), place / top
        if target.is_symlink() and source.is_dir():
            # a namespace that several distributions share: a folder of links instead
            shared = list(target.resolve().iterdir())
            target.unlink()
            target.mkdir()
            for each in shared:
                (target / each.name).symlink_to(each)
        if target.is_dir() and not target.is_symlink():
            for each in source.iterdir():
                if not (target / each.name).exists():
                    (target / each.name).symlink_to(each)
        elif not target.exists():
            target.symlink_to(source)


class Fresh:
    """The environment, made from wheels in `folder`."""

    def __init__(self, folder: Path, *wheels: Path, extras: set[str]) -> None:
        venv.create(folder, with_pip=False)
        self.bin = folder / "bin"
        pip = [sys.executable, "-m", "pip", "--python", str(self.bin / "python"), "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "-q", "--no-deps", "--no-index", *map(str, wheels)], check=True)
        (place,) = (folder / "lib").glob("python*/site-packages")
        here = {canonicalize_name(dist.name): dist for dist in metadata.distributions(path=[str(place)])}
        for dist in closure(here, extras):
            link(dist, place)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command of the environment, with its programs alone on the path."""
        keep = {key: os.environ[key] for key in ("HOME", "LANG", "TMPDIR") if key in os.environ}
        first = str(self.bin / command[0])
        return subprocess.run(
            [first, *command[1:]],
            env={**keep, "PATH": str(self.bin), "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
            cwd=self.bin.parent,
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )

    def check(self, version: str, native: bool) -> None:
        """It is this version, with or without the library; a codec and the command work, and nothing warns."""
        done = self.run("python", "-W", "error", "-c", CODE)
        expected = f"{version} {native} {self.bin.parent.resolve()}"
        if done.returncode or done.stderr or not done.stdout.startswith(expected):
            raise RuntimeError(f"a fresh environment should say {expected!r}, and says {done.stdout}{done.stderr}")
        self.quiet("narrowcast", "formats")

    def quiet(self, *command: str) -> str:
        """The output of a command that must end with 0 and warn of nothing."""
        done = self.run(*command)
        if done.returncode or done.stderr:
            raise RuntimeError(
                f"{' '.join(command)}, in a fresh environment, ended with {done.returncode}: {done.stderr}"
            )
        return done.stdout


CODE = """
import torch, narrowcast as nc
from narrowcast.kernels import native
x = torch.randn(100_003)
codec = nc.codec("int4/128+sr")
wire = codec.encode(x, seed=1)
if wire.numel() != codec.nbytes(x.numel()) or (codec.decode(wire, x.numel()) - x).norm() > 0.2 * x.norm():
    raise RuntimeError("int4/128+sr gives back other numbers")
print(nc.__version__, native.available(), nc.__file__)
"""
