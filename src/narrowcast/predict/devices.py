"""GPUs of today by name, so that any cluster's links can be combined with any of them."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from narrowcast.predict.cluster import Cluster, Device, Loop, Overlap
from narrowcast.toml_file import Section, parse_toml, read_text

FILE = Path(__file__).with_name("data") / "devices.toml"
SPREAD = 0.3
"""Of what training reaches: utilisations from 0.3 to 0.5 are common."""


@lru_cache(maxsize=1)
def devices() -> dict[str, Device]:
    """All presets by name, at the speed that training is assumed to reach."""
    document = parse_toml(read_text(FILE), FILE.name)
    top = Section(document, document.values)
    reached, copied = (float(top.number(key, above=0.0, most=1.0)) for key in ("utilisation", "copy_share"))
    made = (_device(table, reached, copied) for table in top.tables("device"))
    return {one.name: one for one in made}


def _device(table: Section, reached: float, copied: float) -> Device:
    table.check_keys("name", "peak", "bandwidth", "memory_gib")
    peak, bandwidth, size = (float(table.number(key, above=0.0)) for key in ("peak", "bandwidth", "memory_gib"))
    return Device(table.text("name"), reached * peak, copied * bandwidth, spread=SPREAD, memory_gib=size)


def with_device(cluster: Cluster, name: str) -> Cluster:
    """The same links between other devices, whose codecs and steps nobody timed."""
    if name not in devices():
        raise ValueError(
            f"--device: unknown {name!r}; take {', '.join(devices())}, or write [device] into a cluster file"
        )
    device, levels, kept = devices()[name], cluster.levels, "links"
    if cluster.device.is_cpu and not device.is_cpu:
        # of these timings most is what processors do for a byte
        levels, kept = tuple(replace(one, tables=(), timed_gbit=0.0) for one in levels), "bandwidth and latency"
    return replace(
        cluster,
        name=f"{cluster.name} with {name}",
        levels=levels,
        device=device,
        overlap=Overlap(),
        codecs=(),
        measured=False,
        source=f"{cluster.source}; {name} in place of {cluster.device.name}, of whose timings only {kept} were kept",
        loop=Loop(),
    )
