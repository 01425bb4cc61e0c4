"""Plans with a transform before them, in C++: one pass over memory, error feedback and sums included."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from narrowcast.kernels.arithmetic import NO_FINISH, Feedback, Finish, Unfused
from narrowcast.kernels.native import library
from narrowcast.kernels.native.library import DTYPES, check_status
from narrowcast.kernels.noise import NO_NOISE, Noise
from narrowcast.kernels.plan import CastPlan, TransformLayout, TransformPlan

KINDS = {"top": (0, "kept"), "spike": (1, "spikes")}
"""By a transform's name: `nc_transform_kind` of csrc/narrowcast.h, and which of its numbers goes with it."""
MAX_SIZE = 1 << 14
"""MAX_TILE of csrc/fused.hpp."""


class NativeTransform(Structure):
    """`nc_transform` of csrc/narrowcast.h."""

    _fields_ = [
        ("kind", c_int32),
        ("stored", c_int32),
        ("size", c_int64),
        ("number", c_int64),
        ("inner", c_void_p),
    ]
    _keep: object
    """The description of the inner plan, to which it points."""


def why_not(plan: TransformPlan) -> str | None:
    """What speaks against the transform; its inner plan is another matter."""
    if plan.transform.name not in KINDS:
        return f"+{plan.transform.name} is in the reference only"
    if plan.block > MAX_SIZE:
        return f"blocks of more than {MAX_SIZE} values with +{plan.transform.name} are in the reference only"
    return None


def describe(plan: TransformPlan) -> NativeTransform:
    """The description of a plan, written once and kept on it."""
    known: NativeTransform | None = plan.__dict__.get("_native")
    if known is not None:
        return known
    kind, number = KINDS[plan.transform.name]
    native = NativeTransform(kind=kind, size=plan.transform.block, number=getattr(plan.transform, number))
    if isinstance(plan.inner, CastPlan):
        native.stored = DTYPES[plan.inner.dtype]
    else:
        native._keep = library.describe_plan(plan.inner)
        native.inner = ctypes.addressof(native._keep)
    plan.__dict__["_native"] = native
    return native


def _scales_at(plan: TransformPlan, n: int) -> int:
    return plan.inner.layout(plan.transform.count(n)).scales


def _clear_padding(plan: TransformPlan, layout: TransformLayout, wire: Tensor, n: int) -> None:
    """Bytes between planes are zero; mostly there are none."""
    scales, codes_end = _scales_at(plan, n), plan.inner.code_bytes(plan.transform.count(n))
    if codes_end < scales:
        wire[codes_end:scales] = 0
    if layout.inner < layout.side:
        wire[layout.inner : layout.side] = 0


def encode(
    plan: TransformPlan,
    x: Tensor,
    wire: Tensor,
    noise: Noise = NO_NOISE,
    scale: Tensor | None = None,
    feedback: Feedback | None = None,
) -> None:
    """See `kernels.ops.encode`; there is no scale for the tensor."""
    n, codes = x.numel(), wire.data_ptr()
    layout = plan.layout(n)
    _clear_padding(plan, layout, wire, n)
    status = library.require().nc_encode_transform(
        ctypes.byref(describe(plan)), x.data_ptr(), DTYPES[x.dtype], n, *_feedback(feedback), codes,
        codes + _scales_at(plan, n), codes + layout.side, *plan.inner_noise(noise), torch.get_num_threads(),
    )  # fmt: skip
    check_status(status, "nc_encode_transform", plan)


def decode(plan: TransformPlan, wire: Tensor, n: int, out: Tensor, accumulate: bool = False) -> None:
    """See `kernels.ops.decode`."""
    codes = wire.data_ptr()
    status = library.require().nc_decode_transform(
        ctypes.byref(describe(plan)), codes, codes + _scales_at(plan, n), codes + plan.layout(n).side, n,
        out.data_ptr(), DTYPES[out.dtype], accumulate, torch.get_num_threads(),
    )  # fmt: skip
    check_status(status, "nc_decode_transform", plan)


def _feedback(feedback: Feedback | None) -> tuple[int | None, float, float]:
    return (None, 1.0, 1.0) if feedback is None else (feedback.residual.data_ptr(), feedback.weight, feedback.unit)


@dataclass(frozen=True)
class FusedTransform(Unfused):
    """One pass over the values for everything."""

    def encode(
        self,
        plan: Any,
        x: Tensor,
        wire: Tensor,
        noise: Noise = NO_NOISE,
        scale: Tensor | None = None,
        feedback: Feedback | None = None,
    ) -> None:
        encode(plan, x, wire, noise, scale, feedback)

    def reduce(
        self,
        plan: Any,
        wires: Tensor | Sequence[Tensor],
        n: int,
        wire: Tensor,
        noise: Noise = NO_NOISE,
        scale: Tensor | None = None,
        feedback: Feedback | None = None,
        finish: Finish = NO_FINISH,
        out: Tensor | None = None,
    ) -> None:
        codes, layout, scales = wire.data_ptr(), plan.layout(n), _scales_at(plan, n)
        starts = (c_void_p * len(wires))(*(one.data_ptr() for one in wires))
        _clear_padding(plan, layout, wire, n)
        status = library.require().nc_reduce_transform(
            ctypes.byref(describe(plan)), starts, len(wires), scales, layout.side, n, *_feedback(feedback), *finish,
            codes, codes + scales, codes + layout.side, None if out is None else out.data_ptr(),
            DTYPES[torch.float32 if out is None else out.dtype], *plan.inner_noise(noise), torch.get_num_threads(),
        )  # fmt: skip
        check_status(status, "nc_reduce_transform", plan)


KERNELS = FusedTransform(encode, decode)
