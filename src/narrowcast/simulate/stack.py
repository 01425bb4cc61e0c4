"""The tensors of all workers: as one W x n tensor and back, and their residuals of error feedback."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from narrowcast.codecs import Codec, largest_finite
from narrowcast.collectives import Coder, Scales, StackedResiduals, segment_ranges
from narrowcast.kernels import FLOATS

Tensors = Any
"""A tensor W x ..., or a list with one entry for each worker: a tensor, or a list of tensors (segments)."""


@dataclass(frozen=True)
class Stack:
    """Rows of one flat tensor each, and the way back from one flat row to what a worker would hold."""

    x_Wn: Tensor
    lengths: list[int]
    shaped: Callable[[Tensor], Any]
    """From a flat row of n values to one worker's tensor or list of tensors."""
    is_one_tensor: bool

    def coder(self, codec: Codec) -> Coder:
        return Coder(codec, self.lengths, self.x_Wn.dtype)

    def for_all(self, row: Tensor) -> Any:
        """The same row for every worker: views of one memory, since all hold the same bits."""
        if self.is_one_tensor:
            one = self.shaped(row)
            return one.expand(len(self.x_Wn), *one.shape)
        return [self.shaped(row) for _ in range(len(self.x_Wn))]


def stacked(what: str, tensors: Tensors, world: int, segments: Sequence[int] | None = None) -> Stack:
    """Check and stack. `segments` cuts the rows of a single tensor."""
    is_one = isinstance(tensors, Tensor)
    stack = _one_tensor(what, tensors, world, segments) if is_one else _listed(what, tensors, world)
    dtype, numel = stack.x_Wn.dtype, stack.x_Wn.shape[1]
    if dtype not in FLOATS:
        raise TypeError(f"{what}: got {dtype}; codecs take float32, float16 and bfloat16")
    if segments is not None and sum(stack.lengths) != numel:
        raise ValueError(f"{what}: segments={list(segments)} add up to {sum(segments)}, a worker has {numel} values")
    return stack


def _one_tensor(what: str, x: Tensor, world: int, segments: Sequence[int] | None) -> Stack:
    if x.dim() == 0 or x.shape[0] != world:
        raise ValueError(f"{what}: the first dimension counts workers: it must be {world}, got shape {tuple(x.shape)}")
    x, shape = x.detach(), x.shape[1:]
    flat = x.reshape(world, shape.numel())
    return Stack(flat, list(segments or [flat.shape[1]]), lambda row: row.view(shape), is_one_tensor=True)


def _listed(what: str, workers: Sequence[Any], world: int) -> Stack:
    if len(workers) != world:
        raise ValueError(f"{what}: got a list of {len(workers)} for {world} workers; give one entry for each worker")
    rows = [[worker] if isinstance(worker, Tensor) else list(worker) for worker in workers]
    shapes = [[tuple(t.shape) for t in row] for row in rows]
    for worker, own in enumerate(shapes):
        if own != shapes[0]:
            raise ValueError(f"{what}: worker {worker} has shapes {own}, worker 0 {shapes[0]}; make them equal")
    if len({(t.dtype, t.device) for row in rows for t in row}) > 1:
        raise TypeError(f"{what}: all tensors of one call must have one dtype and one device")
    lengths = [t.numel() for t in rows[0]]

    def shaped(flat: Tensor) -> Any:
        views = [flat[a:b].view(t.shape) for t, (a, b) in zip(rows[0], segment_ranges(lengths), strict=True)]
        return views[0] if isinstance(workers[0], Tensor) else views

    return Stack(torch.stack([flat_row(row) for row in rows]), lengths, shaped, is_one_tensor=False)


def flat_row(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.detach().reshape(-1) for t in tensors]) if tensors else torch.empty(0)


def largest_WS(x_Wn: Tensor, segments: Sequence[int]) -> Tensor:
    """The largest finite magnitude of each segment of each worker's values, as float32."""
    parts = [x_Wn[:, low:high] for low, high in segment_ranges(segments)]
    if x_Wn.is_cpu:
        return torch.stack([torch.stack([largest_finite(row) for row in part]) for part in parts], dim=1)
    # without a look at the result: that would make the host wait for the device
    finite = (
        torch.where(part.isfinite(), part, 0.0).abs() if part.shape[1] else part.new_zeros(len(part), 1)
        for part in parts
    )
    return torch.stack([part.amax(dim=1).float() for part in finite], dim=1)


def own_scales(codec: Codec, top_WS: Tensor) -> list[Scales]:
    """By worker: the scales of its own segments, for codecs with one scale for a tensor."""
    # on the CPU, whose division is the one that counts
    scale_WS = codec.scale_of(top_WS.cpu().view(-1)).view(top_WS.shape).to(top_WS.device)
    return [list(scale_S.view(-1, 1).unbind()) for scale_S in scale_WS]


Names = tuple[str, ...]


class WorldResiduals:
    """Residuals by the tensors that travel together, through regrouping, checkpoints and another number of workers."""

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
        return {name: in_rank_order(rows_Wn) / len(rows_Wn) for name, rows_Wn in self.by_name().items()}

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
        self._groups = {}
        for group in state["groups"]:
            owners = [(int(worker), (int(low), int(high))) for worker, (low, high) in group["owners"]]
            stray = None if group["stray"] is None else group["stray"].clone()
            first, second = group["first"].clone(), group["second"].clone()
            residuals = StackedResiduals(first, second, owners, stray, group["unit"])
            self._groups[tuple(group["names"])] = list(group["lengths"]), residuals
        self._loaded = {name: rows_Wn.clone() for name, rows_Wn in state["loaded"].items()}


def in_rank_order(rows: Sequence[Tensor] | Tensor) -> Tensor:
    """The sum, as ranks add up one after the other."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total
