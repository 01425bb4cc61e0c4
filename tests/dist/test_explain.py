"""`explain()`, `stats()` and the log say how much is compressed, what DDP leaves out, and which patterns miss."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist
from dist.models import error_of, loss, mlp, wrapped
from dist.pool import Pool
from dist.shards import mesh_of, sharded
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import narrowcast as nc
from narrowcast.parallel import policy

VALUES = sum(p.numel() for p in mlp().parameters())
WEIGHTS = sum(p.numel() for name, p in mlp().named_parameters() if name.endswith("weight"))


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def model_of(group: dist.ProcessGroup, kind: str) -> nn.Module:
    return wrapped(group) if kind == "ddp" else sharded(mesh_of(group))


def explained(group: dist.ProcessGroup, kind: str, gradients: object) -> tuple[str, dict[str, float], list[str]]:
    """The last line of explain(), the stats after two steps, and what was logged."""
    heard = Heard()
    logging.getLogger("narrowcast").addHandler(heard)
    model = nn.Module() if kind == "local" else model_of(group, kind)
    if kind == "local":
        local = nc.LocalSGD(mlp(), every=1, spec=gradients, group=group, min_values=50)
        local.exchange()
        text, stats = local.explain(), local.stats()
        local.close()
    else:
        handle = nc.attach(model, gradients, min_values=50)
        for step in range(2):
            loss(model, dist.get_rank(group), step).backward()
        text, stats = handle.explain(), handle.stats()
        handle.detach()
    logging.getLogger("narrowcast").removeHandler(heard)
    return text.splitlines()[-1], stats, heard.texts


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "local"])
def test_the_totals_are_those_of_what_is_really_compressed(pool: Pool, kind: str) -> None:
    for last, stats, logged in pool.run(2, explained, kind, "int8/64"):
        share = 100 * WEIGHTS / VALUES
        bits = (WEIGHTS * 8.5 + (VALUES - WEIGHTS) * 32) / VALUES
        assert last == f"total: {VALUES} values, {WEIGHTS} compressed ({share:.1f} %), {bits:.2f} bits a value"
        # FSDP pads what it reduces
        assert stats["compressed_share"] == pytest.approx(WEIGHTS / VALUES, rel=0.01)
        assert stats["compressed_values"] == pytest.approx(stats["compressed_share"] * stats["values"])
        assert stats["compressed_bytes_share"] == pytest.approx(stats["compressed_share"], rel=0.01)
        assert logged == []


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_it_is_said_plainly_where_nothing_is_compressed(pool: Pool, kind: str) -> None:
    small = {"*.weight": "as-is", "*.bias": "int8/64"}
    for rank, (last, stats, logged) in enumerate(pool.run(2, explained, kind, small)):
        assert last.startswith("nothing is compressed: ")
        assert "3 tensors: asked for" in last
        assert "3 tensors have fewer than min_values=50 values" in last
        assert stats["compressed_values"] == stats["compressed_share"] == stats["compressed_bytes_share"] == 0
        assert logged == ([f"attach: {last}"] if rank == 0 else [])
    for last, _, logged in pool.run(2, explained, kind, "as-is"):
        assert last == "nothing is compressed: all 6 tensors: asked for"
        assert logged == []


PATTERNS = {"0.*": "int8/64", "head.*": "int4/64", "*": {"*.bias": "as-is", "tail.*": "bf16", "*": "int8/64"}}


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_patterns_that_match_nothing_are_named(pool: Pool, kind: str) -> None:
    for rank, (_, _, logged) in enumerate(pool.run(2, explained, kind, PATTERNS)):
        named = [f"attach: {policy.no_match(pattern)}" for pattern in ("head.*", "tail.*")]
        assert logged == (named if rank == 0 else [])
    for text, refused in pool.run(2, in_the_table, kind):
        assert all(f"the pattern {p!r} matches no parameter" in text for p in ("head.*", "tail.*"))
        assert "strict=True: the pattern 'head.*' matches no parameter" in refused


def in_the_table(group: dist.ProcessGroup, kind: str) -> tuple[str, str]:
    model = model_of(group, kind)
    handle = nc.attach(model, PATTERNS, min_values=1)
    text = handle.explain()
    handle.detach()
    return text, error_of(lambda: nc.attach(model_of(group, kind), PATTERNS, min_values=1, strict=True))


def test_patterns_are_looked_for_in_every_part_of_a_policy() -> None:
    names = ["a.weight", "b.bias"]
    assert policy.unmatched("int8/64", names) == []
    assert policy.unmatched({"a.*": "as-is", "*": "int8/64"}, names) == []
    assert policy.unmatched(nc.schedule({0: {"c.*": "as-is"}, 5: {"c.*": "bf16", "*": "bf16"}}), names) == ["c.*"]
    assert policy.unmatched({"a.*": {"*.bias": "as-is"}}, names) == ["*.bias"]


def ignoring(group: dist.ProcessGroup) -> tuple[str, list[str], list[str]]:
    net = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100))
    DDP._set_params_and_buffers_to_ignore_for_model(net, ["0.weight"])
    model = DDP(net, process_group=group)
    handle = nc.attach(model, "int4/64+ef", min_values=1, strict=True)
    model(torch.randn(4, 100)).square().mean().backward()
    text, names, state = handle.explain(), [row.name for row in handle.rows()], sorted(handle.state_dict())
    handle.detach()
    return text, names, state


def test_a_parameter_that_ddp_ignores_is_named_and_is_nothing_that_travels(pool: Pool) -> None:
    for text, names, state in pool.run(2, ignoring):
        assert "0.weight: DDP ignores it: not reduced" in text
        assert "total: 10200 values, 10200 compressed" in text
        assert sorted(names) == state == ["0.bias", "1.bias", "1.weight"]
