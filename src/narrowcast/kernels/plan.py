"""What a kernel must know to turn n floats into bytes and back: one frozen value, and where each plane lies."""

from __future__ import annotations

import abc
import enum
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from narrowcast.formats import Format
from narrowcast.formats import format as format_named
from narrowcast.kernels.noise import NO_NOISE, Noise

PLANE_ALIGNMENT = 4
"""Every plane of a wire starts at a multiple of this many bytes, so that scales can be loaded as float32."""

MAX_KNOWN_LAYOUTS = 1024

TINY = 2.0**-100
"""A block whose largest magnitude is below this is a block of zeros: its scale could not be inverted safely."""


NVFP4_BLOCK_SCALE = format_named("e4m3fn")


class Method(enum.Enum):
    """How a block becomes codes and scales."""

    SCALED = "level times scale"
    AFFINE = "minimum plus code times step"
    MEANS = "one bit: the mean of the negatives or of the rest"
    SIGN = "one bit: plus or minus the mean magnitude"
    NVFP4 = "level times block scale times tensor scale"


class Store(enum.Enum):
    """How a scale is written; the value is its size in bytes."""

    FP32 = 4
    BF16 = 2
    E8M0 = 1


class Rule(enum.Enum):
    """How the scale of a block follows from its largest magnitude A."""

    DIVIDE = "A / target"
    FLOOR = "2 ** (floor(log2 A) - floor(log2 target))"
    RCEIL = "2 ** ceil(log2(A / target))"
    APS = "2 ** (ceil(log2 A) - floor(log2 max))"


SCALES_PER_BLOCK = {Method.SCALED: 1, Method.AFFINE: 2, Method.MEANS: 2, Method.SIGN: 1, Method.NVFP4: 1}


@dataclass(frozen=True)
class WireLayout:
    """Where the planes of one wire lie, in bytes: codes from 0, then scales, then (nvfp4) the tensor's scale."""

    scales: int
    tensor_scale: int
    nbytes: int


class _KeepsDerived:
    """Kernels keep what they derive from a plan on the plan itself."""

    def __getstate__(self) -> dict[str, object]:
        # that stays in this process
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]


@dataclass(frozen=True)
class Plan(_KeepsDerived):
    """A codec as kernels see it."""

    format: Format
    method: Method = Method.SCALED
    block: int = 0
    """Values that share a scale; 0: the whole tensor."""
    constant: float | None = None
    """A scale that is agreed beforehand and not on the wire."""
    store: Store = Store.FP32
    rule: Rule = Rule.DIVIDE
    l2: bool = False
    """Take the L2 norm of the block instead of its largest magnitude."""
    stochastic: bool = False
    cpd: bool = False
    """Round as CPD does, corner cases included."""

    @cached_property
    def bits(self) -> int:
        return self.format.bits

    @property
    def target(self) -> float:
        return self.format.target

    @property
    def largest_level(self) -> float:
        levels = self.format.levels[self.format.grid_codes]
        return float(levels.abs().max())

    @cached_property
    def unit_scale(self) -> float:
        """The constant scale, per level, as the float32 that kernels use."""
        assert self.constant is not None
        steps = self.largest_level / self.format.largest
        return float(torch.tensor(self.constant / steps, dtype=torch.float32))

    @cached_property
    def max_scale(self) -> float:
        """The largest scale that can be stored and does not turn the largest level infinite."""
        span = self.largest_level * (NVFP4_BLOCK_SCALE.max if self.method is Method.NVFP4 else 1)
        # a few units in the last place below, for the products that follow; a span below 1 gains nothing
        scale = torch.tensor(torch.finfo(torch.float32).max * (1 - 2.0**-20) / max(span, 1.0), dtype=torch.float32)
        return float(scale.view(torch.int32).bitwise_and(-65536).view(torch.float32) if self.rounds_scale else scale)

    @property
    def rounds_scale(self) -> bool:
        return self.store is Store.BF16

    @property
    def exponents(self) -> tuple[int, int]:
        """The least and the largest power of two that a scale may be: storable, and no level turns infinite."""
        return -126 if self.rule is Rule.APS else -127, math.frexp(self.max_scale)[1] - 1

    @property
    def top_exponent(self) -> int:
        """The binade in which power-of-two rules place the largest magnitude of a block."""
        return math.frexp(self.format.max if self.rule is Rule.APS else self.target)[1] - 1

    def n_scales(self, n: int) -> int:
        """How many scales n values need."""
        if self.constant is not None or n == 0:
            return 0
        blocks = -(-n // self.block) if self.block else 1
        return blocks * SCALES_PER_BLOCK[self.method]

    def code_bytes(self, n: int) -> int:
        return -(-n * self.bits // 8)

    def layout(self, n: int) -> WireLayout:
        """Where the planes of n values lie."""
        if not isinstance(n, int):
            return self._layout(n)  # a size that a compiler does not know yet
        layout = self._layouts.get(n)
        if layout is None:
            if len(self._layouts) > MAX_KNOWN_LAYOUTS:
                self._layouts.clear()
            layout = self._layouts[n] = self._layout(n)
        return layout

    @cached_property
    def _layouts(self) -> dict[int, WireLayout]:
        return {}

    def _layout(self, n: int) -> WireLayout:
        scales = _align(self.code_bytes(n)) if self.n_scales(n) else self.code_bytes(n)
        end = scales + self.n_scales(n) * self.store.value
        if self.method is not Method.NVFP4 or n == 0:
            return WireLayout(scales, end, end)
        return WireLayout(scales, _align(end), _align(end) + Store.FP32.value)


@dataclass(frozen=True)
class CastPlan(_KeepsDerived):
    """A plain cast as kernels see it: one plane, the values as `dtype`."""

    dtype: torch.dtype
    store: Store = Store.FP32
    """There are no scales."""

    @property
    def bits(self) -> int:
        return 8 * self.dtype.itemsize

    def n_scales(self, n: int) -> int:
        return 0

    def code_bytes(self, n: int) -> int:
        return n * self.dtype.itemsize

    def layout(self, n: int) -> WireLayout:
        end = self.code_bytes(n)
        return WireLayout(end, end, end)


@dataclass(frozen=True)
class CustomPlan(_KeepsDerived):
    """A codec that brings code of its own, for CPU tensors, instead of a plan."""

    encode: Callable[[Tensor, Tensor, Noise, Tensor | None], None]
    decode: Callable[[Tensor, int, Tensor, bool], None]


class Transform(abc.ABC):
    """Transform coding: each block of values is changed before a plan encodes it, and changed back after.

    What a transform keeps of a block, say the largest values, is encoded by the inner plan; what it must remember
    besides, say their places, are bytes of its own, the side plane. A frozen value: `forward` and `inverse` are the
    definition, in torch; faster ones are found by `name`.
    """

    name: ClassVar[str]
    """As in the option of a spec; an implementation that is faster than the reference knows it by this."""

    keeps_places: ClassVar[bool] = False
    """Whether n values give n, and no side plane: then a value keeps its random bits wherever a part of x begins."""

    @property
    @abc.abstractmethod
    def block(self) -> int:
        """Values that are changed together; 0: the whole tensor."""

    @abc.abstractmethod
    def count(self, n: int) -> int:
        """How many values the inner plan gets for n values. Of whole blocks it is a multiple of the inner block."""

    def side_bytes(self, n: int) -> int:
        """Bytes of the side plane of n values; those of a block begin on a byte."""
        return 0

    def written(self, m: int) -> tuple[int, ...]:
        """For kernels: how the side plane of a block of m values is written, in numbers that they understand."""
        raise NotImplementedError(f"internal: +{self.name} has no kernels beside the reference")

    @abc.abstractmethod
    def forward(self, x: Tensor, side: Tensor) -> Tensor:
        """The `count(n)` float32 that stand for the n float32 of x; fills the side plane. x stays as it is."""

    @abc.abstractmethod
    def inverse(self, kept: Tensor, side: Tensor, n: int) -> Tensor:
        """n float32 out of what came back of `forward`'s. The side plane comes from a peer: any bytes must do."""


@dataclass(frozen=True)
class TransformLayout:
    """Where the planes of one wire lie, in bytes: those of the inner plan from 0, then the side plane."""

    inner: int
    """Bytes of the inner wire."""
    side: int
    nbytes: int


@dataclass(frozen=True)
class TransformPlan(_KeepsDerived):
    """A transform and what encodes its values."""

    transform: Transform
    inner: Plan | CastPlan

    @property
    def block(self) -> int:
        return self.transform.block

    @property
    def stochastic(self) -> bool:
        return isinstance(self.inner, Plan) and self.inner.stochastic

    def code_bytes(self, n: int) -> int:
        return self.inner.code_bytes(self.transform.count(n))

    def layout(self, n: int) -> TransformLayout:
        inner = self.inner.layout(self.transform.count(n)).nbytes
        extra = self.transform.side_bytes(n)
        side = _align(inner) if extra else inner
        return TransformLayout(inner, side, side + extra)

    def inner_noise(self, noise: Noise) -> Noise:
        """The noise of the inner values: a part that is cut between blocks has the bits that it has in the whole."""
        offset, block = noise.offset, self.transform.block
        if not self.stochastic:
            return NO_NOISE
        if not offset or self.transform.keeps_places:
            return noise
        if block and offset % block == 0:
            return Noise(noise.seed, noise.stream, self.transform.count(offset))
        return noise.derive(offset)


AnyPlan = Plan | CastPlan | CustomPlan | TransformPlan


def inner_of(plan: Plan | TransformPlan) -> Plan:
    """The plan whose planes are the wire, where kernels run a transform without a side plane as a step of it."""
    inner = plan.inner if isinstance(plan, TransformPlan) else plan
    assert isinstance(inner, Plan)
    return inner


def _align(nbytes: int) -> int:
    return -(-nbytes // PLANE_ALIGNMENT) * PLANE_ALIGNMENT
