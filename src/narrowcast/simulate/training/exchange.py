"""The gradients of all workers, stacked in the buckets that DDP would make, and exchanged as `nc.attach` would."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import _DEFAULT_FIRST_BUCKET_BYTES, _compute_bucket_assignment_by_size

from narrowcast.codecs import Codec
from narrowcast.kernels import FLOATS
from narrowcast.parallel import policy
from narrowcast.parallel.ddp import strides
from narrowcast.parallel.stats import Row
from narrowcast.simulate.training.errors import LayerError, layer_errors
from narrowcast.simulate.training.watch import WorldWatch
from narrowcast.simulate.world.world import World

MIB = 1 << 20
BUCKET_CAP_MB = 25


@dataclass(frozen=True)
class Group:
    """The tensors of a bucket that travel with one codec, and their gradients: one row a worker."""

    codec: Codec
    call: tuple[int, int]
    """The numbers of the bucket and, in it, of the codec."""
    names: tuple[str, ...]
    stack_Wn: Tensor
    likes: tuple[Tensor, ...]
    """The parameters themselves."""

    @property
    def lengths(self) -> list[int]:
        return [like.numel() for like in self.likes]

    def views(self, row: Tensor) -> list[Tensor]:
        """A flat row as tensors like the parameters: in the order of their memory (channels last, say), as in DDP."""
        return [strides.like(part, p) for part, p in zip(row.split(self.lengths), self.likes, strict=True)]


Planned = tuple[Codec, tuple[str, ...]]
"""A codec and the tensors that travel with it."""


class Exchange:
    """One stacked gradient buffer, laid out anew when DDP rebuilds its buckets or the policy changes its mind."""

    def __init__(
        self, model: nn.Module, world: World, gradients: object, min_values: int, bucket_cap_mb: float | None
    ) -> None:
        policy.check(gradients)
        self.world, self.policy, self.min_values = world, gradients, min_values
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.watch = WorldWatch(gradients, world.n, min_values)
        self._limits = _limits(bucket_cap_mb)
        self._check_dtypes()
        self.ready: list[str] = []
        """The parameters in the order in which their gradients first became ready; DDP rebuilds its buckets by it."""
        self.buckets = self._first_buckets()
        self.groups: list[Group] = []
        self._layout: object = None
        self._storage: dict[torch.dtype, Tensor] = {}
        self._used: set[str] = set()
        for name, parameter in self.parameters.items():
            world.algorithm_for(self.choice(name, 0).codec, parameter.numel())

    def _check_dtypes(self) -> None:
        for name, parameter in self.parameters.items():
            if parameter.dtype not in FLOATS:
                raise TypeError(f"train: {name} is {parameter.dtype}; codecs take float32, float16 and bfloat16")

    # ---- what travels how --------------------------------------------------------------------------------------------

    def choice(self, name: str, step: int) -> policy.Choice:
        return policy.choose(self.policy, self._info(name), step, self.min_values)

    def _info(self, name: str) -> policy.TensorInfo:
        parameter = self.parameters[name]
        return policy.TensorInfo(name, tuple(parameter.shape), parameter.dtype)

    def rows(self, step: int = 0) -> list[Row]:
        """Every tensor: its wire, or why it stays as it is."""
        found = []
        for name, parameter in self.parameters.items():
            choice = self.choice(name, step)
            found.append(Row.of(name, parameter.numel(), choice, parameter.dtype))
        return found

    def _first_buckets(self) -> list[list[str]]:
        """Before DDP knows in which order gradients become ready, all go in one bucket (one for each dtype)."""
        return self._assigned(list(self.parameters), [sys.maxsize])[::-1]

    def _assigned(self, names: Sequence[str], limits: list[int], indices: Sequence[int] = ()) -> list[list[str]]:
        tensors: list[Tensor] = [self.parameters[name] for name in names]
        every = list(self.parameters)
        dense = [False] * len(every)
        found, _ = _compute_bucket_assignment_by_size(tensors, limits, dense, list(indices))
        return [[every[i] for i in bucket] for bucket in found]

    def rebuild(self, ready: Sequence[str]) -> None:
        """As DDP does once, after the first backward pass; what had no gradient comes last."""
        self.ready = list(ready) + [name for name in self.parameters if name not in set(ready)]
        place = {name: index for index, name in enumerate(self.parameters)}
        self.buckets = self._assigned(self.ready, self._limits, [place[name] for name in self.ready])

    # ---- a step ------------------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        """Lay the buffer out for the codecs of this step."""
        layout = [self._by_codec(bucket, step) for bucket in self.buckets]
        if layout != self._layout:
            self._layout = layout
            self._place(layout)
        self._used.clear()

    def _by_codec(self, bucket: Sequence[str], step: int) -> list[Planned]:
        """The tensors of a bucket by codec, in the order in which a codec first appears."""
        found: dict[Codec, list[str]] = {}
        for name in bucket:
            found.setdefault(self.choice(name, step).codec, []).append(name)
        return [(codec, tuple(names)) for codec, names in found.items()]

    def _place(self, layout: list[list[Planned]]) -> None:
        used: dict[torch.dtype, int] = {}
        self.groups = []
        calls = [(i, j) for i, bucket in enumerate(layout) for j in range(len(bucket))]
        for call, (codec, names) in zip(calls, (group for bucket in layout for group in bucket), strict=True):
            likes = tuple(self.parameters[name] for name in names)
            dtype, numel = likes[0].dtype, sum(like.numel() for like in likes)
            flat, first = self._buffer(likes[0]), used.get(dtype, 0)
            used[dtype] = first + self.world.n * numel
            stack_Wn = flat[first : used[dtype]].view(self.world.n, numel)
            self.groups.append(Group(codec, call, names, stack_Wn, likes))

    def _buffer(self, like: Tensor) -> Tensor:
        """Room for the gradients of all workers, of one dtype."""
        if like.dtype not in self._storage:
            values = sum(p.numel() for p in self.parameters.values() if p.dtype == like.dtype)
            self._storage[like.dtype] = torch.empty(self.world.n * values, dtype=like.dtype, device=like.device)
        return self._storage[like.dtype]

    def take(self, worker: int) -> None:
        """Copy the gradients that the last backward pass left into a worker's rows. None counts as zero."""
        for group in self.groups:
            places, found = [], []
            for name, view in zip(group.names, group.views(group.stack_Wn[worker]), strict=True):
                gradient = self.parameters[name].grad
                if gradient is None:
                    view.zero_()
                    continue
                if gradient.is_sparse:
                    raise TypeError(f"train: {name} has sparse gradients; make its layer with sparse=False")
                self._used.add(name)
                places.append(view)
                found.append(gradient)
            if found:
                torch._foreach_copy_(places, found)

    def reduce(self, step: int, measure: bool = False) -> list[LayerError]:
        """Exchange all buckets; parameters get the mean as their gradient. What the exchange lost, where asked for."""
        errors: list[LayerError] = []
        for group in self.groups:
            result_Wn = self.world.all_reduce(
                group.stack_Wn,
                "avg",
                step=(step, *group.call),
                spec=group.codec,
                segments=group.lengths,
                names=group.names,
            )
            if self.watch.active:
                self._show(group, result_Wn[0], step)
            if measure and not group.codec.lossless:
                errors += layer_errors(
                    self.world, group.codec, group.names, group.stack_Wn, group.lengths, result_Wn[0]
                )
            for name, mean in zip(group.names, group.views(result_Wn[0]), strict=True):
                self.parameters[name].grad = mean if name in self._used else None
        self.watch.decide(step)
        return errors

    def _show(self, group: Group, mean: Tensor, step: int) -> None:
        """Let the policies that watch see what each worker had and what came back."""
        rows, means = group.stack_Wn.split(group.lengths, dim=1), mean.split(group.lengths)
        for name, row_Wn, part in zip(group.names, rows, means, strict=True):
            self.watch.local(self._info(name), list(row_Wn), step)
            self.watch.mean(self._info(name), part, step)


def _limits(bucket_cap_mb: float | None) -> list[int]:
    cap = int((BUCKET_CAP_MB if bucket_cap_mb is None else bucket_cap_mb) * MIB)
    return [_DEFAULT_FIRST_BUCKET_BYTES if bucket_cap_mb is None else cap, cap]
