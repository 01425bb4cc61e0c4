"""Error-feedback residuals of a model, by parameter: through bucket rebuilds, checkpoints and other world sizes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from narrowcast.codecs import Matrix, name_and_side
from narrowcast.collectives import Range, Residuals, segment_ranges
from narrowcast.parallel.scaling import Scaling

if TYPE_CHECKING:
    from narrowcast.parallel.handle import Handle

Names = tuple[str, ...]
Discarded = Callable[[], "Collection[str] | None"]


class _GroupedResiduals:
    """Residuals by group of parameters (those that travel together), and those of parameters in no group, by name."""

    def __init__(self, world: int, shots: int) -> None:
        self._world, self._shots = world, shots
        self.groups: dict[Names, tuple[list[int], Residuals]] = {}
        self._loose: dict[str, Tensor] = {}

    def by_parameter(self) -> dict[str, Tensor]:
        """A shard owner's part counts for all ranks, hence times the world."""
        by_name = dict(self._loose)
        for names, (lengths, residuals) in self.groups.items():
            total = residuals.first if self._shots == 1 else residuals.first + residuals.second * self._world
            by_name |= {n: total[low:high] for n, (low, high) in zip(names, segment_ranges(lengths), strict=True)}
        return by_name

    def regroup(self, names: Names, lengths: list[int], device: torch.device) -> Residuals:
        """Gather the residuals of these parameters from wherever they are kept, where their gradients are."""
        before = self.by_parameter()
        for old in [group for group in self.groups if set(group) & set(names)]:
            del self.groups[old]
            self._loose |= {name: before[name] for name in old if name not in names}
        residuals = Residuals.zeros(sum(lengths), self._shots, device)
        for name, (low, high) in zip(names, segment_ranges(lengths), strict=True):
            self._loose.pop(name, None)
            if name in before:
                residuals.first[low:high] = before[name]
        self.groups[names] = lengths, residuals
        return residuals

    def load(self, residuals: Mapping[str, Tensor]) -> None:
        self.groups.clear()
        self._loose = {name: tensor.float().flatten().clone() for name, tensor in residuals.items()}

    def take(self, other: _GroupedResiduals, names: Collection[str]) -> None:
        """Make the residuals of these parameters those of another, which has the same groups."""
        for group, (lengths, mine) in self.groups.items():
            theirs = other.groups[group][1]
            for low, high in _ranges(group, lengths, names):
                mine.first[low:high] = theirs.first[low:high]
                mine.second[low:high] = theirs.second[low:high]
        self._loose |= {name: value for name, value in other._loose.items() if name in names}

    def names(self) -> set[str]:
        return {*self._loose, *(name for group in self.groups for name in group)}


def _ranges(group: Names, lengths: list[int], names: Collection[str]) -> Iterator[Range]:
    """Where those of a group that are among `names` lie; in one piece where all are."""
    if all(name in names for name in group):
        yield 0, sum(lengths)
        return
    for name, part in zip(group, segment_ranges(lengths), strict=True):
        if name in names:
            yield part


class ModelResiduals:
    """The residuals as they are, and as they were, for passes of which it turns out that they did not count.

    discarded: the parameters for which the result of the last pass was thrown away; None: no pass ever throws any away.
    """

    def __init__(
        self, world: int, scaling: Scaling | None = None, shots: int = 2, discarded: Discarded | None = None
    ) -> None:
        self._scaling, self._discarded = scaling, discarded
        self._now = _GroupedResiduals(world, shots)
        # before the last pass, and before all passes since the optimizer's last step
        self._at_pass = _GroupedResiduals(world, shots) if discarded is not None else None
        self._at_step = _GroupedResiduals(world, shots) if scaling is not None else None

    @property
    def _all(self) -> list[_GroupedResiduals]:
        return [kept for kept in (self._now, self._at_pass, self._at_step) if kept is not None]

    def begin_step(self) -> None:
        """Undo what did not count, and remember where we are."""
        self._settle()
        if self._at_pass is not None:
            self._at_pass.take(self._now, self._now.names())
        if self._scaling is not None:
            self._scaling.begin()
            for _, residuals in self._now.groups.values():
                residuals.unit = self._scaling.scale

    def _settle(self) -> None:
        """Undo the last pass where its result was thrown away, and every pass whose step was skipped."""
        if self._at_pass is not None and self._discarded is not None and self._now.groups:
            discarded = self._discarded()
            if discarded is None:
                self._at_pass = None
            else:
                self._now.take(self._at_pass, discarded)
        if self._at_step is not None and self._scaling is not None:
            outcomes = self._scaling.outcomes()
            self._now.take(self._at_step, {name for name, applied in outcomes.items() if not applied})
            self._at_step.take(self._now, {name for name, applied in outcomes.items() if applied})

    def residuals(self, names: Names, gradients: Sequence[Tensor]) -> Residuals:
        """The residuals of the tensors that travel together in one call; regrouped when buckets were rebuilt."""
        if names not in self._now.groups:
            for kept in self._all:
                kept.regroup(names, [g.numel() for g in gradients], gradients[0].device)
            self._now.groups[names][1].unit = self._scaling.scale if self._scaling is not None else 1.0
        return self._now.groups[names][1]

    def by_parameter(self) -> dict[str, Tensor]:
        """This rank's residual of each parameter, without the passes that did not count."""
        self._settle()
        return self._now.by_parameter()

    def load(self, residuals: Mapping[str, Tensor]) -> None:
        """Start again from the mean of the old ranks' residuals, whatever the world size now."""
        for kept in self._all:
            kept.load(residuals)


def check_saved(state: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]]) -> None:
    """Refuse the residuals of another model. shapes: of the parameters that may have one."""
    for name, saved in state.items():
        if name not in shapes:
            raise ValueError(
                f"load_state_dict: the model keeps no residual of a parameter {name!r}; load the model's own state"
            )
        if tuple(saved.shape) != tuple(shapes[name]):
            raise ValueError(
                f"load_state_dict: {name} has shape {tuple(shapes[name])}, the state for it {tuple(saved.shape)}"
            )


def check_factors(factors: Mapping[str, Tensor], matrices: Mapping[str, Matrix]) -> None:
    """Refuse the factors of another model. matrices: those of this one, by name."""
    for key, saved in factors.items():
        name, on_left = name_and_side(key)
        matrix = matrices.get(name)
        if matrix is None or saved.dim() != 2 or saved.shape[1] != matrix.length(on_left):
            problem = f"{key} has shape {tuple(saved.shape)}, and the model no such matrix"
            raise ValueError(f"load_state_dict: {problem}; load the model's own state")


class WholeResiduals:
    """The state of a handle for checkpoints that one process writes and every process reads: whole tensors on the CPU.

    writes: whether this process writes the checkpoint. The others only take part: their state is empty.
    """

    def __init__(self, handle: Handle, writes: bool) -> None:
        self._handle, self._writes = handle, writes

    def state_dict(self) -> dict[str, Tensor]:
        """Collective."""
        # one after another: who does not write never holds more than one of them
        wholes = ((name, _whole(value)) for name, value in self._handle.state_dict().items())
        return {name: whole.cpu() for name, whole in wholes if self._writes}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """On every process, with what the one had written."""
        self._handle.load_state_dict(state)


def _whole(value: Tensor) -> Tensor:
    """Of a DTensor, all ranks' parts (collective); a rank alone would save its own and lose the rest."""
    gather = getattr(value, "full_tensor", None)
    return gather() if gather is not None else value
