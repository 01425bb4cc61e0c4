"""How far predictions were off elsewhere, by what was known: the widths of all intervals come from this file.

`narrowcast validate --calibrate` (of narrowcast-research) measures them on clusters of published and own runs and
writes `data/spreads.toml`; nothing here is typed in.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

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
    return {kind: _spread(top.table(kind)) for kind in KINDS}


def _spread(table: Section) -> Spread:
    table.check_keys(*Spread.__dataclass_fields__)
    link, step, wire = (float(table.number(key, most=WIDEST)) for key in ("link", "step", "wire"))
    freedom = float(table.number("freedom", low=LEAST_FREEDOM))
    return Spread(link, step, wire, freedom, int(table.number("clusters")), int(table.number("cells")))


def dump(made: Spreads) -> str:
    lines = [HEAD, *toml_lines({"format": FORMAT})]
    for kind in KINDS:
        facts = {key: round(value, 4) for key, value in asdict(made[kind]).items()}
        lines += ["", f"[{kind}]", *toml_lines(facts)]
    return "\n".join(lines) + "\n"


def t_quantile(share_N: Tensor, freedom: float) -> Tensor:
    """Of Student's t-distribution, by its expansion around the normal one (Fisher, Cornish); for three degrees
    of freedom 0.3 % off at 95 % and 1.6 % at 98.75 %."""
    z = torch.special.ndtri(share_N)
    if math.isinf(freedom):
        return z
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def factors(spread: float, draws: int, generator: torch.Generator, freedom: float = math.inf) -> Tensor:
    """1, then e to the power of so many quantiles of a t-distribution with this spread, in a random order, [D + 1].

    Evenly spaced quantiles and not random draws: the 5 and 95 % of a few dozen are those of the distribution.
    """
    one = torch.ones(1, dtype=torch.float64)
    if draws == 0 or spread == 0.0:
        return one.expand(draws + 1)
    shares = torch.linspace(0, 1, draws, dtype=torch.float64).clamp(0.5 / draws, 1 - 0.5 / draws)
    noise = t_quantile(shares, freedom)[torch.randperm(draws, generator=generator)]
    return torch.cat([one, torch.exp(spread * noise)])
