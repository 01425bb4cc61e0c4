"""Why (3,0) with APS is lower here than in the paper: what may differ, tried one by one on a small network.

Each row sums the gradients of the workers in one way; all start from the paper's: a power of two for each tensor that
leaves room for the sum, a cast of each worker's values, and a cast after each addition, in the order of the workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from narrowcast.data import Dataset
from narrowcast.simulate import Batches, compat
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
from narrowcast_research.reproductions.pictures import pictures
from narrowcast_research.reproductions.short import accuracy_of

UPPER = 3
"""The exponent of (3,0)'s largest value, 8."""
BATCH, RATE = 128, 0.05


def _even(x: Tensor) -> Tensor:
    return compat.float_quantize(x, 3, 0)


def _up(x: Tensor) -> Tensor:
    return compat.float_quantize(x, 3, 0, rules="cpd")


def _as_it_is(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Sum:
    """One way to add up the workers' gradients of a tensor."""

    cast: Callable[[Tensor], Tensor] = _up
    own: Callable[[Tensor], Tensor] | None = None
    """Of a worker's own values; None: as the sums."""
    kahan: bool = False
    room: bool = True
    """Whether the factor leaves room for the sum of all, or for one worker's values alone."""
    groups: int = 1
    """Workers are added in so many groups first, each with a factor of its own, then the groups."""
    float32_steps: float = 0.0
    """Share of the steps, from the first, that are float32."""
    matrices_alone: bool = False
    """Vectors (biases) travel in float32."""
    workers: int = 8

    def __call__(self, gradients: Sequence[Tensor]) -> Tensor:
        if self.groups > 1:
            size = len(gradients) // self.groups
            inside = replace(self, groups=1)
            parts = [inside(gradients[at : at + size]) for at in range(0, len(gradients), size)]
            return inside(parts)
        largest = max(float(g.abs().max()) for g in gradients) * (len(gradients) if self.room else 1)
        if largest == 0 or not math.isfinite(largest):
            # what has overflowed once stays lost
            return torch.stack(list(gradients)).sum(0)
        factor = 2.0 ** (UPPER - math.ceil(math.log2(largest)))
        return self._added([(self.own or self.cast)(g * factor) for g in gradients]) / factor

    def _added(self, terms: Sequence[Tensor]) -> Tensor:
        total = carry = torch.zeros_like(terms[0])
        for term in terms:
            if not self.kahan:
                total = self.cast(total + term)
                continue
            y = self.cast(term - carry)
            new = self.cast(total + y)
            carry = self.cast(self.cast(new - total) - y)
            total = new
        return total


def _float32(gradients: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(gradients)).sum(0)


ROWS: dict[str, Sum | None] = {
    "float32": None,
    "ties to even": Sum(_even),
    "ties up, as CPD": Sum(),
    "Kahan sums": Sum(kahan=True),
    "sums in float32": Sum(_as_it_is, own=_up),
    "own values not cast": Sum(own=_as_it_is),
    "no room for the sum": Sum(room=False),
    "two groups of four": Sum(groups=2),
    "four groups of two": Sum(groups=4),
    "2 workers": Sum(workers=2),
    "first third in float32": Sum(float32_steps=1 / 3),
    "vectors in float32": Sum(matrices_alone=True),
}


ERRORS = "errors of the sums"
"""A cell of its own: each way of summing on the same gradients, those of a narrow DavidNet that trains in float32."""


class ApsE3m0(Reproduction):
    name: ClassVar[str] = "aps-e3m0"
    title: ClassVar[str] = "(3,0) with APS by what CPD may do otherwise (Han et al., Table 4)"
    needs: ClassVar[str] = "digits"

    def cells(self, options: Options) -> list[Cell]:
        rows = ("float32", "ties to even", "ties up, as CPD") if options.quick else ROWS
        seeds = range(1 if options.quick else options.seeds)
        return [{"row": row, "seed": seed} for seed in seeds for row in (ERRORS, *rows)]

    def run(self, cell: Cell, options: Options, work: Work) -> Result | None:
        if cell["row"] == ERRORS:
            return _errors(pictures("digits", options, channels=3), 1 if options.quick else 5, cell["seed"])
        data = pictures("digits", options)
        side, epochs = data.x_train.shape[-1], 3 if options.quick else 10
        model = seeded(lambda: models.small_cnn(data.classes, side=side), cell["seed"]).to(options.device)
        _train(model, data, ROWS[cell["row"]], epochs, cell["seed"])
        return {"accuracy": accuracy_of(model, data)}

    def report(self, found: list[tuple[Cell, Result]], options: Options) -> Report:
        accuracy = by(found, "row", "accuracy")
        plain = mean_of(accuracy, "ties up, as CPD")
        errors = {row: by(found, "row", row).get(ERRORS, []) for row in ROWS}
        rows = [
            [row, spread(accuracy[row]), f"{mean_of(accuracy, row) - plain:+.2f}", spread(errors[row], 1)]
            for row in accuracy
        ]
        gap = plain - mean_of(accuracy, "float32")
        claims = [Claim("(3,0) with APS trains", plain > 20, f"{plain:.1f} %, {gap:+.1f} from float32")]
        notes = [
            "digits of 8 x 8, two convolutions, 8 workers, batch 128",
            "rows after the third are CPD's ties with one change",
            "errors are relative, in L2, on gradients of DavidNet, 8 wide, that trains in float32",
        ]
        return Report(self.title, ("sums", "accuracy, %", "from CPD's", "error of a sum, %"), rows, claims, notes)


def _train(model: nn.Module, data: Dataset, how: Sum | None, epochs: int, seed: int) -> None:
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=RATE, momentum=0.9, nesterov=True, weight_decay=5e-4)
    workers = 8 if how is None else how.workers
    steps, batches = epochs * (len(data.x_train) // BATCH), Batches(len(data.x_train), BATCH // workers, workers, seed)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = RATE * min((step + 1) / (0.2 * steps), (steps - step) / (0.8 * steps))
        gradients = [_gradients(model, data, batches.indices(step, worker), workers) for worker in range(workers)]
        exact = how is None or step < how.float32_steps * steps
        for parameter, own in zip(parameters, zip(*gradients, strict=True), strict=True):
            whole = exact or (how is not None and how.matrices_alone and parameter.dim() < 2)
            parameter.grad = _float32(own) if whole or how is None else how(own)
        optimizer.step()


def _gradients(model: nn.Module, data: Dataset, chosen: Tensor, workers: int) -> tuple[Tensor, ...]:
    """Of one worker, whose loss is divided by the number of workers, as in CPD."""
    chosen = chosen.to(data.x_train.device)
    loss = F.cross_entropy(model(data.x_train[chosen]), data.y_train[chosen]) / workers
    return torch.autograd.grad(loss, list(model.parameters()))


def _errors(data: Dataset, epochs: int, seed: int) -> Result:
    """Mean relative error of the summed gradient, %, of each row that does not overflow; one step an epoch."""
    model = seeded(lambda: models.davidnet(data.classes, width=8), seed)
    found: dict[str, list[float]] = {}
    batches = Batches(len(data.x_train), BATCH // 8, 8, seed)
    for _ in range(epochs):
        _train(model, data, None, 1, seed)
        gradients = [_gradients(model, data, batches.indices(0, worker), 8) for worker in range(8)]
        for own in zip(*gradients, strict=True):
            exact = _float32(own)
            for row, how in ROWS.items():
                if how is not None and float(exact.norm()) > 0:
                    found.setdefault(row, []).append(100 * float((_sum(how, own) - exact).norm() / exact.norm()))
    means = {row: sum(values) / len(values) for row, values in found.items()}
    return {row: mean for row, mean in means.items() if math.isfinite(mean)}


def _sum(how: Sum, own: Sequence[Tensor]) -> Tensor:
    """By the workers that the row has: neighbours are one worker where it has fewer."""
    each = len(own) // how.workers
    return how([torch.stack(list(own[at : at + each])).sum(0) for at in range(0, len(own), each)])
