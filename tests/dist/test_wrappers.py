"""Models and optimizers as frameworks hand them on: compiled, wrapped, replicated."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from dist.models import bits, error_of, loss, mlp, wrapped
from dist.pool import Pool
from torch import nn

import narrowcast as nc
from narrowcast.parallel.integrations import HookState


def compiled(group: dist.ProcessGroup, outside: bool) -> tuple[bytes, float]:
    """The parameters after some steps. DDP in torch.compile, or as it is."""
    rank, model = dist.get_rank(group), wrapped(group, bucket_cap_mb=25)
    called = torch.compile(model, backend="eager") if outside else model
    handle = nc.attach(called, "int4/128+ef", min_values=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss(called, rank, step).backward()
        optimizer.step()
    handle.detach()
    return bits(model.module), handle.stats()["ratio"]


def test_a_compiled_ddp_model_sends_the_same_bits(pool: Pool) -> None:
    found = pool.run(2, compiled, True)
    assert found == pool.run(2, compiled, False)
    assert found[0][1] > 4


class Prepared(torch.optim.Optimizer):
    """As Accelerate's prepare() returns it: it passes a step on where gradients were summed."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.passes_on = optimizer, True

    def step(self, closure: Any = None) -> None:
        if self.passes_on:
            self.optimizer.step()


def local(group: dist.ProcessGroup, wrapped_one: bool) -> tuple[bytes, int]:
    rank, model = dist.get_rank(group), mlp()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = Prepared(inner) if wrapped_one else inner
    whole = Prepared(optimizer) if wrapped_one else inner
    workers = nc.LocalSGD(model, whole, every=2, spec="int8/256", group=group, min_values=1)
    for step in range(8):
        model.zero_grad()
        loss(model, rank, step).backward()
        if wrapped_one:
            optimizer.passes_on = step % 2 == 1
        if wrapped_one or step % 2:
            optimizer.step()
    workers.close()
    return bits(model), workers.exchanges


def test_local_sgd_counts_the_steps_of_the_optimizer_inside(pool: Pool) -> None:
    found = pool.run(2, local, True)
    assert found == pool.run(2, local, False)
    assert found[0][1] == 2


def refused(group: dist.ProcessGroup) -> tuple[str, str]:
    from torch.distributed._composable.replicate import replicate

    torch._dynamo.config.optimize_ddp = "python_reducer"
    try:
        reduced_by_python = wrapped(group)
    finally:
        torch._dynamo.config.optimize_ddp = True
    replicated = replicate(mlp(), process_group=group)
    return tuple(error_of(lambda m=m: nc.attach(m, "int8/256")) for m in (reduced_by_python, replicated))


def test_what_has_no_buckets_for_a_hook_is_refused_with_a_way_out(pool: Pool) -> None:
    for by_python, replicated in pool.run(2, refused):
        assert 'optimize_ddp = "python_reducer"' in by_python
        assert 'set it to "ddp_optimizer"' in by_python
        assert "before that, call model.register_comm_hook(HookState(model, gradients), nc.ddp_hook)" in replicated


def hooked(group: dist.ProcessGroup) -> tuple[float, bool]:
    """What that message says to do."""
    from torch.distributed._composable.replicate import replicate

    rank, module = dist.get_rank(group), mlp()
    state = HookState(module, "int8/256", min_values=1, group=group)
    model: nn.Module = replicate(module, process_group=group)
    model.register_comm_hook(state, nc.ddp_hook)
    loss(model, rank, 0).backward()
    names = {row.name for row in state.rows()} == {name for name, _ in mlp().named_parameters()}
    ratio = state.stats()["ratio"]
    state.close()
    return ratio, names


def test_a_replicated_model_takes_the_hook(pool: Pool) -> None:
    for ratio, names in pool.run(2, hooked):
        assert ratio > 3
        assert names
