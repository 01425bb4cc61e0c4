"""The one rule by which DDP's buckets are cut: torch's, for models, simulations and predictions."""

from __future__ import annotations

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.parallel import assign_buckets, first_buckets, rebuilt_buckets
from narrowcast.parallel.ddp import buckets as ddp
from narrowcast.predict.model import TensorTime, ddp_buckets


def test_the_first_cap_is_torchs() -> None:
    assert ddp.FIRST_BYTES == dist._DEFAULT_FIRST_BUCKET_BYTES


@given(st.lists(st.integers(1, 400), max_size=12), st.integers(1, 800), st.integers(1, 1200))
def test_a_bucket_is_closed_once_it_has_reached_its_cap(sizes: list[int], first: int, later: int) -> None:
    expected, held = list[list[int]](), list[int]()
    for number in range(len(sizes)):
        held.append(number)
        if 4 * sum(sizes[n] for n in held) >= (later if expected else first):
            expected.append(held)
            held = []
    expected += [held] if held else []
    assert assign_buckets([torch.empty(size, device="meta") for size in sizes], [first, later]) == expected
    times = tuple(TensorTime(str(number), size, float(number)) for number, size in enumerate(sizes))
    predicted = ddp_buckets(times, first, later, min_values=100)
    assert [bucket.values for bucket in predicted] == [sum(sizes[n] for n in bucket) for bucket in expected]
    assert [bucket.ready for bucket in predicted] == [float(bucket[-1]) for bucket in expected]


def test_buckets_hold_one_dtype_and_come_in_the_order_of_readiness() -> None:
    tensors = [torch.empty(300_000), torch.empty(10, dtype=torch.bfloat16), torch.empty(300_000), torch.empty(5)]
    assert first_buckets(tensors) == [[1], [0, 2, 3]]
    assert rebuilt_buckets(tensors, [3, 2, 1, 0], None)[0] == [3, 2]
    assert [sorted(bucket) for bucket in rebuilt_buckets(tensors[::2], [1, 0], 0.5)] == [[1], [0]]
