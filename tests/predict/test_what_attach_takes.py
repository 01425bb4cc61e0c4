"""What predict, advise, a study and the benches take, attach takes; what they refuse, it refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import narrowcast as nc
from narrowcast.bench import collectives as bench_collectives
from narrowcast.bench import ddp as bench_ddp
from narrowcast.bench import fsdp as bench_fsdp
from narrowcast.cli.options import specs_of
from narrowcast.codecs import Matrix, all_specs, low_rank_specs
from narrowcast.collectives import ALGORITHMS, AllReduce, LowRankReduce, Reduction
from narrowcast.parallel import policy
from narrowcast.predict import Setup
from narrowcast.study import parse

WORLDS = (2, 3, 4)
LISTED = [*all_specs(), *low_rank_specs()]


def with_options(specs: list[str]) -> list[str]:
    """As they are, and with each of the options that say what for."""
    found = list(specs)
    for spec in specs:
        for option in ("+ef", "+diff"):
            try:
                found.append(str(nc.codec(spec + option)))
            except ValueError:
                continue
    return list(dict.fromkeys(found))


SPECS = with_options(LISTED)


def takes(call: Callable[[], object]) -> bool:
    try:
        call()
    except ValueError:
        return False
    return True


def attach_gradients(spec: str, algorithm: str = "auto", world: int = 2) -> None:
    """All that `attach` asks before it sends the gradient of a matrix."""
    policy.check(spec, policy.GRADIENT)
    codec, how = nc.codec(spec), {"algorithm": algorithm, "seed": 0, "nodes": None, "inner": "as-is"}
    if codec.rank:
        LowRankReduce(codec, (Matrix(64, 64),), world, Reduction(divide=float(world)), algorithm)
    else:
        AllReduce.of(codec, (4096,), torch.float32, world, Reduction(divide=float(world)), **how)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("algorithm", ["auto", *(one.name for one in ALGORITHMS.values() if not one.takes_nodes)])
def test_what_is_predicted_attach_takes(algorithm: str, world: int) -> None:
    assert len(SPECS) > 1.5 * len(LISTED)
    predicted = [spec for spec in SPECS if takes(lambda s=spec: Setup(world, s, algorithm))]
    assert predicted == [spec for spec in SPECS if takes(lambda s=spec: attach_gradients(s, algorithm, world))]


def study_of(spec: str) -> None:
    wires = str(list(dict.fromkeys(["fp32", "int8/256", spec]))).replace("'", '"')
    parse(f'models = ["mlp"]\ndata = ["digits"]\nworkers = [2]\nwires = {wires}\n')


DOORS = {
    "--wires": specs_of,
    "bench ddp": lambda spec: bench_ddp.check_wire(spec, False),
    "study": study_of,
    "bench fsdp": lambda spec: bench_fsdp.check_wire(f"gradients={spec}"),
}


@pytest.mark.parametrize("door", DOORS)
def test_what_names_a_wire_of_gradients_is_one(door: str) -> None:
    wrong = [s for s in SPECS if takes(lambda s=s: DOORS[door](s)) != takes(lambda s=s: attach_gradients(s))]
    assert not wrong, wrong


def test_what_benches_sum_can_be_summed() -> None:
    summed = [s for s in SPECS if takes(lambda s=s: bench_collectives.chosen_specs([s]))]
    assert {s for s in summed if nc.codec(s).rank or nc.codec(s).differences} == set()
    assert len(summed) > len(all_specs())
