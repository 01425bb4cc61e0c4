"""The C++ kernels of csrc/ as an implementation: plans and casts, fused where one pass is enough."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from narrowcast.formats import FloatFormat, Format
from narrowcast.kernels.arithmetic import NO_FINISH, Feedback, Finish, Unfused
from narrowcast.kernels.native import library, transforms
from narrowcast.kernels.native.library import DTYPES, check_status
from narrowcast.kernels.native.library import available as available
from narrowcast.kernels.native.library import isa as isa
from narrowcast.kernels.native.library import load as load
from narrowcast.kernels.native.library import set_isa as set_isa
from narrowcast.kernels.noise import NO_NOISE, Noise
from narrowcast.kernels.plan import CastPlan, Plan, TransformPlan, inner_of
from narrowcast.kernels.reference.rotation import Rotation

DEVICE = "cpu"
FLOAT32_BIAS = 127
STEPS = {Rotation.name}
"""Transforms that are a step of the inner plan's own kernels, and so leave its wire as it is."""
OVERFLOWS = {"saturate": 0, "inf": 1, "nan": 2}


def name() -> str:
    return f"native ({isa()})"


def why_not(plan: Plan | CastPlan | TransformPlan | None) -> str | None:
    """Why this plan cannot run here, or None. Without a plan: why none can."""
    loaded, why = library.load()
    if loaded is None:
        return why
    if plan is None or isinstance(plan, CastPlan):
        return None
    if isinstance(plan, TransformPlan):
        return (None if plan.transform.name in STEPS else transforms.why_not(plan)) or why_not(plan.inner)
    return "CPD's corner cases are in the reference only" if plan.cpd else _why_not_format(plan.format)


def why_not_round(fmt: Format, rounding: str, rules: str) -> str | None:
    loaded, why = library.load()
    if loaded is None:
        return why
    if rounding not in ("nearest", "stochastic"):
        return f"rounding {rounding!r} is in the reference only"
    if rules != "ieee":
        return "CPD's corner cases are in the reference only"
    return "formats without a zero are in the reference only" if fmt.positive_only else _why_not_format(fmt)


def _why_not_format(fmt: Format) -> str | None:
    if isinstance(fmt, FloatFormat) and fmt.bias > FLOAT32_BIAS:
        return "formats whose smallest normal number is below float32's are in the reference only"
    return None


def encode(
    plan: Plan | TransformPlan, x: Tensor, wire: Tensor, noise: Noise = NO_NOISE, scale: Tensor | None = None
) -> None:
    """See `kernels.ops.encode`."""
    n, codes = x.numel(), wire.data_ptr()
    layout = inner_of(plan).layout(n)
    scales = codes + layout.scales
    _clear_padding(inner_of(plan), wire, n)
    status = library.require().nc_encode(
        ctypes.byref(library.describe_plan(plan)), x.data_ptr(), DTYPES[x.dtype], n, codes, scales,
        codes + layout.tensor_scale, None if scale is None else scale.data_ptr(), *noise, torch.get_num_threads(),
    )  # fmt: skip
    check_status(status, "nc_encode", plan)


def _clear_padding(plan: Plan, wire: Tensor, n: int) -> None:
    """Bytes between planes are zero; mostly there are none."""
    layout = plan.layout(n)
    codes_end, scales_end = plan.code_bytes(n), layout.scales + plan.n_scales(n) * plan.store.value
    if codes_end < layout.scales:
        wire[codes_end : layout.scales] = 0
    if scales_end < layout.tensor_scale:
        wire[scales_end : layout.tensor_scale] = 0


def decode(plan: Plan | TransformPlan, wire: Tensor, n: int, out: Tensor, accumulate: bool = False) -> None:
    """See `kernels.ops.decode`."""
    codes, layout = wire.data_ptr(), inner_of(plan).layout(n)
    status = library.require().nc_decode(
        ctypes.byref(library.describe_plan(plan)), codes, codes + layout.scales, codes + layout.tensor_scale, n,
        out.data_ptr(), DTYPES[out.dtype], accumulate, torch.get_num_threads(),
    )  # fmt: skip
    check_status(status, "nc_decode", plan)


def encode_with_feedback(plan: Plan | TransformPlan, x: Tensor, wire: Tensor, noise: Noise, feedback: Feedback) -> bool:
    """Encode with error feedback in one pass; False where this plan needs separate ones."""
    n, codes, layout = x.numel(), wire.data_ptr(), inner_of(plan).layout(x.numel())
    status = library.require().nc_encode_owed(
        ctypes.byref(library.describe_plan(plan)), x.data_ptr(), DTYPES[x.dtype], n, feedback.residual.data_ptr(),
        feedback.weight, feedback.unit, codes, codes + layout.scales, *noise, torch.get_num_threads(),
    )  # fmt: skip
    if status == 0:
        _clear_padding(inner_of(plan), wire, n)
    return bool(status == 0)


def reduce(
    plan: Plan | TransformPlan,
    wires: Sequence[Tensor],
    n: int,
    wire: Tensor,
    noise: Noise,
    feedback: Feedback | None,
    finish: Finish,
    out: Tensor | None,
) -> bool:
    """Sum wires and encode the sum in one pass; False where this plan needs separate ones."""
    codes, layout = wire.data_ptr(), inner_of(plan).layout(n)
    starts = (ctypes.c_void_p * len(wires))(*(one.data_ptr() for one in wires))
    kept = (None, 1.0, 1.0) if feedback is None else (feedback.residual.data_ptr(), feedback.weight, feedback.unit)
    status = library.require().nc_reduce(
        ctypes.byref(library.describe_plan(plan)), starts, len(wires), layout.scales, n, *kept, *finish,
        codes, codes + layout.scales, None if out is None else out.data_ptr(),
        DTYPES[torch.float32 if out is None else out.dtype], *noise, torch.get_num_threads(),
    )  # fmt: skip
    if status == 0:
        _clear_padding(inner_of(plan), wire, n)
    return bool(status == 0)


@dataclass(frozen=True)
class Fused(Unfused):
    """One pass over the values where no scale of the whole tensor is needed, else the separate steps."""

    def encode(
        self,
        plan: Any,
        x: Tensor,
        wire: Tensor,
        noise: Noise = NO_NOISE,
        scale: Tensor | None = None,
        feedback: Feedback | None = None,
    ) -> None:
        if feedback is None:
            encode(plan, x, wire, noise, scale)
        elif scale is not None or not encode_with_feedback(plan, x, wire, noise, feedback):
            super().encode(plan, x, wire, noise, scale, feedback)

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
        if scale is not None or not reduce(plan, list(wires), n, wire, noise, feedback, finish, out):
            super().reduce(plan, wires, n, wire, noise, scale, feedback, finish, out)


def cast(x: Tensor, out: Tensor, accumulate: bool = False) -> None:
    """Write contiguous x into `out`, which may be of another type, or add it."""
    status = library.require().nc_cast(
        x.data_ptr(), DTYPES[x.dtype], x.numel(), out.data_ptr(), DTYPES[out.dtype], accumulate, torch.get_num_threads()
    )
    check_status(status, "nc_cast", f"{x.dtype} to {out.dtype}")


def encode_cast(plan: CastPlan, x: Tensor, wire: Tensor, noise: Noise = NO_NOISE, scale: Tensor | None = None) -> None:
    """See `kernels.ops.encode`."""
    aligned = wire if wire.data_ptr() % plan.dtype.itemsize == 0 else torch.empty_like(wire)
    cast(x, aligned.view(plan.dtype))
    if aligned is not wire:
        wire.copy_(aligned)


def decode_cast(plan: CastPlan, wire: Tensor, n: int, out: Tensor, accumulate: bool = False) -> None:
    """See `kernels.ops.decode`."""
    aligned = wire if wire.data_ptr() % plan.dtype.itemsize == 0 else wire.clone()
    cast(aligned.view(plan.dtype), out, accumulate)


PLANS, CASTS = Fused(encode, decode), Unfused(encode_cast, decode_cast)


def kernels(plan: Plan | CastPlan | TransformPlan) -> Unfused:
    if isinstance(plan, TransformPlan) and plan.transform.name not in STEPS:
        return transforms.KERNELS
    return CASTS if isinstance(plan, CastPlan) else PLANS


def round_to(x: Tensor, fmt: Format, rounding: str, overflow: str, rules: str, seed: int, out: Tensor) -> Tensor:
    """See `kernels.ops.round_to`."""
    if rules != "ieee":
        raise ValueError(f"round_to: rules={rules!r} are computed by the reference alone, not by the native library")
    status = library.require().nc_round(
        ctypes.byref(library.describe_rounding(fmt)), x.data_ptr(), out.data_ptr(), DTYPES[x.dtype], x.numel(),
        OVERFLOWS[overflow], rounding == "stochastic", seed, torch.get_num_threads(),
    )  # fmt: skip
    check_status(status, "nc_round", fmt)
    return out


def rounding() -> Callable[..., Tensor]:
    return round_to
