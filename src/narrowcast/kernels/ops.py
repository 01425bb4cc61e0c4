"""What each op promises, its checks, and which implementation runs it. Checks live here, once."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType

import torch
from torch import Tensor

from narrowcast.formats import Format
from narrowcast.formats import format as format_named
from narrowcast.formats.floats import FloatFormat, Specials
from narrowcast.kernels import cpu_fallback, custom, native, reference, triton_loader, unfused
from narrowcast.kernels.native import casts as native_casts
from narrowcast.kernels.noise import NO_NOISE, Noise
from narrowcast.kernels.plain import check_apart, check_plain, check_written, wrote
from narrowcast.kernels.plan import AnyPlan, CastPlan, OwnPlan
from narrowcast.kernels.reference import cast

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
ROUNDINGS = ("nearest", "stochastic", "nearest-away", "toward-zero", "up", "down")


@dataclass(frozen=True)
class Choice:
    """Which implementation runs an op, and why not a faster one."""

    op: str
    device: str
    implementation: str
    why: str


def _on_cpu(reason_against_native: str | None) -> tuple[ModuleType, str]:
    if not native.available():
        return reference, native.load()[1]
    if reason_against_native is not None:
        return reference, reason_against_native
    return native, ""


def _on_cuda(reason_against_triton: str | None) -> tuple[ModuleType | None, str]:
    """Triton, or None where the values must travel over the host."""
    found, why = triton_loader.load()
    if found is None:
        return None, why
    return (None, reason_against_triton) if reason_against_triton is not None else (found, "")


def _kernels(plan: AnyPlan) -> ModuleType:
    """What runs a plan on the CPU."""
    if isinstance(plan, OwnPlan):
        return custom
    found = _on_cpu(native.why_not(plan))[0]
    if isinstance(plan, CastPlan):
        return native_casts if found is native else cast
    return found


def check_same_device(what: object, name: str, tensor: Tensor | None, like: Tensor) -> None:
    if tensor is not None and tensor.device != like.device:
        raise ValueError(
            f"{what}: {name} is on {tensor.device} and the values on {like.device}; put both on one device"
        )


def check_floats(what: object, x: Tensor) -> None:
    """`what` is who asks: a name, or a codec, written out only when something is wrong."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{what}: got {type(x).__name__}; give a torch tensor, for example torch.as_tensor(x)")
    if x.dtype not in FLOATS:
        raise TypeError(f"{what}: got {x.dtype}; give float32, float16 or bfloat16, for example x.float()")
    check_plain(what, x)


def check_integer(what: object, rule: str, number: int) -> int:
    """`number` as a plain int, which is all that C takes; numpy and torch have integers of their own."""
    try:
        return operator.index(number)
    except TypeError:
        raise TypeError(f"{what}: {rule}, got {number!r}") from None


def check_seed(what: object, seed: int) -> int:
    rule = "seed and stream are 64-bit unsigned integers"
    seed = check_integer(what, rule, seed)
    if not 0 <= seed < 2**64:
        raise ValueError(f"{what}: {rule}, got {seed}")
    return seed


def check_count(what: object, n: int) -> int:
    if (type(n) is int and n >= 0) or isinstance(n, torch.SymInt):
        return n  # as it is, with a size that a compiler does not know yet
    rule = "n is a number of values, an integer that is not negative"
    n = check_integer(what, rule, n)
    if n < 0:
        raise ValueError(f"{what}: {rule}, got {n}")
    return n


def encode(
    plan: AnyPlan,
    x: Tensor,
    wire: Tensor,
    noise: Noise = NO_NOISE,
    scale: Tensor | None = None,
    residual: Tensor | None = None,
    unit: float = 1.0,
) -> None:
    """Turn the values of contiguous `x` into the `plan.layout(n).nbytes` bytes of `wire`.

    `noise` is where random bits come from. `scale` (one float32) replaces the
    tensor's own scale where the plan has one scale for the tensor. With `residual` (n float32, contiguous) what is
    encoded is x + residual * unit, in float32, and afterwards residual holds (that - what comes back) / unit; where
    this is not finite it stays as it was.
    """
    if x.is_cuda:
        found = _on_cuda(triton_loader.why_not(plan))[0]
        run = cpu_fallback.encode(_kernels(plan)) if found is None else found.encode
        run(plan, x, wire, noise, scale, residual, unit)
        return
    unfused.encode(_kernels(plan), plan, x, wire, noise, scale, residual, unit)


def decode(plan: AnyPlan, wire: Tensor, n: int, out: Tensor, accumulate: bool = False) -> None:
    """Write the n values of `wire` into contiguous `out`, or add them to it: two roundings, in float32."""
    if out.is_cuda:
        found = _on_cuda(triton_loader.why_not(plan))[0]
        run = cpu_fallback.decode(_kernels(plan)) if found is None else found.decode
        run(plan, wire, n, out, accumulate)
        return
    _kernels(plan).decode(plan, wire, n, out, accumulate)


def reduce(
    plan: AnyPlan,
    wires: Tensor | Sequence[Tensor],
    n: int,
    wire: Tensor,
    noise: Noise = NO_NOISE,
    scale: Tensor | None = None,
    residual: Tensor | None = None,
    unit: float = 1.0,
    divide: float = 1.0,
    multiply: float = 1.0,
    out: Tensor | None = None,
) -> None:
    """Decode W wires of n values each, add them in float32 in their order, encode the sum into `wire`.

    The sum starts as the first wire's values. Before it is encoded it is divided by `divide` and multiplied by
    `multiply`, where these are not 1. noise to unit: as in `encode`. out (n values of any float type) gets what `wire`
    decodes to. `wires` is a uint8 tensor with one wire in each row, or a list of wires; on a CUDA device rows that are
    a multiple of 16 bytes apart are read fastest (`aligned_rows`), and a list is copied into one first.
    """
    if wire.is_cuda:
        rows = wires if isinstance(wires, Tensor) else _stacked(wires)
        found = _on_cuda(triton_loader.why_not(plan))[0]
        run = cpu_fallback.reduce(_kernels(plan)) if found is None else found.reduce
        run(plan, rows, n, wire, noise, scale, residual, unit, divide, multiply, out)
        return
    unfused.reduce(_kernels(plan), plan, wires, n, wire, noise, scale, residual, unit, divide, multiply, out)


ROW_ALIGNMENT = 16


def aligned_rows(world: int, nbytes: int, device: torch.device | str | None = None) -> Tensor:
    """Uninitialised memory for `world` wires of nbytes, one a row, each row where loads are widest."""
    stride = -(-nbytes // ROW_ALIGNMENT) * ROW_ALIGNMENT
    return torch.empty(world, stride, dtype=torch.uint8, device=device)[:, :nbytes]


def _stacked(wires: Sequence[Tensor]) -> Tensor:
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
    found = rounder(format_named(fmt) if isinstance(fmt, str) else fmt, rounding, overflow, rules)
    return found(x, seed, out)


@dataclass(frozen=True)
class Rounder:
    """`round_to` with all but the tensor given: checked once, for those who round hundreds of times a step."""

    format: Format
    rounding: str
    overflow: str
    rules: str

    @cached_property
    def _on_device(self) -> Callable[..., Tensor] | None:
        """What runs on a CUDA device; None where values must travel over the host."""
        found = _on_cuda(triton_loader.why_not_round(self.format, self.rounding, self.rules))[0]
        return None if found is None else found.round_to

    def _run(self, x: Tensor) -> Callable[..., Tensor]:
        if x.is_cuda and self._on_device is not None:
            return self._on_device
        # what runs on the CPU is asked for each time: it costs little there, and tests exchange it
        on_cpu = _on_cpu(native.why_not_round(self.format, self.rounding, self.rules))[0]
        return cpu_fallback.round_to(on_cpu) if x.is_cuda else on_cpu.round_to

    def __call__(self, x: Tensor, seed: int | None = None, out: Tensor | None = None) -> Tensor:
        noise = 0 if seed is None and self.rounding != "stochastic" else _checked_seed(seed)
        check_floats("round_to", x)
        source = x.detach() if x.requires_grad and torch.is_grad_enabled() else x
        if x.is_neg():
            source = source.resolve_neg()
        if out is None and source.is_contiguous():
            out = torch.empty_like(source)
            self._run(x)(source, self.format, self.rounding, self.overflow, self.rules, noise, out)
            return out
        if out is None:
            return self._in_any_layout(source, noise, torch.empty_like(source))
        self._in_any_layout(source, noise, _checked_out(x, out))
        wrote(out)
        return out

    def _in_any_layout(self, x: Tensor, seed: int, out: Tensor) -> Tensor:
        how, run = (self.format, self.rounding, self.overflow, self.rules, seed), self._run(x)
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
    found = known.get(key)
    if found is None:
        given = overflow if overflow is not None else fmt.default_overflow
        _check_rounding(fmt, rounding, given, rules)
        found = known[key] = Rounder(fmt, rounding, given, rules)
    return found


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
    """As the torch op of codecs/compiled.py, which names the format; it checks what is given when it runs."""
    name = fmt if isinstance(fmt, str) else fmt.name
    signed = seed if seed is None or seed < 2**63 else seed - 2**64
    found: Tensor = torch.ops.narrowcast.round_to(x, name, rounding, overflow, rules, signed)
    return found if out is None else out.copy_(found)


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


OPS = ("encode", "decode", "decode and add", "encode with residual", "reduce", "round_to")


def explain(plan: AnyPlan | None = None) -> list[Choice]:
    """What runs each op on each device of this machine, and why nothing faster does."""
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    return [_on(device, op, plan) for device in devices for op in OPS]


def _on(device: str, op: str, plan: AnyPlan | None) -> Choice:
    if isinstance(plan, OwnPlan):
        on_cpu, why = "the codec's own code", ""
    else:
        module, why = _on_cpu(native.why_not(plan) if plan is not None and op != "round_to" else None)
        on_cpu = f"native ({native.isa()})" if module is native else "reference"
    if device == "cpu":
        return Choice(op, device, on_cpu, why)
    found, why = _on_cuda(triton_loader.why_not(plan) if plan is not None and op != "round_to" else None)
    return Choice(op, device, f"host copy, {on_cpu}" if found is None else triton_loader.load()[1], why)
