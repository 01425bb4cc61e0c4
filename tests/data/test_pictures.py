"""Pictures: PNG with every filter, lossless packing, and folders as torchvision makes them."""

from __future__ import annotations

import gzip
import pickle
import struct
import zlib
from pathlib import Path

import pytest
import torch

from narrowcast import data
from narrowcast.data import Dataset, pictures
from narrowcast.data.fetch import DataError
from narrowcast.data.readers import IDX


def random_bytes(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def written(x: torch.Tensor, filters: list[int]) -> bytes:
    """A PNG writer that is independent of the reader: filters applied byte by byte, as the standard states them."""
    height, width, channels = x.shape
    lines, above = bytearray(), [0] * (width * channels)
    for kind, row in zip(filters, x.reshape(height, -1).tolist(), strict=True):
        lines.append(kind)
        for i, value in enumerate(row):
            a = row[i - channels] if i >= channels else 0
            b, c = above[i], above[i - channels] if i >= channels else 0
            p = a + b - c
            pa, pb, pc = abs(p - a), abs(p - b), abs(p - c)
            nearest = a if pa <= pb and pa <= pc else b if pb <= pc else c
            lines.append((value - (0, a, b, (a + b) // 2, nearest)[kind]) % 256)
        above = row
    colour = {1: 0, 2: 4, 3: 2, 4: 6}[channels]
    body = pictures.SIGNATURE
    for name, part in (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)),
        (b"IDAT", zlib.compress(bytes(lines))),
        (b"IEND", b""),
    ):
        body += struct.pack(">I", len(part)) + name + part + struct.pack(">I", zlib.crc32(name + part))
    return body


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_png_undoes_every_filter(channels: int) -> None:
    x = random_bytes(10, 7, channels)
    assert torch.equal(pictures.decode_png(written(x, [1, 0, 2, 3, 4, 1, 4, 3, 2, 1])), x)
    assert torch.equal(pictures.decode_png(written(x, [4, 3, 2, 1, 0, 4, 4, 3, 3, 2])), x)


def test_png_that_is_broken_says_so() -> None:
    good = written(random_bytes(3, 3, 3), [0, 0, 0])
    with pytest.raises(ValueError, match="checksum of a IDAT chunk"):
        pictures.decode_png(good[:-20] + b"x" + good[-19:])
    with pytest.raises(ValueError, match="no PNG"):
        pictures.decode_png(b"GIF89a")


def made(channels: int = 3, count: int = 30) -> Dataset:
    x = random_bytes(count, channels, 6, 5)
    x[0], x[1] = 0, 255
    y = torch.arange(count) % 7
    return Dataset("made", x[: count - 8], y[: count - 8], x[count - 8 :], y[count - 8 :], classes=7)


@pytest.mark.parametrize("channels", [1, 3])
def test_packing_loses_nothing(channels: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "STEP", 4)
    whole = made(channels)
    paths = pictures.pack(whole, tmp_path, limit=1500)
    assert len(paths) > 1
    assert all(path.stat().st_size <= 1500 for path in paths)
    assert pictures.unpack(tmp_path, "made").digest() == whole.digest()


def test_pictures_take_fewer_bytes_than_random_ones(tmp_path: Path) -> None:
    digits = data.load("digits")
    (path,) = pictures.pack(digits, tmp_path, 1 << 20)
    assert path.stat().st_size < 0.55 * (digits.x_train.numel() + digits.x_test.numel())


def test_a_missing_or_cut_piece_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "STEP", 4)
    *_, last = pictures.pack(made(), tmp_path, limit=1500)
    whole = last.read_bytes()
    last.write_bytes(whole[:-1])
    with pytest.raises(DataError, match="cut short"):
        pictures.unpack(tmp_path, "made")
    last.unlink()
    with pytest.raises(DataError, match="bring the others too"):
        pictures.unpack(tmp_path, "made")
    with pytest.raises(ValueError, match="raise the limit"):
        pictures.pack(made(), tmp_path, limit=100)


def same(one: Dataset, other: Dataset) -> bool:
    return all(torch.equal(one.tensors()[key], other.tensors()[key]) for key in one.tensors())


def cifar_like() -> Dataset:
    x, y = random_bytes(12, 3, 32, 32), torch.arange(12) % 10
    return Dataset("cifar10", x[:10], y[:10], x[10:], y[10:], classes=10)


@pytest.mark.parametrize("inside", [".", "cifar-10-batches-bin"])
def test_cifar_in_its_binary_form(tmp_path: Path, inside: str) -> None:
    whole, folder = cifar_like(), tmp_path / inside
    folder.mkdir(exist_ok=True)
    rows = torch.cat([whole.y_train.to(torch.uint8).view(-1, 1), whole.x_train.flatten(1)], 1)
    for n in range(5):
        (folder / f"data_batch_{n + 1}.bin").write_bytes(rows[2 * n : 2 * n + 2].numpy().tobytes())
    test = torch.cat([whole.y_test.to(torch.uint8).view(-1, 1), whole.x_test.flatten(1)], 1)
    (folder / "test_batch.bin").write_bytes(test.numpy().tobytes())
    assert same(data.load(tmp_path), whole)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_cifar_as_torchvision_unpacks_it(tmp_path: Path, protocol: int) -> None:
    whole, folder = cifar_like(), tmp_path / "cifar-10-batches-py"
    folder.mkdir()

    def write(name: str, x: torch.Tensor, y: torch.Tensor) -> None:
        batch = {b"data": x.flatten(1).numpy(), b"labels": y.tolist(), b"batch_label": b"part"}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=protocol))

    for n in range(5):
        write(f"data_batch_{n + 1}", whole.x_train[2 * n : 2 * n + 2], whole.y_train[2 * n : 2 * n + 2])
    write("test_batch", whole.x_test, whole.y_test)
    assert same(data.load(tmp_path), whole)


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return eval, ("1/0",)


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps({b"data": Evil()}))
    with pytest.raises(DataError, match=r"builtins\.eval"):
        data.load(tmp_path)


@pytest.mark.parametrize("inside, packed", [("MNIST/raw", False), ("FashionMNIST/raw", True), (".", True)])
def test_idx_files(tmp_path: Path, inside: str, packed: bool) -> None:
    folder = tmp_path / inside
    folder.mkdir(parents=True, exist_ok=True)
    x, y = random_bytes(9, 28, 28), torch.arange(9, dtype=torch.uint8)
    for key, part in {"x_train": x[:6], "y_train": y[:6], "x_test": x[6:], "y_test": y[6:]}.items():
        head = struct.pack(">HBB", 0, 8, part.dim()) + struct.pack(f">{part.dim()}I", *part.shape)
        content = head + part.numpy().tobytes()
        name = IDX[key] + (".gz" if packed else "")
        (folder / name).write_bytes(gzip.compress(content) if packed else content)
    found = data.load(tmp_path)
    assert torch.equal(found.x_train, x[:6].unsqueeze(1))
    assert torch.equal(found.y_test, y[6:].long())
    assert found.name == ("fashion-mnist" if "Fashion" in inside else "mnist")


def test_class_folders(tmp_path: Path) -> None:
    x = random_bytes(4, 5, 5, 3)
    for n, place in enumerate(("train/cat", "train/dog", "val/cat", "val/dog")):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "a.png").write_bytes(written(x[n], [0, 1, 2, 3, 4]))
    found = data.load(tmp_path)
    assert (found.classes, found.y_train.tolist(), found.y_test.tolist()) == (2, [0, 1], [0, 1])
    assert torch.equal(found.x_test, x[2:].permute(0, 3, 1, 2))


def test_a_folder_without_data_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cifar-10-batches-bin"):
        data.load(tmp_path)
