"""How far predictions are off on clusters that they know nothing of, and the spreads that follow.

Errors are logarithms of measured over predicted. Those of one cluster have causes in common, so clusters count alike
however many cells they have, and whatever is checked on a cluster is estimated on the others.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from narrowcast.predict import BANDWIDTHS, Spread, Spreads, StepPredictor, costs, traffic
from narrowcast.predict import spreads as spread_file
from narrowcast_research.validation.metrics import Cell, Result, figures
from narrowcast_research.validation.steps import Step, steps
from narrowcast_research.validation.table import fit

INSIDE, TAIL = 0.9, 0.95
"""Of all steps so many are to lie in an interval, which ends at the two tails."""
LEAST_INSIDE, MOST_INSIDE = 0.85, 0.97
"""What is promised."""
SPLITS = 3
"""How often other rows of a cluster are taken to fit its link on."""
WAITS, TELLS = 1.1, 0.1
"""A row is fitted on where its step takes so many times its compute; a link's error is read off steps that take so much
more than compute."""
SHARED = ("edbt18", "lab", "nccl")
"""Tables whose ranks share processors, or a GPU, so that codecs slow compute: what `probe` measures, and no fit of few
rows can know.
"""


@dataclass(frozen=True)
class Error:
    """Of one cell."""

    table: str
    cluster: str
    case: Hashable
    wire: str
    log: float
    traffic: float = 1.0
    """How much wires matter to the step, from 0 to 1."""


def _error(step: Step, predicted: float, share: float = 1.0, more: Hashable = None) -> Error:
    log = math.log(step.run.seconds / predicted)
    return Error(step.table, step.cluster, (step.case, more), step.run.setup.wire, log, max(share, LEAST_TRAFFIC))


LEAST_TRAFFIC = 0.3
"""Below it wires cannot be told apart, and what they are off says nothing."""


def by_cluster(cells: Iterable[Step]) -> dict[str, list[Step]]:
    found: dict[str, list[Step]] = {}
    for cell in cells:
        found.setdefault(cell.cluster, []).append(cell)
    return found


def chosen(cells: Sequence[Step], rows: int, split: int) -> list[Step]:
    """What somebody would time first: a float32 step, one with a lossy wire, and another float32 step."""
    waits = [cell for cell in cells if cell.run.seconds > WAITS * cell.run.profile.compute]
    plain = [cell for cell in waits if cell.run.setup.wire == "fp32"]
    lossy = [cell for cell in waits if cell.run.setup.wire != "fp32"] or plain
    if not plain:
        return []
    first, second = split * len(plain) // SPLITS, (split * len(lossy) // SPLITS + 1) % len(lossy)
    wanted = [plain[first], lossy[second], plain[(first + len(plain) // 2) % len(plain)]][:rows]
    return [cell for place, cell in enumerate(wanted) if cell not in wanted[:place]]


def fitted_errors(rows: int) -> list[Error]:
    """Each cluster's link fitted on so many of its rows, and the others predicted."""
    found = []
    for cells in by_cluster(step for step in steps() if step.table not in SHARED).values():
        for split in range(SPLITS):
            known = chosen(cells, rows, split)
            if len(known) == rows:
                link = fit([cell.run for cell in known])
                for cell in cells:
                    if cell not in known:
                        span = link.predictor(cell.run, 0).span(cell.run.setup)[0]
                        found.append(_error(cell, float(span.step[0]), traffic(span), split))
    return found


def probed_errors(quiet: bool) -> list[Error]:
    """Steps predicted from a probe, on a quiet machine or on one of which nobody knows what else it did."""
    known = (step for step in steps() if step.probed is not None and step.quiet == quiet)
    return [_error(step, step.probed, step.traffic) for step in known if step.probed]


def link_errors() -> list[Error]:
    """By how much presets' links are faster or slower than what was measured, where a step tells it."""
    found = []
    for step in steps():
        error = None if step.preset is None else _link_error(step)
        if error is not None:
            found.append(Error(step.table, step.cluster, step.case, step.run.setup.wire, error))
    return found


def _link_error(step: Step) -> float | None:
    """The bandwidth at which the step takes as long as measured, against the preset's."""
    run, cluster = step.run, step.preset
    assert cluster is not None
    if run.seconds < (1 + TELLS) * run.profile.compute:
        return None
    at = StepPredictor(run.profile, costs.Costs(cluster, bandwidths=BANDWIDTHS)).span(run.setup)[0].step
    slower = at > run.seconds
    if not bool(slower.any()) or bool(slower.all()):
        return None
    return math.log(cluster.levels[-1].bandwidth_gbit / float(BANDWIDTHS[slower][-1]))


Weighted = tuple[float, str, float]
"""An error, its cluster, and how much it counts beside others of that cluster."""


def quantile(values: Sequence[Weighted], share: float) -> float:
    """Of the errors' sizes; clusters count alike."""
    whole: dict[str, float] = {}
    for _, cluster, weight in values:
        whole[cluster] = whole.get(cluster, 0.0) + weight
    left = share * len(whole)
    ordered = sorted((abs(error), weight / whole[cluster]) for error, cluster, weight in values)
    for size, weight in ordered:
        left -= weight
        if left <= 1e-9:
            return size
    return ordered[-1][0]


def width(values: Sequence[Weighted]) -> tuple[float, float]:
    """The spread of a normal distribution whose 5 to 95 % hold 90 % of the errors, and degrees of freedom.

    An interval is made of a t-distribution with that spread: of few clusters a bit wider than what held theirs.
    """
    freedom = max(spread_file.LEAST_FREEDOM, len({cluster for _, cluster, _ in values}) - 1.0)
    return quantile(values, INSIDE) / reach(), freedom


def reach(freedom: float = math.inf) -> float:
    """How many spreads the 95 % lie from the middle."""
    return float(costs.t_quantile(torch.tensor([TAIL], dtype=torch.float64), freedom))


def between_wires(errors: Sequence[Error]) -> list[Weighted]:
    """What wires of one case are off beside their middle, were all of the step traffic; steps with little hardly count.

    Two wires have half a degree of freedom each.
    """
    cases: dict[Hashable, list[Error]] = {}
    for error in errors:
        cases.setdefault(error.case, []).append(error)
    found = []
    for group in cases.values():
        if len(group) > 1:
            middle, wider = statistics.fmean(one.log for one in group), (len(group) / (len(group) - 1)) ** 0.5
            found += [(wider * (one.log - middle) / one.traffic, one.cluster, one.traffic**2) for one in group]
    return found


def estimate(errors: Sequence[Error], wire: float | None = None) -> Spread:
    """What all wires of a case are off together, and what each is off by itself: their squares add up to the whole.

    wire: known from elsewhere. Where a link is badly known its wires are off by what they send, and that is the link's.
    """
    whole, freedom = width([(error.log, error.cluster, 1.0) for error in errors])
    wire = width(between_wires(errors))[0] if wire is None else wire
    busy = statistics.fmean(error.traffic for error in errors)
    clusters = len({error.cluster for error in errors})
    return Spread(0.0, max(0.0, whole**2 - (busy * wire) ** 2) ** 0.5, wire, freedom, clusters, len(errors))


def with_link(own: Spread, errors: Sequence[Error]) -> Spread:
    """A preset: its link is off as links were, and the rest as where a link was fitted."""
    link, freedom = width([(error.log, error.cluster, 1.0) for error in errors])
    clusters = len({error.cluster for error in errors})
    return Spread(link, own.step, own.wire, freedom, clusters, len(errors))


@cache
def all_errors() -> dict[str, list[Error]]:
    """By kind of knowledge; those of a preset are of its link."""
    fitted = {f"fitted-{rows}": fitted_errors(rows) for rows in (1, 2, 3)}
    return {
        "preset": link_errors(),
        **fitted,
        "disturbed": probed_errors(quiet=False),
        "probed": probed_errors(quiet=True),
    }


def calibrated(keep: Callable[[Error], bool] = lambda error: True) -> Spreads:
    """The file's content, or what it would be without some cells."""
    own = {kind: [error for error in errors if keep(error)] for kind, errors in all_errors().items()}
    probed = {kind: estimate(own[kind]) for kind in ("disturbed", "probed")}
    fitted = {f"fitted-{rows}": estimate(own[f"fitted-{rows}"], probed["probed"].wire) for rows in (1, 2, 3)}
    return {"preset": with_link(fitted["fitted-3"], own["preset"]), **fitted, **probed}


@cache
def _without(cluster: str) -> Spreads:
    return calibrated(lambda error: error.cluster != cluster)


def _relative_cells(kind: str) -> list[Cell]:
    """Measured steps in units of what was predicted, with the interval of spreads that know nothing of the cluster."""
    found = []
    for error in all_errors()[kind]:
        known = _without(error.cluster)[kind]
        wide = math.hypot(known.step, known.wire * error.traffic) * reach(known.freedom)
        ends = math.exp(-wide), math.exp(wide)
        found.append(Cell((kind, error.cluster, error.wire), math.exp(error.log), 1.0, True, *ends))
    return found


def _preset_cells() -> list[Cell]:
    """Likewise of presets; here the predictor makes the interval, since a link's error is not that of the step."""
    found = []
    for step in steps():
        if step.preset is not None:
            run, known = step.run, _without(step.cluster)
            made = StepPredictor(run.profile, costs.Costs(step.preset, known=known)).predict(run.setup)
            ends = made.low / made.step, made.high / made.step
            found.append(Cell(("preset", step.cluster, run.setup.wire), run.seconds / made.step, 1.0, True, *ends))
    return found


def validate() -> Result:
    """Intervals on clusters that were left out."""
    parts = {kind: _preset_cells() if kind == "preset" else _relative_cells(kind) for kind in spread_file.KINDS}
    cells = [cell for part in parts.values() for cell in part]
    extra = {kind: figures(part) for kind, part in parts.items()}
    for kind, part in parts.items():
        for table in dict.fromkeys(cell.key[1].partition(":")[0] for cell in part):
            extra[f"{kind}, {table}"] = figures([cell for cell in part if cell.key[1].startswith(f"{table}:")])
    return Result(
        name="intervals",
        title="Steps on clusters that the spreads know nothing of, in units of what was predicted",
        fitted="the spreads, for each cluster on all others; fitted-N: a link on N rows of the cluster, the others "
        "predicted",
        columns=("known", "cluster", "wire"),
        cells=cells,
        figures=figures(cells),
        extra=extra,
        targets={
            **{f"{kind}/inside": (">=", LEAST_INSIDE) for kind in spread_file.KINDS},
            "inside": ("<=", MOST_INSIDE),
        },
        notes=[
            "presets that were derived from a table are not tried on it",
            "fitted-N: tables of ranks with a GPU each; codecs slow a shared one, which `probe` alone knows",
        ],
        unit="x",
    )
