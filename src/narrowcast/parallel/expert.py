"""Experts on several ranks: tokens travel to their experts and back, each way and each direction with its own spec."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from narrowcast.collectives import DisagreementError, Work, api
from narrowcast.parallel.tensor import check_activation
from narrowcast.parallel.wires import Direction, Spec, Turn, Wires, gather_small, remember

Counts = Sequence[int]


def exchanged_counts(leaving: Counts, group: dist.ProcessGroup | None = None) -> list[int]:
    """How many rows each rank will send us, from how many we send to each: one small exchange of integers."""
    counts = torch.stack(gather_small(torch.tensor(list(leaving)), group, "counts of rows", ranks=len(leaving)))
    for rank in (counts < 0).any(dim=1).nonzero().flatten().tolist():
        raise DisagreementError(
            f"all_to_all: rank {rank} has counts that are negative or do not fit its rows, so nothing was sent; give "
            "as many rows there as its counts add up to"
        )
    return [int(count) for count in counts[:, dist.get_rank(group)].tolist()]


def all_to_all(x: Tensor, wires: Wires, leaving: Counts, arriving: Counts | None = None) -> Tensor:
    """Rows of `x` to the other ranks: the first `leaving[0]` to rank 0, and so on; what arrives, in rank order.

    Differentiable: gradients go the other way with the backward spec. arriving: asked from the others where not given.
    """
    check_activation(x)
    if len(leaving) != wires.world or sum(leaving) != len(x) or min(leaving) < 0:
        _make_the_others_raise(x, wires, ask=not arriving)
        raise ValueError(
            f"all_to_all: leaving={list(leaving)} must be {wires.world} counts that add up to the {len(x)} rows of x"
        )
    expected = list(leaving) if wires.world == 1 else list(arriving or exchanged_counts(leaving, wires.group))
    return _AllToAll.apply(x, wires, list(leaving), expected)


def _make_the_others_raise(x: Tensor, wires: Wires, ask: bool) -> None:
    """Take part in what the others do next, in a way that no count of theirs fits: they raise and do not wait."""
    if wires.world == 1:
        return
    with suppress(DisagreementError):
        if ask:
            exchanged_counts([-1] * wires.world, wires.group)
        else:
            _exchange(x[:0], wires, Direction.FORWARD, [0] * wires.world, [0] * wires.world)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, wires: Wires, leaving: list[int], arriving: list[int]) -> Tensor:
        ctx.wires, ctx.leaving, ctx.arriving = wires, leaving, arriving
        return _exchange(x, wires, Direction.FORWARD, leaving, arriving)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        back = _exchange(gradients[0], ctx.wires, Direction.BACKWARD, ctx.arriving, ctx.leaving)
        return back, None, None, None


def _exchange(x: Tensor, wires: Wires, direction: Direction, leaving: list[int], arriving: list[int]) -> Tensor:
    if wires.world == 1:
        # nothing travels, so nothing is rounded
        return x.view_as(x)
    source = x.detach().contiguous()
    received = source.new_empty(sum(arriving), *source.shape[1:])
    width = source.shape[1:].numel()

    def call(turn: Turn) -> Work | None:
        return api.all_to_all(
            received.view(-1),
            source.view(-1),
            turn.codec,
            wires.group,
            async_op=True,
            output_split_sizes=[width * rows for rows in arriving],
            input_split_sizes=[width * rows for rows in leaving],
            step=turn.step,
            seed=turn.seed,
        )

    away = (source.numel() - leaving[wires.rank] * width) * source.element_size()
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
        arriving_WE = self._arriving_counts(leaving_WE)
        leaving, arriving = leaving_WE.sum(1).tolist(), arriving_WE.sum(1).tolist()
        arrived = all_to_all(rows, self.out, leaving, arriving)
        return all_to_all(self._compute(arrived, arriving_WE), self.back, arriving, leaving)

    def _arriving_counts(self, leaving_WE: Tensor) -> Tensor:
        if self.out.world == 1:
            return leaving_WE
        counts = gather_small(leaving_WE.cpu(), self.out.group, "counts of tokens", experts=len(self.experts))
        return torch.stack(counts)[:, self.out.rank].to(leaving_WE.device)

    def _compute(self, arrived: Tensor, arriving_WE: Tensor) -> Tensor:
        """Each expert on its rows from all ranks; the rows keep their places."""
        numbers = torch.arange(len(self.experts), device=arrived.device).repeat(len(arriving_WE))
        number_of = numbers.repeat_interleave(arriving_WE.flatten())
        done = torch.zeros_like(arrived)
        for number, expert in enumerate(self.experts):
            places = (number_of == number).nonzero().flatten()
            done = done.index_copy(0, places, expert(arrived[places]).to(done.dtype))
        return done
