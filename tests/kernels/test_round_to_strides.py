"""round_to does not care how a tensor lies in memory: the same values in the same places, with and without noise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import narrowcast as nc

X = torch.randn(3, 5, 7, 4, generator=torch.Generator().manual_seed(0))
LYING = {
    "channels last": X.to(memory_format=torch.channels_last),
    "permuted": X.permute(2, 0, 3, 1),
    "with gaps": X[:, ::2],
    "transposed, cut": X.transpose(0, 1)[1:],
    "backward, cut": X.permute(3, 2, 1, 0)[:2],
    "empty": torch.zeros(0, 3).t(),
    "one value seen often": X[:1].expand(3, 5, 7, 4),
    "sizes of one": X[:, :1, :1].transpose(0, 2),
}


@pytest.mark.parametrize("x", LYING.values(), ids=LYING)
@pytest.mark.parametrize("rounding", ["nearest", "toward-zero", "stochastic"])
def test_the_result_is_that_of_the_same_values_in_order(x: Tensor, rounding: str) -> None:
    given = {"rounding": rounding, "seed": 3 if rounding == "stochastic" else None}
    expected = nc.round_to(x.contiguous(), "e4m3", **given)  # type: ignore[arg-type]
    found = nc.round_to(x, "e4m3", **given)  # type: ignore[arg-type]
    assert torch.equal(found, expected)
    assert found.shape == x.shape
    other = torch.empty(x.shape)
    assert torch.equal(nc.round_to(x, "e4m3", out=other, **given), expected)  # type: ignore[arg-type]


def test_in_place_whatever_the_order_of_the_memory() -> None:
    x = LYING["channels last"].clone(memory_format=torch.preserve_format)
    expected = nc.round_to(x, "e5m2")
    assert nc.round_to(x, "e5m2", out=x) is x
    assert torch.equal(x, expected)
    assert x.stride() == LYING["channels last"].stride()
