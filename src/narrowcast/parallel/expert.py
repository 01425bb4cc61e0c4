"""Experts on several ranks: tokens travel to their experts and back, each way and each direction with its own spec."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from narrowcast.collectives import DisagreementError, Work, api, channel_of
from narrowcast.parallel.tensor import check_activation
from narrowcast.parallel.wires import Direction, Spec, Turn, Wires, remember

Counts = Sequence[int]


class Routes(NamedTuple):
    """How many rows go from this rank to each, and come from each, where all ranks have told each other."""

    leaving: tuple[int, ...]
    arriving: tuple[int, ...]
    even: bool = False
    """Whether all ranks send equally many to everybody."""

    @classmethod
    def exchange(
        cls, leaving: Counts, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu"
    ) -> Routes:
        """From how many rows we send to each: one small exchange of integers. device: whose backend carries them."""
        return cls.of(_gather(torch.tensor(list(leaving), device=device), group, ranks=len(leaving)), group)

    @classmethod
    def of(cls, counts_WW: Tensor, group: dist.ProcessGroup | None = None) -> Routes:
        """From everybody's counts, a row a rank, as every rank has them."""
        for rank in (counts_WW < 0).any(dim=1).nonzero().flatten().tolist():
            raise DisagreementError(
                f"all_to_all: rank {rank} has counts that are negative or do not fit its rows, so nothing was sent; "
                "give as many rows there as its counts add up to"
            )
        own, table = dist.get_rank(group), counts_WW.tolist()
        even = len({count for row in table for count in row}) == 1
        return cls(tuple(table[own]), tuple(row[own] for row in table), even)

    def back(self) -> Routes:
        """The way back."""
        return Routes(self.arriving, self.leaving, self.even)


def _gather(mine: Tensor, group: dist.ProcessGroup | None, **alike: object) -> Tensor:
    """Everyone's counts, one a row, in host memory. alike: what makes their shape, for ranks that disagree."""
    return torch.stack(channel_of(group).gather(mine, "counts of rows", **alike)).cpu()


def all_to_all(x: Tensor, wires: Wires, leaving: Counts | Routes, arriving: Counts | None = None) -> Tensor:
    """Rows of `x` to the other ranks: the first `leaving[0]` to rank 0, and so on; what arrives, in rank order.

    Differentiable: gradients go the other way with the backward spec. arriving: asked from the others where not given;
    where both are given the ranks compare them in every call, and where they are `Routes` no more.
    """
    check_activation(x)
    counts = list(leaving.leaving) if isinstance(leaving, Routes) else list(leaving)
    if len(counts) != wires.world or sum(counts) != len(x) or min(counts) < 0:
        error = ValueError(
            f"all_to_all: leaving={counts} must be {wires.world} counts that add up to the {len(x)} rows of x"
        )
        _make_the_others_raise(x, wires, error, known=isinstance(leaving, Routes), ask=not arriving)
        raise error
    if wires.world == 1:
        # nothing travels, so nothing is rounded
        return x.view_as(x)
    if isinstance(leaving, Routes):
        return _AllToAll.apply(x, wires, leaving, True)
    if arriving:
        return _AllToAll.apply(x, wires, Routes(tuple(counts), tuple(arriving)), False)
    return _AllToAll.apply(x, wires, Routes.exchange(counts, wires.group, x.device), True)


def _make_the_others_raise(x: Tensor, wires: Wires, error: ValueError, known: bool, ask: bool) -> None:
    """Take part in what the others do next, in a way that no count of theirs fits: they raise and do not wait."""
    if wires.world == 1:
        return
    if known:
        # they do not ask: this ends their group
        channel_of(wires.group).fail(error)
        return
    nobody = (0,) * wires.world
    with suppress(DisagreementError):
        if ask:
            Routes.exchange([-1] * wires.world, wires.group, x.device)
        else:
            _exchange(x[:0], wires, Direction.FORWARD, Routes(nobody, nobody), known=False)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, wires: Wires, routes: Routes, known: bool) -> Tensor:
        ctx.wires, ctx.routes = wires, routes
        return _exchange(x, wires, Direction.FORWARD, routes, known)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # what fitted on the way there fits on the way back
        return _exchange(gradients[0], ctx.wires, Direction.BACKWARD, ctx.routes.back(), known=True), None, None, None


def _exchange(x: Tensor, wires: Wires, direction: Direction, routes: Routes, known: bool) -> Tensor:
    """known: all ranks know that their counts fit; else they compare them."""
    source = x.detach().contiguous()
    received = source.new_empty(sum(routes.arriving), *source.shape[1:])
    width = source.shape[1:].numel()
    splits: dict[str, Any] = {}
    if not (known and routes.even):
        splits["output_split_sizes"] = [width * rows for rows in routes.arriving]
        splits["input_split_sizes"] = [width * rows for rows in routes.leaving]
        splits["agreed"] = {"width of a row": width} if known else None

    def call(turn: Turn) -> Work | None:
        options = {"async_op": True, "step": turn.step, "seed": turn.seed, **splits}
        return api.all_to_all(received.view(-1), source.view(-1), turn.codec, wires.group, **options)

    away = (source.numel() - routes.leaving[wires.rank] * width) * source.element_size()
    wires.run(direction, call, source.numel(), away)
    return received


class MoE(nn.Module):
    """A layer of experts, `experts` of them on this rank, with a learned router that sends each token to `top_k`.

    Experts are numbered over the ranks: those of rank 0 first; every rank has as many. dispatch and combine: the specs
    of tokens on their way to the experts and back; dispatch_backward and combine_backward those of their gradients.
    Tokens are never dropped.
    """

    def __init__(
        self,
        width: int,
        experts: Sequence[nn.Module],
        *,
        top_k: int = 2,
        group: dist.ProcessGroup | None = None,
        dispatch: Spec = "as-is",
        combine: Spec = "as-is",
        dispatch_backward: Spec | None = None,
        combine_backward: Spec | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.experts = nn.ModuleList(experts)
        self.out = Wires(dispatch, dispatch_backward, group=group, name="dispatch", seed=seed)
        self.back = Wires(combine, combine_backward, group=group, name="combine", seed=seed)
        for wires in (self.out, self.back):
            remember(self, wires)
        total = self.out.world * len(self.experts)
        if not 0 < top_k <= total:
            raise ValueError(f"MoE: top_k={top_k} of {total} experts; take 1 to {total}")
        self.top_k, self.router = top_k, nn.Linear(width, total, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights_TK, chosen_TK = self.router(tokens).softmax(dim=-1).topk(self.top_k)
        order = chosen_TK.flatten().argsort(stable=True)
        owners = order // self.top_k
        done = self._through_experts(tokens[owners], chosen_TK.flatten()[order])
        weighted = done * weights_TK.flatten()[order].unsqueeze(-1).to(done.dtype)
        return torch.zeros_like(tokens).index_add(0, owners, weighted).view_as(x)

    def _through_experts(self, rows: Tensor, numbers: Tensor) -> Tensor:
        """Rows, sorted by the number of their expert, to the experts and back in the same order."""
        world, own = self.out.world, len(self.experts)
        leaving_WE = torch.bincount(numbers, minlength=world * own).view(world, own)
        counts_WWE = leaving_WE.cpu()[None] if world == 1 else _gather(leaving_WE, self.out.group, experts=own)
        routes = Routes.of(counts_WWE.sum(2), self.out.group)
        arrived = all_to_all(rows, self.out, routes)
        arriving_WE = counts_WWE[:, self.out.rank].to(rows.device)
        return all_to_all(self._compute(arrived, arriving_WE), self.back, routes.back())

    def _compute(self, arrived: Tensor, arriving_WE: Tensor) -> Tensor:
        """Each expert on its rows from all ranks; the rows keep their places."""
        numbers = torch.arange(len(self.experts), device=arrived.device).repeat(len(arriving_WE))
        number_of = numbers.repeat_interleave(arriving_WE.flatten())
        done = torch.zeros_like(arrived)
        for number, expert in enumerate(self.experts):
            places = (number_of == number).nonzero().flatten()
            done = done.index_copy(0, places, expert(arrived[places]).to(done.dtype))
        return done
