"""Laws of every algorithm from 2 to 65,536 workers, on presets: finite, monotone, and no quicker than the links."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from narrowcast.collectives.algorithms.record import ALGORITHMS
from narrowcast.predict import cluster, costs
from narrowcast.predict.cluster import Cluster, Device, Level
from narrowcast.predict.costs import Costs
from narrowcast.predict.model import wire_sizes

WORLDS = [2**k for k in range(1, 17)]
VALUES = torch.tensor([2.0**k for k in (0, 6, 14, 20, 24, 30, 34)], dtype=torch.float64)
RACKS = Cluster(
    "racks",
    (Level("inside", 8, 2400.0, 3.0), Level("rack", 32, 400.0, 10.0), Level("spine", 0, 12800.0, 20.0)),
    Device("H100", memory_gbyte=2700.0),
)
PLACES = {name: cluster.load(name) for name in ("10gbe-tcp", "8xH100", "p2.16xlarge", "100gb-ib")} | {
    "racks": RACKS,
    "gloo": replace(cluster.load("10gbe-tcp"), device=Device("cpu", memory_gbyte=10.0)),
}


def wire_of(algorithm: str) -> str:
    return {"native": "bf16"}.get(algorithm, "int8/256")


def seconds(place: Cluster, algorithm: str, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """On the links alone, and whole calls."""
    made, wire = Costs(place, draws=0), wire_of(algorithm)
    travel = made.wire_seconds(costs.plan(algorithm, place, world), wire, VALUES)[0]
    return travel, made.seconds(algorithm, wire, VALUES, world)[0][0]


def cases() -> list[tuple[str, str]]:
    return [
        (name, algorithm)
        for name, place in PLACES.items()
        for algorithm, one in ALGORITHMS.items()
        if len(place.levels) > 1 or not one.takes_nodes
    ]


@pytest.mark.parametrize("name, algorithm", cases())
def test_more_workers_or_values_never_take_less_and_no_link_is_outrun(name: str, algorithm: str) -> None:
    place, before = PLACES[name], torch.zeros(len(VALUES), dtype=torch.float64)
    # shared_scale has room for 127 ranks: beyond there is nothing to predict
    for world in WORLDS[: 6 if algorithm == "shared_scale" else None]:
        travel, whole = seconds(place, algorithm, world)
        assert bool(torch.isfinite(whole).all())
        assert bool((torch.diff(travel) >= 0).all()), f"{world} workers: more values take less"
        # a further node that shares the card's bytes with others may be a thousandth quicker inside
        assert bool((travel >= before * 0.999).all()), f"{world} workers take less than {world // 2}"
        assert bool((travel >= slowest_link(place, algorithm, world) * 0.999).all()), f"{world} workers outrun a link"
        assert bool((whole >= 0.3 * travel).all())
        before = travel


def slowest_link(place: Cluster, algorithm: str, world: int) -> torch.Tensor:
    """Every sum brings what the others have into each member of a level, and what was made of it out again: no less
    than 2 (m-1)/m of the tensor go through each of its ports."""
    wire = torch.tensor(wire_sizes(wire_of(algorithm), tuple(map(int, VALUES))), dtype=torch.float64)
    least, ranks = torch.zeros_like(wire), costs.placement(place, world)
    for number, level in enumerate(place.levels[: ranks.level + 1]):
        members = ranks.members(number)
        least = least.maximum(wire * 2 * (members - 1) / members * 8 / (level.member_gbit * 1e9))
    return least


def test_a_tree_grows_with_the_logarithm_and_messages_to_all_with_the_ranks() -> None:
    """One bucket of 25 MB, 65,536 H100: a tenth of a second of NCCL's sum would be a ring's."""
    place = PLACES["8xH100"]
    theirs, ours, flat = (float(seconds(place, name, 65536)[0][3]) for name in ("native", "hierarchical", "two_shot"))
    assert theirs < 5e-3
    assert theirs < ours < flat < 2.0


def test_racks_are_a_third_level() -> None:
    """8 devices, 32 nodes a rack, 4 racks: a ring goes 2*3 times between racks, 2*124 between nodes, 2*896 inside."""
    place = costs.placement(RACKS, 1024)
    assert (place.sizes, place.level) == ((8, 32, 4), 2)
    assert [place.members(n) for n in range(4)] == [1024, 128, 4, 1]
    assert place.ring_steps == pytest.approx(2 * 3 + 2 * 124 * 0.5 + 2 * 896 * 0.15)
    assert place.direct_bytes == pytest.approx((1023 / 1024, 8 * 1016 / 1024, 256 * 768 / 1024))


def test_an_oversubscribed_switch_takes_its_share_of_a_members_bandwidth() -> None:
    crossed = replace(RACKS, levels=(*RACKS.levels[:2], replace(RACKS.levels[2], oversubscription=4.0)))
    quarter = replace(RACKS, levels=(*RACKS.levels[:2], replace(RACKS.levels[2], bandwidth_gbit=3200.0)))
    same = [seconds(place, "two_shot", 1024)[0].tolist() for place in (crossed, quarter)]
    assert same[0] == same[1] != seconds(RACKS, "two_shot", 1024)[0].tolist()
    one_rack = [seconds(place, "two_shot", 256)[0].tolist() for place in (crossed, RACKS)]
    assert one_rack[0] == one_rack[1], "nothing leaves the rack"
