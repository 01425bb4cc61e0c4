"""Han et al., Tables 4 and 5: CIFAR-10, eight workers, gradients summed in 8 and 4 bits, with and without APS.

As in the released code: a tensor is a parameter of the model, small ones included; the loss of a worker is divided by
the number of workers before the backward pass; partial sums are cast after each addition; with APS a worker's own
values are cast too, without it they are not.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from narrowcast.parallel import schedule
from narrowcast.simulate import Run, World, train
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
from narrowcast_research.reproductions.pictures import crop_flip, crop_flip_cut, pictures

WORKERS = 8
LOOK_EVERY = 25
"""Steps between looks at the loss: a run that lost its numbers need not go on."""


@dataclass(frozen=True)
class Row:
    """A line of the table: what is on the wire."""

    name: str
    spec: str
    aps: bool = False
    hybrid: bool = False
    last_layer: bool = False
    divided: bool = True
    """A worker's loss is divided by the number of workers before the backward pass, as in the released code."""
    core: bool = True


ROWS = (
    Row("(8,23) float32", "as-is"),
    Row("(5,2) APS", "e5m2+aps", aps=True),
    Row("(5,2) bare", "e5m2@1+cpd"),
    Row("(4,3) APS", "e4m3+aps", aps=True),
    Row("(4,3) bare", "e4m3@1+cpd"),
    Row("(3,0) APS", "e3m0+aps", aps=True),
    Row("(3,0) bare", "e3m0@1+cpd"),
    Row("hybrid: float32, then (4,3) APS", "e4m3+aps", aps=True, hybrid=True),
    Row("(4,3) APS, last layer float32", "e4m3+aps", aps=True, last_layer=True),
    # sums of powers of two are often ties: 2 + 1 is one, and CPD rounds every tie up
    Row("(3,0) APS, ties up", "e3m0+aps+cpd", aps=True, core=False),
    Row("(4,3) bare, loss not divided by the workers", "e4m3@1+cpd", divided=False, core=False),
    Row("(5,2) bare, saturating", "e5m2@1", core=False),
    Row("(4,3) bare, saturating", "e4m3@1", core=False),
    Row("(3,0) bare, saturating", "e3m0@1", core=False),
)
QUICK = ("(8,23) float32", "(4,3) APS", "(3,0) APS", "(3,0) bare")
FEW = ("(8,23) float32", "(4,3) APS", "(4,3) bare", "(3,0) APS")
"""Those that tell most, where time is short."""
AS_PAPER = "paper"


@dataclass(frozen=True)
class Recipe:
    """How a model is trained, in the paper's own terms."""

    make: Callable[[], nn.Module]
    batch: int
    epochs: int
    rate: Callable[[float], float]
    """Of the epoch."""
    decay: float
    paper: dict[str, float]
    summed: bool = False
    """The loss is summed over a worker's examples, and the rate divided by their number."""
    nesterov: bool = False
    lars: float = 0.0
    augment: Callable[[Tensor, torch.Generator], Tensor] = crop_flip
    half_products: bool = False
    """Products in bfloat16 (autocast); weights, gradients, sums of workers and updates stay float32."""

    short: Mapping[str, Any] = field(default_factory=dict)
    """What else is another thing in a short schedule: `peak` of the rate, and any of the above."""

    def shortened(self, epochs: int) -> Recipe:
        """The peak is reached after 5/24 of the epochs, then a straight line to zero, as DavidNet has it."""
        changed = dict(self.short)
        peak = changed.pop("peak", max(self.rate(epoch) for epoch in range(self.epochs)))
        return replace(
            self, epochs=epochs, rate=partial(_triangle, epochs=epochs, peak=peak, first=peak / 16), **changed
        )


def _between(epoch: float, points: Iterable[tuple[float, float]]) -> float:
    """Straight lines through the points."""
    listed = list(points)
    for (left, low), (right, high) in itertools.pairwise(listed):
        if epoch <= right:
            return low + (high - low) * (epoch - left) / (right - left)
    return listed[-1][1]


def _triangle(epoch: float, epochs: int = 24, peak: float = 0.4, first: float = 0.0) -> float:
    return _between(epoch, [(0, first), (5 * epochs / 24, peak), (epochs, 0.0)])


def _resnet_rate(epoch: float) -> float:
    warm = _between(epoch, [(0, 0.1), (5, 1.6)])
    return float(warm * 0.1 ** ((epoch >= 40) + (epoch >= 80)))


RECIPES = {
    "davidnet": Recipe(
        models.davidnet,
        4096,
        24,
        _triangle,
        5e-4,
        {
            "(8,23) float32": 88.2,
            "(5,2) APS": 88.4,
            "(5,2) bare": 88.3,
            "(4,3) APS": 88.6,
            "(4,3) bare": 10.0,
            "(3,0) APS": 81.3,
            "(3,0) bare": 10.0,
        },
        summed=True,
        nesterov=True,
        augment=crop_flip_cut,
    ),
    "resnet18": Recipe(
        models.resnet18,
        4096,
        100,
        _resnet_rate,
        1e-4,
        {
            "(8,23) float32": 91.4,
            "(5,2) APS": 91.4,
            "(5,2) bare": 90.1,
            "(4,3) APS": 91.6,
            "(4,3) bare": 90.4,
            "(3,0) APS": 86.7,
            "(3,0) bare": 10.0,
        },
        # with a batch of 4096 and the peak of 1.6 float32 was at 42 % after 24 epochs: 288 steps, too few to come back
        short={"peak": 0.4, "nesterov": True, "decay": 5e-4, "batch": 2048},
    ),
    "resnet18-lars": Recipe(
        models.resnet18,
        8192,
        100,
        _resnet_rate,
        1e-4,
        {
            "(8,23) float32": 92.072,
            "(5,2) APS": 92.015,
            "(5,2) bare": 91.737,
            "(4,3) APS": 92.44,
            "(4,3) bare": 92.036,
        },
        lars=0.001,
    ),
}
SMALL = Recipe(
    partial(models.small_cnn, channels=3, side=8),
    128,
    5,
    partial(_triangle, epochs=5, peak=0.2),
    5e-4,
    {},
    summed=True,
    nesterov=True,
    augment=lambda x, _: x,
)
"""For digits of 8 x 8, in seconds: no crops and no flips, since a mirrored digit is another one."""


class ApsCifar10(Reproduction):
    name: ClassVar[str] = "aps-cifar10"
    title: ClassVar[str] = "Auto Precision Scaling on CIFAR-10 (Han et al., Tables 4 and 5)"
    needs: ClassVar[str] = "cifar10"
    choices: ClassVar[dict[str, tuple[str, ...]]] = {
        "model": tuple(RECIPES),
        "rows": ("core", "few", "all"),
        "epochs": (AS_PAPER, "6", "12", "18", "24", "48"),
        "products": ("float32", "bf16"),
    }

    def cells(self, options: Options) -> list[Cell]:
        """Seed by seed, so that a short budget gives whole tables."""
        model = options.chosen("model", "davidnet")
        if options.quick:
            return [{"model": "small", "row": name, "seed": 0} for name in QUICK]
        core = [row.name for row in ROWS if row.core]
        if options.chosen("rows", "core") == "few":
            core = [row for row in FEW if row in RECIPES[model].paper]
        more = [row.name for row in ROWS if not row.core] if options.chosen("rows", "core") == "all" else []
        given = {key: options.chosen(key, self.choices[key][0]) for key in ("epochs", "products")}
        changed = {key: value for key, value in given.items() if value != self.choices[key][0]}
        return [
            {"model": model, "row": row, "seed": seed, **changed}
            for rows in (core, more)
            for seed in range(options.seeds)
            for row in rows
        ]

    def run(self, cell: Cell, options: Options, work: Work) -> Result | None:
        row = next(row for row in ROWS if row.name == cell["row"])
        recipe = SMALL if options.quick else _recipe(cell)
        data = pictures("cifar10", options, channels=3)
        model = seeded(recipe.make, cell["seed"])
        # convolutions on tensor cores want channels last
        model = model.to(options.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        if recipe.half_products:
            model.forward = torch.autocast(torch.device(options.device).type, torch.bfloat16)(model.forward)
        per_epoch = len(data.x_train) // recipe.batch
        lost, share = _Lost(), WORKERS if row.divided else 1
        run = train(
            model,
            data,
            # CPD casts a worker's own values with APS alone
            workers=World(WORKERS, "ring", accumulate="low" if row.aps else "fp32", seed=cell["seed"]),
            spec=_policy(row, model, recipe.epochs * per_epoch),
            epochs=recipe.epochs,
            batch=recipe.batch,
            optimizer=partial(_optimizer, recipe=recipe, share=share),
            lr=lambda step: _rate(recipe, share, step / per_epoch),
            loss=partial(_loss, summed=recipe.summed, share=share),
            seed=cell["seed"],
            augment=recipe.augment,
            min_values=0,
            test_every=per_epoch * max(recipe.epochs // 4, 1),
            checkpoint=work.checkpoint,
            checkpoint_every=10 * per_epoch,
            time_limit=work.clock.left,
            after_step=lost,
        )
        if not (run.finished or run.stop):
            return None
        return {"accuracy": 100 * (run.accuracy or 0.0), "lost_at": run.step if run.stop else None, "steps": run.step}

    def report(self, found: list[tuple[Cell, Result]], options: Options) -> Report:
        model = "small" if options.quick else options.chosen("model", "davidnet")
        paper = {} if options.quick else RECIPES[model].paper
        accuracy, lost = by(found, "row", "accuracy"), by(found, "row", "lost_at")
        rows = []
        for row in ROWS:
            if row.name in accuracy:
                gone = f"{len(lost[row.name])} of {len(accuracy[row.name])}" if row.name in lost else ""
                known = f"{paper[row.name]:g}" if row.name in paper else ""
                rows.append([row.name, row.spec, known, spread(accuracy[row.name]), gone])
        given = AS_PAPER if options.quick else options.chosen("epochs", AS_PAPER)
        epochs = "" if given == AS_PAPER else f", {given} epochs"
        title = f"{self.title}: {model}, {WORKERS} workers{epochs}"
        columns = ("precision", "wire", "paper, %", "here, %", "runs that lost their numbers")
        return Report(title, columns, rows, _claims(accuracy, model))


def _recipe(cell: Cell) -> Recipe:
    recipe = replace(RECIPES[cell["model"]], half_products=cell.get("products") == "bf16")
    return recipe.shortened(int(cell["epochs"])) if "epochs" in cell else recipe


def _claims(accuracy: dict[Any, list[float]], model: str) -> list[Claim]:
    def at(name: str) -> float:
        return mean_of(accuracy, name)

    def near(name: str, within: float) -> Claim:
        gap = at(name) - at("(8,23) float32")
        return Claim(f"{name} reaches float32's accuracy (within {within:g})", gap > -within, f"{gap:+.2f}")

    tolerance = 8.0 if model == "small" else 1.0
    claims = [near("(4,3) APS", tolerance)]
    if model != "small":
        claims.append(near("(5,2) APS", tolerance))
        broken = at("(4,3) bare")
        if model == "davidnet":
            claims.append(Claim("bare (4,3) is broken", broken < 20, f"{broken:.1f} %"))
    if model != "resnet18-lars":
        gain = at("(3,0) APS") - at("(3,0) bare")
        claims.append(Claim("(3,0) with APS is far above bare (3,0)", gain > 20, f"{gain:+.1f}"))
    return claims


class _Lost:
    """Ends a run whose loss is no number any more: it will not come back."""

    def __call__(self, run: Run) -> None:
        if run.step % LOOK_EVERY == 0 and run.loss is not None and not math.isfinite(float(run.loss)):
            run.stop = True


def _policy(row: Row, model: nn.Module, steps: int) -> object:
    if row.hybrid:
        return schedule({0: "as-is", steps // 3: row.spec})
    if row.last_layer:
        last = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)][-1]
        return {f"{last}.*": "as-is", "*": row.spec}
    return row.spec


def _loss(scores: Tensor, labels: Tensor, summed: bool, share: int) -> Tensor:
    return F.cross_entropy(scores.float(), labels, reduction="sum" if summed else "mean") / share


def _examples(recipe: Recipe) -> int:
    """What the loss of one worker is summed over, and the rate therefore divided by."""
    return recipe.batch // WORKERS if recipe.summed else 1


def _rate(recipe: Recipe, share: int, epoch: float) -> float:
    """The paper's step acts on the sum over workers; `train` gives the mean, so the rate makes up for it."""
    return recipe.rate(epoch) * (1 if recipe.lars else share) / _examples(recipe)


def _optimizer(parameters: list[nn.Parameter], recipe: Recipe, share: int) -> torch.optim.Optimizer:
    decay = recipe.decay * _examples(recipe) / share
    if recipe.lars:
        return Lars(parameters, trust=recipe.lars, momentum=0.9, weight_decay=decay)
    return torch.optim.SGD(parameters, lr=0.0, momentum=0.9, weight_decay=decay, nesterov=recipe.nesterov)


class Lars(torch.optim.Optimizer):
    """As in the released code: the rate of a tensor is trust * |w| / (|g| + decay * |w|); the buffer holds steps."""

    def __init__(self, parameters: list[nn.Parameter], trust: float, momentum: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": 0.0, "trust": trust, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, weight: nn.Parameter, group: dict[str, Any]) -> None:
        decay, gradient = group["weight_decay"], weight.grad
        assert gradient is not None
        local = group["trust"] * weight.norm() / (gradient.norm() + decay * weight.norm() + 1e-30)
        buffer = self.state[weight].setdefault("buffer", torch.zeros_like(weight))
        buffer.mul_(group["momentum"]).add_((gradient + decay * weight) * (local * group["lr"]))
        weight.sub_(buffer)
