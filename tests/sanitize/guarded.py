"""Buffers in a desert: whoever touches a byte before or behind one is stopped by the address sanitizer."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor

DESERT = 512
"""Bytes on each side, which nobody may read or write: more than the widest vector, twice unrolled."""
POISON = 0xA5


class Guard:
    """Makes buffers; while `closed` the ground around all of them is forbidden to compiled code."""

    def __init__(self) -> None:
        runtime = ctypes.CDLL(None)
        self._forbid, self._allow = (runtime[f"__asan_{way}_memory_region"] for way in ("poison", "unpoison"))
        for each in (self._forbid, self._allow):
            each.argtypes, each.restype = [ctypes.c_void_p, ctypes.c_size_t], None
        self._made: list[tuple[Tensor, int, int]] = []

    def empty(self, shape: Sequence[int], dtype: torch.dtype, shift: int = 0) -> Tensor:
        """Memory that nobody has written, `shift` elements off its alignment."""
        size = torch.empty(0, dtype=dtype).element_size()
        begin, length = DESERT + shift * size, size * prod(shape)
        raw = torch.full((begin + length + DESERT,), POISON, dtype=torch.uint8)
        self._made.append((raw, begin, begin + length))
        return raw[begin : begin + length].view(dtype).view(list(shape))

    def copy(self, values: Tensor, shift: int = 0) -> Tensor:
        return self.empty(values.shape, values.dtype, shift).copy_(values)

    @contextmanager
    def closed(self) -> Iterator[None]:
        ends = [(raw.data_ptr(), raw.numel(), low, high) for raw, low, high in self._made]
        for start, size, low, high in ends:
            self._forbid(start, low)
            self._forbid(start + high, size - high)
        try:
            yield
        finally:
            for start, size, _, _ in ends:
                self._allow(start, size)
        self._check()

    def _check(self) -> None:
        """What the sanitizer does not see, such as a write by code that was not built with it."""
        for raw, low, high in self._made:
            for part in (raw[:low], raw[high:]):
                if not bool((part == POISON).all()):
                    raise AssertionError("a byte outside of a buffer was written")
