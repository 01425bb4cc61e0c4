"""The question of arXiv 1911.07384: are 16 bits enough in weights, gradients, sums and updates, with no copy?"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from narrowcast.simulate import World, optim
from narrowcast.study import seeded
from narrowcast_research import models
from narrowcast_research.reproductions.aps_cifar10 import RECIPES
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
from narrowcast_research.reproductions.short import exchange_run
from narrowcast_research.reproductions.zamirai import UPDATES, precision_of

WORKERS = 8
FORMATS = ("fp16", "bf16")
FEW = ("float32", "fp16 nearest", "bf16 nearest", "bf16 stochastic")
"""Those that tell most, where time is short."""
TRAINED_ON = 50_000
"""Pictures of CIFAR-10."""
RESNET_EPOCHS = ("12", "6", "3")


class Pure16(Reproduction):
    """Eight workers around a ring whose partial sums are 16 bits wide, too."""

    name: ClassVar[str] = "pure16"
    title: ClassVar[str] = "16 bits throughout, without a float32 copy (the question of Cheng et al. 2019)"
    needs: ClassVar[str] = "mnist"
    choices: ClassVar[dict[str, tuple[str, ...]]] = {
        "model": ("perceptron", "resnet18"),
        "rows": ("all", "few"),
        "epochs": RESNET_EPOCHS,
    }

    def data_of(self, options: Options) -> str:
        return "cifar10" if options.chosen("model", "perceptron") == "resnet18" else self.needs

    def cells(self, options: Options) -> list[Cell]:
        seeds = 1 if options.quick else options.seeds
        large = {"model": "resnet18"} if options.chosen("model", "perceptron") == "resnet18" else {}
        if large and options.chosen("epochs", RESNET_EPOCHS[0]) != RESNET_EPOCHS[0]:
            large["epochs"] = options.chosen("epochs", None)
        every = ("float32", *(f"{fmt} {update}" for update in UPDATES for fmt in FORMATS))
        rows = FEW if options.chosen("rows", "all") == "few" else every
        return [{"row": row, "seed": seed, **large} for seed in range(seeds) for row in rows]

    def run(self, cell: Cell, options: Options, work: Work) -> Result | None:
        fmt, _, update = cell["row"].partition(" ")
        plain = fmt == "float32"
        training = _on_cifar10(options, cell) if "model" in cell else _on_mnist(options)
        decay = training.pop("decay")
        return exchange_run(
            lambda model, per_epoch: "as-is" if plain else fmt,
            cell["seed"],
            options,
            work,
            world=World(WORKERS, "ring", accumulate="fp32" if plain else fmt, seed=cell["seed"]),
            optimizer=partial(_sgd, decay=decay, precision=precision_of(update or "float32", fmt, cell["seed"])),
            lower=None if plain else {"weights": fmt, "activations": fmt, "gradients": fmt, "accumulate": "fp32"},
            **training,
        )

    def report(self, found: list[tuple[Cell, Result]], options: Options) -> Report:
        accuracy = by(found, "row", "accuracy")
        rows = [[row, spread(accuracy[row])] for row in accuracy]
        slack, claims = (3.0 if options.quick else 0.5), []
        for row in (f"{fmt} {update}" for fmt in FORMATS for update in UPDATES[1:]):
            gap = mean_of(accuracy, row) - mean_of(accuracy, "float32")
            claims.append(Claim(f"{row} is enough (within {slack:g} of float32)", gap > -slack, f"{gap:+.2f}"))
        notes = [f"{WORKERS} workers, ring with 16-bit partial sums; no loss scale; products summed in float32"]
        return Report(self.title, ("weights, gradients, exchange, update", "accuracy, %"), rows, claims, notes)


def _on_mnist(options: Options) -> dict[str, Any]:
    """A perceptron, and a rate that falls to zero."""
    epochs = 8 if options.quick else 3
    total = epochs * (11 if options.quick else 468)
    return {"epochs": epochs, "lr": lambda step: 0.03 * (1 - step / total), "decay": 0.0}


def _on_cifar10(options: Options, cell: Cell) -> dict[str, Any]:
    """ResNet-18 by the recipe of Han et al., shortened; a narrow one on digits where the run is a quick one."""
    recipe = RECIPES["resnet18"].shortened(1 if options.quick else int(cell.get("epochs", RESNET_EPOCHS[0])))
    width, batch, per_epoch = (8, 128, 11) if options.quick else (64, recipe.batch, TRAINED_ON // recipe.batch)
    return {
        "epochs": recipe.epochs,
        "batch": batch,
        "data": "cifar10",
        "channels": 3,
        "make": lambda data, _, seed: seeded(partial(models.resnet18, width=width), seed),
        "augment": None if options.quick else recipe.augment,
        "lr": lambda step: recipe.rate(step / per_epoch) * (0.1 if options.quick else 1),
        "decay": recipe.decay,
    }


def _sgd(parameters: list[nn.Parameter], decay: float, precision: dict[str, Any]) -> torch.optim.Optimizer:
    return optim.SGD(parameters, lr=0.0, momentum=0.9, weight_decay=decay, **precision)
