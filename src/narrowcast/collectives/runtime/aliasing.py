"""Which memory a call uses: two calls that share some must not overlap in time."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

Extents = list[tuple[int, int]]
"""The addresses from the first byte that is used to the last, by storage, rising. Storages may share memory: views that
were made outside of torch have one each.
"""


def extents(tensors: Iterable[Tensor]) -> Extents:
    """The memory of these tensors. What lies between the parts of a storage counts as used."""
    spans: dict[int, tuple[int, int]] = {}
    for tensor in tensors:
        if tensor.numel():
            storage, low = tensor.untyped_storage().data_ptr(), tensor.data_ptr()
            high = low + _reach(tensor) * tensor.itemsize
            begin, end = spans.get(storage, (low, high))
            spans[storage] = min(begin, low), max(end, high)
    return sorted(spans.values())


def _reach(tensor: Tensor) -> int:
    """Elements from the first to the last."""
    if tensor.is_contiguous():
        return tensor.numel()
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def overlap(one: Extents, other: Extents) -> bool:
    return any(low < end and begin < high for low, high in one for begin, end in other)
