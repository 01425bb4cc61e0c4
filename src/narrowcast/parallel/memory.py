"""Error-feedback residuals of a model, by parameter: through bucket rebuilds, checkpoints and other world sizes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from narrowcast.collectives.coder import segment_ranges
from narrowcast.collectives.feedback import Residuals

Names = tuple[str, ...]


class Memory:
    """Residuals by group of parameters (those that travel together)."""

    def __init__(self, world: int, scaler: torch.amp.GradScaler | None = None, shots: int = 2) -> None:
        self._world, self._scaler, self._shots = world, scaler, shots
        self._groups: dict[Names, tuple[list[int], Residuals]] = {}
        self._loaded: dict[str, Tensor] = {}
        self._saved: dict[Names, tuple[Tensor, Tensor]] = {}
        """With a loss scaler: the residuals before the last step, for when it turns out to be skipped."""
        self._scale = self._current_scale()

    def _current_scale(self) -> float:
        return float(self._scaler.get_scale()) if self._scaler is not None else 1.0

    def begin_step(self) -> None:
        """Undo the last step where the loss scaler skipped it, and remember where we are."""
        if self._scaler is None:
            return
        self._undo_skipped()
        for names, (_, residuals) in self._groups.items():
            residuals.unit = self._scale
            self._save(names, residuals)

    def _undo_skipped(self) -> None:
        """A scaler that skipped a step made its scale smaller."""
        scale = self._current_scale()
        if scale < self._scale:
            for names, (first, second) in self._saved.items():
                residuals = self._groups[names][1]
                residuals.first.copy_(first)
                residuals.second.copy_(second)
        self._scale = scale

    def _save(self, names: Names, residuals: Residuals) -> None:
        if self._scaler is not None:
            self._saved[names] = residuals.first.clone(), residuals.second.clone()

    def residuals(self, names: Names, gradients: Sequence[Tensor]) -> Residuals:
        """The residuals of the tensors that travel together in one call; regrouped when buckets were rebuilt."""
        found = self._groups.get(names)
        if found is None:
            found = self._groups[names] = self._regroup(names, [g.numel() for g in gradients], gradients[0].device)
            self._save(names, found[1])
        return found[1]

    def _regroup(self, names: Names, lengths: list[int], device: torch.device) -> tuple[list[int], Residuals]:
        """Gather what is owed to these parameters from wherever it is kept, where their gradients are."""
        owed = self._by_parameter()
        for old in [group for group in self._groups if set(group) & set(names)]:
            del self._groups[old]
            self._saved.pop(old, None)
            left = {name: owed[name] for name in old if name not in names}
            self._loaded.update(left)
        residuals = Residuals.zeros(sum(lengths), self._shots, device)
        residuals.unit = self._scale
        for name, (low, high) in zip(names, segment_ranges(lengths), strict=True):
            self._loaded.pop(name, None)
            if name in owed:
                residuals.first[low:high] = owed[name]
        return lengths, residuals

    def by_parameter(self) -> dict[str, Tensor]:
        """What this rank owes to each parameter, skipped steps undone."""
        if self._scaler is not None:
            self._undo_skipped()
        return self._by_parameter()

    def _by_parameter(self) -> dict[str, Tensor]:
        """A shard owner's part counts for all ranks, hence times the world."""
        owed = dict(self._loaded)
        for names, (lengths, residuals) in self._groups.items():
            total = residuals.first if self._shots == 1 else residuals.first + residuals.second * self._world
            owed |= {n: total[low:high] for n, (low, high) in zip(names, segment_ranges(lengths), strict=True)}
        return owed

    def load(self, owed: dict[str, Tensor]) -> None:
        """Start again from what each rank owes: the mean over the old ranks, whatever the world size now."""
        self._groups.clear()
        self._saved.clear()
        self._loaded = {name: tensor.float().flatten().clone() for name, tensor in owed.items()}
