"""Casts: what a tensor is cast to (`Caster`), and casts that gradients go through (`cast`, `Quantizer`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from narrowcast.codecs import Codec, codec, refuse_differences
from narrowcast.formats import Format
from narrowcast.formats import format as format_named
from narrowcast.kernels import FLOAT32, Rounder, check_floats, derive, rounder, traced_round

GRADIENTS = ("straight-through", "quantised")
FORWARD, BACKWARD = 0, 1
LOWERED, MASTER, OPTIMIZER = 2**40, 2**40 + 1, 2**40 + 2
"""Who draws in a simulated training: the first word of each one's noise, so that all may be given one seed."""


def _format(what: object) -> Format | None:
    """A format, itself or by name; None, which is float32, stays."""
    if what is None:
        return None
    chosen = format_named(what) if isinstance(what, str) else what
    if not isinstance(chosen, Format):
        raise TypeError(f"cast to {what!r}: give a format's name, a codec's spec, a Format, a Codec or a Caster")
    return chosen


@dataclass(frozen=True)
class Caster:
    """Values to values of a format, or of the one that a name stands for.

    `seed` is used where rounding is stochastic, `step` where there is a warm-up.
    """

    format: Format | None = None
    codec: Codec | None = None
    rounding: str = "nearest"
    overflow: str | None = None
    rules: str = "ieee"
    is_identity: bool = field(init=False, repr=False, compare=False)
    stochastic: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "format", _format(self.format))
        # once, not at each cast; a cached property has a lock, which no compiler traces
        lossless = self.codec is None or self.codec.lossless
        noisy = self.codec.stochastic if self.codec is not None else self.rounding == "stochastic"
        object.__setattr__(self, "is_identity", self.format is None and lossless)
        object.__setattr__(self, "stochastic", noisy)

    @cached_property
    def _rounder(self) -> Rounder:
        """Found and checked at the first cast: a lowered model casts hundreds of times a step."""
        assert self.format is not None
        return rounder(self.format, self.rounding, self.overflow, self.rules)

    def __str__(self) -> str:
        if self.codec is not None:
            return str(self.codec)
        return (str(self.format) if self.format else FLOAT32) + ("+sr" if self.format and self.stochastic else "")

    def __call__(self, x: Tensor, seed: int = 0, step: int = 0) -> Tensor:
        if self.is_identity:
            return x
        if self.codec is not None:
            wire = self.codec.encode(x, seed=seed)
            # into a tensor of its shape: a view of a flat one could not be changed in place
            return self.codec.decode(wire, x.numel(), out=x.new_empty(x.shape))
        assert self.format is not None
        noise_seed = seed if self.stochastic else None
        if torch.compiler.is_compiling():
            named = self.format, self.rounding, self.overflow, self.rules
            return traced_round(x, *named, seed=noise_seed)
        return self._rounder(x, noise_seed)


@dataclass(frozen=True)
class LayerScale(Caster):
    """A format under one power of two for each tensor: x -> P(x / s) * s, s = 2**(round(mean log2 |x|) + sigma).

    Lu et al. 2019, who train with posits: numbers are moved to where posits are densest. sigma shifts the centre.
    During the first `warmup` steps nothing is rounded.
    """

    sigma: int = 0
    warmup: int = 0

    def __str__(self) -> str:
        return f"{super().__str__()} scaled by layer"

    def scale(self, x: Tensor) -> float:
        """The power of two; 1 where there is nothing to centre."""
        sizes = x.detach().abs().double()
        sizes = sizes[(sizes > 0) & sizes.isfinite()]
        if sizes.numel() == 0:
            return 1.0
        return math.ldexp(1.0, round(float(torch.log2(sizes).mean())) + self.sigma)

    def __call__(self, x: Tensor, seed: int = 0, step: int = 0) -> Tensor:
        if step < self.warmup:
            return x
        scale = self.scale(x)
        return super().__call__(x / scale, seed) * scale


What = str | Format | Codec | Caster | None
"""What names a cast: "bf16", "e4m3+sr", "int8/256", a Format, a Codec, a Caster; None and "fp32" cast nothing."""


def caster(what: What, rounding: str | None = None, overflow: str | None = None, rules: str = "ieee") -> Caster:
    """The cast that `what` names.

    A format's name is the bare cast, without a scale, as in `round_to`; `+sr` makes it stochastic. A string with `/` or
    `@` names a scale and is a codec's spec. (One scale for the tensor: give the codec, `nc.codec("e5m2")`.)
    """
    if isinstance(what, Caster):
        return what
    if what is None or what == FLOAT32 or what == "as-is":
        return Caster()
    if isinstance(what, Codec) or (isinstance(what, str) and ("/" in what or "@" in what)):
        chosen = codec(what)
        if rounding is not None or overflow is not None:
            advice = "a codec's spec says how it rounds (+sr); leave rounding and overflow out"
            raise ValueError(f"cast to {chosen}: {advice}")
        refuse_differences("cast", chosen)
        if chosen.feedback:
            raise ValueError(f"cast to {chosen}: a cast keeps no residual; leave +ef out")
        return Caster(codec=chosen)
    if isinstance(what, str) and what.endswith("+sr"):
        what, rounding = what.removesuffix("+sr"), "stochastic"
    return Caster(_format(what), None, rounding or "nearest", overflow, rules)


class Casting(NamedTuple):
    """What happens to a tensor on its way forward and to its gradient on its way back, and the seeds of both."""

    forward: Caster
    backward: Caster
    seeds: tuple[int, int] = (0, 0)

    def does_nothing_to(self, x: Tensor) -> bool:
        return self.forward.is_identity and (self.backward.is_identity or not x.requires_grad)


class _Casts(torch.autograd.Function):
    """Tensors that are cast together: one node of the graph, since each costs the host more than a launch."""

    @staticmethod
    def forward(ctx: Any, castings: Sequence[Casting], step: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.castings, ctx.step = castings, step
        # an unused result has no gradient, rather than one of zeros
        ctx.set_materialize_grads(False)
        results = tuple(
            x.view_as(x) if how.forward.is_identity else how.forward(x, how.seeds[0], step)
            for x, how in zip(tensors, castings, strict=True)
        )
        # a caster may give back what it got (before it begins), of which autograd would make a view
        results = tuple(y.clone() if y is x else y for x, y in zip(tensors, results, strict=True))
        constant = [y for x, y in zip(tensors, results, strict=True) if not x.requires_grad]
        if constant:
            # else gradients would be computed for inputs that want none, pictures for example
            ctx.mark_non_differentiable(*constant)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        back = []
        for grad, how in zip(grads, ctx.castings, strict=True):
            leave = grad is None or how.backward.is_identity
            back.append(grad if leave else how.backward(grad, how.seeds[1], ctx.step))
        return None, None, *back


class _GradientCast(torch.autograd.Function):
    """A tensor of which only the gradient is cast: itself, not a view of it, which nobody could change in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: Casting, step: int) -> Tensor:
        ctx.how, ctx.step = how, step
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.how.backward(grad, ctx.how.seeds[1], ctx.step), None, None


def apply_to_result(x: Tensor, how: Casting, step: int = 0) -> Tensor:
    """The result of an operation, which nobody else holds, under its casting; what comes back may be changed in place.

    A result that is a view is copied, so that it is nobody's view.
    """
    if how.does_nothing_to(x) or not how.forward.is_identity:
        return apply_together([x], [how], step)[0]
    if torch.compiler.is_compiling():
        # which knows no views, and makes of the copy what it likes
        return apply_together([x], [how], step)[0].clone()
    result: Tensor = _GradientCast.apply(x.clone() if x._is_view() else x, how, step)
    return result


def apply_together(tensors: Sequence[Tensor], castings: Sequence[Casting], step: int = 0) -> list[Tensor]:
    """The operands of an operation, each under its casting; itself where that does nothing.

    They may be views of the operands, so the operation must not change them.
    """
    results = list(tensors)
    at = [i for i, how in enumerate(castings) if not how.does_nothing_to(tensors[i])]
    if at:
        cast_ones = _Casts.apply([castings[i] for i in at], step, *(tensors[i] for i in at))
        for i, y in zip(at, cast_ones, strict=True):
            results[i] = y
    return results


def apply_casts(x: Tensor, forward: Caster, backward: Caster, seeds: tuple[int, int] = (0, 0), step: int = 0) -> Tensor:
    """x cast by `forward`, whose gradient is cast by `backward`; x itself where neither does anything.

    Where the gradient alone is cast the result is a copy: whoever changes it in place leaves x as it is.
    """
    how = Casting(forward, backward, seeds)
    if how.does_nothing_to(x):
        return x
    return apply_to_result(x.clone() if how.forward.is_identity else x, how, step)


def _need_seed(what: str, casters: tuple[Caster, ...], seed: int | None) -> int:
    if seed is None and any(c.stochastic for c in casters):
        raise ValueError(f"{what}: stochastic rounding needs seed=, an integer; take a new one for each step")
    return seed or 0


def cast(
    x: Tensor,
    fmt: What,
    *,
    rounding: str | None = None,
    overflow: str | None = None,
    rules: str = "ieee",
    gradient: str = "straight-through",
    backward_fmt: What = None,
    backward_rounding: str | None = None,
    seed: int | None = None,
) -> Tensor:
    """x rounded to `fmt`, differentiable; x is never changed.

    fmt: a format's name (the bare cast, `+sr` for stochastic), a codec's spec with `/` or `@`, a Format, a Codec;
    "fp32" casts nothing. gradient: "straight-through" hands the gradient on as it is; "quantised" casts it to
    `backward_fmt` (by default `fmt`), rounded by `backward_rounding` (by default as forward). rounding, overflow,
    rules: as in `round_to`. seed: forward noise is that of `derive(seed, 0)`, backward noise that of `derive(seed, 1)`.
    """
    if gradient not in GRADIENTS:
        raise ValueError(f"cast: unknown gradient {gradient!r}; take {' or '.join(map(repr, GRADIENTS))}")
    if gradient == "straight-through" and backward_fmt is not None:
        raise ValueError("cast: backward_fmt goes with gradient='quantised'")
    forward = caster(fmt, rounding, overflow, rules)
    backward = Caster()
    if gradient == "quantised":
        default = fmt if backward_fmt is None else backward_fmt
        backward = caster(default, backward_rounding or rounding, overflow if backward_fmt is None else None, rules)
    if not (torch.compiler.is_compiling() or (forward.is_identity and backward.is_identity)):
        check_floats("cast", x)
    base = _need_seed("cast", (forward, backward), seed)
    return apply_casts(x, forward, backward, (derive(base, FORWARD), derive(base, BACKWARD)))


class Quantizer(nn.Module):
    """A layer that casts activations on the way forward and gradients on the way back.

    Noise is that of (seed, call, worker): a buffer counts the forward calls in training mode, so a checkpoint continues
    where it stopped; in evaluation the count stands still. Two quantizers in one model need two seeds.
    """

    calls: Tensor
    worker: int = 0
    """Of several ranks each sets its own; `simulate.train` does that for its workers."""

    def __init__(
        self,
        forward: What = None,
        backward: What = None,
        *,
        forward_rounding: str | None = None,
        backward_rounding: str | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self.to_forward = caster(forward, forward_rounding)
        self.to_backward = caster(backward, backward_rounding)
        self.seed = _need_seed("Quantizer", (self.to_forward, self.to_backward), seed)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        base = derive(self.seed, int(self.calls), self.worker)
        if self.training:
            self.calls += 1
        return apply_casts(x, self.to_forward, self.to_backward, (derive(base, FORWARD), derive(base, BACKWARD)))

    def extra_repr(self) -> str:
        return f"forward={self.to_forward}, backward={self.to_backward}"
