"""The tensors of a call, flat."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.collectives.segments import host_waits, segment_ranges


class Flat:
    """Tensors as one flat tensor, where they are, that can be written back."""

    def __init__(self, tensors: list[Tensor], buffer: Tensor | None = None) -> None:
        self.tensors = tensors
        self.lengths = [t.numel() for t in tensors]
        self.numel = sum(self.lengths)
        like = tensors[0] if tensors else torch.empty(0)
        self.dtype, self.device = like.dtype, like.device
        one = buffer if buffer is not None else like.detach() if len(tensors) < 2 else None
        self.is_view = one is not None and one.is_contiguous()
        self._x = one.view(-1) if one is not None and self.is_view else None

    def host_waits(self, *codecs: Codec) -> bool:
        return host_waits(codecs, self.device, self.dtype)

    @property
    def x(self) -> Tensor:
        """Gathered where it must be, at the first use: not before the call has its turn, since what it is to read may
        still be written by the one before.
        """
        if self._x is None:
            self._x = torch.cat([t.detach().reshape(-1) for t in self.tensors])
        return self._x

    @property
    def memory(self) -> list[Tensor]:
        """The caller's memory, all that is read and written of it."""
        return [self.x] if self.is_view else self.tensors

    def write_back(self) -> None:
        if self.is_view:
            return
        for tensor, (low, high) in zip(self.tensors, segment_ranges(self.lengths), strict=True):
            tensor.detach().copy_(self.x[low:high].view(tensor.shape))
