"""Local updates: every worker trains by itself for many steps, then the workers exchange what they have learnt.

With an outer optimizer (Nesterov momentum) on the mean of what the workers moved, this is DiLoCo; with plain SGD at a
learning rate of 1, local SGD.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from narrowcast.codecs import Codec, KeptFactors, Matrix
from narrowcast.collectives import (
    Channel,
    LowRankCall,
    LowRankReduce,
    Reduction,
    Residuals,
    Times,
    TorchTransport,
    Work,
    all_reduce,
    start_low_rank,
)
from narrowcast.kernels import FLOATS
from narrowcast.parallel import policy
from narrowcast.parallel.fsdp.optimizer_check import parameters_of
from narrowcast.parallel.local_sgd import state as local_state
from narrowcast.parallel.local_sgd.state import State, start_of
from narrowcast.parallel.ranks import digest, local_part, propagate_errors, ranks_that_differ
from narrowcast.parallel.residuals import ModelResiduals
from narrowcast.parallel.seeds import default_group, own_seed
from narrowcast.parallel.stats import CallEvent, Stats, TensorRow, all_reduce_bytes, compressed_values, render

Outer = Callable[[list[Tensor]], Optimizer]
ROLE, CALL = "outer gradient", "all_reduce of outer gradients"


def nesterov(anchors: list[Tensor]) -> Optimizer:
    """The outer optimizer of DiLoCo, with its learning rate and momentum."""
    return torch.optim.SGD(anchors, lr=0.7, momentum=0.9, nesterov=True)


class LocalSGD:
    """Exchange with the other workers every so many steps, in few bits. Making one is collective.

    Between exchanges a worker's parameters are its own. At an exchange each worker sends how far it moved (the outer
    gradient: where it started less where it is), the mean goes to an outer optimizer, and all start from its result,
    each parameter in its own type. With an optimizer, that one keeps it alive until `close()`.

    optimizer: the inner one; every step that it makes is counted. Without it call `step()` after each. spec: a policy,
    as for `attach`. outer: makes the outer optimizer of a list of tensors; by default `nesterov`. group: the workers;
    where a worker has several ranks, those ranks of all workers that hold the same part of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        every: int,
        spec: object,
        outer: Outer = nesterov,
        group: dist.ProcessGroup | None = None,
        min_values: int = policy.MIN_VALUES,
        seed: int = 0,
    ) -> None:
        if every < 1:
            raise ValueError(f"LocalSGD: every={every}; give the number of steps between exchanges, 1 or more")
        policy.check(spec)
        if policy.all_watchers(spec):
            raise ValueError(
                "LocalSGD: spec= is a policy that learns from gradients, of which it sees none; give a fixed one"
            )
        self._model = model.module if isinstance(model, DistributedDataParallel) else model
        self.every, self.steps, self.exchanges = every, 0, 0
        self._policy, self._min_values = spec, min_values
        self._parameters = _trainable(self._model)
        self._unhook: Callable[[], None] = lambda: None
        _check_optimizer(optimizer, self._parameters)
        # float32, whatever the model's type: an outer step is small beside the value
        self._anchors = {name: local_part(p).float().clone() for name, p in self._parameters.items()}
        self._outer = outer(list(self._anchors.values()))
        self._fresh = local_state.own_keys(self._outer)
        self._channel = Channel(TorchTransport(group))
        self._seed = own_seed("LocalSGD", seed, group or default_group())
        self._residuals, self._stats = ModelResiduals(self._channel.world), Stats()
        # of the seed as it is given: a checkpoint goes on with the same factors in another object
        self._factors = KeptFactors(seed)
        self._agree_on_the_start()
        self._check_wires()
        # last: what fails above leaves the optimizer alone
        self._unhook = _call_after_steps(optimizer, self.step)

    def _agree_on_the_start(self) -> None:
        """What the workers moved has a mean only if they moved from the same place."""
        different = ranks_that_differ(self._channel, digest(self._anchors.values()))
        if different:
            self.close()
            raise RuntimeError(
                f"LocalSGD: the parameters of workers {different} differ from those of worker 0; make it while all "
                "have the same values (one seed, or a broadcast), and load a worker's own checkpoint afterwards"
            )

    def _check_wires(self) -> None:
        """What the first exchange would stumble over, hundreds of steps later."""
        try:
            with propagate_errors(self._channel):
                self._by_codec()
        except BaseException:
            self.close()
            raise

    def step(self) -> bool:
        """Count an inner step, and exchange if it is time. Returns whether it did."""
        self.steps += 1
        if self.steps % self.every:
            return False
        self.exchange()
        return True

    @torch.no_grad()
    def exchange(self) -> None:
        """Exchange now (collective)."""
        with propagate_errors(self._channel):
            _check_complete(self._model, self._parameters)
            moved = {name: self._outer_gradient(name) for name in self._parameters}
            calls = enumerate(self._by_codec().items())
            works = [self._start(number, codec, names, moved) for number, (codec, names) in calls]
            works += self._start_buffers()
        for work in works:
            work.wait()
        for name, anchor in self._anchors.items():
            anchor.grad = moved[name]
        self._outer.step()
        self._outer.zero_grad()
        for name, parameter in self._parameters.items():
            local_part(parameter).copy_(self._anchors[name])
        self.exchanges += 1
        self._stats.steps = self.exchanges

    def _outer_gradient(self, name: str) -> Tensor:
        own = local_part(self._parameters[name])
        return start_of(own, self._anchors[name]) - own.float()

    def _start(self, number: int, codec: Codec, names: tuple[str, ...], moved: dict[str, Tensor]) -> Work:
        if codec.rank:
            moved |= {name: moved[name].contiguous() for name in names}
        tensors = [moved[name] for name in names]
        residuals = self._residuals.residuals(names, tensors) if codec.feedback else None
        if codec.rank:
            return self._start_matrices(number, codec, names, tensors, residuals)
        return self._all_reduce(CALL, tensors, codec, number, residuals=residuals)

    def _start_matrices(
        self, number: int, codec: Codec, names: tuple[str, ...], tensors: list[Tensor], residuals: Residuals | None
    ) -> Work:
        """All matrices of a wire travel together, as their factors."""
        matrices, mean = tuple(Matrix.of(tensor.shape) for tensor in tensors), Reduction(divide=self._channel.world)
        kind = LowRankReduce(codec, matrices, self._channel.world, mean, seed=self._seed)
        xs, step = [tensor.view(-1) for tensor in tensors], (self.exchanges, number)
        call = LowRankCall(kind, xs, step, names, self._factors, residuals)
        count = self._counter(CALL, tensors, codec, call.times)
        work = start_low_rank(self._channel, [call])
        work.then(count)
        return work

    def _start_buffers(self) -> list[Work]:
        """Running statistics are averaged as they are; counters stay each worker's own."""
        buffers = [b for b in self._model.buffers() if b.dtype in FLOATS and b.numel()]
        by_type = [[b for b in buffers if b.dtype == dtype] for dtype in dict.fromkeys(b.dtype for b in buffers)]
        return [self._all_reduce("all_reduce of buffers", same, policy.AS_IS) for same in by_type]

    def _all_reduce(self, name: str, tensors: Sequence[Tensor], codec: Codec, number: int = 0, **more: Any) -> Work:
        times = Times()
        count = self._counter(name, tensors, codec, times)
        more |= {"step": (self.exchanges, number), "seed": self._seed, "times": times, "channel": self._channel}
        work = all_reduce(tensors, codec, dist.ReduceOp.AVG, async_op=True, **more)
        assert work is not None
        work.then(count)
        return work

    def _counter(self, name: str, tensors: Sequence[Tensor], codec: Codec, times: Times) -> Callable[[Work], None]:
        values, world = sum(tensor.numel() for tensor in tensors), self._channel.world
        plain = all_reduce_bytes(values, tensors[0].element_size(), world)
        compressed = compressed_values(codec, tensors[0].dtype, values, world)
        return self._stats.counter(name, values, plain, times, compressed=compressed)

    def _choice(self, name: str, parameter: Tensor) -> policy.CodecChoice:
        info = policy.TensorInfo(name, tuple(parameter.shape), torch.float32, ROLE)
        choice = policy.choose(self._policy, info, self.exchanges, self._min_values)
        if choice.codec.rank and local_part(parameter).shape != parameter.shape:
            raise ValueError(
                f"LocalSGD with {choice.codec}: {name} is sharded, and low rank sums whole matrices; take "
                f"{choice.codec.factors}, or shard nothing"
            )
        return choice

    def _by_codec(self) -> dict[Codec, tuple[str, ...]]:
        names: dict[Codec, tuple[str, ...]] = {}
        for name, parameter in self._parameters.items():
            codec = self._choice(name, parameter).codec
            names[codec] = (*names.get(codec, ()), name)
        return names

    def rows(self) -> list[TensorRow]:
        """Every parameter: its wire, or why it stays as it is."""
        return [
            TensorRow.of(name, parameter.numel(), self._choice(name, parameter), torch.float32, ROLE, parameter.shape)
            for name, parameter in self._parameters.items()
        ]

    def explain(self) -> str:
        """Every parameter in a table, and how often it travels."""
        buffers = sum(b.numel() * b.element_size() for b in self._model.buffers() if b.dtype in FLOATS)
        notes = [f"every {self.every} steps over {self._channel.world} workers; {self.exchanges} exchanges so far"]
        if buffers:
            notes.append(f"buffers: {buffers} bytes averaged at each exchange, as they are")
        return render(self.rows(), notes)

    def stats(self) -> dict[str, float]:
        """Bytes, effective ratio and milliseconds of this rank, summed over the exchanges (its `steps`)."""
        return self._stats.as_dict()

    def events(self) -> list[CallEvent]:
        """The last calls, for a trace."""
        return list(self._stats.events)

    def check_ranks(self) -> None:
        """Compare where the workers started from, and their outer optimizers (collective); raise where one differs."""
        state = [
            v for a in self._anchors.values() for v in self._outer.state.get(a, {}).values() if isinstance(v, Tensor)
        ]
        factors = [vectors for _, vectors in sorted(self._factors.state_dict().items())]
        different = ranks_that_differ(self._channel, digest([*self._anchors.values(), *state, *factors]))
        if different:
            raise RuntimeError(f"check_ranks: the outer state of workers {different} differs from that of worker 0")

    @torch.no_grad()
    def state_dict(self) -> State:
        """Where the workers started, the outer optimizer, counters, mean residuals, and factors (collective).

        Valid for any number of workers. The model's own state is the caller's: best saved right after an exchange, when
        it is the same everywhere.
        """
        residuals = self._residuals.by_parameter()
        mean = {
            name: residuals.get(name, torch.zeros(a.numel(), dtype=torch.float32)).to(a.device, copy=True)
            for name, a in self._anchors.items()
        }
        all_reduce(list(mean.values()), "fp32", dist.ReduceOp.AVG, channel=self._channel.called("state_dict"))
        counters = {"steps": self.steps, "exchanges": self.exchanges}
        factors = self._factor_places() | self._factors.state_dict()
        return local_state.to_save(self._parameters, self._anchors, mean, factors, self._outer, counters)

    def _factor_places(self) -> dict[str, Tensor]:
        """Of all matrices that would travel by low rank now."""
        places: dict[str, Tensor] = {}
        for codec, names in self._by_codec().items():
            for name in names if codec.rank else ():
                matrix = Matrix.of(self._parameters[name].shape)
                places |= KeptFactors.places(name, matrix, codec, self._anchors[name].device)
        return places

    @torch.no_grad()
    def load_state_dict(self, state: State) -> None:
        """Go on from a checkpoint, with whatever number of workers; load the model's state as well."""
        self._residuals.load(local_state.load(self._parameters, self._anchors, self._outer, self._fresh, state))
        self._factors.load(state.get(local_state.FACTORS, {}))
        self.steps, self.exchanges = int(state["counters"]["steps"]), int(state["counters"]["exchanges"])
        self._stats.steps = self.exchanges

    def close(self) -> None:
        """Stop counting steps and close the connections; the parameters stay as they are."""
        self._unhook()
        self._channel.close()


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise ValueError("LocalSGD: the model has no parameter that is trained")
    for name, parameter in trained.items():
        if parameter.dtype not in FLOATS:
            raise TypeError(f"LocalSGD: {name} is {parameter.dtype}; it takes 16- and 32-bit floats")
    return trained


def _check_complete(model: nn.Module, ours: Mapping[str, nn.Parameter]) -> None:
    """Whatever is trained and not exchanged drifts apart."""
    more = sorted(name for name, p in model.named_parameters() if p.requires_grad and name not in ours)
    if more:
        raise RuntimeError(
            f"LocalSGD: {more[0]} is trained now and was not when LocalSGD was made; close() it and make a new one "
            "while all workers have the same values"
        )


_COUNTED: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""The optimizers whose steps somebody counts."""


def _check_optimizer(optimizer: Optimizer | None, parameters: Mapping[str, Tensor]) -> None:
    if optimizer is None:
        return
    if optimizer in _COUNTED:
        raise RuntimeError("LocalSGD: another one counts the steps of this optimizer already; close() that one first")
    ours = {id(p) for p in parameters.values()}
    if not any(id(p) in ours for p in parameters_of(optimizer)):
        raise ValueError(
            "LocalSGD: the optimizer holds none of the model's parameters; make it after the model has its final ones "
            "(after fully_shard and after .to())"
        )


def _call_after_steps(optimizer: Optimizer | None, step: Callable[[], object]) -> Callable[[], None]:
    """Call `step` after each step of the optimizer; returns the way to stop that."""
    if optimizer is None:
        return lambda: None

    def count(*_: Any) -> None:
        step()

    hook = optimizer.register_step_post_hook(count)
    _COUNTED.add(optimizer)

    def stop() -> None:
        hook.remove()
        _COUNTED.discard(optimizer)

    return stop
