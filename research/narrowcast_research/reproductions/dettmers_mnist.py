"""Dettmers 2016, section 4: an MNIST network whose gradients or activations travel in each of the four 8-bit types."""

from __future__ import annotations

import math
import statistics
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from narrowcast.codecs import codec as codec_named
from narrowcast.data import Dataset
from narrowcast.simulate import Quantizer, World, train
from narrowcast.study import linear_layers, seeded
from narrowcast_research.reproductions.base import Cell, Claim, Options, Report, Reproduction, Result, Work, by, spread
from narrowcast_research.reproductions.pictures import pictures

SPECS = {
    "float32": ("as-is", "as-is", "as-is"),
    "dynamic tree": ("dtree8", "dtree8", "dtree8"),
    "linear": ("linear8", "linear8", "linear8"),
    "mantissa": ("mantissa8@0.01", "mantissa8@1", "mantissa8@0.001"),
    "static tree": ("stree8@0.01", "stree8@1", "stree8@0.001"),
}
"""Of gradients between data-parallel workers, of activations and of their errors between model-parallel ones. The two
types without a scale of their own have an offset that fits what they carry, as in the paper."""
PAPER = {
    ("data", "mantissa"): "1.220-1.272",
    ("data", "static tree"): "1.224-1.256",
    ("data", "dynamic tree"): "1.196-1.249",
    ("data", "float32"): "1.238-1.298",
    ("model", "mantissa"): "1.231-1.284",
    ("model", "static tree"): "1.247-1.301",
    ("model", "dynamic tree"): "1.218-1.271",
    ("model", "float32"): "1.231-1.316",
}
"""95 % intervals of the best test error, %, from the paper's raw files."""
BATCH, RATE, DECAY = 128, 0.003, 0.98


class DettmersMnist(Reproduction):
    name: ClassVar[str] = "dettmers-mnist"
    title: ClassVar[str] = "MNIST with 8-bit gradients and 8-bit activations (Dettmers 2016)"
    needs: ClassVar[str] = "mnist"
    choices: ClassVar[dict[str, tuple[str, ...]]] = {"epochs": ("20", "2", "5", "100")}

    def cells(self, options: Options) -> list[Cell]:
        seeds, epochs = (1, 3) if options.quick else (options.seeds, int(options.chosen("epochs", "20")))
        return [
            {"parallel": parallel, "type": kind, "epochs": epochs, "seed": seed}
            for seed in range(seeds)
            for parallel in ("data", "model")
            for kind in SPECS
        ]

    def run(self, cell: Cell, options: Options, work: Work) -> Result | None:
        data = pictures("mnist", options)
        gradients, forward, backward = SPECS[cell["type"]]
        model = seeded(lambda: network(data, options), cell["seed"])
        data_parallel = cell["parallel"] == "data"
        if not data_parallel and cell["type"] != "float32":
            model = _with_wires(model, forward, backward)
        batch = 32 if options.quick else BATCH
        per_epoch = len(data.x_train) // batch
        run = train(
            model.to(options.device),
            data,
            workers=World(2, "one_shot", seed=cell["seed"]),
            spec=gradients if data_parallel else "as-is",
            epochs=cell["epochs"],
            batch=batch,
            optimizer=partial(torch.optim.RMSprop, alpha=0.9),
            lr=lambda step: RATE * DECAY ** (step // per_epoch),
            seed=cell["seed"],
            min_values=0,
            checkpoint=work.checkpoint,
            time_limit=work.clock.left,
        )
        if not run.finished:
            return None
        errors = [100 * (1 - record["accuracy"]) for record in run.history]
        return {"best": min(errors), "last": errors[-1], "epochs": len(errors)}

    def report(self, found: list[tuple[Cell, Result]], options: Options) -> Report:
        rows, claims = [], []
        for parallel in ("data", "model"):
            best = by([pair for pair in found if pair[0]["parallel"] == parallel], "type", "best")
            for kind in best:
                known = "" if options.quick else PAPER.get((parallel, kind), "")
                rows.append([parallel, kind, SPECS[kind][0 if parallel == "data" else 1], known, spread(best[kind])])
            claims += _claims(parallel, best, 5.0 if options.quick else 0.2)
        epochs = found[0][1]["epochs"] if found else 0
        notes = [f"{epochs} epochs (the paper: 75 to 100); best test error over the epochs"]
        columns = ("parallel", "type", "wire", "paper: best test error, %", "here, %")
        return Report(self.title, columns, rows, claims, notes)


def _claims(parallel: str, best: dict[Any, list[float]], slack: float) -> list[Claim]:
    """No type is worse than 32 bits by more than chance (two standard errors, and `slack` at least)."""
    if len(best) < len(SPECS):
        return []
    claims, plain = [], best["float32"]
    for kind in [kind for kind in SPECS if kind != "float32"]:
        gap = statistics.fmean(best[kind]) - statistics.fmean(plain)
        allowed = max(slack, 2 * math.hypot(_standard_error(best[kind]), _standard_error(plain)))
        claims.append(Claim(f"{parallel} parallel: {kind} is as good as 32 bits", gap <= allowed, f"{gap:+.2f} points"))
    return claims


def _standard_error(values: list[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def network(data: Dataset, options: Options) -> nn.Module:
    if options.quick:
        return linear_layers((64, 64, 64, data.classes))
    return linear_layers((784, 1024, 1024, data.classes), dropout=(0.2, 0.3, 0.3))


def _with_wires(model: nn.Module, forward: str, backward: str) -> nn.Module:
    """After each hidden layer its activations travel to the other workers, and their errors come back."""
    layers: list[nn.Module] = []
    for module in model.children():
        layers.append(module)
        if isinstance(module, nn.ReLU):
            layers.append(Quantizer(forward=codec_named(forward), backward=codec_named(backward)))
    return nn.Sequential(*layers)
