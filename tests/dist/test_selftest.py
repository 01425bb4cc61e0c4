"""`narrowcast selftest` passes where all is well, and finds and names what was broken on purpose."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist.pool import Crew
from each import each
from torchrun import torchrun

from narrowcast import selftest
from narrowcast.codecs import Codec
from narrowcast.collectives import ALGORITHMS
from narrowcast.selftest import checks, runner

WORLD, CULPRIT = 4, 2


def break_nothing(rank: int) -> None:
    pass


def break_kernel(rank: int) -> None:
    """One bit of one code, in what every encoding goes through: as a wrong instruction set would."""
    right = Codec.encode

    def encode(self: Codec, *args: Any, **options: Any) -> torch.Tensor:
        wire = right(self, *args, **options)
        wire[0] ^= rank == CULPRIT
        return wire

    Codec.encode = encode  # type: ignore[method-assign]


def break_algorithm(rank: int) -> None:
    """A value that one rank's sum leaves out."""
    right = ALGORITHMS["ring"]

    def run(call: Any) -> None:
        right.run(call)
        if rank == CULPRIT:
            call.x[7] = 0.0

    ALGORITHMS["ring"] = dataclasses.replace(right, run=run)


def break_nan(rank: int) -> None:
    """What is not finite arrives as zero, on every rank."""
    right = checks.collectives.all_reduce

    def all_reduce(x: torch.Tensor, *args: Any, **options: Any) -> None:
        right(x, *args, **options)
        x.nan_to_num_(0.0, 0.0, 0.0)

    checks.collectives.all_reduce = all_reduce


def break_off(rank: int) -> None:
    """One rank raises in the middle."""

    def moves(at: selftest.Scope) -> Any:
        yield selftest.Found("first")
        if rank == CULPRIT:
            raise ValueError("broken off on purpose")
        checks.collectives.all_reduce(torch.ones(1000), "int8/256")
        yield selftest.Found("second")

    checks.SECTIONS["moves against the simulator"] = moves


def report(group: dist.ProcessGroup, broken: Callable[[int], None]) -> tuple[dict[str, Any], list[str]]:
    runner.PROBE_VALUES, runner.MOST_VALUES = 1 << 12, 1 << 12
    rank, said = dist.get_rank(), list[str]()
    broken(rank)
    at = selftest.Scope(rank, WORLD, specs=("int8/256", "onebit/64+ef"), values=11_003)
    return selftest.run(at, "Gloo", said.append).as_dict(), said


def reports(broken: Callable[[int], None]) -> list[tuple[dict[str, Any], list[str]]]:
    with Crew(WORLD, report, broken, timeout=20.0) as crew:
        found = [crew.outcome(rank) for rank in range(WORLD)]
    assert all(one is not None and not one.error for one in found), found
    return [one.value for one in found if one is not None]


def test_all_ranks_find_all_well_and_say_whether_it_pays() -> None:
    found = reports(break_nothing)
    first, said = found[0]
    assert first["ok"]
    assert first["verdict"].startswith("PASSED on 4 ranks of 1 host, Gloo: ")
    assert {report["verdict"].partition(" checks in ")[0] for report, _ in found} == {
        first["verdict"].partition(" checks in ")[0]
    }
    names = [check["name"] for check in first["checks"]]
    for name in ALGORITHMS:
        assert any(f"by {name} " in checked for checked in names) == any(
            selftest.specs_for(name, ("int8/256", "onebit/64+ef"), WORLD)
        ), name
    assert [row["wire"] for row in first["bench"]] == ["fp32 sum", "bf16 sum", "int8/256", "int4/128"]
    assert first["pays"] in (True, False)
    assert len(said) == len(checks.SECTIONS) + len(first["bench"])


@each(
    "broken, names, ranks",
    [
        (break_kernel, "kernels of int8/256", [CULPRIT]),
        (break_algorithm, "all_reduce by ring with int8/256", [CULPRIT]),
        (break_nan, "NaN and Inf stay so with int8/256", [0, 1, 2, 3]),
    ],
)
def test_what_is_broken_on_purpose_is_found_on_every_rank_and_named(
    broken: Callable[[int], None], names: str, ranks: list[int]
) -> None:
    for found, _ in reports(broken):
        assert not found["ok"]
        failed = {check["name"]: check for check in found["checks"] if check["failed_ranks"]}
        assert failed[names]["failed_ranks"] == ranks
        assert failed[names]["fault"]
        assert found["verdict"].startswith("FAILED on 4 ranks of 1 host, Gloo: rank ")
        assert found["bench"] == []


def test_a_rank_that_raises_ends_it_for_all_and_is_named() -> None:
    for rank, (found, _) in enumerate(reports(break_off)):
        assert not found["ok"]
        assert "broken off on purpose" in found["error"]
        assert rank == CULPRIT or f"rank {CULPRIT}" in found["error"]


@pytest.mark.timeout(300)
def test_under_torchrun_rank_0_speaks_and_the_status_is_that_of_the_checks(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    done = torchrun("--nproc-per-node=4", "-m", "narrowcast", "selftest", "--quick", "--json", str(file))
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert (found["ok"], found["ranks"], found["left_out"]) == (True, 4, [])
    assert done.stdout.splitlines()[-1] == f"narrowcast selftest {found['verdict']}"
    assert done.stdout.count("PASSED") == 1
