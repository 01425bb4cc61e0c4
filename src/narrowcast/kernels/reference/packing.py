"""Codes of any width as one little-endian string of bits: code i takes bits i*b to i*b + b - 1, lowest bit first."""

from __future__ import annotations

import torch
from torch import Tensor


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 bytes of int64 codes; the last byte is filled with zero bits."""
    if bits == 8:
        return codes.to(torch.uint8)
    string = ((codes[:, None] >> torch.arange(bits)) & 1).flatten()
    string = torch.nn.functional.pad(string, (0, -len(string) % 8)).view(-1, 8)
    return (string << torch.arange(8)).sum(dim=1).to(torch.uint8)


def unpack(packed: Tensor, bits: int, n: int) -> Tensor:
    """The first n codes, as int64."""
    if bits == 8:
        return packed[:n].long()
    string = ((packed.long()[:, None] >> torch.arange(8)) & 1).flatten()[: n * bits].view(n, bits)
    return (string << torch.arange(bits)).sum(dim=1)
