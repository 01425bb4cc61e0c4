"""Matrix products with a chosen accumulator: what the op promises, its checks, and which implementation runs it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from narrowcast.kernels.checks import check_floats, check_seed, check_written, mark_written
from narrowcast.kernels.dispatch import KernelChoice
from narrowcast.kernels.matmul.accumulator import Accumulator, accumulator, how_to_compute
from narrowcast.kernels.native import matmul as native_matmul
from narrowcast.kernels.reference import matmul as reference_matmul
from narrowcast.kernels.reference import quire


def matmul(
    a: Tensor, b: Tensor, accumulate: str | Accumulator = "fp32", *, seed: int | None = None, out: Tensor | None = None
) -> Tensor:
    """a @ b with every product and every sum rounded as `accumulate` says; shapes and broadcasting are torch.matmul's.

    The result is float32 and holds numbers of the sums' format. The values of `a` and `b` are taken as they are
    (float32, float16 or bfloat16): round them first where they shall be narrow. Each output is summed over k in the
    stated order, from zero, whatever the shape and the number of threads. `seed` is needed for stochastic rounding:
    random bits follow from it, the step and the output's index. Accumulate "fp32" alone is torch's own matmul.
    """
    rule = accumulator(accumulate)
    _check(a, b)
    if rule.stochastic and seed is None:
        raise ValueError("matmul: stochastic rounding needs seed=, an integer; the same seed gives the same noise")
    noise = 0 if seed is None else check_seed("matmul", seed)
    if rule.is_torch:
        result = torch.matmul(a.float(), b.float())
        return result if out is None else _into(out, result)
    if out is not None:
        check_floats("matmul: out", out)
        check_written("matmul", {"out": out}, {})
    a_BMK, b_BKN, shape = _as_batches(*(x.detach().float().resolve_neg() for x in (a, b)))
    if out is not None and _is_free(out, shape, a, b):
        result = out
    else:
        result = torch.empty(shape, dtype=torch.float32, device=a.device)
    # a view for the kernel, not for the caller: autograd lets nobody change one in place
    _dispatch(a_BMK, b_BKN, rule, noise, result.view(a_BMK.shape[0], a_BMK.shape[1], b_BKN.shape[2]))
    if out is not result:
        return result if out is None else _into(out, result)
    mark_written(out)
    return out


def _is_free(out: Tensor, shape: tuple[int, ...], *operands: Tensor) -> bool:
    """Whether a kernel can write there, and nobody reads it."""
    if out.shape != shape or out.dtype != torch.float32 or out.device != operands[0].device:
        return False
    read = [x.untyped_storage().data_ptr() for x in operands]
    return out.is_contiguous() and out.untyped_storage().data_ptr() not in read


def _into(out: Tensor, result: Tensor) -> Tensor:
    if out.shape != result.shape or out.dtype != result.dtype:
        got, want = f"{tuple(out.shape)} {out.dtype}", f"{tuple(result.shape)} {result.dtype}"
        raise ValueError(f"matmul: out is {got}; it must be {want}")
    return out.copy_(result)


def _check(a: Tensor, b: Tensor) -> None:
    for x in (a, b):
        check_floats("matmul", x)
        if x.dim() == 0:
            raise ValueError("matmul: got a scalar; give vectors or matrices")
    if a.device != b.device:
        raise ValueError(f"matmul: a is on {a.device} and b on {b.device}; move one")
    inner = b.shape[-2] if b.dim() > 1 else b.shape[0]
    if a.shape[-1] != inner:
        shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
        raise ValueError(f"matmul: a has {a.shape[-1]} columns and b {inner} rows; got {shapes}")


def _as_batches(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Three-dimensional views (copies only where a broadcast cannot be a view), and the shape of the result."""
    rows, columns = a.shape[:-1][-1:], b.shape[-1:] if b.dim() > 1 else ()
    a = a[None] if a.dim() == 1 else a
    b = b[:, None] if b.dim() == 1 else b
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    count = math.prod(batch)
    a_BMK, b_BKN = (
        x.expand(count, *x.shape) if x.dim() == 2 else x.expand(*batch, *x.shape[-2:]).reshape(count, *x.shape[-2:])
        for x in (a, b)
    )
    return a_BMK, b_BKN, (*batch, *rows, *columns)


def _dispatch(a: Tensor, b: Tensor, rule: Accumulator, seed: int, out: Tensor) -> None:
    if rule.order == "quire":
        quire.matmul(a, b, rule, out)
    elif a.is_cuda:
        from narrowcast.kernels.triton import matmul as triton_matmul

        triton_matmul.matmul(a, b, rule, seed, out, how_to_compute(a, b, rule))
    elif native_matmul.why_not(rule) is None:
        native_matmul.matmul(a, b, rule, seed, out, how_to_compute(a, b, rule))
    else:
        reference_matmul.matmul(a, b, rule, seed, out)


def explain(accumulate: str | Accumulator = "bf16", device: str = "cpu") -> KernelChoice:
    """What runs a matrix product with this accumulator, and why nothing faster does."""
    rule = accumulator(accumulate)
    if rule.is_torch:
        return KernelChoice("matmul", device, "torch", "")
    if rule.order == "quire":
        return KernelChoice("matmul", device, "reference", "exact sums are float64 products of slices")
    if device.startswith("cuda"):
        return KernelChoice("matmul", device, "triton", "")
    why = native_matmul.why_not(rule)
    return KernelChoice("matmul", device, "native" if why is None else "reference", why or "")
