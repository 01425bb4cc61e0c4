"""A new format is one new file: names, rounding, codecs, the listing and all laws follow by themselves."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from fractions import Fraction

import pytest
import torch
from laws.laws import LAWS, exempt

import narrowcast as nc
from narrowcast.codecs import all_specs
from narrowcast.formats import all_formats
from narrowcast.formats.registry import unregister

FILES = {"formats.extra_float": "tiny6", "formats.extra_codebook": "squares4"}
WANTED = {
    "tiny6": sorted({s * Fraction(m + 4 * (e > 0), 4) * Fraction(2) ** (max(e, 1) - 8)
                     for s in (-1, 1) for e in range(8) for m in range(4)}),
    "squares4": [Fraction(i * abs(i), 49) for i in range(-7, 8)],
}  # fmt: skip


@pytest.fixture(params=FILES)
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of a format that exists while its file is imported."""
    importlib.import_module(request.param)
    yield FILES[request.param]
    unregister(FILES[request.param])
    del sys.modules[request.param]


@pytest.mark.parametrize("name", FILES.values())
def test_without_its_file_the_format_is_unknown(name: str) -> None:
    with pytest.raises(ValueError, match="unknown format"):
        nc.format(name)
    with pytest.raises(ValueError, match="unknown format"):
        nc.codec(f"{name}/64")


def test_the_format_is_found_and_listed(name: str) -> None:
    assert nc.format(name) in list(all_formats())
    assert f"{name}/64" in all_specs()
    assert nc.format(name).grid.tolist() == [float(torch.tensor(float(v))) for v in WANTED[name]]


def test_round_to_rounds_to_it(name: str) -> None:
    x = torch.linspace(-1, 1, 10_001)
    grid = nc.format(name).grid
    y = nc.round_to(x, name)
    distance = (x.double()[:, None] - grid).abs()
    assert torch.equal((x.double() - y.double()).abs(), distance.amin(dim=1))


def test_it_makes_a_codec_that_obeys_every_law(name: str) -> None:
    codec = nc.codec(f"{name}/64")
    assert str(codec) == f"{name}/64"
    assert codec.bits_per_value == nc.format(name).bits + 32 / 64
    for law in LAWS:
        if not exempt(codec, law):
            LAWS[law](codec)
