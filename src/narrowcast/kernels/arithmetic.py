"""Float32 arithmetic in torch as every kernel does it: what is finite stays finite, and subnormal numbers are kept.

Beside it, as values that travel through every layer, what error feedback adds to an encoding and what becomes of a sum;
and both out of encode and decode: what a fused kernel must equal, and what the CPU runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from narrowcast.kernels.noise import NO_NOISE, Noise

LARGEST = torch.finfo(torch.float32).max
_SUBNORMAL, _ONE = 5e-324, 1.0
_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
_NAN = {torch.float32: 0x7FC00000, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}

P = ParamSpec("P")
T = TypeVar("T")


def keeps_subnormals(function: Callable[P, T]) -> Callable[P, T]:
    """The function, in a calling thread that does not flush subnormals (`torch.set_flush_denormal`), and in it alone:
    torch's other threads keep the mode in which they were started."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if _SUBNORMAL * _ONE != 0.0:
            return function(*args, **kwargs)
        threads = torch.get_num_threads()
        torch.set_flush_denormal(False)
        torch.set_num_threads(1)
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_num_threads(threads)
            torch.set_flush_denormal(True)

    return run


def clamp_overflow(result: Tensor, *operands: Tensor) -> Tensor:
    """`result`, but the largest number where it is too large for float32 and all that it comes from is finite."""
    # one cheap pass shows that nothing is; a device would have to be waited for
    if result.is_cpu and bool(result.sum().isfinite()):
        return result
    finite = torch.stack([x.isfinite() for x in operands]).all(dim=0) if len(operands) > 1 else operands[0].isfinite()
    return torch.where(finite, result.clamp(-LARGEST, LARGEST), result)


@keeps_subnormals
def plus(a: Tensor, b: Tensor) -> Tensor:
    """The sum of two float32 tensors."""
    return clamp_overflow(a + b, a, b)


def saturate(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` with finite values cut to what `dtype` holds; Inf and NaN stay."""
    limit = torch.finfo(dtype).max
    if torch.finfo(x.dtype).max <= limit:
        return x
    # in float32: bfloat16 has no 65504, and the number next to it is Inf as float16
    cut = x.float().clamp(-limit, limit)
    return torch.where(x.isinf(), x.float(), cut)


def with_one_nan_(x: Tensor) -> Tensor:
    """Every NaN of x as the quiet one without sign and payload: casts of torch leave others on other machines."""
    lost = x.isnan()
    if bool(lost.any()):
        x.view(_BITS[x.dtype]).masked_fill_(lost, _NAN[x.dtype])
    return x


def put(out: Tensor, value: Tensor) -> Tensor:
    """Write float32 values; NaN has one pattern in 16 bits."""
    out.copy_(value)
    return out if out.dtype == torch.float32 else with_one_nan_(out)


class Feedback(NamedTuple):
    """Error feedback of one encoding: what earlier roundings removed is added, and then holds what this one removed."""

    residual: Tensor
    """One float32 for each value, in units of `unit`."""
    unit: float = 1.0
    decay: float = 1.0
    """The share of the residual that is added; the rest is forgotten (`+ef95`: 0.95)."""

    @property
    def weight(self) -> float:
        """What the residual is multiplied by when it is added; kernels round it to float32."""
        return self.unit * self.decay

    def part(self, values: slice) -> Feedback:
        """The feedback of some of the values."""
        return self._replace(residual=self.residual[values])

    @keeps_subnormals
    def add_to(self, values: Tensor) -> Tensor:
        """values + residual * weight, in float32: two roundings."""
        residual, weight = self.residual, self.weight
        return plus(values.float(), residual if weight == 1.0 else clamp_overflow(residual * weight, residual))

    @keeps_subnormals
    def keep(self, expected: Tensor, sent: Tensor) -> None:
        """The residual becomes what was expected and not sent, in units; where that is not finite it stays."""
        lost = expected - sent
        lost = lost if self.unit == 1.0 else lost / self.unit
        self.residual.copy_(torch.where(lost.isfinite(), lost, self.residual))


class Finish(NamedTuple):
    """What becomes of a float32 sum: first divided, then multiplied."""

    divide: float = 1.0
    multiply: float = 1.0

    @keeps_subnormals
    def apply(self, total: Tensor) -> Tensor:
        if self.divide != 1.0:
            # by a tensor: a number would be inverted first on a GPU, which rounds twice
            total = clamp_overflow(total / torch.full((), self.divide, dtype=torch.float32, device=total.device), total)
        return clamp_overflow(total * self.multiply, total) if self.multiply != 1.0 else total


NO_FINISH = Finish()
"""The sum as it is."""


def encode_each(
    encode: Callable[..., None],
    plan: Any,
    x: Tensor,
    per: int,
    wires: Tensor,
    noise: Noise = NO_NOISE,
    feedback: Feedback | None = None,
    pitch: int = 0,
) -> None:
    """See `kernels.ops.encode_rows`: one after another."""
    for row, wire in enumerate(wires):
        begin = row * (pitch or per)
        values = slice(begin, begin + per)
        kept = None if feedback is None else feedback.part(values)
        drawn = noise.after(begin) if getattr(plan, "stochastic", True) else noise
        encode(plan, x[values], wire, drawn, None, kept)


def decode_each(decode: Callable[..., None], plan: Any, wires: Tensor, per: int, out: Tensor, pitch: int = 0) -> None:
    """See `kernels.ops.decode_rows`: one after another."""
    for row, wire in enumerate(wires):
        begin = row * (pitch or per)
        decode(plan, wire, per, out[begin : begin + per], False)


@dataclass(frozen=True)
class Unfused:
    """The kernels of an implementation that has but an encode (plan, x, wire, noise, scale) and a decode."""

    encode_alone: Callable[[Any, Tensor, Tensor, Noise, Tensor | None], None]
    decode: Callable[..., None]

    def encode(
        self,
        plan: Any,
        x: Tensor,
        wire: Tensor,
        noise: Noise = NO_NOISE,
        scale: Tensor | None = None,
        feedback: Feedback | None = None,
    ) -> None:
        """See `kernels.ops.encode`."""
        if feedback is None:
            self.encode_alone(plan, x, wire, noise, scale)
            return
        expected = feedback.add_to(x)
        self.encode_alone(plan, expected, wire, noise, scale)
        sent = torch.empty_like(expected)
        self.decode(plan, wire, expected.numel(), sent, False)
        feedback.keep(expected, sent)

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
        """Decode all wires into one float32 sum, in order; encode that."""
        total = torch.empty(n, dtype=torch.float32)
        self.sum_wires(plan, wires, n, total)
        self.encode(plan, finish.apply(total), wire, noise, scale, feedback)
        if out is not None:
            self.decode(plan, wire, n, out, False)

    def sum_wires(
        self, plan: Any, wires: Tensor | Sequence[Tensor], n: int, out: Tensor, finish: Finish = NO_FINISH
    ) -> None:
        """See `kernels.ops.sum_wires`."""
        for number, one in enumerate(wires):
            self.decode(plan, one, n, out, number > 0)
        if finish != NO_FINISH:
            out.copy_(finish.apply(out))

    def encode_rows(
        self,
        plan: Any,
        x: Tensor,
        per: int,
        wires: Tensor,
        noise: Noise = NO_NOISE,
        feedback: Feedback | None = None,
        pitch: int = 0,
    ) -> None:
        """See `kernels.ops.encode_rows`."""
        encode_each(self.encode, plan, x, per, wires, noise, feedback, pitch)

    def decode_rows(self, plan: Any, wires: Tensor, per: int, out: Tensor, pitch: int = 0) -> None:
        """See `kernels.ops.decode_rows`."""
        decode_each(self.decode, plan, wires, per, out, pitch)
