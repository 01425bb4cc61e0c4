"""Members of torchft that come together: those who hold other parameters find out before they exchange."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist.pool import Pool

from narrowcast.collectives import Channel, TorchTransport
from narrowcast.parallel.integrations.torchft import Elastic


class Manager:
    """Keeps what it is told."""

    told: Any = None

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.told = state


def met(group: dist.ProcessGroup, anchors: list[float], exchanges: list[int]) -> tuple[str, Any]:
    rank = dist.get_rank(group)
    member = Elastic.__new__(Elastic)
    member._anchors, member.exchanges = {"w": torch.full((5,), anchors[rank])}, exchanges[rank]
    member._manager = Manager()
    channel = Channel(TorchTransport(group))
    try:
        said = str(member._agree(channel, contributes=rank != 2))
    except RuntimeError as error:
        said = str(error)
    channel.close()
    return said, member._manager.told


BACK = {"step": 0, "batches_committed": 0}


@pytest.mark.parametrize(
    "anchors, exchanges, leader, others",
    [
        ([1.0, 1.0, 1.0], [7, 7, 7], 0, []),
        ([1.0, 2.0, 1.0], [7, 7, 7], 0, [1]),
        ([2.0, 1.0, 1.0], [7, 8, 8], 1, [0]),
        ([-0.0, 0.0, 0.0], [7, 7, 7], 0, [1, 2]),  # equal, and other bits
        ([1.0, 1.0, 1.0], [7, 7, 6], 0, [2]),
    ],
)
def test_members_that_differ_get_the_state_of_the_one_that_made_most_exchanges(
    pool: Pool, anchors: list[float], exchanges: list[int], leader: int, others: list[int]
) -> None:
    found = pool.run(3, met, anchors, exchanges)
    words = f"members {others} hold other parameters than member {leader}, and get those" if others else "2"
    assert found == [(words, BACK if rank in others else None) for rank in range(3)]
