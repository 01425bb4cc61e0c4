"""Products of a matrix with few vectors in plain torch, in the order that `kernels.low_rank` states: the oracle.

Shapes: n rows, m columns, r vectors, L lanes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from narrowcast.kernels.arithmetic import Feedback, keeps_subnormals

LANES = 16


def with_residual(x_nm: Tensor, feedback: Feedback | None) -> Tensor:
    """A matrix and its residual, in float32."""
    return x_nm.float() if feedback is None else feedback.add_to(x_nm)


@keeps_subnormals
def left(x_nm: Tensor, feedback: Feedback | None, right_rm: Tensor) -> Tensor:
    """Lane j mod 16 adds its products one after another; then halves of lanes are added."""
    rows, columns = x_nm.shape
    rest = -columns % LANES
    w_ncL = pad(with_residual(x_nm, feedback), (0, rest)).view(rows, -1, LANES)
    q_rcL = pad(right_rm, (0, rest)).view(len(right_rm), -1, LANES)
    sums_rnL = torch.zeros(len(right_rm), rows, LANES, dtype=torch.float32)
    for c in range(w_ncL.shape[1]):
        sums_rnL = sums_rnL + w_ncL[:, c] * q_rcL[:, None, c]
    while sums_rnL.shape[-1] > 1:
        half = sums_rnL.shape[-1] // 2
        sums_rnL = sums_rnL[..., :half] + sums_rnL[..., half:]
    return sums_rnL[..., 0]


@keeps_subnormals
def right(x_nm: Tensor, feedback: Feedback | None, left_rn: Tensor) -> Tensor:
    """Row after row is added."""
    w_nm = with_residual(x_nm, feedback)
    sums_rm = torch.zeros(len(left_rn), x_nm.shape[1], dtype=torch.float32)
    for row in range(len(w_nm)):
        sums_rm = sums_rm + w_nm[row] * left_rn[:, row, None]
    return sums_rm


@keeps_subnormals
def product(left_rn: Tensor, right_rm: Tensor) -> Tensor:
    """The matrix of two factors: one pair of vectors after another is added."""
    total_nm = left_rn[0, :, None] * right_rm[0]
    for p_n, q_m in zip(left_rn[1:], right_rm[1:], strict=True):
        total_nm = total_nm + p_n[:, None] * q_m
    return total_nm
