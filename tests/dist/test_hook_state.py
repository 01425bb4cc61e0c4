"""`HookState`: for frameworks that wrap the model and register hooks by themselves."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from dist.models import bits, error_of, loss, mlp, wrapped
from dist.pool import Pool
from torch import nn

import narrowcast as nc
from narrowcast.parallel.integrations import HookState


def train(model: nn.Module, rank: int) -> bytes:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss(model, rank, step).backward()
        optimizer.step()
    return bits(model.module)


def both_ways(group: dist.ProcessGroup, gradients: object) -> tuple[bytes, bytes, list[str], float]:
    """A state that knows the model as it was before, beside `attach`."""
    rank, module = dist.get_rank(group), mlp()
    state = HookState(module, gradients, group=group, min_values=1)
    early = error_of(state.rows)
    model = wrapped(group, module)
    model.register_comm_hook(state, nc.ddp_hook)
    ours = train(model, rank)
    names, steps = [row.wire for row in state.rows()], state.stats()["steps"]
    assert "0.weight" in state.explain()
    assert len(state.events()) == state.stats()["calls"]
    assert "no gradient has come yet" in early
    state.close()
    attached = wrapped(group)
    handle = nc.attach(attached, gradients, min_values=1)
    theirs = train(attached, rank)
    handle.detach()
    return ours, theirs, names, steps


@pytest.mark.parametrize("gradients", ["int8/256", {"*.bias": "as-is", "*": "int4/128+ef"}], ids=["spec", "by name"])
def test_a_state_made_before_the_model_is_wrapped_gives_the_bits_of_attach(pool: Pool, gradients: object) -> None:
    for ours, theirs, wires, steps in pool.run(2, both_ways, gradients):
        assert ours == theirs
        assert steps == 3
        assert len(set(wires)) == (1 if isinstance(gradients, str) else 2)


def test_a_wrong_spec_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="int8/255"):
        HookState(mlp(), "int8/255")
