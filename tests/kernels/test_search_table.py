"""The tables of one look-up and one compare give the grid index that the definition gives, on every kind of float."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import narrowcast as nc
from narrowcast.formats import Format, Kind, all_formats
from narrowcast.formats.codebooks import TableFormat
from narrowcast.kernels import search_table

LINEAR8 = "linear8"
TABLES = [fmt for fmt in all_formats() if (fmt.kind is Kind.TABLE and not fmt.positive_only) or fmt.name == LINEAR8]


def random_codebook(seed: int, size: int) -> Format:
    """Values of many magnitudes and both signs, in no order, some twice, some so close that a bin holds several."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=size) * 2.0 ** rng.uniform(-30, 30, size=size)
    crowd = values[size // 2 :: 3][:30]
    crowd[:] = values[0] * (1 + rng.uniform(-1e-3, 1e-3, size=len(crowd)))
    values[-1] = values[0]
    return TableFormat(f"random{seed}", tuple(values.tolist()), ties_down=bool(seed % 2))


RANDOM = [random_codebook(seed, size) for seed, size in enumerate((2, 3, 7, 16, 100, 256, 1000, 60_000))]
every_table = pytest.mark.parametrize("fmt", [*TABLES, *RANDOM], ids=str)


def patterns(fmt: Format) -> Tensor:
    """Random bit patterns, and all starts with the pattern before and after (int64, finite floats only)."""
    random = torch.randint(0, 2**32, (200_000,), generator=torch.Generator().manual_seed(1))
    start = fmt.starts.view(torch.int32).long() & 0xFFFFFFFF
    near = torch.cat([start - 1, start, start + 1, start ^ 2**31]) % 2**32
    ends = torch.tensor([0, 1, 2**31, 2**31 + 1, 0x7F7FFFFF, 0xFF7FFFFF])
    found = torch.cat([random, near, ends])
    return found[found % 2**31 < 0x7F800000]


def value(pattern: Tensor) -> Tensor:
    return torch.from_numpy(pattern.numpy().astype(np.uint32).view(np.float32))


def grid_index(fmt: Format, x: Tensor) -> Tensor:
    """By definition: how many starts are <= x."""
    return torch.from_numpy(np.searchsorted(fmt.starts.numpy(), x.numpy(), side="right"))


@every_table
def test_the_prefix_brackets_the_index_of_every_float_in_its_bin(fmt: Format) -> None:
    prefix = search_table.build(fmt).prefix.long()
    assert len(prefix) == 65537
    pattern = patterns(fmt)
    wanted = grid_index(fmt, value(pattern))
    one, other = prefix[pattern >> 16], prefix[(pattern >> 16) + 1]
    # negative floats run the other way
    assert bool((torch.minimum(one, other) <= wanted).all())
    assert bool((wanted <= torch.maximum(one, other)).all())


@every_table
def test_between_the_brackets_the_starts_decide(fmt: Format) -> None:
    prefix = search_table.build(fmt).prefix.long()
    pattern = patterns(fmt)
    x = value(pattern)
    one, other = prefix[pattern >> 16], prefix[(pattern >> 16) + 1]
    index, last = torch.minimum(one, other), torch.maximum(one, other)
    for _ in range(int((last - index).max())):
        step = (index < last) & (fmt.starts[index.clamp(max=len(fmt.starts) - 1)] <= x)
        index = index + step.long()
    assert torch.equal(index, grid_index(fmt, x))


@every_table
def test_the_packed_entry_gives_the_code_by_one_compare(fmt: Format) -> None:
    packed = search_table.build(fmt).packed
    if packed is None:
        assert fmt.bits > 8 or crowded(fmt)
        return
    pattern = patterns(fmt)
    entry = packed.long()[pattern >> 16]
    threshold, below, above = entry & 0xFFFF, entry >> 16 & 0xFF, entry >> 24
    code = torch.where(pattern & 0xFFFF >= threshold, above, below)
    index = grid_index(fmt, value(pattern))
    wanted = fmt.grid_codes[index]
    if fmt.negative_zero_code is not None:
        wanted = torch.where((fmt.grid[index] == 0) & (pattern >= 2**31), fmt.negative_zero_code, wanted)
    wrong = (code != wanted).nonzero().flatten()
    assert len(wrong) == 0, f"{value(pattern[wrong[:1]]).item()!r}"


def crowded(fmt: Format) -> bool:
    """Whether two starts share the top 16 bits, counting one that begins a bin as belonging to the last."""
    start = fmt.starts
    first = torch.where(start < 0, start.view(torch.int32).long() + 1, start.view(torch.int32).long())
    inside = first[first & 0xFFFF > 0] >> 16
    return len(inside.unique()) < len(inside)


def test_the_formats_that_are_meant_to_be_fast_have_the_packed_table() -> None:
    for name in ("dtree8", "dynamic8", "udynamic8", "stree8", "mantissa8", "nf4", "posit8.0", "posit8.1", "posit8.2"):
        assert search_table.build(nc.format(name)).packed is not None, name
