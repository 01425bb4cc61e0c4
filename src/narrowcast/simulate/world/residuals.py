"""Error-feedback residuals of all workers, by the tensors that travel together, as `parallel.memory` keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from narrowcast.collectives.segments import Range, segment_ranges
from narrowcast.kernels import Feedback

Names = tuple[str, ...]
Owners = list[tuple[int, Range]]
"""Which worker sums which part."""


@dataclass
class Residuals:
    """What is owed for one flat tensor: by each worker for its own values, and by owners for the sums of their parts.

    `second_n` holds the part of each owner. Where owners change (another codec, another cut) what the old ones owe
    stays with them in `stray_Wn`, since on a cluster it does.
    """

    first_Wn: Tensor
    second_n: Tensor
    owners: Owners = field(default_factory=list)
    stray_Wn: Tensor | None = None
    unit: float = 1.0

    @classmethod
    def zeros(cls, world: int, numel: int, device: torch.device) -> Residuals:
        return cls(torch.zeros(world, numel, device=device), torch.zeros(numel, device=device))

    def wanted(self, values: Tensor, owed: Tensor) -> Tensor:
        """What should be sent, in float32."""
        return Feedback(owed, self.unit).add_to(values)

    def owe(self, owed: Tensor, wanted: Tensor, sent: Tensor) -> None:
        """Keep what was wanted but not sent; where that is not finite the old residual stays."""
        Feedback(owed, self.unit).keep(wanted, sent)

    def keep(self, owed: Tensor, exact: Tensor, stored: Tensor, gain: float = 1.0) -> None:
        """`narrowcast.collectives.Residuals.keep`."""
        if stored.dtype != torch.float32:
            lost = (exact - stored.float()) * gain / self.unit
            owed.copy_(torch.where(lost.isfinite(), owed + lost, owed))

    def hand_over(self, owners: Owners) -> None:
        """From now on these own the sums."""
        if owners == self.owners:
            return
        if self.owners:
            self.stray_Wn = torch.zeros_like(self.first_Wn) if self.stray_Wn is None else self.stray_Wn
            self._spill(self.stray_Wn)
        self.owners = owners
        if self.stray_Wn is not None:
            for worker, (low, high) in owners:
                self.second_n[low:high] = self.stray_Wn[worker, low:high]
                self.stray_Wn[worker, low:high] = 0.0

    def _spill(self, rows_Wn: Tensor) -> None:
        for worker, (low, high) in self.owners:
            rows_Wn[worker, low:high] = self.second_n[low:high]

    def fold(self, gain: float) -> None:
        """`narrowcast.collectives.Residuals.fold`, for every worker."""
        if self.owners:
            second_Wn = self._second()
            self.first_Wn = torch.where(second_Wn == 0, self.first_Wn, self.first_Wn + second_Wn * gain)
            self.second_n.zero_()
            self.stray_Wn = None

    def _second(self) -> Tensor:
        """What each worker owes for sums, now and before."""
        second_Wn = torch.zeros_like(self.first_Wn) if self.stray_Wn is None else self.stray_Wn.clone()
        self._spill(second_Wn)
        return second_Wn

    def by_worker(self) -> Tensor:
        """All that each worker owes; an owner's part counts for all workers, hence times W."""
        return self.first_Wn + self._second() * len(self.first_Wn)


class Memory:
    """Residuals by group of tensors, through regrouping, checkpoints and another number of workers."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._groups: dict[Names, tuple[list[int], Residuals]] = {}
        self._loaded: dict[str, Tensor] = {}
        """W x values, for tensors that have not travelled since."""

    def residuals(self, names: Names, lengths: Sequence[int], device: torch.device) -> Residuals:
        found = self._groups.get(names)
        if found is None:
            found = self._groups[names] = self._regroup(names, list(lengths), device)
        if found[0] != list(lengths):
            raise ValueError(
                f"World: {', '.join(names)} had {found[0]} values before and {list(lengths)} now, so what error "
                "feedback owes has no place; give each tensor its own names="
            )
        return found[1]

    def _regroup(self, names: Names, lengths: list[int], device: torch.device) -> tuple[list[int], Residuals]:
        owed = self.by_name()
        for old in [group for group in self._groups if set(group) & set(names)]:
            del self._groups[old]
            self._loaded.update({name: owed[name] for name in old if name not in names})
        residuals = Residuals.zeros(self._world, sum(lengths), device)
        for name, (low, high) in zip(names, segment_ranges(lengths), strict=True):
            self._loaded.pop(name, None)
            if name in owed:
                residuals.first_Wn[:, low:high] = owed[name].to(device)
        return lengths, residuals

    def by_name(self) -> dict[str, Tensor]:
        """W x values: what each worker owes to each tensor."""
        owed = dict(self._loaded)
        for names, (lengths, residuals) in self._groups.items():
            ranges = zip(names, segment_ranges(lengths), strict=True)
            rows_Wn = residuals.by_worker()
            owed |= {name: rows_Wn[:, low:high] for name, (low, high) in ranges}
        return owed

    def mean(self) -> dict[str, Tensor]:
        """By tensor, added in rank order as a cluster's checkpoint does: valid for any number of workers."""
        return {name: _rank_order_mean(rows_Wn) for name, rows_Wn in self.by_name().items()}

    def load_mean(self, owed: dict[str, Tensor]) -> None:
        """Every worker owes this now."""
        self._groups.clear()
        rows = {name: tensor.float().flatten() for name, tensor in owed.items()}
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


def _residuals(group: dict[str, Any]) -> Residuals:
    owners = [(int(worker), (int(low), int(high))) for worker, (low, high) in group["owners"]]
    stray = None if group["stray"] is None else group["stray"].clone()
    return Residuals(group["first"].clone(), group["second"].clone(), owners, stray, group["unit"])


def _rank_order_mean(rows_Wn: Tensor) -> Tensor:
    total = rows_Wn[0].clone()
    for row in rows_Wn[1:]:
        total += row
    return total / len(rows_Wn) if len(rows_Wn) > 1 else total
