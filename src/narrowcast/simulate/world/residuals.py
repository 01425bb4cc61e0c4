"""Error-feedback residuals of all workers, by the tensors that travel together, as `parallel.residuals` keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from narrowcast.collectives import StackedResiduals, segment_ranges

Names = tuple[str, ...]


class WorldResiduals:
    """Residuals by group of tensors, through regrouping, checkpoints and another number of workers."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._groups: dict[Names, tuple[list[int], StackedResiduals]] = {}
        self._loaded: dict[str, Tensor] = {}
        """W x values, for tensors that have not travelled since."""

    def of_group(self, names: Names, lengths: Sequence[int], device: torch.device) -> StackedResiduals:
        """Those of tensors that travel together."""
        if names not in self._groups:
            self._groups[names] = self._regroup(names, list(lengths), device)
        before, residuals = self._groups[names]
        if before != list(lengths):
            raise ValueError(
                f"World: {', '.join(names)} had {before} values before and {list(lengths)} now, so that residuals of "
                "error feedback have no place; give each tensor its own names="
            )
        return residuals

    def _regroup(self, names: Names, lengths: list[int], device: torch.device) -> tuple[list[int], StackedResiduals]:
        rows = self.by_name()
        for old in [group for group in self._groups if set(group) & set(names)]:
            del self._groups[old]
            self._loaded.update({name: rows[name] for name in old if name not in names})
        residuals = StackedResiduals.zeros(self._world, sum(lengths), device)
        for name, (low, high) in zip(names, segment_ranges(lengths), strict=True):
            self._loaded.pop(name, None)
            if name in rows:
                residuals.first_Wn[:, low:high] = rows[name].to(device)
        return lengths, residuals

    def by_name(self) -> dict[str, Tensor]:
        """W x values: each worker's residual of each tensor."""
        rows = dict(self._loaded)
        for names, (lengths, residuals) in self._groups.items():
            ranges = zip(names, segment_ranges(lengths), strict=True)
            rows_Wn = residuals.by_worker()
            rows |= {name: rows_Wn[:, low:high] for name, (low, high) in ranges}
        return rows

    def mean(self) -> dict[str, Tensor]:
        """By tensor, added in rank order as a cluster's checkpoint does: valid for any number of workers."""
        return {name: _rank_order_mean(rows_Wn) for name, rows_Wn in self.by_name().items()}

    def load_mean(self, mean: dict[str, Tensor]) -> None:
        """Every worker has this one now."""
        self._groups.clear()
        rows = {name: tensor.float().flatten() for name, tensor in mean.items()}
        self._loaded = {name: row.repeat(self._world, 1) for name, row in rows.items()}

    def exact(self) -> dict[str, Any]:
        """Everything as it is, for this number of workers: a run that goes on from it repeats bit for bit."""
        groups = [
            {"names": list(names), "lengths": lengths, "owners": r.owners, "unit": r.unit}
            | {"first": r.first_Wn, "second": r.second_n, "stray": r.stray_Wn}
            for names, (lengths, r) in self._groups.items()
        ]
        return {"world": self._world, "groups": groups, "loaded": dict(self._loaded)}

    def load_exact(self, state: dict[str, Any]) -> None:
        if state["world"] != self._world:
            raise ValueError(
                f"World: the state is of {state['world']} workers, here are {self._world}; "
                "take state_dict(), which holds for any number"
            )
        self._groups = {tuple(g["names"]): (list(g["lengths"]), _residuals(g)) for g in state["groups"]}
        self._loaded = {name: rows_Wn.clone() for name, rows_Wn in state["loaded"].items()}


def _residuals(group: dict[str, Any]) -> StackedResiduals:
    owners = [(int(worker), (int(low), int(high))) for worker, (low, high) in group["owners"]]
    stray = None if group["stray"] is None else group["stray"].clone()
    return StackedResiduals(group["first"].clone(), group["second"].clone(), owners, stray, group["unit"])


def _rank_order_mean(rows_Wn: Tensor) -> Tensor:
    total = rows_Wn[0].clone()
    for row in rows_Wn[1:]:
        total += row
    return total / len(rows_Wn) if len(rows_Wn) > 1 else total
