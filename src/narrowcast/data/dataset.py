"""What a data set is (pictures as bytes, labels), and where it is kept: one file each, written whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from narrowcast.data.fetch import DataError

PARTS = ("x_train", "y_train", "x_test", "y_test")
VARIABLE = "NARROWCAST_DATA"
"""An environment variable for the place alone; nothing in the environment changes a number."""


@dataclass(frozen=True)
class Dataset:
    """Training and test examples: pictures N x C x H x W (uint8 as stored, float32 once normalised), labels int64."""

    name: str
    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: int

    def __post_init__(self) -> None:
        for part, x, y in (("train", self.x_train, self.y_train), ("test", self.x_test, self.y_test)):
            if len(x) != len(y):
                raise ValueError(f"{self.name}: {len(x)} pictures but {len(y)} labels in the {part} part")

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each channel over the training pictures, as shares of 255."""
        x = self.x_train.transpose(0, 1).flatten(1)
        means = [channel.double().mean() / 255 for channel in x]
        deviations = [channel.double().std(unbiased=False) / 255 for channel in x]
        return torch.stack(means).float(), torch.stack(deviations).float()

    def normalised(self, device: str | torch.device = "cpu") -> Dataset:
        """Float32 pictures with mean 0 and deviation 1 for each channel of the training part, on `device`."""
        mean, deviation = (v.view(1, -1, 1, 1).to(device) for v in self.statistics())
        x_train, x_test = ((x.to(device).float() / 255 - mean) / deviation for x in (self.x_train, self.x_test))
        labels = {key: getattr(self, key).to(device) for key in ("y_train", "y_test")}
        return replace(self, x_train=x_train, x_test=x_test, **labels)

    def head(self, train: int, test: int | None = None) -> Dataset:
        """The first so many examples of each part."""
        counts = {"train": train, "test": test or max(train // 5, 1)}
        return replace(self, **{key: part[: counts[key[2:]]] for key, part in self.tensors().items()})

    def digest(self) -> str:
        """A checksum of the stored bytes, whatever package they came from."""
        digest = hashlib.sha256()
        for x in (self.x_train, self.x_test, self.y_train.to(torch.uint8), self.y_test.to(torch.uint8)):
            digest.update(x.contiguous().view(-1).numpy().data)
        return digest.hexdigest()

    def tensors(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in PARTS}


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
