"""Codecs of other systems by their published speed, so that the reader of a paper can ask for that system."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from narrowcast.predict.cluster import Cluster, CodecSpeed, Points
from narrowcast.toml_file import Section, parse_toml, read_text

FILE = Path(__file__).with_name("data") / "codec_systems.toml"
KNOTS = tuple(2.0**k for k in range(10, 31, 2))


@dataclass(frozen=True)
class CodecSystem:
    """How long a system's codec takes, what it sends, and where the numbers are from."""

    name: str
    wire: str
    algorithm: str
    source: str
    encode_ns: float
    """Nanoseconds a value."""
    decode_ns: float
    encode_us: float = 0.0
    """Microseconds a call."""
    decode_us: float = 0.0

    def speed(self) -> CodecSpeed:
        encode, decode = (
            _points(us, ns) for us, ns in ((self.encode_us, self.encode_ns), (self.decode_us, self.decode_ns))
        )
        return CodecSpeed(self.wire, encode, decode)


def _points(microseconds: float, nanoseconds: float) -> Points:
    return tuple((values, 1e-6 * microseconds + 1e-9 * nanoseconds * values) for values in KNOTS)


@lru_cache(maxsize=1)
def codec_systems() -> dict[str, CodecSystem]:
    document = parse_toml(read_text(FILE), FILE.name)
    made = map(_system, Section(document, document.values).tables("system"))
    return {one.name: one for one in made}


def _system(table: Section) -> CodecSystem:
    table.check_keys(*CodecSystem.__dataclass_fields__)
    name, wire, algorithm, source = (table.text(key) for key in ("name", "wire", "algorithm", "source"))
    values = (float(table.number(key, above=0.0)) for key in ("encode_ns", "decode_ns"))
    calls = (float(table.number(key, 0.0)) for key in ("encode_us", "decode_us"))
    return CodecSystem(name, wire, algorithm, source, *values, *calls)


def with_codec_system(cluster: Cluster, name: str) -> Cluster:
    """The same cluster, on which wires are encoded and decoded as slowly as there; casts to 16 bits are not."""
    if name not in codec_systems():
        raise ValueError(f"--codec-system: unknown {name!r}; take {', '.join(codec_systems())}")
    system = codec_systems()[name]
    named = f"{cluster.name} with codecs of {name}"
    source = f"{cluster.source}; codecs: {system.source}"
    return replace(cluster, codecs=(system.speed(),), codec_system=name, name=named, source=source, measured=False)
