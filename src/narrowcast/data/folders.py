"""Data sets that are on the disk already, in the folders that torchvision makes, or as pictures in class folders."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from narrowcast.data import png
from narrowcast.data.archives import IDX, from_idx
from narrowcast.data.dataset import Dataset
from narrowcast.data.fetch import DataError

CIFAR_ROW = 1 + 3 * 32 * 32
TEST_FOLDERS = ("test", "val")


def read_folder(folder: Path, name: str | None = None) -> Dataset:
    """Whatever is recognised in `folder`: CIFAR-10 (binary or python), MNIST, Fashion-MNIST, or train/ and test/."""
    for recognise in (_cifar_binary, _cifar_python, _idx_files, _class_folders):
        data = recognise(folder, name)
        if data is not None:
            return data
    raise DataError(
        f"{folder}: no data set is recognised here; expected cifar-10-batches-bin, cifar-10-batches-py, MNIST/raw, "
        "FashionMNIST/raw, idx files, or train/CLASS/*.png with test/CLASS/*.png"
    )


def _cifar_binary(folder: Path, name: str | None) -> Dataset | None:
    here = _first_with("data_batch_1.bin", folder, folder / "cifar-10-batches-bin")
    return None if here is None else _cifar(name, lambda batch: _cifar_rows((here / f"{batch}.bin").read_bytes()))


def _cifar_rows(content: bytes) -> tuple[Tensor, Tensor]:
    rows = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, CIFAR_ROW)
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].long()


def _cifar_python(folder: Path, name: str | None) -> Dataset | None:
    here = _first_with("data_batch_1", folder, folder / "cifar-10-batches-py")
    return None if here is None else _cifar(name, lambda batch: _cifar_pickle(here / batch))


def _cifar_pickle(path: Path) -> tuple[Tensor, Tensor]:
    with path.open("rb") as file:
        batch = _ArraysOnly(file, encoding="bytes").load()
    x = torch.frombuffer(bytearray(batch[b"data"].content), dtype=torch.uint8)
    return x.view(-1, 3, 32, 32), torch.tensor(batch[b"labels"])


def _cifar(name: str | None, batch: Callable[[str], tuple[Tensor, Tensor]]) -> Dataset:
    parts = [batch(f"data_batch_{n}") for n in range(1, 6)]
    x_test, y_test = batch("test_batch")
    train = torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
    return Dataset(name or "cifar10", *train, x_test, y_test, classes=10)


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
        return png.decode(path.read_bytes())
    try:
        from PIL import Image
    except ImportError as missing:
        raise DataError(f"{path}: pictures other than PNG need Pillow; run: pip install pillow") from missing
    picture = Image.open(path).convert("RGB")
    width, height = picture.size
    return torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(height, width, 3)


def _first_with(file: str, *folders: Path) -> Path | None:
    return next((folder for folder in folders if (folder / file).is_file()), None)
