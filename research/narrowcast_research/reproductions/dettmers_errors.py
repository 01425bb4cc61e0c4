"""Dettmers 2016, Table 2, its last 24 cells: errors of the 8-bit types on an MNIST network's own numbers, by layer."""

from __future__ import annotations

import statistics
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from narrowcast.codecs import error_report
from narrowcast.data import Dataset
from narrowcast.simulate import Batches
from narrowcast.study import seeded
from narrowcast_research.reproductions.base import Cell, Claim, Options, Report, Reproduction, Result, Work, spread
from narrowcast_research.reproductions.dettmers_mnist import BATCH, RATE, SPECS, network
from narrowcast_research.reproductions.pictures import pictures

KINDS = {"activations": 1, "gradients": 0}
"""What travels between model-parallel and data-parallel workers, and which of `SPECS` carries it."""
PAPER = {
    ("activations", "dynamic tree"): (0.5, 2, 2),
    ("activations", "linear"): (1, 2, 3),
    ("activations", "mantissa"): (1.5, 2, 8),
    ("activations", "static tree"): (1, 2, 6),
    ("gradients", "dynamic tree"): (3, 4, 5),
    ("gradients", "linear"): (5, 6, 6),
    ("gradients", "mantissa"): (4.5, 4.5, 6),
    ("gradients", "static tree"): (4, 4, 5),
}
"""Mean relative errors of the three layers, %."""
LOOKS = 5
"""At how many moments of the training errors are taken."""


class DettmersErrors(Reproduction):
    """Relative errors alone: the other column grows with the numbers, whose size the paper does not state."""

    name: ClassVar[str] = "dettmers-errors"
    title: ClassVar[str] = "Errors of 8-bit types on MNIST activations and gradients (Dettmers 2016, Table 2)"
    needs: ClassVar[str] = "mnist"

    def cells(self, options: Options) -> list[Cell]:
        return [{"row": "errors", "seed": seed} for seed in range(1 if options.quick else options.seeds)]

    def run(self, cell: Cell, options: Options, work: Work) -> Result | None:
        data = pictures("mnist", options)
        model = seeded(lambda: network(data, options), cell["seed"]).to(options.device)
        found = _errors(model, data, 50 if options.quick else 400, cell["seed"])
        return {key: statistics.fmean(values) for key, values in found.items()}

    def report(self, found: list[tuple[Cell, Result]], options: Options) -> Report:
        rows, mean = [], {}
        for (kind, name), paper in PAPER.items():
            here = [[result[_key(kind, name, layer)] for _, result in found] for layer in range(3)]
            mean[kind, name] = statistics.fmean(value for values in here for value in values) if found else float("nan")
            known = "" if options.quick else " / ".join(f"{value:g}" for value in paper)
            rows.append([kind, name, SPECS[name][KINDS[kind]], known, " / ".join(spread(values) for values in here)])
        columns = ("of", "type", "wire", "paper: mean relative error by layer, %", "here, %")
        return Report(self.title, columns, rows, _claims(mean), [f"means over {LOOKS} moments of a short training"])


def _claims(mean: dict[tuple[str, str], float]) -> list[Claim]:
    claims = []
    for kind in KINDS:
        best = min((name for of, name in mean if of == kind), key=lambda name: mean[kind, name])
        seen = ", ".join(f"{name} {mean[kind, name]:.1f}" for of, name in mean if of == kind)
        claims.append(Claim(f"{kind}: the dynamic tree has the least error", best == "dynamic tree", seen))
    return claims


def _key(kind: str, name: str, layer: int) -> str:
    return f"{kind}, {name}, layer {layer + 1}"


def _errors(model: nn.Module, data: Dataset, steps: int, seed: int) -> dict[str, list[float]]:
    optimizer = torch.optim.RMSprop(model.parameters(), lr=RATE, alpha=0.9)
    batches, found = Batches(len(data.x_train), BATCH, 1, seed), dict[str, list[float]]()
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    outputs: list[Tensor] = []
    for layer in layers:
        layer.register_forward_hook(lambda _module, _given, y: outputs.append(y.detach()))
    for step in range(steps):
        chosen = batches.indices(step, 0).to(data.x_train.device)
        optimizer.zero_grad()
        outputs.clear()
        F.cross_entropy(model(data.x_train[chosen]), data.y_train[chosen]).backward()
        if (step + 1) % (steps // LOOKS) == 0:
            gradients = [layer.weight.grad for layer in layers]
            _note(found, {"activations": [*map(torch.relu, outputs[:-1]), outputs[-1]], "gradients": gradients})
        optimizer.step()
    return found


def _note(found: dict[str, list[float]], seen: dict[str, list[Any]]) -> None:
    for kind, name in PAPER:
        for layer, values in enumerate(seen[kind]):
            error = error_report(values, SPECS[name][KINDS[kind]]).mean_relative_error
            found.setdefault(_key(kind, name, layer), []).append(100 * error)
