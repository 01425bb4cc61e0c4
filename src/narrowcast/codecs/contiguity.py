"""How tensors lie in memory: kernels get an address and know nothing of strides and of torch's negative bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from narrowcast.kernels.plain import check_written, overlap


def lies_plainly(x: Tensor, n: int, dtype: torch.dtype) -> bool:
    """Whether a kernel that is given the address of x finds n such values there."""
    is_such = isinstance(x, Tensor) and x.dtype == dtype and x.numel() == n
    return is_such and x.layout is torch.strided and x.is_contiguous() and not x.is_neg()


def described(x: Tensor) -> str:
    """What it is instead, for an error."""
    if not isinstance(x, Tensor):
        return type(x).__name__
    if x.layout is not torch.strided:
        return f"{x.numel()} of {x.dtype} in layout {x.layout}"
    return f"{x.numel()} of {x.dtype}" + ("" if x.is_contiguous() and not x.is_neg() else ", not contiguous")


def check_reduced(
    what: object, written: Mapping[str, Tensor | None], wires: Tensor | Sequence[Tensor], scale: Tensor | None
) -> None:
    """What a reduction writes must lie apart from each of its wires."""
    outputs = [x for x in written.values() if x is not None]
    if outputs:
        # row by row only where the rows' stretch of memory is touched at all
        together = isinstance(wires, Tensor) and not any(overlap(x, wires) for x in outputs)
        read = {} if together else {f"wire {rank}": wire for rank, wire in enumerate(wires)}
        check_written(what, written, {**read, "scale": scale})


def flat(x: Tensor) -> Tensor:
    """The values of x in row-major order as a kernel takes them: x itself, or a copy."""
    if x.dim() == 1 and x.is_contiguous() and not x.requires_grad and not x.is_neg():
        return x
    return x.detach().resolve_neg().reshape(-1).contiguous()


def write_back(values: Tensor | None, out: Tensor | None) -> None:
    """Where `flat` had to copy `out`, put the values where they belong."""
    if values is not None and out is not None and values.data_ptr() != out.data_ptr():
        out.detach().copy_(values.view(out.shape))
