"""Commands as a shell would start them, each in a process of its own, without importing everything for each."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

SERVER = """
import json, os, sys, traceback
from narrowcast.cli import assemble, main
assemble()
for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if child == 0:
        os.chdir(job["folder"])
        for number, path in enumerate(job["outputs"], 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.argv, code = ["narrowcast", *job["words"]], 0
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Imports the command line once and runs each command in a copy of itself."""


@cache
def _server() -> subprocess.Popen[str]:
    """One for each worker of pytest; it ends with its input."""
    command = [sys.executable, "-c", SERVER]
    env = os.environ | {"OMP_NUM_THREADS": "1"}  # as in tests/conftest.py
    process = subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
    assert process.stdin is not None
    atexit.register(process.stdin.close)
    return process


def narrowcast(*words: object, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`narrowcast WORDS` in a folder: its status and what it wrote."""
    server, command = _server(), list(map(str, words))
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as room:
        outputs = [Path(room, name) for name in ("out", "err")]
        job = {"words": command, "folder": str(folder or Path.cwd()), "outputs": list(map(str, outputs))}
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        status = int(server.stdout.readline())
        return subprocess.CompletedProcess(command, status, *(path.read_text("utf-8") for path in outputs))
