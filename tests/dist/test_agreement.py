"""Law 11: ranks that disagree find out, all of them, before bytes move, and hear who differs."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from dist.models import error_of, loss, wrapped
from dist.pool import Crew, Outcome, Pool

import narrowcast as nc
from narrowcast.collectives import agreement
from narrowcast.collectives.channel import channel_of

TIMEOUT = 3.0


def bytes_moved(group: dist.ProcessGroup) -> list[int]:
    """Counts what leaves through the group's transport from now on."""
    transport, sent = channel_of(group).transport, []
    isend = transport.isend

    def counting(wire: torch.Tensor, peer: int, tag: int) -> object:
        sent.append(wire.numel())
        return isend(wire, peer, tag)

    transport.isend = counting
    return sent


def differing(group: dist.ProcessGroup, what: str) -> tuple[str, int]:
    """Rank 1 calls something else; then all call the same thing."""
    odd = dist.get_rank(group) == 1
    x, sent = torch.ones(64), bytes_moved(group)
    message = ""
    try:
        if what == "spec":
            nc.all_reduce(x, "int8/32" if odd else "int8/16", group=group)
        elif what == "size":
            nc.all_reduce(x[: 60 if odd else 64], "int8/16", group=group)
        elif what == "segments":
            nc.all_reduce([x[:32], x[32:]] if odd else [x[:16], x[16:]], "int8/16", group=group)
        elif what == "dtype":
            nc.all_reduce(x.bfloat16() if odd else x, "int8/16", group=group)
        elif what == "op":
            nc.all_reduce(x, "int8/16", dist.ReduceOp.AVG if odd else dist.ReduceOp.SUM, group)
        elif what == "algorithm":
            nc.all_reduce(x, "int8/16", group=group, algorithm="ring" if odd else "two_shot")
        elif what == "accumulator":
            nc.all_reduce(x, "int8/16", group=group, algorithm="ring", accumulator="low" if odd else "float32")
        elif what == "seed":
            nc.all_reduce(x, "int8/16+sr", group=group, step=0, seed=7 if odd else 3)
        elif what == "nodes":
            nc.all_reduce(x, "int8/16", group=group, nodes=[[0], [1], [2]] if odd else [[0, 1, 2]])
        elif what == "inner":
            nc.all_reduce(x, "int8/16", group=group, nodes=[[0, 1, 2]], inner="bf16" if odd else "as-is")
        elif what == "call":
            if odd:
                nc.broadcast(x, "int8/16", group_src=0, group=group)
            else:
                nc.all_reduce(x, "int8/16", group=group)
        elif what == "src":
            nc.broadcast(x, "int8/16", group_src=1 if odd else 0, group=group)
        elif what == "version":
            old, agreement.VERSION = agreement.VERSION, "0.9" if odd else agreement.VERSION
            try:
                nc.all_reduce(x[:50], "int8/16", group=group)
            finally:
                agreement.VERSION = old
    except agreement.DisagreementError as error:
        message = str(error)
    before = sum(sent)
    assert torch.equal(x, torch.ones(64)), "the tensor changed"
    y = torch.ones(8)
    nc.all_reduce(y, "as-is", group=group)
    assert float(y[0]) == dist.get_world_size(group), "the channel does not work afterwards"
    del channel_of(group).transport.isend
    return message, before


DIFFERENCES = {
    "spec": "spec='int8/32' (others 'int8/16')",
    "size": "numel=60 (others 64)",
    "segments": "segments=[32, 32] (others [16, 48])",
    "dtype": "dtype='bfloat16' (others 'float32')",
    "op": "op=",
    "algorithm": "algorithm='ring' (others 'two_shot')",
    "accumulator": "accumulator='low' (others 'float32')",
    "seed": "seed=7 (others 3)",
    "nodes": "nodes=[[0], [1], [2]] (others [[0, 1, 2]])",
    "inner": "inner='bf16' (others 'as-is')",
    "call": "call='broadcast' (others 'all_reduce')",
    "src": "src=1 (others 0)",
    "version": "version='0.9' (others '1')",
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_every_rank_hears_who_differs_in_what_before_a_byte_moves(pool: Pool, what: str) -> None:
    for message, sent in pool.run(3, differing, what):
        assert message.startswith("ranks disagree about this call, so nothing was sent; rank 1: ")
        assert DIFFERENCES[what] in message
        assert "rank 0:" not in message
        assert "rank 2:" not in message
        assert sent == 0


def splits(group: dist.ProcessGroup) -> str:
    """Rank 1 expects one value more from rank 0 than that sends."""
    rank = dist.get_rank(group)
    arriving = [4, 4, 4] if rank != 1 else [5, 4, 4]
    options = {"output_split_sizes": arriving, "input_split_sizes": [4, 4, 4]}
    try:
        nc.all_to_all(torch.zeros(sum(arriving)), torch.ones(12), "int8/16", group, **options)
    except agreement.DisagreementError as error:
        message = str(error)
    y = torch.zeros(3)
    nc.all_to_all(y, torch.full((3,), float(rank)), "as-is", group)
    assert y.tolist() == [0.0, 1.0, 2.0]
    return message


def test_all_to_all_compares_the_sizes_of_every_pair(pool: Pool) -> None:
    for message in pool.run(3, splits):
        assert message.startswith("all_to_all: rank 0 sends 4 values to rank 1, which expects 5, so nothing was sent")


def different_policies(group: dist.ProcessGroup) -> str:
    """attach with another spec on one rank: it raises on both, and both can attach again."""
    rank = dist.get_rank(group)
    model, told = wrapped(group), ""
    try:
        nc.attach(model, "int8/256" if rank else "int8/128", min_values=1)
    except agreement.DisagreementError as error:
        told = str(error)
    handle = nc.attach(model, "int8/256", min_values=1)
    loss(model, rank, 1).backward()
    handle.detach()
    return told


def test_ranks_that_attach_different_specs_hear_of_it_and_may_attach_again(pool: Pool) -> None:
    for told in pool.run(2, different_policies):
        assert told.startswith("ranks disagree about this call")
        assert "spec='int8/" in told


def different_schedules(group: dist.ProcessGroup) -> list[str]:
    """Schedules that part ways at step 2."""
    rank = dist.get_rank(group)
    model = wrapped(group)
    handle = nc.attach(model, nc.schedule({0: "int8/256", 2: "int8/64" if rank else "int8/128"}), min_values=1)
    told = [error_of(lambda step=step: loss(model, rank, step).backward()) for step in range(3)]
    handle.detach()
    return told


def test_a_disagreement_in_training_is_raised_by_backward(pool: Pool) -> None:
    for told in pool.run(2, different_schedules):
        assert told[:2] == ["", ""]
        assert "DisagreementError: ranks disagree about this call" in told[2]


# ---- known things in different orders: only a timeout can tell -------------------------------------------------------


def warm(group: dist.ProcessGroup) -> None:
    """Two calls that every rank knows from now on."""
    for spec, n in (("int8/16", 5000), ("int8/32", 50)):
        nc.all_reduce(torch.ones(n), spec, group=group)
    nc.all_reduce([torch.ones(40)] * 3, "e5m2+aps", group=group)
    nc.all_reduce([torch.ones(40)] * 2, "e5m2+aps", group=group)
    nc.all_reduce(torch.ones(40), "bf16", group=group, algorithm="native")
    nc.all_reduce(torch.ones(80), "bf16", group=group, algorithm="native")


def known_in_another_order(group: dist.ProcessGroup, kind: str) -> None:
    warm(group)
    odd = dist.get_rank(group) == 1
    if kind == "sizes":
        nc.all_reduce(torch.ones(50 if odd else 5000), "int8/32" if odd else "int8/16", group=group)
    elif kind == "exponents":
        nc.all_reduce([torch.ones(40)] * (2 if odd else 3), "e5m2+aps", group=group)
    elif kind == "native":
        nc.all_reduce(torch.ones(80 if odd else 40), "bf16", group=group, algorithm="native")
    elif kind == "new":
        nc.all_reduce(torch.ones(777 if odd else 5000), "int8/16", group=group)
    elif kind == "nothing" and not odd:
        nc.all_reduce(torch.ones(777), "int8/16", group=group)
    elif kind == "nothing, known" and not odd:
        nc.all_reduce(torch.ones(50), "int8/32", group=group)


def outcomes(kind: str, world: int = 3) -> list[Outcome]:
    began = time.monotonic()
    with Crew(world, known_in_another_order, kind, timeout=TIMEOUT) as crew:
        found = [crew.outcome(rank) for rank in range(world)]
    assert time.monotonic() - began < TIMEOUT + 15
    assert None not in found, "a rank died"
    return found


@pytest.mark.parametrize("kind", ["sizes", "exponents", "native", "new"])
def test_known_calls_in_different_orders_end_in_an_error_that_names_who_differs(kind: str) -> None:
    for outcome in outcomes(kind):
        assert outcome.error.startswith("DisagreementError: ranks were in different calls; rank 1: "), outcome.error
        assert "Make all ranks call the same, in the same order" in outcome.error
        assert outcome.seconds < TIMEOUT + 4


@pytest.mark.parametrize("kind", ["nothing", "nothing, known"])
def test_a_rank_that_does_not_call_is_missed_within_the_timeout(kind: str) -> None:
    first, idle, last = outcomes(kind)
    assert not idle.error
    for outcome in (first, last):
        assert outcome.raised in ("TimeoutError", "TransportError")
        assert outcome.seconds < TIMEOUT + 4
    if kind == "nothing":
        assert "ranks [1]" in first.error
