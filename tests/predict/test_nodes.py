"""Sums over several nodes: NCCL's ring and tree, and numbers of members that were timed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from predict.test_costs import FLAT, NODES, sizes

from narrowcast.collectives.algorithms.cost import TREE_HOP, TREE_SHARE
from narrowcast.predict import cluster, costs
from narrowcast.predict.cluster import Cluster, CollectiveTimings, Device
from narrowcast.predict.costs import Costs


def bus(place: Cluster, world: int, size: float) -> float:
    """GB/s as nccl-tests counts them, of float32 by the backend's own sum."""
    made = Costs(place, draws=0)
    return (
        costs.volume("all_reduce", world)
        * size
        / 1e9
        / float(made.seconds("native", "fp32", sizes(size / 4), world)[0])
    )


def test_nccl_takes_the_quicker_of_a_ring_and_a_tree_and_gloo_has_a_ring() -> None:
    """1024 ranks: 2046 latencies around a ring, 20 hops up and down a tree, which has its own bytes."""
    nccl = replace(FLAT, device=Device("H100", memory_gbyte=10.0))
    ring, (tree,) = (getattr(costs.plan("native", nccl, 1024), name) for name in ("stages", "otherwise"))
    assert ring == costs.plan("native", FLAT, 1024).stages
    assert costs.plan("native", FLAT, 1024).otherwise == ()
    assert (ring[0].steps, tree.steps) == (2046, TREE_HOP * 20)
    assert tree.sent == pytest.approx(ring[0].sent / TREE_SHARE)
    few, many = (float(Costs(nccl, draws=0).seconds("native", "fp32", sizes(n), 1024)[0]) for n in (1.0, 2.0**32))
    assert few == pytest.approx(tree.steps * 1e-4, rel=1e-3)
    assert many == pytest.approx(ring[0].sent * 2**34 / 1e9 + ring[0].steps * 1e-4)


FOUR_NODES = {2**20: 5.4, 2**24: 64, 2**26: 157, 2**28: 229, 2**30: 362, 2**34: 382}
"""ml-engineering: bus bandwidth of 4 nodes of 8 B200 with eight 50 GB/s cards each, GB/s. Their NVLink is faster than
the preset's, which shows with large messages."""
BY_RINGS = {2: (0.32, 0.85, 0.95), 8: (0.13, 0.69, 0.95), 32: (0.044, 0.39, 0.92), 128: (0.009, 0.10, 0.74)}
"""SimAI's shares of the cards' speed at 16 MiB, 256 MiB and 4 GiB, by nodes of 8."""


def test_four_nodes_are_as_fast_as_somebody_measured() -> None:
    made = cluster.load("8xH100")
    for size, measured in FOUR_NODES.items():
        assert 0.75 < bus(made, 32, size) / measured < 1.35, size


@pytest.mark.parametrize("nodes", BY_RINGS)
def test_rings_of_many_nodes_are_as_slow_as_a_published_table_has_them(nodes: int) -> None:
    """16 MiB on 128 nodes: 10 ms around a ring; a ring's bytes with a tree's latency would be 26 times quicker."""
    made = cluster.load("8xH100")
    plan = replace(costs.plan("native", made, 8 * nodes), otherwise=())
    for size, share in zip((2**24, 2**28, 2**32), BY_RINGS[nodes], strict=True):
        seconds = float(Costs(made, draws=0).wire_seconds(plan, "fp32", sizes(size / 4)))
        assert costs.volume("all_reduce", 8 * nodes) * size / 400e9 / seconds / share == pytest.approx(1.0, abs=0.27)


def test_a_tree_sends_a_nodes_bytes_through_the_card_and_not_a_ranks() -> None:
    """2(N-1)/N of 2 nodes is half of what a ring of 16 sends; inside everybody sends up and down."""
    (tree,) = costs.plan("native", cluster.load("8xH100"), 16).otherwise
    assert (tree.sent * TREE_SHARE, tree.own * TREE_SHARE) == (1.0, 2.0)


def test_the_busiest_node_of_a_tree_sends_twice_the_bytes_from_four_nodes_on() -> None:
    """It has a parent and two children in one tree and a parent in the other: 400 GB/s of cards gave 382, not 475."""
    for nodes, sent in ((2, 1.0), (3, 1.5), (4, 2.0), (128, 2.0)):
        (tree,) = costs.plan("native", cluster.load("8xH100"), 8 * nodes).otherwise
        assert tree.sent * TREE_SHARE == sent


BERT_LARGE = {8: 2047.0, 16: 2194.0, 32: 2273.0}
"""ddl-benchmarks: ms beyond compute, 336.2 million values on nodes of 4 GPUs behind PCIe, 10 GbE, by GPUs."""


def test_nodes_without_nvlink_send_what_a_ring_sends() -> None:
    made = Costs(replace(NODES, device=Device("GPU")), draws=0)
    seconds = {world: float(made.seconds("native", "fp32", sizes(336.2e6), world)[0]) for world in BERT_LARGE}
    for world, measured in BERT_LARGE.items():
        assert seconds[world] / seconds[8] == pytest.approx(measured / BERT_LARGE[8], rel=0.02)


def two_numbers(few: float, many: float, each: float = 1e-9) -> Cluster:
    """2 and 4 members were timed: so many seconds a call, and for each byte that a member sends."""
    tables = tuple(
        CollectiveTimings("all_reduce", ranks, tuple((2.0**k, call + 2.0**k * volume * each) for k in range(12, 25)))
        for ranks, call, volume in ((4, many, 1.5), (2, few, 1.0))
    )
    return replace(FLAT, levels=(replace(FLAT.levels[0], tables=tables),))


def test_each_number_of_members_that_was_timed_is_predicted_as_timed() -> None:
    """Between them it lies between, beyond them each step adds a latency; whatever the order in the file."""
    made = Costs(two_numbers(1e-3, 3e-3), draws=0)

    def call(world: int) -> float:
        return float(made.seconds("native", "fp32", sizes(2.0**20), world)[0])

    sent = {world: 2.0**22 * 1e-9 * 2 * (world - 1) / world for world in (2, 3, 4, 8)}
    assert call(2) == pytest.approx(1e-3 + sent[2])
    assert call(4) == pytest.approx(3e-3 + sent[4])
    # not at a knot
    assert call(3) == pytest.approx(2e-3 + sent[3], rel=0.02)
    assert call(8) == pytest.approx(3e-3 + sent[8] + 8 * 1e-4, rel=0.02)


def test_what_was_timed_is_predicted_whichever_of_ring_and_tree_it_was() -> None:
    points = tuple((2.0**k, 1e-3 + 2.0**k * 1e-9 * (30 if k == 18 else 1)) for k in range(12, 25))
    level = replace(FLAT.levels[0], tables=(CollectiveTimings("all_reduce", 16, points),))
    made = Costs(replace(FLAT, levels=(level,), device=Device("H100")), draws=0)
    for size, seconds in points:
        assert float(made.seconds("native", "fp32", sizes(size / 4), 16)[0]) == pytest.approx(seconds)
