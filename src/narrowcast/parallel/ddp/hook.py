"""Gradients of DistributedDataParallel through codecs: the communication hook and its state."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from narrowcast.codecs import Codec, error_report
from narrowcast.collectives.algorithms import record
from narrowcast.collectives.api import all_reduce
from narrowcast.collectives.runtime.channel import Channel
from narrowcast.collectives.segments import Times
from narrowcast.collectives.transports.torch import TorchTransport
from narrowcast.collectives.work import Work
from narrowcast.kernels import FLOATS
from narrowcast.parallel import policy, scaling
from narrowcast.parallel.ddp import layout, torch_parts
from narrowcast.parallel.private import in_autograd
from narrowcast.parallel.probe import probe
from narrowcast.parallel.propagate_errors import telling
from narrowcast.parallel.residuals import Memory
from narrowcast.parallel.seeds import model_seed, seed_of
from narrowcast.parallel.stats import Row, Stats, is_compressed
from narrowcast.parallel.watch import Watch

Bucket = Any
"""torch.distributed.GradBucket, which has no type."""
Done = torch.futures.Future[Tensor]
CALL = "all_reduce of gradients"
ASIDE_VALUES = 1 << 18
"""More than this takes so long on the wire that its latency no longer matters."""


@dataclass(frozen=True)
class Group:
    """The gradients of a bucket that travel with one codec."""

    codec: Codec
    names: tuple[str, ...]
    gradients: tuple[Tensor, ...]


class DDPState:
    """What the hook knows: the policy, the channel, residuals and counters. For `model.register_comm_hook`, too."""

    def __init__(
        self,
        model: DistributedDataParallel,
        gradients: object,
        *,
        scaler: torch.amp.GradScaler | None = None,
        group: dist.ProcessGroup | None = None,
        nodes: Sequence[Sequence[int]] | None = None,
        algorithm: str = "auto",
        min_values: int = policy.MIN_VALUES,
        seed: int = 0,
        sample_every: int = 0,
    ) -> None:
        policy.check(gradients)
        torch_parts.check_state(model)
        self.group = layout.check_group(model, group)
        self.policy, self.nodes, self.algorithm = gradients, nodes, algorithm
        self.min_values, self.seed, self.step = min_values, model_seed(seed, self.group), 0
        self.parameters = {name: p for name, p in layout.reduced(model) if p.requires_grad}
        # those that are frozen now, too: DDP reduces what was trainable when it was made
        self.reduced = dict(layout.reduced(model))
        self.names = {id(p): name for name, p in self.reduced.items()}
        self._ignored = layout.ignored(model)
        self._sparse = _with_sparse_gradients(model.module)
        self.channel = Channel(TorchTransport(self.group))
        self._aside = self._second_channel()
        self._unused = layout.unused(model, self.names)
        self.memory = self._new_memory(scaler)
        self.stats, self.sample_every = Stats(), sample_every
        try:
            # with the channels open, so that whoever fails is heard; ranks that disagree find out here already
            with telling(self.channel, self._aside):
                self._check_algorithm()
                device = next(iter(self.parameters.values())).device
                self.probe = probe(self.channel, self.lossy(), device) if self.channel.world > 1 else None
        except Exception:
            self.close()
            raise
        # weakly: the reducer, in which no garbage collector looks, holds the hook, and that this state
        self._share, self._watch = _LiveShare(weakref.ref(model), self.channel), Watch(gradients, min_values)

    def _check_algorithm(self) -> None:
        """Refuse now what the first backward pass would stumble over."""
        world = dist.get_world_size(self.group)
        for name, parameter in self.parameters.items():
            codec = self.choice(name, parameter).codec
            chosen = record.choose(self.algorithm, codec, parameter.numel(), world, bool(self.nodes))
            record.check(chosen, codec, world, self.nodes)
            if codec.feedback and chosen not in record.WITH_FEEDBACK:
                allowed = ", ".join(record.WITH_FEEDBACK)
                raise ValueError(f"attach: {name} has {codec}; error feedback goes with {allowed}, not with {chosen}")

    def _new_memory(self, scaler: torch.amp.GradScaler | None) -> Memory:
        parameters = self.reduced
        discarded = None if self._unused is None else self._unused.discarded
        return Memory(self.channel.world, scaling.scaling(scaler, lambda: parameters), discarded=discarded)

    def _second_channel(self) -> Channel:
        """For what need not wait in line. Two on one device would be two connections of its backend that race there."""
        devices = {parameter.device for parameter in self.parameters.values()}
        if any(self.channel.transport.carries(device) for device in devices):
            return self.channel
        return Channel(TorchTransport(self.group))

    # ---- what travels how --------------------------------------------------------------------------------------------

    def choice(self, name: str, parameter: Tensor) -> policy.Choice:
        """The codec of one parameter's gradient at this step."""
        if name in self._sparse:
            return policy.Choice(policy.AS_IS, "has sparse gradients, which DDP's own all-reduce adds")
        if parameter.dtype not in FLOATS:
            return policy.Choice(policy.AS_IS, f"is {parameter.dtype}; codecs take 16- and 32-bit floats")
        return policy.choose(self.policy, self._info(name), self.step, self.min_values)

    def _info(self, name: str) -> policy.TensorInfo:
        parameter = self.reduced[name]
        return policy.TensorInfo(name, tuple(parameter.shape), parameter.dtype)

    def rows(self) -> list[Row]:
        found = []
        for name, parameter in self.parameters.items():
            choice = self.choice(name, parameter)
            found.append(Row.of(name, parameter.numel(), choice, parameter.dtype))
        return found

    def warnings(self) -> list[str]:
        """What the policy misses, and where compression is likely to lose on this link."""
        found = [*self._ignored, *map(policy.missed, self.unmatched())]
        if self.probe is None:
            return [*found, "one rank: nothing travels, and nothing is rounded"]
        notes = (self.probe.note(codec, values) for codec, values in self.lossy().items())
        return found + [text for text in notes if text is not None]

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

    def groups(self, bucket: Bucket) -> list[Group]:
        """The gradients of a bucket by codec, in the order in which a codec first appears."""
        by_codec: dict[Codec, list[tuple[str, Tensor]]] = {}
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            name = self.names[id(parameter)]
            by_codec.setdefault(self.choice(name, parameter).codec, []).append((name, gradient))
        return [
            Group(codec, tuple(name for name, _ in pairs), tuple(gradient for _, gradient in pairs))
            for codec, pairs in by_codec.items()
        ]

    # ---- the hook ----------------------------------------------------------------------------------------------------

    def reduce(self, bucket: Bucket) -> Done:
        """Start the all-reduce of a bucket and return at once; the future gets the bucket's buffer."""
        future = _future(bucket.buffer())
        try:
            started = self._start_bucket(bucket, future)
        except Exception as error:  # noqa: BLE001  raised here it would leave the DDP model unusable
            for channel in {self.channel, self._aside}:
                channel.fail(error)
            _settle(future, bucket.buffer(), error)
            started = future
        if bucket.is_last():
            self.step += 1
            self.stats.steps += 1
        # through then(): an error keeps its own text
        return started.then(lambda done: done.value())

    def _start_bucket(self, bucket: Bucket, future: Done) -> Done:
        buffer = bucket.buffer()
        if bucket.index() == 0:
            self.memory.begin_step()
            self._share.begin_step()
            self._decide()
        if self._unused is not None:
            self._unused.see(bucket.parameters())
        # complex gradients lie in a real buffer, of which bucket.gradients() shows but half
        if buffer.is_sparse or buffer.dtype not in FLOATS or any(p.is_complex() for p in bucket.parameters()):
            return self._start_plain(buffer)
        groups, rescale, step = self.groups(bucket), self._share.rescale, self.step
        self._show(groups, step, "local")

        def settle(works: list[Work], error: BaseException | None) -> None:
            if error is None:
                for work in works:
                    work.wait()  # done, all of them: what follows comes after them on the device, too
                rescale(buffer)
                error = self._watch.guarded(lambda: self._show(groups, step, "mean"))
            _settle(future, buffer, error)

        if self.sample_every and self.step % self.sample_every == 0:
            self._sample(groups)
        pending = _Pending(len(groups), settle)
        for number, group in enumerate(groups):
            self._start(group, buffer, pending, (self.step, bucket.index(), number))
        return future

    def _show(self, groups: list[Group], step: int, at: str) -> None:
        """Let the policies that watch see the gradients, before the exchange (`local`) or after it (`mean`)."""
        for group in groups if self._watch.active else ():
            for name, gradient in zip(group.names, group.gradients, strict=True):
                self._watch.look(self._info(name), gradient, step, at)

    def _decide(self) -> None:
        """Before a step's first choice: what the last one showed, added over the ranks."""

        def add(numbers: Tensor) -> Tensor:
            all_reduce(numbers, "as-is", algorithm="one_shot", channel=self.channel)
            return numbers

        self._watch.decide(self.step - 1, add, self.channel.world)

    def _start_plain(self, buffer: Tensor) -> Done:
        """What codecs do not take goes the way that DDP itself would send it."""
        world = self.channel.world
        if not buffer.is_sparse:
            size = 2 * (world - 1) * buffer.numel() * buffer.element_size() // world
            self.stats.count(CALL, buffer.numel(), size, size, Times(), 0.0, compressed=0)
        rescale = self._share.rescale
        return plain(buffer, self.group).then(lambda done: rescale(done.value()))

    def _start(self, group: Group, buffer: Tensor, pending: _Pending, call: tuple[int, ...]) -> None:
        times, began = Times(), time.perf_counter()
        numel = sum(gradient.numel() for gradient in group.gradients)
        work = all_reduce(
            group.gradients,
            group.codec,
            op=dist.ReduceOp.AVG,
            async_op=True,
            algorithm=self.algorithm,
            step=call,
            seed=self.seed,
            nodes=self.nodes,
            residuals=self.memory.residuals(group.names, group.gradients) if group.codec.feedback else None,
            times=times,
            channel=self._lane(group.codec, numel),
            buffer=_adjacent(group.gradients, buffer),
        )
        assert work is not None
        plain_bytes = 2 * (self.channel.world - 1) * numel * buffer.element_size() // self.channel.world
        compressed = numel if self.channel.world > 1 and is_compressed(group.codec, buffer.dtype) else 0

        def count(done: Work) -> None:
            seconds = time.perf_counter() - began
            self.stats.count(CALL, numel, done.sent_bytes, plain_bytes, times, seconds, compressed=compressed)
            pending.arrived(done)

        work.then(count)

    def _lane(self, codec: Codec, numel: int) -> Channel:
        """Small tensors that stay as they are go aside: in line with the others each would add its latency."""
        return self._aside if codec.lossless and numel <= ASIDE_VALUES else self.channel

    def _sample(self, groups: list[Group]) -> None:
        """What the codecs would lose on these gradients, tensor by tensor; it takes time, so it is off by default."""
        for group in groups:
            for name, gradient in zip(group.names, group.gradients, strict=True):
                if not group.codec.lossless:
                    seed = seed_of(f"sample {self.seed} {self.channel.rank} {name}")
                    self.stats.sampled[name] = error_report(gradient, group.codec, seed=seed, stream=self.step)

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
        if model is not None and torch_parts.divides_by_live_ranks(model):
            # a rank without inputs calls the hook from outside of autograd, to keep the others company
            self._count = torch.tensor([float(in_autograd())])
            options: dict[str, Any] = {"async_op": True, "algorithm": "one_shot", "channel": self._channel}
            self._counted = all_reduce(self._count, "as-is", **options)

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


class _Pending:
    """Counts the groups of a bucket down, then calls back once, with their works and the first error."""

    def __init__(self, count: int, done: Callable[[list[Work], BaseException | None], None]) -> None:
        self._count, self._done = count, done
        self._works: list[Work] = []
        self._lock = threading.Lock()

    def arrived(self, work: Work) -> None:
        with self._lock:
            self._works.append(work)
            last = len(self._works) == self._count
        if last:
            errors = (work.exception() for work in self._works)
            self._done(self._works, next((error for error in errors if error is not None), None))


def _adjacent(gradients: Sequence[Tensor], buffer: Tensor) -> Tensor | None:
    """The part of a bucket's buffer that these gradients fill without a gap, so that nothing is copied; or None."""
    start = at = gradients[0].storage_offset()
    for gradient in gradients:
        if (
            gradient.storage_offset() != at
            or gradient.untyped_storage().data_ptr() != buffer.untyped_storage().data_ptr()
        ):
            return None
        at += gradient.numel()
    return buffer[start - buffer.storage_offset() : at - buffer.storage_offset()]


def _future(buffer: Tensor) -> Done:
    """On a CUDA device it carries the stream's work with it: whoever waits for it lets its own stream wait."""
    return torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)


def _settle(future: Any, buffer: Tensor, error: BaseException | None) -> None:
    """Every future is set, always: DDP would wait for ever otherwise."""
    if error is None:
        future.set_result(buffer)
    else:
        future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))


def failed(bucket: Bucket, error: BaseException) -> Done:
    """What a hook returns that could not even start; through then(), so that the error keeps its own text."""
    future = _future(bucket.buffer())
    _settle(future, bucket.buffer(), error)
    return future.then(lambda done: done.value())


def plain(buffer: Tensor, group: dist.ProcessGroup | None) -> Done:
    """What DDP does without a hook: the mean over its group."""
    buffer.div_(dist.get_world_size(group))
    future: Any = dist.all_reduce(buffer, group=group, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


def _with_sparse_gradients(module: torch.nn.Module) -> set[str]:
    """The parameters whose gradients are sparse, found as DDP finds them."""
    return {
        f"{prefix}.{name}".removeprefix(".")
        for prefix, part in module.named_modules()
        if isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag) and part.sparse
        for name, _ in part.named_parameters(recurse=False)
    }


def ddp_hook(state: DDPState, bucket: Bucket) -> Done:
    """For `model.register_comm_hook(nc.DDPState(model, "int8/256"), nc.ddp_hook)`."""
    return state.reduce(bucket)


# DDP compares annotations with its own classes and would not know these strings
ddp_hook.__annotations__.clear()
