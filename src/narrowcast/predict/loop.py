"""Real DDP steps beside what is predicted for them: in the loop a link is slower than bare, and DDP costs something."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace

import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel

from narrowcast.measure import DeviceClock, until_all_done
from narrowcast.parallel import attach
from narrowcast.predict.cluster import Cluster, Loop
from narrowcast.predict.costs import Costs
from narrowcast.predict.model import Profile
from narrowcast.predict.profile import DEFAULT_BATCH, Profiler, build, default_loss, example_batch, mean_over_ranks
from narrowcast.predict.step import PLAIN, Setup, StepPredictor

WIRE = "int8/256"
ROUNDS, WARM_UP = 9, 3
SLOWEST = 8.0
"""A factor beyond it is none of the link's."""
TELLS = 0.05
"""Communication tells a factor where it adds at least this share of a step."""


class _Trainer:
    """DDP steps of a copy; the parameters do not change."""

    def __init__(self, module: nn.Module, batch: Tensor, wire: str = "", sends: bool = True) -> None:
        own = copy.deepcopy(module)
        self._batch, self._sends = batch, sends
        self.model = DistributedDataParallel(own, device_ids=[batch.device] if batch.is_cuda else None)
        self.handle = attach(self.model, wire) if wire else None
        self._optimizer = optim.SGD(own.parameters(), lr=0.0)
        self._clock = DeviceClock(batch.device)

    def seconds(self) -> float:
        """The slowest rank's."""
        return until_all_done(self._step, self._clock)

    def _step(self) -> None:
        self._optimizer.zero_grad()
        self.model.require_backward_grad_sync = self._sends
        default_loss(self.model(self._batch)).backward()
        self._optimizer.step()


def prepare(model: str, shape: str) -> tuple[nn.Module, Tensor]:
    """The module that `model` names, and inputs of this shape."""
    module = build(model)
    return module, example_batch(module, shape, DEFAULT_BATCH)


def measure(cluster: Cluster, module: nn.Module, batch: Tensor, name: str, wire: str = WIRE) -> Cluster:
    """Collective: the same cluster with factors from real steps of this model, plain and with one wire."""
    runs = {
        "alone": _Trainer(module, batch, sends=False),
        PLAIN: _Trainer(module, batch),
        wire: _Trainer(module, batch, wire),
    }
    took: dict[str, list[float]] = {key: [] for key in runs}
    with closing(Profiler(copy.deepcopy(module), batch)) as profiler:
        for number in range(WARM_UP + ROUNDS):
            # the steps without communication in every round, so that all see the same machine
            for _ in range(2):
                dist.barrier()
                profiler.step()
            for key, run in runs.items():
                spent = run.seconds()
                if number >= WARM_UP:
                    took[key].append(spent)
    handle = runs[wire].handle
    if handle is not None:
        handle.detach()
    profile = mean_over_ranks(profiler.result(name))
    return calibrated(
        cluster, profile, dist.get_world_size(), {key: statistics.median(t) for key, t in took.items()}, wire
    )


def calibrated(cluster: Cluster, profile: Profile, world: int, took: dict[str, float], wire: str = WIRE) -> Cluster:
    """took: seconds of a step of DDP that sends nothing ("alone"), of a plain one, and of one with the wire."""
    own = max(0.0, took["alone"] - profile.compute)
    made = replace(cluster, loop=Loop(1e3 * own))

    def predicted(loop: Loop, setup: Setup) -> float:
        return float(StepPredictor(profile, Costs(replace(made, loop=loop), draws=0)).steps(setup)[0])

    plain = factor(lambda f: predicted(replace(made.loop, plain=f), Setup(world, PLAIN)), took[PLAIN], took["alone"])
    wires = factor(lambda f: predicted(replace(made.loop, wires=f), Setup(world, wire)), took[wire], took["alone"])
    return replace(made, loop=Loop(1e3 * own, plain, wires))


def factor(predicted: Callable[[float], float], measured: float, alone: float) -> float:
    """How many times longer calls must take for the step to come out as measured; 1 where it does not tell."""
    if measured < (1 + TELLS) * alone:
        return 1.0
    low, high = 1 / SLOWEST, SLOWEST
    # a step that no calls within reason explain says nothing about them
    if predicted(low) > measured or predicted(high) < measured:
        return 1.0
    for _ in range(30):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if predicted(middle) < measured else (low, middle)
    return (low * high) ** 0.5
