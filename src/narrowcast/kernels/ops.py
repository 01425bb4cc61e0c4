"""Every op on one page: what it promises, and what torch.compile knows it by.

`encode`, `decode` and `reduce` take what was checked and flattened before (`Codec` does), and call the kernels that
`dispatch` chose for the plan; `round_to` checks for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from narrowcast.formats import FloatFormat, Format, Specials
from narrowcast.formats import format as format_named
from narrowcast.kernels import dispatch
from narrowcast.kernels.arithmetic import NO_FINISH, Feedback, Finish
from narrowcast.kernels.checks import check_apart, check_floats, check_seed, check_written, mark_written
from narrowcast.kernels.noise import NO_NOISE, Noise, as_signed, as_unsigned
from narrowcast.kernels.plan import AnyPlan

ROUNDINGS = ("nearest", "stochastic", "nearest-away", "toward-zero", "up", "down")

_NOISE = "int seed, int stream, int offset, Tensor? scale"
_LIBRARY = torch.library.Library("narrowcast", "DEF")
for _schema in (
    f"encode(Tensor x, str codec, {_NOISE}) -> Tensor",
    f"encode_owed(Tensor x, Tensor(a!) residual, str codec, float unit, {_NOISE}) -> Tensor",
    "decode(Tensor wire, str codec, int n, ScalarType dtype) -> Tensor",
    "decode_add(Tensor wire, str codec, Tensor(a!) out) -> ()",
    f"reduce(Tensor wires, str codec, int n, float divide, float multiply, {_NOISE}) -> Tensor",
    "round_to(Tensor x, str format, str rounding, str? overflow, str rules, int? seed) -> Tensor",
):
    # a codec is named by its spec and a format by its name; 64-bit words are signed (`noise.as_signed`)
    _LIBRARY.define(_schema)


def implement(name: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """What an op of the list above does, and what a compiler must know of its result."""
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"narrowcast::{name}", fake, lib=_LIBRARY)


def encode(
    plan: AnyPlan,
    x: Tensor,
    wire: Tensor,
    noise: Noise = NO_NOISE,
    scale: Tensor | None = None,
    feedback: Feedback | None = None,
) -> None:
    """Turn the values of contiguous `x` into the `plan.layout(n).nbytes` bytes of `wire`.

    `noise` is where random bits come from. `scale` (one float32) replaces the tensor's own scale where the plan has one
    scale for the tensor. With `feedback` (n float32, contiguous, a unit and a decay) what is encoded is x + residual *
    (unit * decay), in float32, and afterwards the residual holds (that - what comes back) / unit; where this is not
    finite it stays as it was.
    """
    kernels = dispatch.kernels_for(plan, "cuda" if x.is_cuda else "cpu")
    kernels.encode(plan, x, wire, noise, scale, feedback)


def decode(plan: AnyPlan, wire: Tensor, n: int, out: Tensor, accumulate: bool = False) -> None:
    """Write the n values of `wire` into contiguous `out`, or add them to it: two roundings, in float32."""
    dispatch.kernels_for(plan, "cuda" if out.is_cuda else "cpu").decode(plan, wire, n, out, accumulate)


def reduce(
    plan: AnyPlan,
    wires: Tensor | Sequence[Tensor],
    n: int,
    wire: Tensor,
    noise: Noise = NO_NOISE,
    scale: Tensor | None = None,
    feedback: Feedback | None = None,
    finish: Finish = NO_FINISH,
    out: Tensor | None = None,
) -> None:
    """Decode W wires of n values each, add them in float32 in their order, encode the sum into `wire`.

    The sum starts as the first wire's values. Before it is encoded it is divided and multiplied as `finish` says, where
    its numbers are not 1. noise, scale, feedback: as in `encode`. out (n values of any float type) gets what `wire`
    decodes to. `wires` is a uint8 tensor with one wire in each row, or a list of wires; on a CUDA device rows that are
    a multiple of 16 bytes apart are read fastest (`aligned_rows`), and a list is copied into one first.
    """
    if wire.is_cuda and not isinstance(wires, Tensor):
        wires = _stack(wires)
    kernels = dispatch.kernels_for(plan, "cuda" if wire.is_cuda else "cpu")
    kernels.reduce(plan, wires, n, wire, noise, scale, feedback, finish, out)


def sum_wires(plan: AnyPlan, wires: Tensor | Sequence[Tensor], n: int, out: Tensor, finish: Finish = NO_FINISH) -> None:
    """The sum that `reduce` would encode, into contiguous float32 `out`: what it decodes, adds, divides, multiplies."""
    if out.is_cuda and not isinstance(wires, Tensor):
        wires = _stack(wires)
    dispatch.kernels_for(plan, "cuda" if out.is_cuda else "cpu").sum_wires(plan, wires, n, out, finish)


def encode_rows(
    plan: AnyPlan,
    x: Tensor,
    per: int,
    wires: Tensor,
    noise: Noise = NO_NOISE,
    feedback: Feedback | None = None,
    pitch: int = 0,
) -> None:
    """`encode` of each `per` values of contiguous x into a row of `wires`, which has as many rows as x has such parts.

    `noise` is that of the first part; the others have what follows it in the tensor. feedback: of all of x. pitch: from
    the begin of a part to that of the next, where values lie between them.
    """
    kernels = dispatch.kernels_for(plan, "cuda" if x.is_cuda else "cpu")
    kernels.encode_rows(plan, x, per, wires, noise, feedback, pitch)


def decode_rows(plan: AnyPlan, wires: Tensor, per: int, out: Tensor, pitch: int = 0) -> None:
    """`decode` of each row of `wires` into the `per` values of contiguous `out` that are its part."""
    dispatch.kernels_for(plan, "cuda" if out.is_cuda else "cpu").decode_rows(plan, wires, per, out, pitch)


ROW_ALIGNMENT = 16


def aligned_rows(world: int, nbytes: int, device: torch.device | str | None = None) -> Tensor:
    """Uninitialised memory for `world` wires of nbytes, one a row, each row where loads are widest."""
    stride = -(-nbytes // ROW_ALIGNMENT) * ROW_ALIGNMENT
    return torch.empty(world, stride, dtype=torch.uint8, device=device)[:, :nbytes]


def _stack(wires: Sequence[Tensor]) -> Tensor:
    rows = aligned_rows(len(wires), wires[0].numel(), wires[0].device)
    for row, one in zip(rows, wires, strict=True):
        row.copy_(one)
    return rows


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
    if torch.compiler.is_compiling():
        return traced_round(x, fmt, rounding, overflow, rules, seed, out)
    return rounder(format_named(fmt) if isinstance(fmt, str) else fmt, rounding, overflow, rules)(x, seed, out)


@dataclass(frozen=True)
class Rounder:
    """`round_to` with all but the tensor: checked once, for those who round hundreds of times a step."""

    format: Format
    rounding: str
    overflow: str
    rules: str

    def choose_kernel(self, device: str) -> Callable[..., Tensor]:
        """What runs on "cpu" or "cuda", asked anew."""
        return dispatch.choose_rounding(self.format, self.rounding, self.rules, device)

    def kernel_for(self, device: str) -> Callable[..., Tensor]:
        """What runs on "cpu" or "cuda"; kept here, as `dispatch.kernels_for` keeps it on a plan."""
        kernel: Callable[..., Tensor] | None = self.__dict__.get(device)
        if kernel is None:
            kernel = self.__dict__[device] = self.choose_kernel(device)
        return kernel

    def __call__(self, x: Tensor, seed: int | None = None, out: Tensor | None = None) -> Tensor:
        noise = 0 if seed is None and self.rounding != "stochastic" else _checked_seed(seed)
        check_floats("round_to", x)
        source = x.detach() if x.requires_grad and torch.is_grad_enabled() else x
        if x.is_neg():
            source = source.resolve_neg()
        if out is None and source.is_contiguous():
            out = torch.empty_like(source)
            run = self.kernel_for("cuda" if x.is_cuda else "cpu")
            run(source, self.format, self.rounding, self.overflow, self.rules, noise, out)
            return out
        if out is None:
            return self._in_any_layout(source, noise, torch.empty_like(source))
        self._in_any_layout(source, noise, _checked_out(x, out))
        mark_written(out)
        return out

    def _in_any_layout(self, x: Tensor, seed: int, out: Tensor) -> Tensor:
        how = self.format, self.rounding, self.overflow, self.rules, seed
        run = self.kernel_for("cuda" if x.is_cuda else "cpu")
        if self.rounding != "stochastic" and (lying := _as_they_lie(x, out)) is not None:
            _check_in_place(*lying)
            run(lying[0], *how, lying[1])
            return out
        in_place = out.is_contiguous() and not out.is_neg()
        target = out if in_place else torch.empty_like(x, memory_format=torch.contiguous_format)
        source = x.contiguous()
        _check_in_place(source, target)
        run(source, *how, target)
        return out if target is out else out.copy_(target)


def rounder(fmt: Format, rounding: str = "nearest", overflow: str | None = None, rules: str = "ieee") -> Rounder:
    """The rounder of these, kept with the format."""
    known: dict[object, Rounder] = fmt.__dict__.setdefault("_rounders", {})
    key = rounding, overflow, rules
    kept = known.get(key)
    if kept is None:
        chosen = overflow if overflow is not None else fmt.default_overflow
        _check_rounding(fmt, rounding, chosen, rules)
        kept = known[key] = Rounder(fmt, rounding, chosen, rules)
    return kept


def _as_they_lie(x: Tensor, out: Tensor) -> tuple[Tensor, Tensor] | None:
    """Both as flat tensors in the order of their memory, where it is the same order without gaps: pictures in channels
    last need no copies then. Noise goes by the place in the tensor, so this is not for stochastic rounding."""
    if x.is_contiguous() or x.stride() != out.stride() or out.is_neg() or not _dense(x):
        return None
    return torch.as_strided(x.detach(), (x.numel(),), (1,)), torch.as_strided(out, (out.numel(),), (1,))


def _check_in_place(x: Tensor, out: Tensor) -> None:
    """In place is fine: each value is written where it was read."""
    if x.data_ptr() != out.data_ptr():
        check_apart("round_to", "out", out, "x", x)


def _dense(x: Tensor) -> bool:
    """Whether the values of x fill a stretch of memory, each once."""
    filled = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size != 1:
            if stride != filled:
                return False
            filled *= size
    return True


def traced_round(
    x: Tensor,
    fmt: str | Format,
    rounding: str,
    overflow: str | None,
    rules: str,
    seed: int | None,
    out: Tensor | None = None,
) -> Tensor:
    """As the torch op, which names the format; it checks its arguments when it runs."""
    name = fmt if isinstance(fmt, str) else fmt.name
    word = None if seed is None else as_signed(seed)
    y: Tensor = torch.ops.narrowcast.round_to(x, name, rounding, overflow, rules, word)
    return y if out is None else out.copy_(y)


def _run_round_to(x: Tensor, format: str, rounding: str, overflow: str | None, rules: str, seed: int | None) -> Tensor:
    word = None if seed is None else as_unsigned(seed)
    return round_to(x, format, rounding=rounding, overflow=overflow, rules=rules, seed=word)


implement("round_to", _run_round_to, lambda x, *_: torch.empty_like(x))


def _checked_out(x: Tensor, out: Tensor) -> Tensor:
    check_floats("round_to: out", out)
    if out.shape != x.shape or out.dtype != x.dtype or out.device != x.device:
        got = f"{tuple(out.shape)} {out.dtype} on {out.device}"
        raise ValueError(f"round_to: out is {got}; it must be like x: {tuple(x.shape)} {x.dtype} on {x.device}")
    check_written("round_to", {"out": out}, {})
    return out


def _check_rounding(fmt: Format, rounding: str, overflow: str, rules: str) -> None:
    if rounding not in ROUNDINGS:
        raise ValueError(f"round_to: unknown rounding {rounding!r}; take one of {', '.join(ROUNDINGS)}")
    if overflow not in fmt.overflows:
        raise ValueError(f"round_to: {fmt} cannot follow overflow={overflow!r}; take one of {', '.join(fmt.overflows)}")
    if rules not in ("ieee", "cpd"):
        raise ValueError(f"round_to: unknown rules {rules!r}; take 'ieee' or 'cpd'")
    if rules == "cpd":
        _check_cpd(fmt, rounding, overflow)


def _checked_seed(seed: int | None) -> int:
    if seed is None:
        raise ValueError("round_to: stochastic rounding needs seed=, an integer; the same seed gives the same noise")
    return check_seed("round_to", seed)


def _check_cpd(fmt: Format, rounding: str, overflow: str) -> None:
    if not isinstance(fmt, FloatFormat) or fmt.specials is not Specials.IEEE:
        raise ValueError(f"round_to: rules='cpd' is for IEEE-style floats such as e5m2 and e4m3, got {fmt}")
    if rounding != "nearest" or overflow != fmt.default_overflow:
        raise ValueError("round_to: CPD rounds to nearest and overflows to Inf; leave rounding and overflow alone")
