"""The products of csrc/low_rank.cpp, for contiguous float32 matrices."""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor
from torch.nn.functional import pad

from narrowcast.kernels.arithmetic import Feedback
from narrowcast.kernels.native import library

LANES = 16


class NativeLowRank(Structure):
    """`nc_low_rank` of csrc/low_rank.h."""

    _fields_ = [
        ("x", c_void_p),
        ("residual", c_void_p),
        ("unit", c_float),
        ("weight", c_float),
        ("rows", c_int64),
        ("columns", c_int64),
        ("left", c_void_p),
        ("right", c_void_p),
        ("rank", c_int64),
        ("out", c_void_p),
        ("share", c_float),
    ]


def why_not() -> str | None:
    """Why these cannot run here, or None."""
    loaded, why = library.load()
    if loaded is None:
        return why
    return None if hasattr(loaded, "nc_low_rank_left") else "the native library has no low rank; run `make native`"


def _padded(right_rm: Tensor) -> Tensor:
    return pad(right_rm, (0, -right_rm.shape[1] % LANES)).contiguous()


def _run(
    name: str,
    x_nm: Tensor,
    feedback: Feedback | None,
    rank: int,
    *,
    left: Tensor | None = None,
    right: Tensor | None = None,
    out: Tensor | None = None,
    share: float = 1.0,
) -> None:
    taken = [x_nm, left, right, out, None if feedback is None else feedback.residual]
    for tensor in taken:  # what C writes to must be what it takes it for
        if tensor is not None and (tensor.dtype != torch.float32 or not tensor.is_contiguous() or not tensor.is_cpu):
            raise TypeError(f"internal: {name} takes contiguous float32 on the CPU, got {tensor.dtype}")
    added: tuple[int | None, float, float] = (None, 1.0, 1.0)
    if feedback is not None:
        added = feedback.residual.data_ptr(), feedback.unit, feedback.weight
    places = [None if one is None else one.data_ptr() for one in (left, right, out)]
    job = NativeLowRank(x_nm.data_ptr(), *added, *x_nm.shape, *places[:2], rank, places[2], share)
    call = getattr(library.require(), name)
    call.argtypes = [c_void_p, c_int32]
    library.check_status(call(ctypes.byref(job), torch.get_num_threads()), name, tuple(x_nm.shape))


def left(x_nm: Tensor, feedback: Feedback | None, right_rm: Tensor) -> Tensor:
    """See `kernels.low_rank.left`."""
    out_rn = torch.empty(len(right_rm), x_nm.shape[0], dtype=torch.float32)
    _run("nc_low_rank_left", x_nm, feedback, len(right_rm), right=_padded(right_rm), out=out_rn)
    return out_rn


def right(x_nm: Tensor, feedback: Feedback | None, left_rn: Tensor) -> Tensor:
    """See `kernels.low_rank.right`."""
    columns = x_nm.shape[1]
    out_rm = torch.empty(len(left_rn), columns + -columns % LANES, dtype=torch.float32)
    _run("nc_low_rank_right", x_nm, feedback, len(left_rn), left=left_rn.contiguous(), out=out_rm)
    return out_rm[:, :columns]


def finish(x_nm: Tensor, feedback: Feedback | None, left_rn: Tensor, right_rm: Tensor, share: float) -> None:
    """See `kernels.low_rank.finish`."""
    factors = {"left": left_rn.contiguous(), "right": _padded(right_rm)}
    _run("nc_low_rank_finish", x_nm, feedback, len(left_rn), **factors, share=share)
