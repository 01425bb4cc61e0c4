"""Gradients of DistributedDataParallel through codecs: the communication hook and its state."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from narrowcast.codecs import Codec, KeptFactors
from narrowcast.collectives import (
    AllReduce,
    Channel,
    Flat,
    LowRankCall,
    LowRankReduce,
    PreparedCall,
    Reduction,
    Times,
    TorchTransport,
    Work,
    all_reduce,
)
from narrowcast.kernels import FLOATS
from narrowcast.parallel import policy, scaling
from narrowcast.parallel.ddp import buckets, torch_parts
from narrowcast.parallel.ddp.backend import Finish, finish_bucket, plain_all_reduce
from narrowcast.parallel.ddp.bucket_calls import (
    CALL,
    BucketGroup,
    BucketReduction,
    Done,
    GroupCall,
    Grouped,
    HeldCalls,
    failed_future,
    shared_buffer,
    start_calls,
)
from narrowcast.parallel.levels import Levels, inside_of
from narrowcast.parallel.policy import Watch
from narrowcast.parallel.private import in_autograd
from narrowcast.parallel.probe import probe
from narrowcast.parallel.profiled import profiled
from narrowcast.parallel.ranks import agree, propagate_errors
from narrowcast.parallel.residuals import ModelResiduals
from narrowcast.parallel.seeds import model_seed
from narrowcast.parallel.stats import Stats, TensorRow, is_compressed

Bucket = Any
"""torch.distributed.GradBucket, which has no type."""
ASIDE_VALUES = 1 << 18
"""More than this takes so long on the wire that its latency no longer matters."""


class DDPState:
    """What the hook knows: the policy, the channel, residuals and counters. For `model.register_comm_hook`, too."""

    probes = True
    """Whether the link is measured at once, to warn of wires that lose on it."""

    def __init__(
        self,
        model: DistributedDataParallel,
        gradients: object,
        *,
        scaler: torch.amp.GradScaler | None = None,
        group: dist.ProcessGroup | None = None,
        nodes: object = None,
        inner: str | Codec | None = None,
        algorithm: str = "auto",
        min_values: int = policy.MIN_VALUES,
        seed: int = 0,
        sample_every: int = 0,
    ) -> None:
        policy.check(gradients)
        torch_parts.check_state(model)
        self.group = buckets.check_group(model, group)
        self.policy, self.algorithm = gradients, algorithm
        self.min_values, self.seed, self.step = min_values, model_seed(seed, self.group), 0
        # those that are frozen now, too: DDP reduces what was trainable when it was made
        self.reduced = dict(buckets.reduced_parameters(model))
        self.parameters = {name: p for name, p in self.reduced.items() if p.requires_grad}
        self.names = {id(p): name for name, p in self.reduced.items()}
        self._ignored = buckets.ignored_parameters(model)
        self._sparse = buckets.sparse_parameters(model.module)
        self._choices: dict[str, policy.CodecChoice] = {}
        """Those of a policy that is one codec at every step."""
        self._groups: dict[tuple[torch.dtype, Codec, tuple[str, ...]], BucketGroup] = {}
        self.channel = Channel(TorchTransport(self.group))
        self._aside = self._second_channel()
        self._unused = buckets.unused_parameters(model, self.names)
        self.residuals = self._new_residuals(scaler)
        self.stats, self.sample_every = Stats(), sample_every
        self._held = HeldCalls(self.channel, self.stats)
        self.factors = KeptFactors(self.seed)
        self._held_matrices: dict[tuple[Codec, torch.dtype], HeldCalls] = {}
        try:
            # with the channels open, so that whoever fails is heard; ranks that disagree find out here already
            with propagate_errors(self.channel, self._aside):
                agree(self.channel, "attach", policy.spelled(gradients))
                self.levels = Levels.of(nodes, inner, self.channel)
                self._check_algorithm()
                device = next(iter(self.parameters.values())).device
                asks = self.probes and self.channel.world > 1
                self.probe = probe(self.channel, self.lossy(), device) if asks else None
        except Exception:
            self.close()
            raise
        # weakly: the reducer, in which no garbage collector looks, holds the hook, and that this state
        self._share, watch = _LiveShare(weakref.ref(model), self.channel), Watch(gradients, min_values)
        self._watch = watch if watch.active else None

    def _check_algorithm(self) -> None:
        """Refuse now what the first backward pass would stumble over."""
        for name, parameter in self.parameters.items():
            self._check_possible(name, self.choice(name, parameter).codec)

    def _check_possible(self, name: str, codec: Codec) -> None:
        try:
            self._kind(codec, [self.reduced[name]], self.reduced[name].dtype)
        except ValueError as error:
            raise ValueError(f"attach with {codec} for {name}: {error}") from error

    def _kind(self, codec: Codec, tensors: Sequence[Tensor], dtype: torch.dtype) -> AllReduce | LowRankReduce:
        options: dict[str, Any] = {"algorithm": self.algorithm, "nodes": self.levels.nodes, "seed": self.seed}
        options["inner"] = inside_of(codec, self.levels.inner)
        world = self.channel.world
        mean = Reduction(divide=float(world))
        if codec.rank:
            return LowRankReduce(codec, tuple(map(buckets.matrix_of, tensors)), world, mean, **options)
        return AllReduce.of(codec, [tensor.numel() for tensor in tensors], dtype, world, mean, **options)

    def _new_residuals(self, scaler: torch.amp.GradScaler | None) -> ModelResiduals:
        parameters = self.reduced
        discarded = None if self._unused is None else self._unused.discarded_names
        return ModelResiduals(self.channel.world, scaling.watch_scaler(scaler, lambda: parameters), discarded=discarded)

    def _second_channel(self) -> Channel:
        """For what need not wait in line. Two on one device would be two connections of its backend that race there."""
        devices = {parameter.device for parameter in self.parameters.values()}
        if any(self.channel.transport.carries(device) for device in devices):
            return self.channel
        return Channel(TorchTransport(self.group))

    def choice(self, name: str, parameter: Tensor) -> policy.CodecChoice:
        """The codec of one parameter's gradient at this step."""
        choice = self._choices.get(name)
        if choice is None:
            choice = self._choose(name, parameter)
            if isinstance(self.policy, str | Codec):
                self._choices[name] = choice
        return choice

    def _choose(self, name: str, parameter: Tensor) -> policy.CodecChoice:
        if name in self._sparse:
            return policy.CodecChoice(policy.AS_IS, "has sparse gradients, which DDP's own all-reduce adds")
        if parameter.dtype not in FLOATS:
            return policy.CodecChoice(policy.AS_IS, f"is {parameter.dtype}; codecs take 16- and 32-bit floats")
        return policy.choose(self.policy, self._info(name), self.step, self.min_values)

    def _info(self, name: str) -> policy.TensorInfo:
        return buckets.info_of(name, self.reduced[name])

    def rows(self) -> list[TensorRow]:
        """Every parameter: its wire, or why it stays as it is."""
        rows: list[TensorRow] = []
        for name, p in self.parameters.items():
            choice = self.choice(name, p)
            row = TensorRow.of(name, p.numel(), choice, p.dtype, shape=self._info(name).sent_shape)
            rows += self.levels.rows(row, choice, p.dtype)
        return rows

    def warnings(self) -> list[str]:
        """What the policy misses, and where compression is likely to lose on this link."""
        sent = (self._sent(name, p) for name, p in self.parameters.items())
        notes = self.levels.notes(sent, self.channel.rank)
        warnings = [*notes, *self._ignored, *map(policy.no_match, self.unmatched())]
        if self.channel.world == 1:
            return [*warnings, policy.ONE_RANK]
        slow = [self.probe.note(codec, values) for codec, values in self.lossy().items()] if self.probe else []
        return warnings + [text for text in slow if text is not None]

    def _sent(self, name: str, parameter: Tensor) -> tuple[torch.dtype, int, policy.CodecChoice]:
        """What travels of a parameter's gradient: its type, its values and their codec."""
        choice = self.choice(name, parameter)
        if not choice.codec.rank:
            return parameter.dtype, parameter.numel(), choice
        values = choice.codec.rank * sum(buckets.matrix_of(parameter))
        return torch.float32, values, policy.CodecChoice(choice.codec.factors)

    def unmatched(self) -> list[str]:
        """The patterns of the policy that match no parameter."""
        return policy.unmatched(self.policy, self.parameters)

    def lossy(self) -> dict[Codec, int]:
        """The codecs of this step that round, and how many values each takes."""
        values: dict[Codec, int] = {}
        for name, parameter in self.parameters.items():
            codec = self.choice(name, parameter).codec
            if not codec.lossless:
                values[codec] = values.get(codec, 0) + parameter.numel()
        return values

    @profiled("all_reduce")
    def reduce(self, bucket: Bucket) -> Done:
        """Start the all-reduce of a bucket and return at once; the future gets the bucket's buffer."""
        try:
            started = self._start(bucket)
            if bucket.is_last():
                for held in self._all_held:
                    held.start()
        except Exception as error:  # noqa: BLE001  raised here it would leave the DDP model unusable
            for channel in {self.channel, self._aside}:
                channel.fail(error)
            for held in self._all_held:
                held.fail(error)
            started = failed_future(bucket.buffer(), error)
        if bucket.is_last():
            self.step += 1
            self.stats.steps += 1
        return started

    def _start(self, bucket: Bucket, done: Callable[[], None] = lambda: None) -> Done:
        """done: called when the buffer has what DDP expects, with the stream that it was made on."""
        buffer, parameters = bucket.buffer(), bucket.parameters()
        if bucket.index() == 0:
            self._begin_step()
        if self._unused is not None:
            self._unused.see(parameters)
        # complex gradients lie in a real buffer, of which bucket.gradients() shows but half
        if buffer.is_sparse or buffer.dtype not in FLOATS or any(p.is_complex() for p in parameters):
            return self._start_plain(buffer, partial(finish_bucket, self._share.rescale, done))
        groups = self._group_gradients(parameters, bucket.gradients(), buffer.dtype)
        self.show(groups, self.step, "local")
        if self.sample_every and self.step % self.sample_every == 0:
            self._sample(groups)
        finish, see = partial(finish_bucket, self._share.rescale, done), partial(self.show, groups, self.step, "mean")
        reduction = BucketReduction(buffer, len(groups), finish, see)
        for number, (group, gradients) in enumerate(groups):
            residuals = self.residuals.residuals(group.names, gradients) if group.codec.feedback else None
            step = self.step, bucket.index(), number
            if isinstance(group.kind, LowRankReduce):
                xs = list(map(buckets.in_memory, gradients))
                matrices = LowRankCall(group.kind, xs, step, group.names, self.factors, residuals)
                self._held_for(group.codec, buffer.dtype).add(GroupCall(group, matrices, reduction))
                continue
            flat = Flat(gradients, shared_buffer(gradients, buffer))
            prepared = PreparedCall(group.kind, flat, step, residuals)
            call = GroupCall(group, prepared, reduction)
            if prepared.travels_together and self.channel.transport.carries(buffer.device):
                self._held.add(call)
                continue
            # small tensors that stay as they are go aside: in line with the others each would add its latency
            channel = self._aside if group.codec.lossless and group.numel <= ASIDE_VALUES else self.channel
            start_calls(channel, [call], self.stats)
        return reduction.future.then(lambda done: done.value())  # through then(): an error keeps its own text

    @property
    def _all_held(self) -> list[HeldCalls]:
        return [self._held, *self._held_matrices.values()]

    def _held_for(self, codec: Codec, dtype: torch.dtype) -> HeldCalls:
        """The matrices of a step, whose factors travel together."""
        return self._held_matrices.setdefault((codec, dtype), HeldCalls(self.channel, self.stats))

    def _begin_step(self) -> None:
        for held in self._all_held:
            held.clear()
        self.residuals.begin_step()
        self._share.begin_step()
        if self._watch is not None:
            # what the last step showed, added over the ranks, before the first choice of this one
            self._watch.decide(self.step - 1, self._add, self.channel.world)

    def _add(self, numbers: Tensor) -> Tensor:
        all_reduce(numbers, "as-is", algorithm="one_shot", channel=self.channel)
        return numbers

    def _group_gradients(self, parameters: list[Tensor], gradients: list[Tensor], dtype: torch.dtype) -> Grouped:
        """The gradients of a bucket by codec, in the order in which a codec first appears."""
        by_codec: dict[Codec, tuple[list[str], list[Tensor]]] = {}
        for parameter, gradient in zip(parameters, gradients, strict=True):
            name = self.names[id(parameter)]
            names, members = by_codec.setdefault(self.choice(name, parameter).codec, ([], []))
            names.append(name)
            members.append(gradient)
        return [
            (self._bucket_group(codec, tuple(names), members, dtype), members)
            for codec, (names, members) in by_codec.items()
        ]

    def _bucket_group(
        self, codec: Codec, names: tuple[str, ...], gradients: list[Tensor], dtype: torch.dtype
    ) -> BucketGroup:
        group = self._groups.get((dtype, codec, names))
        if group is None:
            numel, world = sum(gradient.numel() for gradient in gradients), self.channel.world
            plain_bytes = 2 * (world - 1) * numel * dtype.itemsize // world
            compressed = numel if world > 1 and is_compressed(codec, dtype) else 0
            # a bucket's gradients do not say how their parameters lie in memory
            kind = self._kind(codec, [self.reduced[name] for name in names], dtype)
            wire_bytes = kind.wire_bytes() if isinstance(kind, LowRankReduce) else codec.nbytes(numel, dtype)
            group = BucketGroup(codec, names, numel, kind, wire_bytes, plain_bytes, compressed)
            self._groups[dtype, codec, names] = group
        return group

    def show(self, groups: Grouped, step: int, at: str) -> None:
        """Let the policies that watch see the gradients, before the exchange (`local`) or after it (`mean`)."""
        if self._watch is not None:
            for group, gradients in groups:
                for name, gradient in zip(group.names, gradients, strict=True):
                    self._watch.look(self._info(name), gradient, step, at)

    def _start_plain(self, buffer: Tensor, finish: Finish) -> Done:
        """What codecs do not take goes the way that DDP itself would send it."""
        world = self.channel.world
        if not buffer.is_sparse:
            size = 2 * (world - 1) * buffer.numel() * buffer.element_size() // world
            self.stats.count(CALL, buffer.numel(), size, size, Times(), 0.0, compressed=0)
        return plain_all_reduce(buffer, self.group, finish)

    def _sample(self, groups: Grouped) -> None:
        """What the codecs would lose on these gradients, tensor by tensor; it takes time, so it is off by default."""
        for group, gradients in groups:
            for name, gradient in zip(group.names, gradients, strict=True):
                if group.codec.rank:  # as it is sent: its parameter says how it lies in memory
                    gradient = buckets.in_memory(gradient).view(buckets.matrix_of(self.reduced[name]))
                self.stats.sample(name, gradient, group.codec, seed=self.seed, rank=self.channel.rank, step=self.step)

    def close(self) -> None:
        self.channel.close()
        self._aside.close()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """A copy of a model has none: its reducer has no hook."""
        return type(None), ()


class _LiveShare:
    """For `join(divide_by_initial_world_size=False)`: the mean is over the ranks that still have inputs."""

    def __init__(self, model: Callable[[], DistributedDataParallel | None], channel: Channel) -> None:
        self._model, self._channel = model, channel
        self._count: Tensor | None = None
        self._counted: Work | None = None

    def begin_step(self) -> None:
        """Count the ranks that are in a backward pass; the channel does this before the buckets."""
        model = self._model()
        self._count = None
        if model is not None and model._join_config.enable and torch_parts.divides_by_live_ranks(model):
            # a rank without inputs calls the hook from outside of autograd, to keep the others company
            self._count = torch.tensor([float(in_autograd())], dtype=torch.float32)
            self._counted = all_reduce(self._count, "as-is", async_op=True, algorithm="one_shot", channel=self._channel)

    @property
    def rescale(self) -> Callable[[Tensor], Tensor]:
        """From the mean over all ranks to that over the live ones."""
        count, counted, world = self._count, self._counted, self._channel.world
        if count is None or counted is None:
            return lambda buffer: buffer

        def rescale(buffer: Tensor) -> Tensor:
            counted.wait()  # done long since, unless this bucket went aside
            return buffer.mul_(world / count.item())

        return rescale


def ddp_hook(state: DDPState, bucket: Bucket) -> Done:
    """For `model.register_comm_hook(nc.DDPState(model, "int8/256"), nc.ddp_hook)`."""
    return state.reduce(bucket)


# DDP compares annotations with its own classes and would not know these strings
ddp_hook.__annotations__.clear()
