"""Where data sets are kept: one file each, written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from narrowcast.data.dataset import Dataset
from narrowcast.data.fetch import DataError

VARIABLE = "NARROWCAST_DATA"
"""An environment variable for the place alone; nothing in the environment changes a number."""


def folder(root: str | os.PathLike[str] | None = None) -> Path:
    """`root`, else $NARROWCAST_DATA, else the user's cache folder."""
    if root is not None:
        return Path(root).expanduser()
    if place := os.environ.get(VARIABLE):
        return Path(place).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "narrowcast" / "data"


def file_of(name: str, root: str | os.PathLike[str] | None = None) -> Path:
    return folder(root) / f"{name}.pt"


def store(data: Dataset, path: Path) -> None:
    """Write a data set so that a reader sees all of it or nothing."""
    with replacing(path) as part:
        torch.save({"name": data.name, "classes": data.classes, **data.tensors()}, part)


def read(path: Path) -> Dataset:
    """A data set that `store` wrote; its pages are read when they are looked at."""
    try:
        return Dataset(**torch.load(path, weights_only=True, mmap=True))
    except Exception as error:  # torch has many words for a file that is cut short or of another kind
        why = str(error).partition("\n")[0].partition(". ")[0]
        raise DataError(f"{path}: this is no whole data set ({why}); run: narrowcast data get {path.stem}") from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside `path` that takes its place once it is complete."""
    with _writing_in(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        yield Path(name)
        # mkstemp's files are for the owner alone; a shared cache should be readable as its folder is
        os.chmod(name, 0o666 & path.parent.stat().st_mode)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _writing_in(folder: Path) -> Iterator[None]:
    """A folder that cannot be written to is named, with what to do."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{folder}: cannot write there ({error.strerror}); give --root a folder that can be written to, or set "
            f"{VARIABLE}"
        ) from error


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Hold a lock beside `path`, so that two processes do not fetch the same file into each other."""
    with _writing_in(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        held = open(f"{path}.lock", "w")  # noqa: SIM115  closed below
    with held:
        try:
            import fcntl
        except ImportError:  # no such locks there; checksums still tell a broken file
            yield
            return
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
