"""The tensors of a call, flat."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowcast.collectives.coder import segment_ranges


class Flat:
    """Tensors as one flat tensor, where they are, that can be written back."""

    def __init__(self, tensors: list[Tensor], buffer: Tensor | None = None) -> None:
        self.tensors = tensors
        self.lengths = [t.numel() for t in tensors]
        one = buffer if buffer is not None else tensors[0].detach() if len(tensors) == 1 else None
        self.is_view = one is not None and one.is_contiguous()
        self.x = one.view(-1) if one is not None and self.is_view else self._gathered()

    def _gathered(self) -> Tensor:
        return torch.cat([t.detach().reshape(-1) for t in self.tensors] or [torch.empty(0)])

    def write_back(self) -> None:
        if self.is_view:
            return
        for tensor, (low, high) in zip(self.tensors, segment_ranges(self.lengths), strict=True):
            tensor.detach().copy_(self.x[low:high].view(tensor.shape))
