"""Loss scalers and error feedback: the passes of a skipped step are undone, for the parameters of that optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from dist.pool import Pool
from dist.shards import mesh_of, replicated_mesh
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

import narrowcast as nc

SHAPE, SPEC, STEPS = (40, 30), "int2/64+ef", 9


class Two(nn.Module):
    """Two parameters; the gradient of each is what it is multiplied by."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(SHAPE)), nn.Parameter(torch.zeros(SHAPE))

    def forward(self, grads: Tensor) -> Tensor:
        return (self.a * grads[0]).sum() + (self.b * grads[1]).sum()


@dataclass(frozen=True)
class Case:
    """How to train: one optimizer or two, and what happens at which step."""

    optimizers: int = 2
    bad: dict[int, str] = field(default_factory=dict)
    """The steps in which a parameter's gradient has an Inf on rank 0."""
    every: tuple[int, int] = (1, 1)
    """Each optimizer steps every so many steps; it zeroes its gradients then. With `held`: they share one scale."""
    passes: int = 1
    fused: bool = False
    lowered: tuple[int, ...] = ()
    """The steps after which the scale is set by hand."""
    unscaled: bool = False
    """Gradients are unscaled and clipped before the step."""
    enabled: bool = True
    held: bool = False
    """The scale is set to what it was after each step: a skip does not show in it."""
    saves: bool = False
    """Look at the state at every place of a step where somebody may."""


CASES = {
    "plain": Case(),
    "one optimizer": Case(1, {0: "a", 4: "b", 5: "a"}),
    "the first of two": Case(bad={0: "a", 4: "a", 5: "a"}),
    "the second of two": Case(bad={0: "b", 3: "b"}),
    "in turn, then both": Case(bad={1: "a", 2: "b", 5: "ab"}),
    "lowered by hand": Case(lowered=(0, 3, 4), bad={4: "b"}),
    "the scale stays": Case(bad={1: "a", 4: "b"}, held=True),
    "accumulated": Case(passes=3, bad={0: "a", 2: "b", 5: "ab"}),
    "one steps seldom": Case(every=(1, 3), bad={2: "b", 4: "a", 8: "a"}, held=True),
    "seldom and accumulated": Case(every=(3, 2), passes=2, bad={2: "a", 3: "b"}, held=True),
    "fused": Case(fused=True, bad={0: "b", 2: "a", 5: "ab"}),
    "clipped": Case(unscaled=True, bad={0: "a", 3: "b"}),
    "switched off": Case(enabled=False),
    "looked at": Case(saves=True, passes=2, bad={0: "a", 3: "b"}, every=(1, 2), held=True),
}

FEW = ("in turn, then both", "seldom and accumulated")
"""For eight processes."""


def whole(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().double()


def model_of(group: dist.ProcessGroup, kind: str) -> nn.Module:
    if kind == "ddp":
        return DDP(Two(), process_group=group, bucket_cap_mb=0.001)
    return fully_shard(Two(), mesh=replicated_mesh(2, 4) if kind == "hsdp" else mesh_of(group))


def passes_of(case: Case, step: int, rank: int) -> Iterator[Tensor]:
    for number in range(case.passes):
        seed = 1000 * step + 10 * number + rank
        yield torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(seed))


class Training:
    """One optimizer for each group of parameters, learning rate 1: what was applied is minus the parameter."""

    def __init__(self, group: dist.ProcessGroup, kind: str, case: Case) -> None:
        self.group, self.case, self.rank = group, case, dist.get_rank(group)
        self.model = model_of(group, kind)
        options: dict[str, object] = {"init_scale": 1024.0, "growth_interval": 10**6}
        if kind != "ddp":
            options["process_group"] = group
        scaler = torch.amp.GradScaler if kind == "ddp" else ShardedGradScaler
        self.scaler = scaler("cpu", enabled=case.enabled, **options)
        self.handle = nc.attach(self.model, SPEC, min_values=1, scaler=self.scaler)
        self.named = {name.removeprefix("module."): p for name, p in self.model.named_parameters()}
        parts = ["ab"] if case.optimizers == 1 else ["a", "b"]
        # the scaler lets a fused one look for Inf itself; there is none for sharded parameters on CPUs
        self.optimizers = {
            part: torch.optim.SGD(
                [self.named[n] for n in part], lr=1.0, fused=case.fused and kind == "ddp" and part != "b"
            )
            for part in parts
        }
        self.expected, self.pending = ({n: torch.zeros(SHAPE).double() for n in "ab"} for _ in range(2))

    def step(self, step: int) -> None:
        for number, grads in enumerate(passes_of(self.case, step, self.rank)):
            bad = self.case.bad.get(step, "") if number == 0 and self.rank == 0 else ""
            sent = grads.clone()
            for index, name in enumerate("ab"):
                if name in bad:
                    # in the middle of a shard: a block there has values of this parameter alone
                    sent[index].view(-1)[450] = torch.inf
                mean = grads[index].double()
                dist.all_reduce(mean, group=self.group)
                self.pending[name] += mean / dist.get_world_size(self.group)
            self.scaler.scale(self.model(sent)).backward()
            self.look()
        stepped = [
            part for part, every in zip(self.optimizers, self.case.every, strict=False) if (step + 1) % every == 0
        ]
        for part in stepped:
            if self.case.unscaled:
                self.scaler.unscale_(self.optimizers[part])
                nn.utils.clip_grad_norm_([self.named[n] for n in part], 1e9)
            self.scaler.step(self.optimizers[part])
            self.look()
            self.optimizers[part].zero_grad()
            self.settle(part, step)
        if stepped and (self.case.held or step in self.case.lowered):
            self.scaler.update(self.scaler.get_scale() / (1 if self.case.held else 2))
        elif stepped:
            self.scaler.update()
        self.look()

    def settle(self, part: str, step: int) -> None:
        every = self.case.every[list(self.optimizers).index(part)]
        skipped = any(set(part) & set(self.case.bad.get(s, "")) for s in range(step + 1 - every, step + 1))
        for name in part:
            if not skipped:
                self.expected[name] += self.pending[name]
            self.pending[name].zero_()

    def look(self) -> None:
        if self.case.saves:
            self.handle.state_dict()

    def missing(self) -> dict[str, float]:
        """Of what was expected: what was neither applied nor is a residual."""
        state = self.handle.state_dict()
        residuals = {n: whole(state[n]) if n in state else 0.0 for n in "ab"}
        found = {n: self.expected[n] + whole(p) - residuals[n] for n, p in self.named.items()}
        return {n: float(x.abs().max() / self.expected[n].abs().max()) for n, x in found.items()}


def trained(group: dist.ProcessGroup, kind: str) -> list[str]:
    found = []
    for name in FEW if kind == "hsdp" else CASES:
        case = CASES[name]
        training = Training(group, kind, case)
        for step in range(STEPS):
            training.step(step)
        # a last one for those that have not stepped in the last step
        for part, every in zip(training.optimizers, case.every, strict=False):
            if STEPS % every:
                training.scaler.step(training.optimizers[part])
                training.settle(part, STEPS - 1)
        missing = training.missing()
        training.handle.detach()
        found += [f"{name}: {missing}"] if max(missing.values()) > 2e-6 else []
    return found


@pytest.mark.parametrize("kind, world", [("ddp", 2), ("fsdp", 2), ("hsdp", 8)])
def test_what_was_applied_and_the_residuals_are_what_was_expected_of_the_steps_that_counted(
    pool: Pool, kind: str, world: int
) -> None:
    assert pool.run(world, trained, kind) == [[]] * world


def refused(group: dist.ProcessGroup) -> str:
    class Mine:
        def is_enabled(self) -> bool:
            return True

    try:
        nc.attach(DDP(Two(), process_group=group), SPEC, scaler=Mine())
    except TypeError as error:
        return str(error)
    return ""


def test_a_scaler_that_does_not_say_whose_step_it_skipped_is_refused(pool: Pool) -> None:
    for told in pool.run(2, refused):
        assert told.startswith("attach: scaler= is a Mine, which does not say whose step it skipped")
