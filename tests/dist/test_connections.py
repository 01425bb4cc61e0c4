"""Several connections for one message: the same bits, and every rank hears of a wrong number or a dead peer."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist.pool import Crew, Pool

import narrowcast as nc
from narrowcast.collectives import TorchTransport, use_connections
from narrowcast.collectives.transports.several import SHARED_FROM, shares

COUNT = 600_001  # of int8 values: shares that are no multiples of anything


def summed(group: dist.ProcessGroup, counts: list[int]) -> tuple[list[bytes], int]:
    """The bits of an all-reduce with each number of connections, and how many messages the last one sent."""
    rank, got = dist.get_rank(group), []
    x = torch.randn(4 * COUNT, generator=torch.Generator().manual_seed(rank))
    for count in counts:
        part = dist.new_group(list(range(dist.get_world_size(group))), backend="gloo")
        use_connections(count, part)
        before, y = TorchTransport.messages, x.clone()
        nc.all_reduce(y, "int8/256", group=part)
        got.append(y.numpy().tobytes())
    return got, TorchTransport.messages - before


def test_shares_cover_a_message_and_a_small_one_stays_whole() -> None:
    wire = torch.arange(SHARED_FROM + 3, dtype=torch.int64).to(torch.uint8)
    for count in (1, 2, 7, 64):
        parts = shares(wire, count)
        assert (len(parts), torch.equal(torch.cat(list(parts)), wire)) == (count, True)
    assert [part.numel() for part in shares(wire[: SHARED_FROM - 1], 4)] == [SHARED_FROM - 1]


def test_connections_change_no_bit(pool: Pool) -> None:
    outcomes = pool.run(3, summed, [1, 2, 5])
    first = outcomes[0][0][0]
    assert all(bits == first for got, _ in outcomes for bits in got)
    _, alone = pool.run(3, summed, [1])[0]
    assert outcomes[0][1] == 5 * alone  # each message went in five shares


def different(group: dist.ProcessGroup) -> None:
    part = dist.new_group(list(range(dist.get_world_size(group))), backend="gloo")
    use_connections(2 if dist.get_rank(group) == 1 else 4, part)
    nc.all_reduce(torch.ones(10), "int8/256", group=part)


def test_ranks_with_different_numbers_find_out(pool: Pool) -> None:
    for outcome in pool.outcomes(3, different):
        assert "rank 0 4, rank 1 2, rank 2 4" in outcome.error
        assert outcome.seconds < 15


def until_it_raises(group: dist.ProcessGroup, *_: Any) -> str:
    use_connections(4, group)
    x = torch.ones(8 * COUNT)
    nc.all_reduce(x, "int8/256", group=group)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"summed/{dist.get_rank(group)}", "")
    if dist.get_rank(group) == 1:
        # the others have all that this rank sent: in the first sum nothing fails
        store.wait([f"summed/{rank}" for rank in range(dist.get_world_size(group))], timedelta(seconds=60))
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        while True:
            nc.all_reduce(x, "int8/256", group=group)
    except RuntimeError as error:
        return f"{type(error).__name__} after {time.monotonic() - began:.0f} s"


def test_a_dead_peer_ends_every_wait() -> None:
    with Crew(3, until_it_raises, timeout=120) as crew:
        for rank in (0, 2):
            outcome = crew.outcome(rank, within=60)
            assert outcome is not None, f"rank {rank} hangs"
            assert " after " in outcome.value, outcome


@pytest.mark.parametrize("wrong", [0, 65, True, 2.0, "4"])
def test_a_wrong_number_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"connections: got .*from 1 to 64"):
        use_connections(wrong)
