"""What each op promises, its checks, and which implementation runs it. Checks live here, once."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from narrowcast.formats import Format
from narrowcast.formats import format as format_named
from narrowcast.formats.floats import FloatFormat, Specials
from narrowcast.kernels import native, reference
from narrowcast.kernels.plan import Plan

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
ROUNDINGS = ("nearest", "stochastic", "nearest-away", "toward-zero", "up", "down")
NOISE_ALIGNMENT = 16
"""`offset` is a multiple of this, as blocks are."""


@dataclass(frozen=True)
class Choice:
    """Which implementation runs an op, and why not a faster one."""

    op: str
    device: str
    implementation: str
    why: str


def _choose(reason_against_native: str | None) -> tuple[ModuleType, str]:
    if not native.available():
        return reference, native.load()[1]
    if reason_against_native is not None:
        return reference, reason_against_native
    return native, ""


def check_cpu(what: object, tensor: Tensor) -> None:
    """`what` is who asks: a name, or a codec, written out only when something is wrong."""
    if not tensor.is_cpu:
        raise NotImplementedError(f"{what}: got a tensor on {tensor.device}; kernels run on the CPU, so move it there")


def check_floats(what: object, x: Tensor) -> None:
    if x.dtype not in FLOATS:
        raise TypeError(f"{what}: got {x.dtype}; give float32, float16 or bfloat16, for example x.float()")
    check_cpu(what, x)


def check_seed(what: str, seed: int) -> None:
    if not 0 <= seed < 2**64:
        raise ValueError(f"{what}: seed and stream are 64-bit unsigned integers, got {seed}")


def encode(
    plan: Plan, x: Tensor, wire: Tensor, seed: int = 0, stream: int = 0, offset: int = 0, scale: Tensor | None = None
) -> None:
    """Turn the values of contiguous `x` into the `plan.layout(n).nbytes` bytes of `wire`.

    Random bits are those of elements offset .. offset + n - 1 under (seed, stream). `scale` (one float32) replaces the
    tensor's own scale where the plan has one scale for the tensor.
    """
    _choose(native.why_not(plan))[0].encode(plan, x, wire, seed, stream, offset, scale)


def decode(plan: Plan, wire: Tensor, n: int, out: Tensor, accumulate: bool = False) -> None:
    """Write the n values of `wire` into contiguous `out`, or add them to it: two roundings, in float32."""
    _choose(native.why_not(plan))[0].decode(plan, wire, n, out, accumulate)


def round_to(
    x: Tensor,
    fmt: str | Format,
    *,
    rounding: str = "nearest",
    overflow: str | None = None,
    rules: str = "ieee",
    seed: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Round every value of `x` (float32, float16, bfloat16) to a value of `fmt`; the result has x's type and shape.

    rounding: "nearest" (ties to the even code), "stochastic" (needs `seed`), or in the reference only "nearest-away",
    "toward-zero", "up", "down".
    overflow: "saturate", "inf" or "nan", for finite values that are too large; each format has a documented default.
    rules: "cpd" reproduces the corner cases of CPD's cast. NaN, Inf and -0 are kept where the format can hold them;
    `format(...).rules` says what becomes of them elsewhere. `x` is never changed, unless it is given as `out`.
    """
    fmt = format_named(fmt) if isinstance(fmt, str) else fmt
    check_floats("round_to", x)
    overflow = overflow if overflow is not None else fmt.default_overflow
    _check_rounding(fmt, rounding, overflow, rules, seed)
    out = _checked_out(x, out)
    chosen = _choose(native.why_not_round(fmt, rounding, rules))[0]
    source = x.detach().contiguous()
    target = out if out.is_contiguous() else torch.empty_like(source)
    chosen.round_to(source, fmt, rounding, overflow, rules, seed or 0, target)
    return out if target is out else out.copy_(target)


def _checked_out(x: Tensor, out: Tensor | None) -> Tensor:
    if out is None:
        return torch.empty_like(x, requires_grad=False)
    if out.shape != x.shape or out.dtype != x.dtype or out.device != x.device:
        got = f"{tuple(out.shape)} {out.dtype} on {out.device}"
        raise ValueError(f"round_to: out is {got}; it must be like x: {tuple(x.shape)} {x.dtype} on {x.device}")
    return out


def _check_rounding(fmt: Format, rounding: str, overflow: str, rules: str, seed: int | None) -> None:
    if rounding not in ROUNDINGS:
        raise ValueError(f"round_to: unknown rounding {rounding!r}; take one of {', '.join(ROUNDINGS)}")
    if overflow not in fmt.overflows:
        raise ValueError(f"round_to: {fmt} cannot follow overflow={overflow!r}; take one of {', '.join(fmt.overflows)}")
    if rounding == "stochastic" and seed is None:
        raise ValueError("round_to: stochastic rounding needs seed=, an integer; the same seed gives the same noise")
    if seed is not None:
        check_seed("round_to", seed)
    if rules not in ("ieee", "cpd"):
        raise ValueError(f"round_to: unknown rules {rules!r}; take 'ieee' or 'cpd'")
    if rules == "cpd":
        _check_cpd(fmt, rounding, overflow)


def _check_cpd(fmt: Format, rounding: str, overflow: str) -> None:
    if not isinstance(fmt, FloatFormat) or fmt.specials is not Specials.IEEE:
        raise ValueError(f"round_to: rules='cpd' is for IEEE-style floats such as e5m2 and e4m3, got {fmt}")
    if rounding != "nearest" or overflow != fmt.default_overflow:
        raise ValueError("round_to: CPD rounds to nearest and overflows to Inf; leave rounding and overflow alone")


def explain(plan: Plan | None = None) -> list[Choice]:
    """What runs each op on this machine, and why nothing faster does."""
    why_codec = native.why_not(plan) if plan is not None else None
    rows = []
    for op, reason in (("encode", why_codec), ("decode", why_codec), ("round_to", None)):
        module, why = _choose(reason)
        name = f"native ({native.isa()})" if module is native else "reference"
        rows.append(Choice(op, "cpu", name, why))
    return rows
