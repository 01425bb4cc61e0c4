"""What a tensor is cast to: a bare format, a codec with its scales, or a format under a layer's own scale."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from narrowcast.codecs import Codec, codec
from narrowcast.formats import Format
from narrowcast.formats import format as format_named
from narrowcast.kernels import FLOAT32
from narrowcast.kernels.ops import Rounder, rounder, traced_round


def _format(what: object) -> Format | None:
    """A format, given or by name; None, which is float32, stays."""
    if what is None:
        return None
    found = format_named(what) if isinstance(what, str) else what
    if not isinstance(found, Format):
        raise TypeError(f"cast to {what!r}: give a format's name, a codec's spec, a Format, a Codec or a Caster")
    return found


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
        given = seed if self.stochastic else None
        if torch.compiler.is_compiling():
            named = self.format, self.rounding, self.overflow, self.rules
            return traced_round(x, *named, seed=given)
        return self._rounder(x, given)


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
        return _codec_caster(codec(what), rounding, overflow)
    if isinstance(what, str) and what.endswith("+sr"):
        what, rounding = what.removesuffix("+sr"), "stochastic"
    return Caster(_format(what), None, rounding or "nearest", overflow, rules)


def _codec_caster(found: Codec, rounding: str | None, overflow: str | None) -> Caster:
    if rounding is not None or overflow is not None:
        raise ValueError(f"cast to {found}: a codec's spec says how it rounds (+sr); leave rounding and overflow out")
    if found.feedback:
        raise ValueError(f"cast to {found}: a cast keeps no residual; leave +ef out")
    return Caster(codec=found)
