"""Law 8 in LocalSGD: an outer optimizer writes down what it is given."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from dist.law8.cases import Case
from dist.law8.gradients import counts, group_of, schedule
from dist.law8.ledger import Ledger
from dist.law8.toy import Toy, uses, values
from torch import Tensor

import narrowcast as nc

State = dict[str, Any]


class Outer(torch.optim.SGD):
    """Averages, and keeps what it was given."""

    def __init__(self, anchors: list[Tensor]) -> None:
        super().__init__(anchors, lr=0.5, momentum=0.5)
        self.given: list[Tensor] = []

    def step(self, closure: Any = None) -> None:
        self.given = [anchor.grad.double() for group in self.param_groups for anchor in group["params"]]
        super().step()


class Training:
    """One part of a case: workers, from one checkpoint to the next."""

    def __init__(self, case: Case, world: int, first: int, state: State) -> None:
        self.case, self.world, self.rank = case, world, dist.get_rank()
        self.model = Toy(case)
        self.named = dict(self.model.named_parameters())
        self.inner = torch.optim.SGD(self.model.parameters(), lr=1.0)
        made: list[Outer] = []
        self.local = nc.LocalSGD(
            self.model,
            self.inner if case.bucket_view else None,
            every=case.passes,
            spec=schedule(case, 0, 1),
            outer=lambda anchors: made.append(Outer(anchors)) or made[0],
            group=group_of(*range(world)),
            min_values=1,
            seed=case.seed,
        )
        (self.outer,) = made
        if state:
            self.local.load_state_dict(state)
            with torch.no_grad():
                for name, p in self.named.items():
                    p.copy_(state["anchors"][name])

    def iterate(self, iteration: int, ledger: Ledger, settle: bool) -> None:
        case = self.case
        if case.frozen is not None and iteration >= case.frozen:
            list(self.named.values())[-1].requires_grad_(False)
        start = {name: p.detach().double() for name, p in self.named.items()}
        for number in range(case.passes):
            self._move(iteration, number)
            if number == case.passes - 1:
                moved = {name: start[name] - p.detach().double() for name, p in self.named.items()}
            self._count()
        flat = torch.cat([value.flatten() for value in moved.values()])
        ledger.saw(flat)
        dist.all_reduce(flat, group=group_of(*range(self.world)))
        parts = flat.split([value.numel() for value in moved.values()])
        for (name, p), total, given in zip(self.named.items(), parts, self.outer.given, strict=True):
            if counts(case, name, torch.empty(0), iteration):
                ledger.count(name, total.view(p.shape) / self.world, given)
        ledger.steps += 1
        ledger.world = max(ledger.world, self.world)

    @torch.no_grad()
    def _move(self, iteration: int, number: int) -> None:
        """What an inner step does: nothing to what is frozen, unused, or skipped by a scaler of this worker alone."""
        for place, p in enumerate(self.named.values()):
            move = values(self.case, (iteration, number, self.rank, place), tuple(p.shape), p.dtype)
            if p.requires_grad and uses(self.case, iteration, number, self.rank, place):
                p.add_(move)

    def _count(self) -> None:
        if not self.case.bucket_view:
            self.local.step()
            return
        # the hook counts, after a step that changes nothing: there are no gradients
        self.inner.step()

    def part(self, name: str, whole: Tensor) -> Tensor:
        return whole

    whole = part

    def residuals(self) -> State:
        return self.local.state_dict()["owed"]

    def state(self) -> State:
        return self.local.state_dict()

    def close(self) -> None:
        self.local.close()
