"""An algorithm is one record: whoever registers one finds it everywhere."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from dist import algorithms, emulation
from dist.pool import Pool
from torch import Tensor
from typer.testing import CliRunner

import narrowcast as nc
from narrowcast.cli import assemble
from narrowcast.collectives.algorithms.record import ALGORITHMS, register
from narrowcast.study import parse

GENERATOR = Path(__file__).parents[2] / "docs" / "generate.py"
STUDY = """
name = "mine"
models = ["mlp"]
data = ["digits"]
wires = ["fp32", "int8/256"]
workers = [2]
algorithms = ["toy"]
"""


@contextmanager
def toy() -> Iterator[None]:
    """one_shot under another name."""
    register(replace(ALGORITHMS["one_shot"], name="toy", summary="made up for a test"))
    try:
        yield
    finally:
        del ALGORITHMS["toy"]


def values(worker: int) -> Tensor:
    return torch.randn(1000, generator=torch.Generator().manual_seed(worker))


def reduced(group: dist.ProcessGroup) -> Tensor:
    x = values(dist.get_rank(group))
    with toy():
        nc.all_reduce(x, "int4/64", group=group, algorithm="toy")
    return x


def test_a_toy_runs_on_ranks_in_the_simulator_and_in_the_emulation(pool: Pool) -> None:
    xs = [values(worker) for worker in range(3)]
    with toy():
        world = nc.simulate.World(3, "toy", "int4/64")
        setting = emulation.Setting(nc.codec("int4/64"), [1000])
        expected = emulation.all_reduce("toy", setting, xs)
        assert torch.equal(world.all_reduce(torch.stack(xs))[0], expected)
        assert world.sent_bytes([1000]) == setting.sent == [2 * nc.codec("int4/64").nbytes(1000)] * 3
        assert "toy" in algorithms.flat_names(3)
        assert "toy" in algorithms.simulated_names(3)
        assert "toy" in algorithms.with_feedback()
    assert all(torch.equal(x, expected) for x in pool.run(3, reduced))


def test_a_toy_is_predicted_and_a_study_may_name_it() -> None:
    words = "predict --model resnet50 --cluster pcie3 --workers 4 --wires int8/256 --algorithms toy,one_shot --json -"
    with toy():
        done = CliRunner().invoke(assemble(), words.split(), catch_exceptions=False)
        assert [grid.algorithms for grid in parse(STUDY).grids] == [("toy",)] * 2
    made, expected = json.loads(done.stdout)
    assert made == expected | {"algorithm": "toy"}


def test_a_toy_stands_in_the_docs_and_in_the_errors() -> None:
    spec = importlib.util.spec_from_file_location("generate", GENERATOR)
    assert spec is not None
    assert spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    with toy():
        assert "| `toy` | made up for a test | (W-1) nbytes(n) | 1 |" in generator.algorithm_table()
        with pytest.raises(ValueError, match=r"take auto, two_shot.*, toy"):
            nc.simulate.World(2, "rings")
        allowed = "two_shot, one_shot, hierarchical, toy"
        with pytest.raises(ValueError, match=f"error feedback goes with {allowed}; got 'ring'"):
            nc.simulate.World(2, "ring", "int8/64+ef")


def test_the_command_line_lists_every_algorithm() -> None:
    done = CliRunner().invoke(assemble(), ["predict", "--help"], catch_exceptions=False, env={"COLUMNS": "300"})
    assert all(name in done.stdout for name in ALGORITHMS)


def test_a_name_is_taken_once() -> None:
    for name in ("two_shot", "auto"):
        with pytest.raises(ValueError, match=f"algorithm name '{name}' is taken"):
            register(replace(ALGORITHMS["ring"], name=name))
