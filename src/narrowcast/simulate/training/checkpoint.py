"""Checkpoints of a run: written beside the old one, whose name they then take, so that there is always a whole one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

VERSION = 2


def save(path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with beside.open("wb") as file:
            torch.save({"version": VERSION, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


def load(path: str | os.PathLike[str], device: torch.device, run: Mapping[str, Any]) -> dict[str, Any] | None:
    """The state of a run with the same settings; None where there is no file yet."""
    if not Path(path).exists():
        return None
    state = _read(path, device)
    if state.get("version") != VERSION:
        raise ValueError(f"train: {path} is no checkpoint of this version; give another path or resume=False")
    other = {key: (state["run"].get(key), value) for key, value in run.items() if state["run"].get(key) != value}
    if other:
        told = ", ".join(f"{key} was {was!r} and is {now!r}" for key, (was, now) in other.items())
        raise ValueError(f"train: {path} is of another run: {told}; give another path or resume=False")
    return state


def _read(path: str | os.PathLike[str], device: torch.device) -> dict[str, Any]:
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # whatever a file that is something else makes of torch
        told = f"train: {path} is no checkpoint, or a broken one ({type(error).__name__}: {str(error)[:200]})"
        raise ValueError(f"{told}; give another path or resume=False") from error
    return state if isinstance(state, dict) else {}
