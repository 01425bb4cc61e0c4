"""What a codec is, and what others may ask of one: n floats <-> exactly nbytes(n) bytes."""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from narrowcast.codecs import calls, compiled
from narrowcast.codecs.spec import Spec
from narrowcast.kernels import (
    NO_FINISH,
    NO_NOISE,
    AnyPlan,
    CustomPlan,
    Feedback,
    Finish,
    KernelChoice,
    Noise,
    explain,
)


class Law:
    """The laws from which a codec may declare itself exempt, with its reason."""

    SIZE = "1: size known beforehand"
    BLOCKS = "2: blocks are independent"
    NEAREST = "3: nearest means nearest"
    IDEMPOTENT = "4: idempotent"
    ZERO = "4: zero stays zero"
    NONFINITE = "5: non-finite never turns finite"
    FINITE = "5: finite never turns non-finite"
    BYTES = "6: same bytes everywhere"


@dataclass(frozen=True)
class Codec(abc.ABC):
    """A frozen recipe. `str(codec)` is its spec; `nc.codec(str(codec)) == codec`.

    A subclass supplies `examples`, `from_spec`, `__str__`, `block`, `bits_per_value`, `nbytes`, and what it does: a
    kernel plan through `plan_for`, or code of its own in `_encode` and `_decode`, for contiguous CPU tensors.
    """

    examples: ClassVar[tuple[str, ...]] = ()
    """Specs that the listing shows and that every law is tested on."""

    heads: ClassVar[tuple[str, ...]] = ()
    """Names that mean this codec in specs and are no formats; no format may take one."""

    feedback: bool = False
    """Whoever sends repeatedly keeps what rounding removed and adds it to the next tensor (`+ef`)."""

    kept_percent: int = field(default=100, kw_only=True)
    """How much of what was kept is added (`+ef95`); the rest is forgotten."""

    differences: bool = field(default=False, kw_only=True)
    """Whoever sends repeatedly sends the difference to what everybody has last decoded (`+diff`)."""

    @property
    def wishes(self) -> list[str]:
        """The options that ask something of the sender."""
        kept = "ef" if self.kept_percent == 100 else f"ef{self.kept_percent}"
        return [name for name, is_on in ((kept, self.feedback), ("diff", self.differences)) if is_on]

    @property
    def decay(self) -> float:
        """What a residual is multiplied by before it is added."""
        return self.kept_percent / 100

    @classmethod
    @abc.abstractmethod
    def from_spec(cls, spec: Spec) -> Codec | None:
        """The codec that `spec` names, or None where it is another's; ValueError where it is wrong."""

    @property
    @abc.abstractmethod
    def block(self) -> int:
        """A wire may be cut after each multiple of this many values; 0 where it cannot be cut."""

    @property
    @abc.abstractmethod
    def bits_per_value(self) -> float:
        """Bits on the wire for each value of a large tensor, scales included."""

    @abc.abstractmethod
    def nbytes(self, n: int, dtype: torch.dtype = torch.float32) -> int:
        """Size of the wire of n values. Only `as-is` looks at the dtype."""

    def planes(self, n: int, dtype: torch.dtype = torch.float32) -> tuple[tuple[int, int], ...] | None:
        """Where the planes of a wire of n values begin and end, if those of its blocks are slices of them; or None."""
        return None

    def plan_for(self, dtype: torch.dtype) -> AnyPlan:
        """What kernels do with values of this type."""
        return self._custom_plan

    @cached_property
    def _custom_plan(self) -> CustomPlan:
        return CustomPlan(self._encode, self._decode)

    def _encode(self, x: Tensor, wire: Tensor, noise: Noise, scale: Tensor | None) -> None:
        """Fill `wire` with the bytes of x, which is not empty."""
        raise NotImplementedError(f"{type(self).__name__} has neither a plan nor code of its own")

    def _decode(self, wire: Tensor, n: int, out: Tensor, accumulate: bool) -> None:
        """Fill `out` with the n values of `wire`, or add them to it."""
        raise NotImplementedError(f"{type(self).__name__} has neither a plan nor code of its own")

    def __post_init__(self) -> None:
        # written once: calls that agree on a codec compare it, and torch.compile can read a plain attribute
        object.__setattr__(self, "spec", str(self))
        compiled.KNOWN[self.spec] = self

    spec: ClassVar[str]
    """What `str` says."""

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self.__post_init__()

    def __getstate__(self) -> dict[str, object]:
        # what was derived or cached stays in this process
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def stochastic(self) -> bool:
        """Whether `seed` and `stream` matter."""
        return False

    @property
    def lossless(self) -> bool:
        """Whether every float32 comes back as it was."""
        return False

    @property
    def sends_all(self) -> bool:
        """Whether every value has a code; one that has none comes back as zero."""
        return True

    @property
    def is_identity(self) -> bool:
        """Whether values travel as they are, in the tensor's own type."""
        return False

    def stored_dtype(self, dtype: torch.dtype) -> torch.dtype | None:
        """The float type in which values of `dtype` lie on the wire; None where codes do."""
        return None

    @property
    def code_bits(self) -> int:
        """Bits of a value's code, scales apart: 1 for onebit/16, whose wire has 5 a value."""
        return max(1, int(self.bits_per_value))

    @property
    def is_block_int8(self) -> bool:
        """Whether codes are int8, rounded to nearest, with one scale for each block: then integers may be summed."""
        return False

    @property
    def transformed_by(self) -> str:
        """The option that changes what the rest of the spec encodes, as it is written: top64, rot; else empty."""
        return ""

    @property
    def rank(self) -> int:
        """How many pairs of vectors stand for a matrix (`collectives.low_rank`); 0: values travel themselves."""
        return 0

    @property
    def sends_one_factor(self) -> bool:
        """Where there is a rank: whether a call sends one of the two factors, in turn."""
        return False

    @property
    def factors(self) -> Codec:
        """The codec of what travels: another one where there is a rank."""
        return self

    def for_shape(self, shape: Sequence[int]) -> tuple[Codec, str]:
        """The codec of a tensor of this shape and, where it is another one, why."""
        return self, ""

    def bits_for(self, shape: Sequence[int]) -> float:
        """Bits on the wire for each value of a tensor of this shape."""
        return self.bits_per_value

    @property
    def constant_scale(self) -> float | None:
        """The scale that the spec names (`@SCALE`) and no wire carries."""
        return None

    @property
    def largest_value(self) -> float:
        """The largest magnitude that can come back; infinite where scales follow the values."""
        return math.inf

    @property
    def takes_scale(self) -> bool:
        """Whether `encode(scale=)` means something: one float32 scale for the tensor."""
        return False

    @property
    def agrees_on_scales(self) -> bool:
        """Whether all ranks agree on a scale for each tensor before they encode it, and for its sum too (APS)."""
        return False

    def tensor_scale(self, x: Tensor) -> Tensor:
        """Where `takes_scale`: the scale of `x` as a whole, from its finite values. Encode parts of x with it."""
        raise self._has_no_scale()

    def scale_of(self, largest_N: Tensor) -> Tensor:
        """Where `takes_scale`: the scale of N tensors of these largest finite magnitudes, on the CPU."""
        raise self._has_no_scale()

    def scale_of_exponent(self, exponent_N: Tensor) -> Tensor:
        """Where `agrees_on_scales`: the scale of N tensors whose sums over all ranks stay within 2 ** exponent."""
        raise self._has_no_scale()

    def _has_no_scale(self) -> TypeError:
        return TypeError(f"internal: {self} has no scale for the whole tensor; ask takes_scale or agrees_on_scales")

    @property
    def largest_scale(self) -> float:
        """The largest number for `encode(scale=)`: with it no level turns infinite."""
        return torch.finfo(torch.float32).max

    @property
    def exemptions(self) -> dict[str, str]:
        """Laws that this codec cannot obey by its nature, each with the reason."""
        return {}

    def limits(self, wire: Tensor, n: int) -> tuple[Tensor, Tensor] | None:
        """The smallest and largest number that could have come back in each place, where that means something."""
        return None

    def explain(self) -> list[KernelChoice]:
        """What runs this codec on this machine, and why nothing faster does."""
        return explain(self.plan_for(torch.float32))

    def encode(
        self,
        x: Tensor,
        *,
        seed: int = 0,
        stream: int = 0,
        offset: int = 0,
        scale: Tensor | None = None,
        residual: Tensor | None = None,
        unit: float = 1.0,
        out: Tensor | None = None,
    ) -> Tensor:
        """The wire (uint8) of the values of `x` in row-major order, on x's device.

        seed, stream, offset: where stochastic rounding takes its bits, see docs/wire-format.md; `offset` is the index
        of x's first value in the whole tensor, when x is a part of it. scale: one float32, used instead of the tensor's
        own by codecs with one scale for the tensor: 0, NaN or a normal number that turns no level infinite (looked at
        on the CPU only, since a GPU would have to be waited for). residual: error feedback: n float32 that are added,
        times `unit` (and the codec's `decay`), and then hold what rounding removed, in units; where that is not finite
        they stay as they were.
        out: a uint8 tensor of `nbytes(x.numel())` to write into.
        """
        feedback = None if residual is None else Feedback(residual, unit)
        return self.encode_with(x, Noise(seed, stream, offset), scale, feedback, out)

    def encode_with(
        self,
        x: Tensor,
        noise: Noise = NO_NOISE,
        scale: Tensor | None = None,
        feedback: Feedback | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """`encode`, its numbers bundled as they travel on to kernels."""
        if torch.compiler.is_compiling():
            return compiled.encode(self.spec, x, noise, scale, feedback, out)
        return calls.encode(self, x, noise, scale, feedback, out)

    def reduce(
        self,
        wires: Tensor | Sequence[Tensor],
        n: int,
        *,
        seed: int = 0,
        stream: int = 0,
        offset: int = 0,
        scale: Tensor | None = None,
        residual: Tensor | None = None,
        unit: float = 1.0,
        divide: float = 1.0,
        multiply: float = 1.0,
        out: Tensor | None = None,
        decoded: Tensor | None = None,
    ) -> Tensor:
        """The wire of the sum of what W wires of n values hold, added in float32 in their order.

        wires: one in each row of a uint8 tensor (`kernels.ops.aligned_rows` makes one), or a list. The sum is divided
        by `divide` and multiplied by `multiply` before it is encoded. decoded: n values, as `decode` takes them for
        `out`, that get what the result decodes to. The rest is as in `encode`. On a GPU all of it is one kernel, or two
        for one scale a tensor.
        """
        feedback = None if residual is None else Feedback(residual, unit)
        noise, finish = Noise(seed, stream, offset), Finish(divide, multiply)
        return self.reduce_with(wires, n, noise, scale, feedback, finish, out, decoded)

    def reduce_with(
        self,
        wires: Tensor | Sequence[Tensor],
        n: int,
        noise: Noise = NO_NOISE,
        scale: Tensor | None = None,
        feedback: Feedback | None = None,
        finish: Finish = NO_FINISH,
        out: Tensor | None = None,
        decoded: Tensor | None = None,
    ) -> Tensor:
        """`reduce`, its numbers bundled as they travel on to kernels."""
        if torch.compiler.is_compiling():
            if feedback is not None or decoded is not None:
                raise TypeError("reduce inside torch.compile: leave out residual= and decoded=")
            return compiled.reduce(self.spec, wires, n, noise, scale, finish, out)
        return calls.reduce(self, wires, n, noise, scale, feedback, finish, out, decoded)

    def decode(
        self,
        wire: Tensor,
        n: int,
        *,
        out: Tensor | None = None,
        accumulate: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """The n values of a wire, flat, as `dtype`; or written into `out` (n values of any shape), or added to it."""
        if torch.compiler.is_compiling():
            return compiled.decode(self.spec, wire, n, out, accumulate, dtype)
        return calls.decode(self, wire, n, out, accumulate, dtype)


def refuse_differences(what: str, codec: Codec) -> None:
    """For all that is sent to somebody who does not keep what came before. what: who asks."""
    if codec.differences:
        raise ValueError(
            f"{what} with {codec}: +diff is for FSDP2's parameters=, of which every rank keeps what it last decoded; "
            "leave it out"
        )


def refuse_low_rank(what: str, codec: Codec) -> None:
    """For all that does not sum matrices over ranks again and again. what: who asks."""
    if codec.rank:
        raise ValueError(
            f"{what} with {codec}: low rank is for gradients (`attach`, `LocalSGD`), which are summed step after step "
            f"and keep a factor from one to the next; take {codec.factors}"
        )
