"""The short form of `make sanitize`: the sources built with the sanitizers, and every kernel called with them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sanitize.__main__ import OPTIONS, run, runtime

ROOT = Path(__file__).parents[2]
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
CALLS = 180

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(runtime() is None, reason="no C++ compiler here brings the address sanitizer"),
    pytest.mark.timeout(600),  # the library is built first
]
TOO_FAR = """
import sys
from pathlib import Path
import torch
from sanitize.__main__ import use
from sanitize.guarded import Guard
from narrowcast.codecs import codec
from narrowcast.kernels import native
use(Path(sys.argv[1]))
found, guard = codec("int8/16"), Guard()
wire = guard.copy(found.encode(torch.ones(96)))
out = guard.empty([96], torch.float32)
with guard.closed():
    native.decode(found.plan, wire, 96, out)
    print("as it should be", flush=True)
    native.decode(found.plan, wire, 97, out)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made of this tree's sources."""
    folder = tmp_path_factory.mktemp("sanitize")
    for words in (["-S", ROOT, "-B", folder, "-G", "Ninja", "-DNC_SANITIZE=ON"], ["--build", folder]):
        call = [shutil.which("cmake", path=PATH) or "cmake", *map(str, words)]
        done = subprocess.run(call, env={**os.environ, "PATH": PATH}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("libnarrowcast_cpu.*"))


def test_no_kernel_leaves_its_buffers_or_what_the_language_defines(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    done = run(library, CALLS, seed=2)
    assert done.returncode == 0, done.stdout
    assert re.search(rf"^{CALLS} calls, 0 faults, seed 2", done.stdout, re.M)


def test_a_kernel_that_goes_one_value_too_far_is_stopped(library: Path) -> None:
    env = {**os.environ, **OPTIONS, "LD_PRELOAD": str(runtime()), "PYTHONPATH": str(ROOT / "tests")}
    call = [sys.executable, "-c", TOO_FAR, str(library)]
    done = subprocess.run(call, env=env, capture_output=True, text=True, check=False)
    assert "as it should be" in done.stdout, done.stderr
    assert done.returncode != 0
    assert "AddressSanitizer" in done.stderr
