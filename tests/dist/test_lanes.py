"""Wires on a device, without one: ranks as threads, a late transport, and lanes that forget to wait.

There are no streams on a CPU, but rounds have their order and their lateness, and staged wires their copies. The same
cases run on a GPU, behind sleeping streams: tests/gpu/check_streams.py.
"""

from __future__ import annotations

import pytest
import torch
from gpu import late_cases as cases
from gpu.late_ranks import run
from torch import Tensor

from narrowcast.collectives.algorithms import two_shot
from narrowcast.collectives.runtime.streams import Way

CPU = torch.device("cpu")
N = 6003


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_shot, "CHUNK_BYTES", cases.SMALL_CHUNKS)


def same(found: list[list[Tensor]], wanted: list[list[Tensor]]) -> bool:
    return all(
        torch.equal(a, b) for one, other in zip(found, wanted, strict=True) for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("way", [Way.ROUNDS, Way.STAGED])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("spec", cases.SPECS)
def test_the_way_of_the_wires_changes_no_bit(spec: str, world: int, way: Way) -> None:
    for algorithm in cases.ALGORITHMS:
        job = cases.all_reduces(spec, algorithm, N, CPU)
        assert same(run(world, CPU, way, job), run(world, CPU, Way.PLAIN, job)), algorithm


@pytest.mark.parametrize("way", [Way.ROUNDS, Way.STAGED])
@pytest.mark.parametrize("algorithm, spec", cases.BY_BACKEND)
def test_sums_of_the_backend_take_the_same_ways(algorithm: str, spec: str, way: Way) -> None:
    job = cases.all_reduces(spec, algorithm, N, CPU)
    assert same(run(4, CPU, way, job), run(4, CPU, Way.PLAIN, job))


@pytest.mark.parametrize("way", [Way.ROUNDS, Way.STAGED])
@pytest.mark.parametrize("spec", cases.SPECS)
def test_parts_of_an_all_reduce_and_what_fsdp_calls_take_the_same_ways(spec: str, way: Way) -> None:
    job = cases.others(spec, 1001, CPU)
    assert same(run(3, CPU, way, job), run(3, CPU, Way.PLAIN, job))


@pytest.mark.parametrize("n", [0, 1, 100, 2000])
def test_rounds_of_ranks_without_a_shard_stay_in_order(n: int) -> None:
    """Where a tensor is so small that some shards or chunks are empty, ranks skip messages, each other ones."""
    for algorithm in cases.ALGORITHMS:
        job = cases.all_reduces("int8/256", algorithm, max(n, 3), CPU)
        assert same(run(4, CPU, Way.ROUNDS, job), run(4, CPU, Way.PLAIN, job)), algorithm


def test_rounds_out_of_the_order_of_sending_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device's backend would wait for ever: some ranks do one round first, others another."""
    monkeypatch.setattr(two_shot, "second_index", lambda c: 100 + c)
    with pytest.raises((AssertionError, RuntimeError), match="a round that has started|another rank gave up"):
        run(2, CPU, Way.ROUNDS, cases.all_reduces("int8/256", "two_shot", N, CPU))


def test_a_round_that_is_not_waited_for_is_noticed() -> None:
    job = cases.all_reduces("int8/256", "two_shot", N, CPU)
    assert not same(run(2, CPU, Way.ROUNDS, job, careful=False), run(2, CPU, Way.PLAIN, job))
