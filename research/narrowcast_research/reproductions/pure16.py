"""The question of arXiv 1911.07384: are 16 bits enough in weights, gradients, sums and updates, with no copy?"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from narrowcast.simulate import World, optim
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


class Pure16(Reproduction):
    """Eight workers around a ring whose partial sums are 16 bits wide, too."""

    name: ClassVar[str] = "pure16"
    title: ClassVar[str] = "16 bits throughout, without a float32 copy (the question of Cheng et al. 2019)"
    needs: ClassVar[str] = "mnist"

    def cells(self, options: Options) -> list[Cell]:
        seeds = 1 if options.quick else options.seeds
        kinds = [("float32", "")] + [(fmt, update) for fmt in FORMATS for update in UPDATES]
        return [{"row": f"{fmt} {update}".strip(), "seed": seed} for seed in range(seeds) for fmt, update in kinds]

    def run(self, cell: Cell, options: Options, work: Work) -> Result | None:
        fmt, _, update = cell["row"].partition(" ")
        plain = fmt == "float32"
        epochs = 8 if options.quick else 3
        total = epochs * (11 if options.quick else 468)
        return exchange_run(
            lambda model, per_epoch: "as-is" if plain else fmt,
            cell["seed"],
            options,
            work,
            epochs=epochs,
            world=World(WORKERS, "ring", accumulate="fp32" if plain else fmt, seed=cell["seed"]),
            optimizer=partial(_sgd, precision=precision_of(update or "float32", fmt, cell["seed"])),
            lr=lambda step: 0.03 * (1 - step / total),
            lower=None if plain else {"weights": fmt, "activations": fmt, "gradients": fmt, "accumulate": "fp32"},
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


def _sgd(parameters: list[nn.Parameter], precision: dict[str, Any]) -> torch.optim.Optimizer:
    return optim.SGD(parameters, lr=0.0, momentum=0.9, **precision)
