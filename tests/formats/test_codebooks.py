"""Formats given by a table: the maps of bitsandbytes, nf4, and a user's own."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Iterator

import bitsandbytes.functional
import numpy as np
import pytest
import torch
from torch import Tensor

import narrowcast as nc
from narrowcast.formats.registry import _FORMATS, unregister
from narrowcast.kernels.plan import Plan

MAPS = {"dynamic8": True, "udynamic8": False}


@pytest.fixture(autouse=True)
def forget_new_formats() -> Iterator[None]:
    before = set(_FORMATS)
    yield
    for name in set(_FORMATS) - before:
        unregister(name)


def heavy_tailed(n: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, generator=generator) * torch.exp(3 * torch.randn(n, generator=generator))


def planes(wire: Tensor, plan: Plan, n: int) -> tuple[Tensor, Tensor]:
    """Codes of one byte each, and float32 scales."""
    layout = plan.layout(n)
    return wire[:n], wire[layout.scales : layout.nbytes].clone().view(torch.float32)


@pytest.mark.parametrize("name", MAPS)
def test_the_table_is_that_of_bitsandbytes(name: str) -> None:
    table = bitsandbytes.functional.create_dynamic_map(signed=MAPS[name])
    assert torch.equal(nc.format(name).values.float(), table.float())


def test_the_numbers_that_the_facts_give_of_the_dynamic_map() -> None:
    values = nc.format("dynamic8").values.float()
    assert values[0].item() == np.float32(-0.99296875)
    assert values[-1].item() == 1.0
    near_zero = values[values.abs() < 1e-5].tolist()
    assert near_zero == pytest.approx([-7.75e-6, -3.25e-6, -5.5e-7, 0, 5.5e-7, 3.25e-6, 7.75e-6], rel=1e-6)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("block", [64, 256, 4096])
@pytest.mark.parametrize("name", MAPS)
def test_codes_are_the_exact_nearest_in_float64(name: str, block: int) -> None:
    codec = nc.codec(f"{name}/{block}")
    x = heavy_tailed(50_000)
    x[::7] = 0
    wire = codec.encode(x)
    codes, scales = planes(wire, codec.plan, len(x))  # type: ignore[attr-defined]
    t = x * (1.0 / scales).repeat_interleave(block)[: len(x)]
    table = nc.format(name).values.numpy()
    midpoints = (table[:-1] + table[1:]) / 2
    assert np.array_equal(codes.numpy(), np.searchsorted(midpoints, t.double().numpy()))
    assert torch.equal(scales, torch.nn.functional.pad(x, (0, -len(x) % block)).view(-1, block).abs().amax(dim=1))


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("name", MAPS)
def test_round_to_is_the_exact_nearest_in_float64(name: str) -> None:
    x = heavy_tailed(50_000, seed=1).clamp(-1.5, 1.5)
    table = nc.format(name).values.numpy()
    midpoints = (table[:-1] + table[1:]) / 2
    x = torch.cat([x, torch.tensor(midpoints).float()])
    wanted = table[np.searchsorted(midpoints, x.double().numpy())]
    assert torch.equal(nc.round_to(x, name).double(), torch.tensor(wanted))


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("name", [*MAPS, "nf4"])
def test_a_zero_stays_an_exact_zero(name: str) -> None:
    x = heavy_tailed(4096).abs()
    x[::3] = 0
    y = nc.codec(f"{name}/256").decode(nc.codec(f"{name}/256").encode(x), len(x))
    assert torch.equal(y == 0, nc.round_to(y, name) == 0)
    assert not y[::3].any()


def test_nf4_is_the_table_of_bitsandbytes() -> None:
    table = bitsandbytes.functional.get_4bit_type("nf4", device="cpu")
    assert torch.equal(nc.format("nf4").values.float(), table.float())


@pytest.mark.usefixtures("implementation")
def test_a_codebook_is_nearest_with_ties_to_the_even_code() -> None:
    fmt = nc.Codebook([4.0, -1.0, 0.0, 2.0])
    x = torch.tensor([-9.0, -0.6, -0.5, -0.4, 0.9, 1.0, 1.1, 2.9, 3.0, 3.1, 9.0])
    #                                  tie: codes 1, 2                 2, 3               3, 0
    assert nc.round_to(x, fmt).tolist() == [-1.0, -1.0, 0.0, 0.0, 0.0, 0.0, 2.0, 2.0, 4.0, 4.0, 4.0]


def test_a_codebook_works_in_a_spec_by_its_name_and_by_its_content() -> None:
    table = [-2.0, -0.5, 0.0, 0.25, 3.0]
    named, plain = nc.Codebook(table, name="mine5"), nc.Codebook(table)
    x = heavy_tailed(1000)
    wires = [nc.codec(f"{fmt}/64").encode(x) for fmt in (named, plain)]
    assert torch.equal(*wires)
    assert nc.codec("mine5/64").bits_per_value == 3 + 32 / 64
    assert nc.Codebook(table) == plain
    assert str(nc.codec(f"{plain}/64")) == f"{plain}/64"


def test_a_codebook_survives_pickling_and_copying() -> None:
    fmt = nc.Codebook([-1.0, 0.0, 1.0], name="mine3")
    assert len(fmt.grid) == 3
    for twin in (pickle.loads(pickle.dumps(fmt)), copy.deepcopy(fmt)):
        assert twin == fmt
        assert torch.equal(twin.values, fmt.values)


def test_a_table_that_does_not_fill_its_codes_repeats_its_last_value_and_never_produces_it() -> None:
    fmt = nc.Codebook([-1.0, 0.0, 0.5])
    assert fmt.values.tolist() == [-1.0, 0.0, 0.5, 0.5]
    assert fmt.grid_codes.tolist() == [0, 1, 2]


WRONG: dict[str, tuple[list[float], str]] = {
    "too few": ([1.0], "got 1 values; give 2 to 65536"),
    "too many": ([float(i) for i in range(65537)], "got 65537 values; give 2 to 65536"),
    "nan": ([0.0, math.nan], "finite float32 number; drop NaN"),
    "inf": ([0.0, math.inf], "finite float32 number; drop NaN"),
    "beyond float32": ([0.0, 1e39], "finite float32 number; drop NaN, Inf and larger ones"),
    "nothing positive": ([-1.0, 0.0], "needs a value above zero"),
    "equal": ([1.0, 1.0 + 1e-12], "at least two different ones"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_codebook_is_told_what_is_wrong(case: str) -> None:
    values, message = WRONG[case]
    with pytest.raises(ValueError, match=f"Codebook: .*{message}"):
        nc.Codebook(values)


def test_a_taken_name_and_a_name_that_cannot_stand_in_a_spec_are_refused() -> None:
    for name in ("dynamic8", "e4m3", "int8", "sign", "onebit", "nvfp4", "mxfp4", "mxfp8", "fp32", "bf16"):
        with pytest.raises(ValueError, match=f"format name '{name}' is taken; choose another"):
            nc.Codebook([0.0, 1.0], name=name)
    for name in ("a/b", "Mine", "mine 2", "é", "2nd"):
        with pytest.raises(ValueError, match=f"format name '{name}': use small letters, digits and '.'"):
            nc.Codebook([0.0, 1.0], name=name)


def test_a_name_given_to_another_table_later_means_the_new_table() -> None:
    x = torch.tensor([0.3] * 63 + [1.0])
    first = nc.Codebook([-1.0, 0.0, 0.25, 1.0], name="mine")
    assert nc.codec("mine/64").decode(nc.codec("mine/64").encode(x), 64)[0] == 0.25
    unregister(first.name)
    nc.Codebook([-1.0, 0.0, 0.5, 1.0], name="mine")
    assert nc.codec("mine/64").decode(nc.codec("mine/64").encode(x), 64)[0] == 0.5
