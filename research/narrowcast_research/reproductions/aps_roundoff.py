"""Han et al., Table 9: round-off of a sum of 256 gradients in (5,2), by the size of the groups that add first."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from narrowcast.simulate import World
from narrowcast.study import seeded
from narrowcast_research import models
from narrowcast_research.reproductions.base import (
    Cell,
    Claim,
    Options,
    Report,
    Reproduction,
    Result,
    Work,
    by,
    mean_of,
    spread,
)
from narrowcast_research.reproductions.figure import line_chart
from narrowcast_research.reproductions.pictures import pictures

SPEC, FORMAT = "e5m2+aps", "e5m2"
PAPER = {4: 55.0, 8: 44.21, 16: 41.83, 32: 49.62, 64: 58.21, 256: 85.22}
"""By group size; all 256 in one is the ring."""
NEAR_ZERO = 0.01
"""Relative errors have no mean to speak of where sums may be near zero: this share of the values, those whose exact sum
is smallest, is left out of `error`, and the mean over all is given beside it."""


class ApsRoundoff(Reproduction):
    """The gradient of the first convolution, as 256 workers see it, each on its own pictures."""

    name: ClassVar[str] = "aps-roundoff"
    title: ClassVar[str] = "Round-off of a (5,2) sum by group size (Han et al., Table 9)"
    needs: ClassVar[str] = "cifar10"

    def cells(self, options: Options) -> list[Cell]:
        groups = (2, 4, 8, 16, 64) if options.quick else tuple(PAPER)
        seeds = 1 if options.quick else options.seeds
        return [{"group": group, "seed": seed} for seed in range(seeds) for group in groups]

    def run(self, cell: Cell, options: Options, work: Work) -> Result | None:
        g_Wn = _gradients(cell["seed"], options, work.folder)
        exact = g_Wn.double().sum(dim=0)
        got = _world(len(g_Wn), cell["group"]).all_reduce(g_Wn)[0].double()
        single = World(len(g_Wn), "two_shot", SPEC).all_reduce(g_Wn)[0].double()
        return {**_errors(got, exact), "float32_sums": _errors(single, exact)["error"], "workers": len(g_Wn)}

    def report(self, found: list[tuple[Cell, Result]], options: Options) -> Report:
        error, median, everything, plain = (
            by(found, "group", key) for key in ("error", "median", "mean_of_all", "float32_sums")
        )
        workers = found[0][1]["workers"] if found else 0
        rows = []
        for group in error:
            name = "ring" if group == workers else str(group)
            known = f"{PAPER[group]:g}" if not options.quick and group in PAPER else ""
            figures = [spread(values[group], 1) for values in (error, median, everything, plain)]
            rows.append([name, known, *figures])
        columns = (
            *("group", "paper: mean relative error, %", "here, without the 1 % nearest to 0", "here: median"),
            *("here: mean of all", "two_shot with float32 sums"),
        )
        notes = [_figure(error, workers, options)] if len(error) > 1 else []
        claims = [*_claims(error, workers, "mean"), *_claims(median, workers, "median")]
        return Report(f"{self.title}: {workers} workers", columns, rows, claims, notes)


def _world(workers: int, group: int) -> World:
    if group == workers:
        return World(workers, "ring", SPEC, accumulate="low")
    return World(workers, "hierarchical", SPEC, groups=group, inner=SPEC, accumulate=FORMAT)


def _errors(got: Tensor, exact: Tensor) -> dict[str, float]:
    """Relative errors, %."""
    there = exact != 0
    relative, size = 100 * ((got - exact)[there] / exact[there]).abs(), exact[there].abs()
    kept = size >= size.quantile(NEAR_ZERO)
    return {
        "error": float(relative[kept].mean()),
        "median": float(relative.median()),
        "mean_of_all": float(relative.mean()),
    }


def _claims(error: dict[Any, list[float]], workers: int, of: str) -> list[Claim]:
    if len(error) < 3 or workers not in error:
        return []
    best = min(error, key=lambda group: mean_of(error, group))
    worst = max(error, key=lambda group: mean_of(error, group))
    inside = min(error) < best < workers
    return [
        Claim(f"the ring is worst ({of})", worst == workers, f"group {worst}: {mean_of(error, worst):.1f} %"),
        Claim(f"the least error is in the middle ({of})", inside, f"group {best}: {mean_of(error, best):.1f} %"),
    ]


def _figure(error: dict[Any, list[float]], workers: int, options: Options) -> str:
    """Writes the figure and says where it is."""
    lines = {"here": [(float(group), mean_of(error, group)) for group in sorted(error)]}
    if not options.quick:
        lines["paper"] = [(float(group), value) for group, value in PAPER.items()]
    ticks = {float(group): "ring" if group == workers else str(group) for group in sorted(error)}
    path = Path(options.out) / ApsRoundoff.name / "roundoff.svg"
    path.parent.mkdir(parents=True, exist_ok=True)
    title = f"Relative round-off error of a (5,2) sum over {workers} workers, %"
    path.write_text(line_chart(title, "workers in a group", "mean relative error, %", lines, ticks))
    return f"figure: {path}"


def _gradients(seed: int, options: Options, folder: Path) -> Tensor:
    """Of the first convolution, a row for each worker; computed once for all cells of a seed."""
    path = folder / f"gradients-{'quick' if options.quick else 'full'}-{seed}.pt"
    if path.exists():
        return torch.load(path, weights_only=True)
    workers, each = (64, 8) if options.quick else (256, 8)
    data = pictures("cifar10", options, channels=3)
    model = seeded((lambda: models.small_cnn(channels=3, side=8)) if options.quick else models.davidnet, seed)
    model = model.to(options.device)
    order = torch.randperm(len(data.x_train), generator=torch.Generator().manual_seed(seed))[: workers * each]
    weight = next(module for module in model.modules() if isinstance(module, nn.Conv2d)).weight
    rows = []
    for part in order.to(options.device).split(each):
        model.zero_grad()
        F.cross_entropy(model(data.x_train[part]), data.y_train[part]).backward()
        assert weight.grad is not None
        rows.append(weight.grad.flatten().clone())
    found = torch.stack(rows).cpu()
    torch.save(found, path)
    return found
