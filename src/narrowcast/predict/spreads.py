"""How far predictions were off elsewhere, by what was known: the widths of all intervals come from this file.

`narrowcast validate --calibrate` (of narrowcast-research) measures them on clusters of published and own runs and
writes `data/spreads.toml`; nothing here is typed in.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from narrowcast.predict.cluster import WIDEST, Cluster, Loop
from narrowcast.toml_file import Section, parse_toml, read_text, toml_lines

FILE = Path(__file__).with_name("data") / "spreads.toml"
FORMAT = 1
KINDS = ("preset", "fitted-1", "fitted-2", "fitted-3", "disturbed", "probed")
"""What is known of a cluster: nothing but a preset; so many measured steps (3 or more), on which a link was fitted; all
that `probe` measures, while others used the machine or nobody looked, or on a quiet machine."""
QUIET = 0.1
"""Below this much unrest a machine counts as quiet."""
LEAST_FREEDOM = 3.0
HEAD = "# Made by `narrowcast validate --calibrate` from measured steps; do not edit."


@dataclass(frozen=True)
class Spread:
    """Relative standard deviations, and the degrees of freedom of their t-distribution."""

    link: float
    """Of a link's speed: common to all wires, in proportion to what they send."""
    step: float
    """Of the step, common to all wires: it cancels where two of them are compared."""
    wire: float
    """Of each wire by itself, normally distributed: many cases tell it. In steps without traffic it has no part."""
    freedom: float
    """Of the first two: one less than the clusters that they were measured on; of few nobody knows the tails."""
    clusters: int = 0
    cells: int = 0


Spreads = dict[str, Spread]


def kind_of(cluster: Cluster) -> str:
    """Which errors a prediction for this cluster may be expected to have."""
    if cluster.measured:
        return "probed" if cluster.busy is not None and cluster.unrest < QUIET else "disturbed"
    return f"fitted-{min(cluster.fitted_rows, 3)}" if cluster.fitted_rows else "preset"


def rest_words(cluster: Cluster) -> str:
    """Whether the machine did something else while it was probed, and what real steps told."""
    loop, steps = cluster.loop, ""
    if loop != Loop():
        steps = (
            f"\nin real steps DDP adds {loop.step_ms:.3g} ms, its sums take {_times(loop.plain)} as long as bare ones, "
            f"calls with fewer bits {_times(loop.wires)}"
        )
    others = f"others used {100 * (cluster.busy or 0.0):.0f} % of the processors"
    seen = f"{others}, timings drifted by {100 * cluster.drift:.0f} %"
    if kind_of(cluster) == "probed":
        return f"the machine was quiet: {seen}{steps}"
    return f"BUSY MACHINE: {seen}; intervals are wider for it, or probe again with --wait 600{steps}"


def _times(factor: float) -> str:
    return f"{factor:.2f}x" if factor != 1.0 else "1x (steps did not tell)"


@cache
def shipped() -> Spreads:
    return parse(read_text(FILE), str(FILE))


def parse(text: str, name: str) -> Spreads:
    document = parse_toml(text, name)
    top = Section(document, document.values)
    top.check_keys("format", *KINDS)
    top.check_format(FORMAT)
    made = {}
    for kind in KINDS:
        table = top.table(kind)
        table.check_keys(*Spread.__dataclass_fields__)
        link, step, wire = table.floats("link", "step", "wire", most=WIDEST)
        (freedom,) = table.floats("freedom", low=LEAST_FREEDOM)
        clusters, cells = table.floats("clusters", "cells")
        made[kind] = Spread(link, step, wire, freedom, int(clusters), int(cells))
    return made


def dump(made: Spreads) -> str:
    lines = [HEAD, *toml_lines({"format": FORMAT})]
    for kind in KINDS:
        facts = {key: round(value, 4) for key, value in asdict(made[kind]).items()}
        lines += ["", f"[{kind}]", *toml_lines(facts)]
    return "\n".join(lines) + "\n"
