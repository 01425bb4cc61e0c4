"""On what a study ran: the machine, the versions, the commit."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import narrowcast
from narrowcast.bench.codecs import cpu_name


def describe() -> dict[str, Any]:
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": _memory_gib(),
        "gpu": gpu,
        "system": f"{platform.system()} {platform.release()}",
    }


def _memory_gib() -> int | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30))
    except (ValueError, OSError, AttributeError):
        return None


def versions() -> dict[str, str]:
    return {"narrowcast": narrowcast.__version__, "torch": torch.__version__, "python": platform.python_version()}


def commit() -> str | None:
    """Of the source tree that this package runs from, with + where it has changes; None where it is installed."""
    root = Path(narrowcast.__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        head, changes = _git(root, "rev-parse", "--short=12", "HEAD"), _git(root, "status", "--porcelain")
    except (OSError, subprocess.SubprocessError):
        return None
    return head + ("+" if changes else "")


def _git(root: Path, *words: str) -> str:
    # safe.directory: the tree may belong to another user
    command = ["git", "-c", f"safe.directory={root}", "-C", str(root), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
