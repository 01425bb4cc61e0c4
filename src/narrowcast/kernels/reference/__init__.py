"""Plain torch on the CPU: the oracle. Written to be read; whatever is faster is compared with it bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from narrowcast.formats import Format
from narrowcast.kernels.arithmetic import Unfused, keeps_subnormals, plus, put, saturate, with_one_nan_
from narrowcast.kernels.noise import NO_NOISE, Noise
from narrowcast.kernels.plan import CastPlan, Method, Plan, TransformPlan
from narrowcast.kernels.reference import methods
from narrowcast.kernels.reference.blocks import pack, read_scales, unpack, write_scales
from narrowcast.kernels.reference.rounding import random_bits
from narrowcast.kernels.reference.rounding import round_to as round_to

DEVICE = "cpu"


def name() -> str:
    return "reference"


def why_not(plan: Plan | CastPlan | TransformPlan | None) -> None:
    """Every plan can run here."""


def why_not_round(fmt: Format, rounding: str, rules: str) -> None:
    """So can every rounding."""


@keeps_subnormals
def encode(plan: Plan, x: Tensor, wire: Tensor, noise: Noise = NO_NOISE, scale: Tensor | None = None) -> None:
    """See `kernels.ops.encode`."""
    n = x.numel()
    if n == 0:
        return
    x, layout = x.flatten().float(), plan.layout(n)
    random = random_bits(n, *noise) if plan.stochastic else None
    wire.zero_()  # padding between planes is zero
    scale_plane = wire[layout.scales : layout.scales + plan.n_scales(n) * plan.store.value]
    if plan.method is Method.NVFP4:
        codes, block_codes, tensor_scale = methods.encode_nvfp4(plan, x, random)
        scale_plane.copy_(block_codes.to(torch.uint8))
        wire[layout.tensor_scale :].copy_(tensor_scale.view(1).view(torch.uint8))
    else:
        if plan.method is Method.SCALED:
            codes, scales = methods.encode_scaled(plan, x, random, scale)
        elif plan.method is Method.AFFINE:
            codes, scales = methods.encode_affine(plan, x, random)
        else:
            codes, scales = methods.encode_signs(plan, x)
        write_scales(plan, scales, scale_plane)
    wire[: plan.code_bytes(n)].copy_(pack(codes, plan.bits))


@keeps_subnormals
def decode(plan: Plan, wire: Tensor, n: int, out: Tensor, accumulate: bool = False) -> None:
    """See `kernels.ops.decode`."""
    if n == 0:
        return
    value = _decode_float(plan, wire, n).view(out.shape)
    if accumulate:
        value = plus(out.float(), value)
    # a finite value stays finite in a 16-bit output too
    put(out, saturate(value, out.dtype))


def _decode_float(plan: Plan, wire: Tensor, n: int) -> Tensor:
    layout = plan.layout(n)
    codes = unpack(wire[: plan.code_bytes(n)], plan.bits, n)
    scale_plane = wire[layout.scales : layout.scales + plan.n_scales(n) * plan.store.value]
    if plan.method is Method.NVFP4:
        tensor_scale = wire[layout.tensor_scale :].clone().view(torch.float32)
        return methods.decode_nvfp4(plan, codes, scale_plane.long(), tensor_scale)
    scales = read_scales(plan, scale_plane)
    if plan.method is Method.SCALED:
        return methods.decode_scaled(plan, codes, scales)
    if plan.method is Method.AFFINE:
        return methods.decode_affine(plan, codes, scales)
    return methods.decode_signs(plan, codes, scales)


@keeps_subnormals
def encode_cast(plan: CastPlan, x: Tensor, wire: Tensor, noise: Noise = NO_NOISE, scale: Tensor | None = None) -> None:
    """A plain cast: one plane, the values in another type. A finite value that is too large becomes the largest."""
    dtype = plan.dtype
    aligned = wire if wire.data_ptr() % dtype.itemsize == 0 else torch.empty_like(wire)
    stored = aligned.view(dtype).copy_(x)
    # one cheap pass shows whether anything overflowed, or was not finite to begin with
    if not bool(stored.sum(dtype=torch.float32).isfinite()):
        with_one_nan_(stored.copy_(saturate(x, dtype)))
    if aligned is not wire:
        wire.copy_(aligned)


@keeps_subnormals
def decode_cast(plan: CastPlan, wire: Tensor, n: int, out: Tensor, accumulate: bool = False) -> None:
    aligned = wire if wire.data_ptr() % plan.dtype.itemsize == 0 else wire.clone()
    value = with_one_nan_(aligned.view(plan.dtype).clone())
    if accumulate:
        value = plus(out.float(), value.float())
    put(out, saturate(value, out.dtype))


@keeps_subnormals
def encode_transform(
    plan: TransformPlan, x: Tensor, wire: Tensor, noise: Noise = NO_NOISE, scale: Tensor | None = None
) -> None:
    """The transform's values by the inner plan, then the side plane."""
    layout = plan.layout(x.numel())
    wire[layout.inner : layout.side] = 0
    kept = plan.transform.forward(x.flatten().float(), wire[layout.side :])
    kernels(plan.inner).encode(plan.inner, kept, wire[: layout.inner], plan.inner_noise(noise), scale)


@keeps_subnormals
def decode_transform(plan: TransformPlan, wire: Tensor, n: int, out: Tensor, accumulate: bool = False) -> None:
    layout, count = plan.layout(n), plan.transform.count(n)
    kept = torch.empty(count, dtype=torch.float32)
    kernels(plan.inner).decode(plan.inner, wire[: layout.inner], count, kept, False)
    value = plan.transform.inverse(kept, wire[layout.side :], n).view(out.shape)
    if accumulate:
        value = plus(out.float(), value)
    put(out, saturate(value, out.dtype))


PLANS, CASTS = Unfused(encode, decode), Unfused(encode_cast, decode_cast)
TRANSFORMS = Unfused(encode_transform, decode_transform)


def kernels(plan: Plan | CastPlan | TransformPlan) -> Unfused:
    if isinstance(plan, TransformPlan):
        return TRANSFORMS
    return CASTS if isinstance(plan, CastPlan) else PLANS


def rounding() -> Callable[..., Tensor]:
    return round_to
