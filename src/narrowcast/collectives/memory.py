"""Which memory a call uses: two calls that share some must not overlap in time."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

Extents = dict[int, tuple[int, int]]
"""By storage, the addresses from the first byte that is used to the last."""


def extents(tensors: Iterable[Tensor]) -> Extents:
    """The memory of these tensors. What lies between the parts of a storage counts as used."""
    found: Extents = {}
    for tensor in tensors:
        if tensor.numel():
            storage, low = tensor.untyped_storage().data_ptr(), tensor.data_ptr()
            high = low + _reach(tensor) * tensor.itemsize
            begin, end = found.get(storage, (low, high))
            found[storage] = min(begin, low), max(end, high)
    return found


def _reach(tensor: Tensor) -> int:
    """Elements from the first to the last."""
    if tensor.is_contiguous():
        return tensor.numel()
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def overlap(one: Extents, other: Extents) -> bool:
    return any(one[s][0] < other[s][1] and other[s][0] < one[s][1] for s in one.keys() & other.keys())
