"""`import narrowcast` touches no device, starts no thread, compiles and loads nothing, changes no setting."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# Runs in a process of its own, which has imported torch and nothing else; prints what importing `name` did.
PROBE = """
import importlib, json, os, sys, threading, time, warnings
import torch

name, record = sys.argv[1], []
WATCHED = {"ctypes.dlopen", "os.exec", "os.fork", "os.posix_spawn", "os.system", "socket.connect", "subprocess.Popen"}
sys.addaudithook(lambda event, args: record.append(event) if event in WATCHED else None)

def settings():
    return {
        "warnings": [str(f) for f in warnings.filters],
        "environment": dict(os.environ),
        "threads": threading.active_count(),
        "native threads": len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0,
        "torch threads": torch.get_num_threads(),
        "torch dtype": str(torch.get_default_dtype()),
        "torch generator": torch.random.get_rng_state().tolist(),
        "cuda": torch.cuda.is_initialized(),
    }

before, modules, start = settings(), set(sys.modules), time.process_time()
module = importlib.import_module(name)
for public in getattr(module, "__all__", ()):
    getattr(module, public)  # a name may come at its first use
seconds, after = time.process_time() - start, settings()
loaded = {m.partition(".")[0] for m in set(sys.modules) - modules}
compilers = {"triton", "torch._inductor", "torch._dynamo", "torch.utils.cpp_extension"} & (set(sys.modules) - modules)
print(json.dumps({
    "seconds": seconds,
    "events": sorted(set(record)),
    "changed": [key for key in before if before[key] != after[key]],
    "modules": sorted((loaded - set(sys.stdlib_module_names) - {"torch", name}) | compilers),
    "public": [n for n in dir(module) if not n.startswith("_")],
}))
"""

COSTLY = """
import ctypes, os, subprocess, sys, threading, time, warnings
import pytest, torch, torch.utils.cpp_extension

ctypes.CDLL(None)
os.system("true")
subprocess.run([sys.executable, "-c", ""])
warnings.filterwarnings("ignore")
os.environ["COSTLY"] = "1"
threading.Thread(target=threading.Event().wait, daemon=True).start()
torch.set_default_dtype(torch.float64)
torch.rand(1)
end = time.process_time() + 1
while time.process_time() < end:
    pass
"""


def probe(name: str, cwd: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, name], cwd=cwd, capture_output=True, text=True, timeout=100, check=True
    )
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def narrowcast(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return probe("narrowcast", tmp_path_factory.mktemp("cwd"))


def test_import_takes_less_than_a_second_beyond_torch(narrowcast: dict[str, Any], tmp_path: Path) -> None:
    # processor time, of which a busy machine takes more now and then: one of a few imports shows what it needs
    again = (probe("narrowcast", tmp_path)["seconds"] for _ in range(4))
    assert narrowcast["seconds"] < 1 or any(seconds < 1 for seconds in again)


def test_import_starts_no_process_and_loads_no_library(narrowcast: dict[str, Any]) -> None:
    assert narrowcast["events"] == []


def test_import_changes_no_setting_and_starts_no_thread(narrowcast: dict[str, Any]) -> None:
    assert narrowcast["changed"] == []


def test_import_brings_in_torch_alone(narrowcast: dict[str, Any]) -> None:
    assert narrowcast["modules"] == []


def test_public_names_are_few(narrowcast: dict[str, Any]) -> None:
    assert 0 < len(narrowcast["public"]) <= 25


def test_an_import_that_is_not_free_is_caught(tmp_path: Path) -> None:
    (tmp_path / "costly.py").write_text(COSTLY)
    report = probe("costly", tmp_path)
    assert report["events"] == ["ctypes.dlopen", "os.system", "subprocess.Popen"]
    assert {"pytest", "torch.utils.cpp_extension"} <= set(report["modules"])
    assert set(report["changed"]) >= {"warnings", "environment", "threads", "torch dtype", "torch generator"}
    assert report["seconds"] > 1
