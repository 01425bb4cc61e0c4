"""The fixture that makes an unwritten element show itself does so."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_fresh_floats_are_nan(dtype: torch.dtype) -> None:
    like = torch.zeros(3, dtype=dtype)
    for x in (torch.empty(3, dtype=dtype), torch.empty_like(like), like.new_empty(3), torch.empty(3, out=like)):
        assert x.dtype is dtype
        assert x.float().isnan().all()


def test_fresh_bytes_are_a_pattern() -> None:
    assert torch.empty(2, 2, dtype=torch.uint8).eq(0xA5).all()
    assert torch.empty_strided((2,), (1,), dtype=torch.int64).eq(torch.iinfo(torch.int64).min).all()
    assert torch.empty((), dtype=torch.bool).item() is True


@given(st.integers(0, 3))
def test_hypothesis_sees_poisoned_memory_too(n: int) -> None:
    assert torch.empty(n).isnan().all()
