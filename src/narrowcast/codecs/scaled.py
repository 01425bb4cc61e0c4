"""The workhorse: codes of any format of up to 8 bits, times a scale for each block, for the tensor, or a constant one.

Small floats, integers, trees, codebooks, posits, fixed point, MX types, QSGD and TernGrad are all this codec.
Wire: packed codes, padded to a multiple of 4 bytes, then one scale a block (float32, bfloat16 or one exponent byte).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from narrowcast.codecs.base import Codec, Law
from narrowcast.codecs.cast import Cast
from narrowcast.codecs.planned import PlanCodec
from narrowcast.codecs.spec import Spec, write
from narrowcast.formats import Coding, FloatFormat, Format, Kind, Specials, UniformFormat, all_formats, find
from narrowcast.formats import format as format_named
from narrowcast.kernels import SR_BITS, TINY, Plan, Rule, Store, find_scales

MX_NAMES = {"mxfp8": "e4m3fn", "mxfp6": "e2m3fn", "mxfp4": "e2m1fn"}
MX_BLOCK = 32
LARGEST = torch.finfo(torch.float32).max
CUT_ANYWHERE = 16
"""With a constant scale a wire can be cut wherever codes of any width end on a byte."""


@dataclass(frozen=True)
class Scaled(PlanCodec):
    """value = level * scale. No block and no constant: one scale for the tensor."""

    format: Format = format_named("int8")
    size: int | None = None
    constant: float | None = None
    rounds_stochastically: bool = False
    aps: bool = False
    l2: bool = False
    store: Store = Store.FP32
    rceil: bool = False
    cpd: bool = False

    examples: ClassVar[tuple[str, ...]] = (
        *("int8", "int8/256", "int8/256+sr", "int4/128", "int4/128+sr+ef", "int3/64", "int2/64", "int8/128+sbf16"),
        *("e4m3fn/256", "e4m3fn/128", "e5m2/256", "e5m2", "e3m0", "e4m3@1", "e5m2@1024", "e2m1fn/32", "e4m3fnuz/64+sr"),
        *("e5m2+aps", "e4m3+aps", "e4m3@1+cpd", "e5m2+aps+cpd", "int8/32+se8m0", "e5m2/32+se8m0+rceil"),
        *("mxfp8", "mxfp6", "mxfp4", "mxfp4+sr", "mxfp8+rceil"),
        *("dtree8", "stree8@1000", "mantissa8@1000", "linear8", "dynamic8/256", "dynamic8/4096", "udynamic8/256"),
        *("nf4/64", "posit8.1", "posit8.1/256", "fixed4.4@1", "fixed2.6/64+sr"),
        *("qsgd4/512", "qsgd4/512+l2", "qsgd8/512", "qsgd2/128", "ternary/512"),
    )
    heads: ClassVar[tuple[str, ...]] = tuple(MX_NAMES)

    @classmethod
    def from_spec(cls, spec: Spec) -> Codec | None:
        if spec.head in MX_NAMES:
            spec.allow({"sr", "ef", "rceil"}, block=False)
            spec = replace(spec, head=MX_NAMES[spec.head], block=MX_BLOCK, options=spec.options | {"se8m0"})
        fmt = find(spec.head)
        if fmt is None:
            return None
        _check(spec, fmt)
        has = spec.options.__contains__
        return cls(
            **spec.wishes,
            format=fmt,
            size=spec.block,
            constant=spec.scale,
            rounds_stochastically=has("sr"),
            aps=has("aps"),
            l2=has("l2"),
            store=Store.BF16 if has("sbf16") else Store.E8M0 if has("se8m0") else Store.FP32,
            rceil=has("rceil"),
            cpd=has("cpd"),
        )

    def __str__(self) -> str:
        chosen = {
            "sr": self.rounds_stochastically,
            "aps": self.aps,
            "l2": self.l2,
            "sbf16": self.store is Store.BF16,
            "se8m0": self.store is Store.E8M0,
            "rceil": self.rceil,
            "cpd": self.cpd,
        }
        options = {name for name, is_on in chosen.items() if is_on} | set(self.wishes)
        for name, element in MX_NAMES.items():
            if (self.format.name, self.size) == (element, MX_BLOCK) and self.store is Store.E8M0:
                return write(name, None, None, options - {"se8m0"})
        return write(self.format.name, self.size, self.constant, options)

    @cached_property
    def plan(self) -> Plan:
        rule = Rule.APS if self.aps else Rule.DIVIDE
        if self.store is Store.E8M0:
            rule = Rule.RCEIL if self.rceil else Rule.FLOOR
        always = isinstance(self.format, UniformFormat) and self.format.stochastic_only
        return Plan(
            self.format,
            block=self.size or 0,
            constant=self.constant,
            store=self.store,
            rule=rule,
            l2=self.l2,
            stochastic=self.rounds_stochastically or always,
            cpd=self.cpd,
        )

    @property
    def block(self) -> int:
        return CUT_ANYWHERE if self.constant is not None else self.plan.block

    @property
    def takes_scale(self) -> bool:
        return self.size is None and self.constant is None and self.store is Store.FP32

    @property
    def agrees_on_scales(self) -> bool:
        return self.aps

    @property
    def constant_scale(self) -> float | None:
        return self.constant

    @property
    def largest_value(self) -> float:
        return math.inf if self.constant is None else self.format.max * self.constant

    @property
    def is_block_int8(self) -> bool:
        is_int8 = isinstance(self.format, UniformFormat) and self.format.coding is Coding.TWOS_COMPLEMENT
        has_blocks = self.constant is None and self.block > 0
        return is_int8 and self.format.bits == 8 and has_blocks and not self.stochastic

    @property
    def largest_scale(self) -> float:
        return self.plan.max_scale

    def tensor_scale(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            # by the kernel: torch's division on a GPU has other bits; nothing waits for the host
            return self.encode(largest_finite(x).view(1))[self.plan.layout(1).scales :].view(torch.float32)
        return self.scale_of(largest_finite(x).view(1))

    def scale_of(self, largest_N: Tensor) -> Tensor:
        return find_scales(self.plan, largest_N.view(-1, 1))

    def scale_of_exponent(self, exponent_N: Tensor) -> Tensor:
        low, high = self.plan.exponents
        # by its bits: a power function may be off by one
        bits_N = ((exponent_N - self.plan.top_exponent).clamp(low, high) + 127).int() << 23
        return bits_N.view(torch.float32)

    @property
    def exemptions(self) -> dict[str, str]:
        exempt = {}
        if not self.block:
            exempt[Law.BLOCKS] = "one scale for the tensor"
        if why := self._why_not_idempotent():
            exempt[Law.IDEMPOTENT] = why
        if not bool((self.format.grid == 0).any()):
            exempt[Law.ZERO] = "the table has no zero"
        if self.constant is not None and not self.format.holds_nonfinite:
            exempt[Law.NONFINITE] = "neither a scale nor a code for Inf or NaN"
        if self.cpd:
            exempt[Law.FINITE] = "CPD overflows to Inf"
        return exempt

    def _why_not_idempotent(self) -> str | None:
        if self.l2:
            return "the L2 norm of what was sent is another than that of the input"
        if self.plan.stochastic and self._strays():
            return "a value a rounding error off the grid may be rounded away from it"
        if self.plan.stochastic and self.store is Store.BF16:
            return "the largest value of a block may be rounded down, so the scale changes"
        if self.cpd and self.aps:
            return "CPD overflows to Inf, after which the scale is none"
        if self.store is Store.E8M0 and self._may_change_binade():
            return "the largest value may round into another binade, where the same values have no codes"
        if self.constant is None and not _both_signs_reach(self.format):
            return "the largest magnitude is not in the table with both signs, so the scale changes"
        return None

    def _strays(self) -> bool:
        """Whether a level times its scale and back may be off by what stochastic rounding can see: 2**-17 of a gap."""
        if self.store is Store.E8M0 or self.aps:
            return False  # powers of two: exact
        level = self.format.levels[self.format.grid_codes]
        # a product and a quotient of float32 put it one unit in the last place off, at most
        unit = torch.ldexp((level != 0).double(), torch.frexp(level).exponent - 24)
        return bool((torch.maximum(unit[1:], unit[:-1]) / level.diff() >= 2.0**-SR_BITS).any())

    def _may_change_binade(self) -> bool:
        if self.format.kind is Kind.TABLE and (self.rceil or self.plan.stochastic):
            return True
        return not self.rceil and self.plan.largest_level >= 2.0 ** (self.plan.top_exponent + 1)


def largest_finite(x: Tensor) -> Tensor:
    """Largest magnitude among the finite values, as a float32 scalar; 0 where there is none."""
    if not x.numel():
        return torch.zeros((), dtype=torch.float32, device=x.device)
    if x.is_cuda:
        return torch.where(x.isfinite(), x, 0.0).abs().amax().float()
    # one pass, and far faster than a norm; a NaN or an Inf anywhere shows in the result
    low, high = torch.aminmax(x)
    top = torch.maximum(-low, high).float()
    return top if bool(top.isfinite()) else torch.where(x.isfinite(), x, 0.0).abs().amax().float()


def _both_signs_reach(fmt: Format) -> bool:
    """Whether a block whose largest magnitude is negative keeps its scale, too."""
    levels = fmt.levels[fmt.grid_codes]
    return bool((levels == fmt.target).any() and (levels == -fmt.target).any())


def _check(spec: Spec, fmt: Format) -> None:
    """Refuse combinations that mean nothing."""
    if fmt.name != spec.head and fmt.name in Cast.heads:
        raise spec.error(f"{spec.head} is called {fmt} here; write {fmt}")
    if fmt.bits > 8:
        raise spec.error(f"{fmt} has {fmt.bits} bits; codecs have up to 8 (or bf16, fp16): use it with round_to")
    if fmt.positive_only:
        raise spec.error(f"{fmt} is a type for scales; choose it for them with +se8m0")
    spec.allow(_options_of(fmt, spec), scale=True)
    if {"cpd", "sr"} <= spec.options:
        raise spec.error("+cpd rounds to nearest, as CPD does; leave out +sr or +cpd")
    if len(spec.options & {"sbf16", "se8m0", "aps"}) > 1:
        raise spec.error("choose one of +sbf16, +se8m0 and +aps")
    if "rceil" in spec.options and "se8m0" not in spec.options:
        raise spec.error("+rceil is a rule for power-of-two scales; add +se8m0")
    if "aps" in spec.options and (spec.block or spec.scale):
        raise spec.error("+aps has one scale for the tensor; leave out /BLOCK and @SCALE")
    if spec.scale is not None:
        _check_constant(spec, fmt, spec.scale)
    elif fmt.kind is not Kind.UNIFORM and fmt.target * LARGEST < 1:
        raise spec.error(f"{fmt} ends at {fmt.largest:g}, and no float32 scale brings that to 1; use it with round_to")


def _options_of(fmt: Format, spec: Spec) -> set[str]:
    options = {"sr", "ef"}
    if isinstance(fmt, UniformFormat) and fmt.stochastic_only:
        options = {"ef", "l2"} if spec.block and fmt.name.startswith("qsgd") else {"ef"}
    if spec.scale is None:
        options |= {"sbf16", "se8m0", "rceil"} - ({"se8m0", "rceil"} if "l2" in spec.options else set())
    if fmt.kind is Kind.FLOAT:
        options |= {"aps"}
    if isinstance(fmt, FloatFormat) and fmt.specials is Specials.IEEE:
        options |= {"cpd"}
    return options


def _check_constant(spec: Spec, fmt: Format, scale: float) -> None:
    if not (scale >= TINY and scale * fmt.largest <= LARGEST):
        raise spec.error(f"@{scale:g} times the values of {fmt} leaves float32; take a scale nearer to 1")


def every_small_format() -> list[str]:
    """One spec for each format of up to 8 bits that this codec takes."""
    taken = [fmt for fmt in all_formats() if fmt.bits <= 8 and not fmt.positive_only and fmt.signed]
    return [f"{fmt}/64" for fmt in taken]
