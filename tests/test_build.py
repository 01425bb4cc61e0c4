"""The build itself: its floating-point flags, its variants, a machine without a compiler, another architecture."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
CROSS = "aarch64-linux-gnu-g++"
FLAGS = {"-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden"}


def cmake(*arguments: object, **environment: str) -> str:
    done = subprocess.run(
        ["cmake", *map(str, arguments)],
        env={**os.environ, "PATH": PATH, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    return output


def compile_commands(build: Path) -> list[str]:
    return [entry["command"] for entry in json.loads((build / "compile_commands.json").read_text())]


def cross_options() -> list[str]:
    return ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={CROSS}"]


needs_compiler = pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler on this machine")
needs_cross_compiler = pytest.mark.skipif(not shutil.which(CROSS), reason=f"{CROSS} is not installed")


@needs_compiler
def test_every_source_is_compiled_with_exactly_the_flags_of_the_design(tmp_path: Path) -> None:
    cmake("-S", ROOT, "-B", tmp_path, "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON")
    for command in compile_commands(tmp_path):
        flags = {word for word in command.split() if word.startswith(("-f", "-O"))}
        assert flags - {"-fPIC"} == FLAGS
        assert "-march" not in command


@needs_compiler
@pytest.mark.skipif(platform.machine() not in {"x86_64", "AMD64"}, reason="the variants of x86-64")
def test_the_weakest_variant_is_linked_first(tmp_path: Path) -> None:
    """The linker keeps the first copy of a function that several variants emit, and it must run everywhere."""
    cmake("-S", ROOT, "-B", tmp_path, "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", "-G", "Ninja")
    link = next(line for line in (tmp_path / "build.ninja").read_text().splitlines() if "SHARED_LIBRARY_LINKER" in line)
    places = [link.index(f"nc_{name}.dir") for name in ("dispatch", "baseline", "avx2", "avx512")]
    assert places == sorted(places)


@needs_compiler
def test_fast_math_from_the_environment_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="fast-math flags change results"):
        cmake("-S", ROOT, "-B", tmp_path, CXXFLAGS="-ffast-math")


def test_without_a_compiler_the_build_succeeds_and_says_what_is_missing(tmp_path: Path) -> None:
    output = cmake("-S", ROOT, "-B", tmp_path / "build", "-G", "Ninja", CXX=str(tmp_path / "no-such-compiler"))
    assert "no working C++ compiler" in output
    cmake("--build", tmp_path / "build")
    cmake("--install", tmp_path / "build", "--prefix", tmp_path / "installed")
    assert not (tmp_path / "installed").exists()


@pytest.mark.slow
@needs_cross_compiler
def test_the_library_compiles_for_aarch64(tmp_path: Path) -> None:
    cmake("-S", ROOT, "-B", tmp_path, "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", *cross_options())
    assert len(compile_commands(tmp_path)) == 6, "what is compiled once, and the kernels for one instruction set"
    cmake("--build", tmp_path)
    library = (tmp_path / "libnarrowcast_cpu.so").read_bytes()
    # ELF's e_machine: 183 is AArch64
    assert int.from_bytes(library[18:20], "little") == 183
