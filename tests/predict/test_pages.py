"""The pages of `predict --html` and `advise --clusters ... --html`: one file, the verdict first, drawings that can be
read, and each cluster's own bandwidth where it is."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
from drawings import covered, drawings, frame_of, outside, sticking_out

from narrowcast.predict import Sweep, cluster, decision, offers, report, zoo

WIRES = ("fp32", "bf16", "int8/256", "int4/128")
MANY = (*WIRES, "int8/128", "e4m3fn/128", "mxfp8", "mxfp4", "int2/128+ef", "sign/4096+ef", "nf4/64", "onebit/64+ef")


def _sweep(name: str, price: float = 0.0, mode: str = "data") -> Sweep:
    place = replace(cluster.load(name), price_per_hour=price)
    model = zoo.resnet50()
    profile = model.profile(place.device.flops, place.device.memory_gbyte)
    return Sweep(profile, place, draws=20, samples=1_000_000, mode=mode, description=model)


def _predicted(name: str, workers: tuple[int, ...], wires: tuple[str, ...] = WIRES, mode: str = "data") -> str:
    made = _sweep(name, mode=mode)
    return report.page(made, list(made.cells(workers, wires)))


def _decided(*prices: float) -> str:
    names = ("10gbe-tcp", "25gbe-tcp", "8xH100")
    sweeps = [_sweep(name, price) for name, price in zip(names, prices, strict=True)]
    return offers.page(sweeps, decision.decide(sweeps, 8))


PAGES: dict[str, Callable[[], str]] = {
    "few wires": lambda: _predicted("p2.16xlarge", (1, 2, 16)),
    "many wires": lambda: _predicted("1gbe-tcp", (2, 8), MANY),
    "one count": lambda: _predicted("8xH100", (64,)),
    "one worker": lambda: _predicted("pcie3", (1,)),
    "pipeline": lambda: _predicted("10gbe-tcp", (2, 4), mode="pipeline"),
    "prices": lambda: _decided(2.0, 2.4, 60.0),
    "no prices": lambda: _decided(0.0, 0.0, 0.0),
}


@cache
def page(name: str) -> str:
    return PAGES[name]()


@pytest.mark.parametrize("name", PAGES)
def test_drawings_can_be_read(name: str) -> None:
    found = drawings(page(name))
    assert found
    faults = []
    for svg in found:
        what = svg.get("aria-label")
        assert what is not None
        faults += [f"{what}: {a!r} covers {b!r}" for a, b in covered(svg)]
        faults += [f"{what}: {words!r} sticks out" for words in sticking_out(svg)]
        faults += [f"{what}: {place} lies beyond {frame_of(svg)}" for place in outside(svg)]
    assert faults == []


@pytest.mark.parametrize("name", PAGES)
def test_it_is_one_file_that_asks_nobody_and_begins_with_the_verdict(name: str) -> None:
    text = page(name)
    assert not re.search(r"https?:|@import|<link|\ssrc=|url\((?!#)", text)
    assert not re.search(r"\bnan\b|\binf\b", re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL).lower())
    body = text.split("<body>")[1]
    assert re.match(
        r'<header><p class="kicker">[^<]*</p><h1><span class="answer \w+">[^<]+\.</span> [^<]{20,}</h1>', body
    )
    sections = re.findall(r'<section class="figure".*?</section>', text, re.DOTALL)
    assert all(section.count("<svg viewBox") == section.count("<table") == 1 for section in sections)
    assert all(re.search(r'<p class="proves">[^<]{20,}', section) for section in sections)
    # a number of the first screen is not broken into lines, and has a fifth of the page
    assert all(len(number) <= 12 for number in re.findall(r"<li><strong>([^<]+)</strong>", body))
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]+)"', text)) <= set(ids)


def test_the_data_inside_are_the_predictions() -> None:
    data = page("few wires").partition('id="data">')[2].partition("</script>")[0]
    assert [(row["workers"], row["wire"]) for row in json.loads(data)] == [(n, w) for n in (1, 2, 16) for w in WIRES]


def _section(text: str, key: str) -> str:
    return re.findall(rf'<section class="figure" id="{key}".*?</section>', text, re.DOTALL)[0]


def test_the_clusters_own_bandwidth_is_marked() -> None:
    place = cluster.load("p2.16xlarge")
    own = place.levels[place.level_of(16)].bandwidth_gbit
    shown = _section(page("few wires"), "bandwidth")
    assert f"this cluster: {own:g} Gb/s" in shown
    # the upright line is inside of the frame
    (svg,) = drawings(shown)
    frame = frame_of(svg)
    uprights = [line for line in svg.iter("line") if line.get("class") == "target"]
    assert frame is not None
    assert [frame.left < float(line.get("x1", 0)) == float(line.get("x2", 1)) < frame.right for line in uprights] == [
        True
    ]


def test_each_cluster_is_marked_at_its_own_bandwidth_and_dollars_need_prices() -> None:
    shown = _section(page("prices"), "break-even")
    tips = re.findall(r"<title>([^<:]+): [\d.]+× at its own ([\d.,]+) Gb/s</title>", shown)
    made = [cluster.load(name) for name in ("10gbe-tcp", "25gbe-tcp", "8xH100")]
    assert tips == [(one.name, f"{one.levels[one.level_of(8)].bandwidth_gbit:,g}") for one in made]
    assert 'id="dollars"' in page("prices")
    assert 'id="dollars"' not in page("no prices")


def test_verdicts_follow_the_interval() -> None:
    """The same rule as `advise`: a gain that is worth something, in the whole interval."""
    made = _sweep("1gbe-tcp")
    (cell,) = made.cells([8], ["int4/128"])
    told = {
        "yes": replace(cell, over_16bit=2.0, over_16bit_low=1.5, over_16bit_high=2.5, over_fp32=4.0),
        "no": replace(cell, over_16bit=0.9, over_16bit_low=0.8, over_16bit_high=1.0, over_fp32=1.5),
        "unknown": replace(cell, over_16bit=1.4, over_16bit_low=0.8, over_16bit_high=2.0, over_fp32=1.5),
    }
    for kind, one in told.items():
        assert f'<span class="answer {kind}">' in report.page(made, [one])
