"""The gradients of all workers, stacked in the buckets that DDP would make, and exchanged as `nc.attach` would."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.codecs import SLACK, Codec
from narrowcast.collectives import LowRankReduce, Reduction, segment_ranges
from narrowcast.kernels import FLOATS
from narrowcast.parallel import (
    Autopilot,
    DescribedLink,
    DescribedRoad,
    Replay,
    TensorRow,
    Watch,
    buckets,
    inside_of,
    policy,
)
from narrowcast.simulate.stack import in_rank_order, stacked
from narrowcast.simulate.world import World


@dataclass(frozen=True)
class StackedGroup:
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
        return [buckets.view_like(part, p) for part, p in zip(row.split(self.lengths), self.likes, strict=True)]


Planned = tuple[Codec, tuple[str, ...]]
"""A codec and the tensors that travel with it."""
Call = tuple[tuple[int, int], Codec, tuple[str, ...]]
"""The same with the number of the call."""


class GradientExchange:
    """One stacked gradient buffer, laid out anew when DDP rebuilds its buckets or the policy changes its mind."""

    def __init__(
        self,
        model: nn.Module,
        world: World,
        gradients: object,
        min_values: int,
        bucket_cap_mb: float | None,
        link: DescribedLink | Callable[[int], DescribedLink] | None = None,
    ) -> None:
        policy.check(gradients)
        self.world, self.policy, self.min_values = world, gradients, min_values
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.watch = WorldWatch(gradients, world.n, min_values)
        self._bucket_cap_mb = bucket_cap_mb
        for name, parameter in self.parameters.items():
            if parameter.dtype not in FLOATS:
                raise TypeError(f"train: {name} is {parameter.dtype}; codecs take float32, float16 and bfloat16")
        self.ready: list[str] = []
        """The parameters in the order in which their gradients first became ready; DDP rebuilds its buckets by it."""
        self.buckets = self._named(buckets.first_buckets(list(self.parameters.values())))
        self.step = 0
        """The one under way."""
        if isinstance(gradients, Replay):
            gradients.check_names(self.parameters)
        if isinstance(gradients, Autopilot):
            self._describe(gradients, link)
        self.groups: list[StackedGroup] = []
        self._layout: object = None
        self._storage: dict[torch.dtype, Tensor] = {}
        """Room for the gradients of all workers, of each dtype."""
        for p in self.parameters.values():
            if p.dtype not in self._storage:
                values = sum(other.numel() for other in self.parameters.values() if other.dtype == p.dtype)
                self._storage[p.dtype] = torch.empty(world.n * values, dtype=p.dtype, device=p.device)
        self._used: set[str] = set()
        for name, parameter in self.parameters.items():
            world.algorithm_for(self.choice(name, 0).codec, parameter.numel())

    def _describe(self, pilot: Autopilot, link: DescribedLink | Callable[[int], DescribedLink] | None) -> None:
        """Let an autopilot see steps on a link that nobody measures."""
        if link is None:
            raise ValueError('train: "auto" needs a link to decide for; give link=simulate.DescribedLink(gbit=1.0)')
        infos = [self._info(name) for name, p in self.parameters.items() if p.numel() >= self.min_values]
        names = lambda: [[self._info(name) for name in bucket] for bucket in self.buckets]  # noqa: E731
        DescribedRoad(link, self.world.n, pilot, infos, names, lambda: self.step)

    def choice(self, name: str, step: int) -> policy.CodecChoice:
        return policy.choose(self.policy, self._info(name), step, self.min_values)

    def _info(self, name: str) -> policy.TensorInfo:
        return buckets.info_of(name, self.parameters[name])

    def _sent(self, name: str) -> Sequence[int]:
        """The shape of a gradient as it lies in memory, which is how it is sent."""
        p = self.parameters[name]
        return buckets.matrix_of(p) if p.dim() > 1 and p.numel() else (p.numel(),)

    def rows(self, step: int = 0) -> list[TensorRow]:
        """Every tensor: its wire, or why it stays as it is."""
        return [
            TensorRow.of(name, p.numel(), self.choice(name, step), p.dtype, shape=self._info(name).sent_shape)
            for name, p in self.parameters.items()
        ]

    def _named(self, numbers: Sequence[Sequence[int]]) -> list[list[str]]:
        names = list(self.parameters)
        return [[names[number] for number in bucket] for bucket in numbers]

    def rebuild(self, ready: Sequence[str]) -> None:
        """As DDP does once, after the first backward pass; what had no gradient comes last."""
        self.ready = list(ready) + [name for name in self.parameters if name not in set(ready)]
        place = {name: index for index, name in enumerate(self.parameters)}
        order = [place[name] for name in self.ready]
        rebuilt = buckets.rebuilt_buckets(list(self.parameters.values()), order, self._bucket_cap_mb)
        self.buckets = self._named(rebuilt)

    @contextmanager
    def rebuild_when_ready(self) -> Iterator[None]:
        """Around the first backward pass of worker 0: in the order in which its gradients become ready."""
        order: list[str] = []
        hooks = [
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
            for name, parameter in self.parameters.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self.rebuild(order)

    def begin_step(self, step: int) -> None:
        """Lay the buffer out for the codecs of this step."""
        self.step = step
        layout = [self._by_codec(bucket, step) for bucket in self.buckets]
        if layout != self._layout:
            self._layout = layout
            self._place(layout)
        self._used.clear()

    def _by_codec(self, bucket: Sequence[str], step: int) -> list[Planned]:
        """The tensors of a bucket by codec, in the order in which a codec first appears."""
        names_of: dict[Codec, list[str]] = {}
        for name in bucket:
            names_of.setdefault(self.choice(name, step).codec, []).append(name)
        return [(codec, tuple(names)) for codec, names in names_of.items()]

    def _place(self, layout: list[list[Planned]]) -> None:
        used: dict[torch.dtype, int] = {}
        self.groups = []
        planned = [((i, j), *group) for i, bucket in enumerate(layout) for j, group in enumerate(bucket)]
        for call, codec, names in self._together(planned):
            likes = tuple(self.parameters[name] for name in names)
            dtype, numel = likes[0].dtype, sum(like.numel() for like in likes)
            first = used.get(dtype, 0)
            used[dtype] = first + self.world.n * numel
            stack_Wn = self._storage[dtype][first : used[dtype]].view(self.world.n, numel)
            self.groups.append(StackedGroup(codec, call, names, stack_Wn, likes))

    def _together(self, planned: Sequence[Call]) -> list[Call]:
        """Matrices of one low rank travel together, as far as `buckets.travel_together` says."""
        calls: list[Call] = []
        held: dict[tuple[Codec, torch.dtype], list[Call]] = {}
        for one in planned:
            _, codec, names = one
            if not codec.rank:
                calls.append(one)
                continue
            held.setdefault((codec, self.parameters[names[0]].dtype), []).append(one)
        for (codec, _), members in held.items():
            sizes = [self._factor_bytes(codec, names) for _, _, names in members]
            for first, last in buckets.travel_together(sizes):
                together = members[first:last]
                calls.append((together[0][0], codec, sum((names for _, _, names in together), ())))
        return calls

    def _factor_bytes(self, codec: Codec, names: Sequence[str]) -> int:
        matrices = tuple(buckets.matrix_of(self.parameters[name]) for name in names)
        return LowRankReduce(codec, matrices, self.world.n, Reduction()).wire_bytes()

    def take(self, worker: int) -> None:
        """Copy the gradients that the last backward pass left into a worker's rows. None counts as zero."""
        for group in self.groups:
            places, gradients = [], []
            for name, view in zip(group.names, group.views(group.stack_Wn[worker]), strict=True):
                gradient = self.parameters[name].grad
                if gradient is None:
                    view.zero_()
                    continue
                if gradient.is_sparse:
                    raise TypeError(f"train: {name} has sparse gradients; make its layer with sparse=False")
                self._used.add(name)
                places.append(view)
                gradients.append(gradient)
            if gradients:
                torch._foreach_copy_(places, gradients)

    def reduce(self, step: int, measure: bool = False) -> list[LayerError]:
        """Exchange all buckets; parameters get the mean as their gradient. measure: return what the exchange lost."""
        errors: list[LayerError] = []
        for group in self.groups:
            how: dict[str, Any] = {"spec": group.codec, "segments": group.lengths, "names": group.names}
            how["inner"] = inside_of(group.codec, self.world.inner)
            if group.codec.rank:
                how["matrices"] = [buckets.matrix_of(like) for like in group.likes]
            result = self.world.all_reduce(group.stack_Wn, "avg", step=(step, *group.call), **how)[0]
            if self.watch.active:
                # let the policies that watch see what each worker had and what came back
                rows, means = group.stack_Wn.split(group.lengths, dim=1), result.split(group.lengths)
                for name, row_Wn, part in zip(group.names, rows, means, strict=True):
                    self.watch.local(self._info(name), [row.view(self._sent(name)) for row in row_Wn], step)
                    self.watch.mean(self._info(name), part, step)
            if measure and not group.codec.lossless:
                errors += layer_errors(self.world, group, result)
            for name, mean in zip(group.names, group.views(result), strict=True):
                self.parameters[name].grad = mean if name in self._used else None
        self.watch.decide(step)
        return errors


class WorldWatch:
    """One policy object that stands for those of all ranks, which decide alike."""

    def __init__(self, gradients: object, workers: int, min_values: int) -> None:
        self._gradients, self._workers = gradients, workers
        self._ranks = [Watch(gradients, min_values) for _ in range(workers)]
        self._together = Watch(gradients, min_values)
        self.active = self._together.active

    def local(self, info: policy.TensorInfo, rows: Sequence[Tensor], step: int) -> None:
        """Every worker's own gradient, before the exchange."""
        for rank, row in zip(self._ranks, rows, strict=True):
            rank.look(info, row, step, "local")

    def mean(self, info: policy.TensorInfo, mean: Tensor, step: int) -> None:
        """What came back: looked at once, and counted for every worker, since all see the same."""
        self._together.look(info, mean, step, "mean")

    def decide(self, step: int) -> None:
        """At the end of a step."""
        seen = [rank.take(step) for rank in self._ranks]
        # what is a rank's own was asked from each, and asking again would find nothing new
        common = {
            name: numbers for name, numbers in self._together.take(step).items() if not name.startswith(policy.RANK)
        }
        everything = [{**own, **common} for own in seen]
        merged = Watch(self._gradients)
        merged.give(everything[0])
        merged.decide(step, lambda _: in_rank_order([Watch.flat(own) for own in everything]), self._workers)

    def state_dict(self) -> list[dict[str, Any]]:
        return [watcher.state_dict() for watcher in policy.all_watchers(self._gradients)]

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        for watcher, state in zip(policy.all_watchers(self._gradients), states, strict=True):
            watcher.load_state_dict(state)


@dataclass(frozen=True)
class LayerError:
    """The mean gradient that workers got, against the exact mean of what they had (in double)."""

    name: str
    codec: str
    bias: float
    """Mean error in units of the exact mean's root mean square."""
    snr_db: float
    relative_error: float
    flushed: float
    """Share of values whose exact mean is not zero and that came back as zero."""
    saturated: float
    """Share of worker 0's values beyond what its first encoding can bring back."""


def layer_errors(world: World, group: StackedGroup, result: Tensor) -> list[LayerError]:
    """One entry for each tensor of a group; it makes the host wait for the device."""
    stack = stacked("train", group.stack_Wn, world.n, group.lengths)
    scales = None if group.codec.rank else world.scales(stack, group.codec, None)[0][0]
    errors = []
    for number, (name, (low, high)) in enumerate(zip(group.names, segment_ranges(group.lengths), strict=True)):
        own_Wn = group.stack_Wn[:, low:high]
        exact, got = own_Wn.double().mean(dim=0).cpu(), result[low:high].double().cpu()
        scale = scales[number] if scales else None
        lost = _saturated_share(own_Wn[0].cpu(), group.codec, None if scale is None else scale.cpu())
        errors.append(_layer_error(name, group.codec, exact, got, lost))
    return errors


def _layer_error(name: str, codec: Codec, exact: Tensor, got: Tensor, saturated: float) -> LayerError:
    both = exact.isfinite() & got.isfinite()
    kept, error = exact[both], (got - exact)[both]
    signal, noise, n = float(kept.square().sum()), float(error.square().sum()), max(len(kept), 1)
    level = math.sqrt(signal / n)
    return LayerError(
        name,
        str(codec),
        bias=float(error.sum()) / n / level if level else 0.0,
        snr_db=10 * math.log10(signal / noise) if signal and noise else math.inf if not noise else -math.inf,
        relative_error=math.sqrt(noise / signal) if signal else 0.0 if not noise else math.inf,
        flushed=float(((exact != 0) & (got == 0)).double().mean()),
        saturated=saturated,
    )


def _saturated_share(x: Tensor, codec: Codec, scale: Tensor | None) -> float:
    if codec.rank:
        return 0.0  # nothing is cut
    wire = codec.encode(x, scale=scale)
    limits = codec.limits(wire, x.numel())
    if limits is None:
        return 0.0
    wide, (low, high) = x.double(), (limit.double() for limit in limits)
    beyond = (wide > high + high.abs() * SLACK) | (wide < low - low.abs() * SLACK)
    return float((x.isfinite() & beyond).double().mean())
