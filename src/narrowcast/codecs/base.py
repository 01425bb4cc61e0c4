"""What a codec is: n floats <-> exactly nbytes(n) bytes. Checks live here, once."""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from narrowcast.codecs import compiled
from narrowcast.codecs.contiguity import check_reduced, described, flat, lies_plainly, write_back
from narrowcast.codecs.spec import Spec
from narrowcast.kernels import ops
from narrowcast.kernels.noise import ALIGNMENT, NO_NOISE, Noise
from narrowcast.kernels.plain import check_plain, check_written, wrote
from narrowcast.kernels.plan import AnyPlan, OwnPlan, Plan
from narrowcast.kernels.reference.packing import pack


class Law:
    """The laws from which a codec may declare itself exempt, with its reason."""

    BLOCKS = "2: blocks are independent"
    IDEMPOTENT = "4: idempotent"
    ZERO = "4: zero stays zero"
    NONFINITE = "5: non-finite never turns finite"
    FINITE = "5: finite never turns non-finite"


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

    def plan_for(self, dtype: torch.dtype) -> AnyPlan:
        """What kernels do with values of this type."""
        return OwnPlan(self._encode, self._decode)

    def _encode(self, x: Tensor, wire: Tensor, noise: Noise, scale: Tensor | None) -> None:
        """Fill `wire` with the bytes of x, which is not empty."""
        raise NotImplementedError(f"{type(self).__name__} has neither a plan nor code of its own")

    def _decode(self, wire: Tensor, n: int, out: Tensor, accumulate: bool) -> None:
        """Fill `out` with the n values of `wire`, or add them to it."""
        raise NotImplementedError(f"{type(self).__name__} has neither a plan nor code of its own")

    def __post_init__(self) -> None:
        # torch.compile can read a plain attribute of a frozen value
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
    def exemptions(self) -> dict[str, str]:
        """Laws that this codec cannot obey by its nature, each with the reason."""
        return {}

    def limits(self, wire: Tensor, n: int) -> tuple[Tensor, Tensor] | None:
        """The smallest and largest number that could have come back in each place, where that means something."""
        return None

    def explain(self) -> list[ops.Choice]:
        """What runs this codec on this machine, and why nothing faster does."""
        return ops.explain(self.plan_for(torch.float32))

    def encode(
        self,
        x: Tensor,
        *,
        seed: int = 0,
        stream: int = 0,
        offset: int = 0,
        noise: Noise | None = None,
        scale: Tensor | None = None,
        residual: Tensor | None = None,
        unit: float = 1.0,
        out: Tensor | None = None,
    ) -> Tensor:
        """The wire (uint8) of the values of `x` in row-major order, on x's device.

        seed, stream, offset: where stochastic rounding takes its bits, see docs/wire-format.md; `offset` is the index
        of x's first value in the whole tensor, when x is a part of it. noise: the three as one value. scale: one
        float32, used instead of the tensor's own by codecs with one scale for the tensor: 0, NaN or a normal number
        that turns no level infinite (looked at on the CPU only, since a GPU would have to be waited for). residual:
        error feedback: n float32 that are added, times `unit`, and then hold what rounding removed, in units; where
        that is not finite they stay as they were. out: a uint8 tensor of `nbytes(x.numel())` to write into.
        """
        if torch.compiler.is_compiling():
            return self._traced_encode(x, noise or Noise(seed, stream, offset), scale, residual, unit, out)
        ops.check_floats(self, x)
        noise = self._checked_noise(*((seed, stream, offset) if noise is None else noise))
        if scale is not None:
            scale = self._checked_scale(scale, x)
        n, dtype = x.numel(), x.dtype
        if residual is not None:
            self._check_residual(residual, unit, x)
            dtype = torch.float32
        wire = self._checked_wire(self.nbytes(n, dtype), out, x)
        if out is not None or residual is not None:
            check_written(self, {"out": out, "residual": residual}, {"x": x, "scale": scale})
        if n:
            ops.encode(self.plan_for(dtype), flat(x), wire, noise, scale, residual, unit)
            wrote(out, residual)
        return wire

    def _traced_encode(
        self,
        x: Tensor,
        noise: Noise,
        scale: Tensor | None,
        residual: Tensor | None,
        unit: float,
        out: Tensor | None,
    ) -> Tensor:
        words = *compiled.words(noise), scale
        if residual is None:
            wire = torch.ops.narrowcast.encode(x, self.spec, *words)
        else:
            wire = torch.ops.narrowcast.encode_owed(x, residual, self.spec, unit, *words)
        return wire if out is None else out.copy_(wire)

    def reduce(
        self,
        wires: Tensor | Sequence[Tensor],
        n: int,
        *,
        seed: int = 0,
        stream: int = 0,
        offset: int = 0,
        noise: Noise | None = None,
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
        if torch.compiler.is_compiling():
            words = *compiled.words(noise or Noise(seed, stream, offset)), scale
            if not isinstance(wires, Tensor) or residual is not None or decoded is not None:
                raise TypeError("reduce inside torch.compile: give wires as one tensor, without residual= and decoded=")
            wire = torch.ops.narrowcast.reduce(wires, self.spec, n, divide, multiply, *words)
            return wire if out is None else out.copy_(wire)
        n = ops.check_count(self, n)
        first = self._checked_wires(wires, n)
        noise = self._checked_noise(*((seed, stream, offset) if noise is None else noise))
        if scale is not None:
            scale = self._checked_scale(scale, first)
        if residual is not None:
            self._check_residual(residual, unit, first, n)
        if decoded is not None:
            self._check_values("decoded", decoded, n, first)
        wire = self._checked_wire(self.nbytes(n), out, first)
        check_reduced(self, {"out": out, "residual": residual, "decoded": decoded}, wires, scale)
        if n:
            values = None if decoded is None else flat(decoded)
            plan = self.plan_for(torch.float32)
            ops.reduce(plan, wires, n, wire, noise, scale, residual, unit, divide, multiply, values)
            write_back(values, decoded)
            wrote(out, residual, decoded)
        return wire

    def _checked_wires(self, wires: Tensor | Sequence[Tensor], n: int) -> Tensor:
        """The first wire, after all were looked at."""
        if isinstance(wires, Tensor):
            check_plain(self, wires)
        if not len(wires):
            raise ValueError(f"reduce with {self}: got no wires; give one for each rank")
        if isinstance(wires, Tensor) and (wires.dim() != 2 or (wires.numel() and wires.stride(1) != 1)):
            raise ValueError(
                f"reduce with {self}: got a tensor of shape {tuple(wires.shape)}; give one wire in each row"
            )
        expected = self.nbytes(n)
        for wire in wires if not isinstance(wires, Tensor) else wires[:1]:
            if not lies_plainly(wire, expected, torch.uint8):
                raise ValueError(
                    f"reduce with {self}: {n} values take {expected} bytes, got {described(wire)}; "
                    "pass whole wires, contiguous uint8, and their own n"
                )
            ops.check_same_device(self, "a wire", wire, wires[0])
            check_plain(self, wire)
        return wires[0]

    def _check_residual(self, residual: Tensor, unit: float, x: Tensor, n: int | None = None) -> None:
        n = x.numel() if n is None else n
        if not 0 < unit < math.inf:
            raise ValueError(f"encode with {self}: unit={unit}; what is owed is kept in units of a positive number")
        if not lies_plainly(residual, n, torch.float32):
            got = described(residual)
            raise ValueError(f"encode with {self}: the residual must be {n} contiguous float32, got {got}")
        check_plain(self, residual, "residual")
        ops.check_same_device(self, "the residual", residual, x)

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
            return self._traced_decode(wire, n, out, accumulate, dtype)
        n, given = ops.check_count(self, n), out is not None
        out = self._checked_output(wire, n, out, accumulate, dtype)
        if n:
            values = flat(out)
            ops.decode(self.plan_for(out.dtype), wire.contiguous(), n, values, accumulate)
            write_back(values, out)
            if given:
                wrote(out)
        return out

    def _traced_decode(self, wire: Tensor, n: int, out: Tensor | None, accumulate: bool, dtype: torch.dtype) -> Tensor:
        if accumulate and out is not None:
            torch.ops.narrowcast.decode_add(wire, self.spec, out)
            return out
        value = torch.ops.narrowcast.decode(wire, self.spec, n, dtype if out is None else out.dtype)
        return value if out is None else out.copy_(value.view(out.shape))

    @property
    def takes_scale(self) -> bool:
        """Whether `encode(scale=)` means something: one float32 scale for the tensor."""
        return False

    def _checked_scale(self, scale: Tensor, like: Tensor) -> Tensor:
        if not self.takes_scale:
            raise ValueError(
                f"encode with {self}: scale= is for codecs with one float32 scale for the tensor; leave it out"
            )
        if not isinstance(scale, Tensor) or scale.dtype != torch.float32 or scale.numel() != 1:
            raise TypeError(f"encode with {self}: scale must be a float32 tensor with one element, got {scale!r}")
        check_plain(self, scale, "scale")
        ops.check_same_device(self, "scale", scale, like)
        return scale.resolve_neg()

    def _checked_noise(self, seed: int, stream: int, offset: int) -> Noise:
        if (seed, stream, offset) == NO_NOISE:
            return NO_NOISE
        seed, stream = ops.check_seed(self, seed), ops.check_seed(self, stream)
        rule = f"cut between blocks, at a multiple of {ALIGNMENT}"
        offset = ops.check_integer(self, f"offset: {rule}", offset)
        if offset < 0 or offset % ALIGNMENT:
            raise ValueError(f"encode with {self}: offset={offset}; {rule}")
        return Noise(seed, stream, offset)

    def _checked_wire(self, nbytes: int, out: Tensor | None, like: Tensor) -> Tensor:
        if out is None:
            return torch.empty(nbytes, dtype=torch.uint8, device=like.device)
        if not lies_plainly(out, nbytes, torch.uint8):
            raise ValueError(f"encode with {self}: out must be {nbytes} contiguous uint8, got {described(out)}")
        check_plain(self, out, "out")
        ops.check_same_device(self, "out", out, like)
        return out

    def _checked_output(self, wire: Tensor, n: int, out: Tensor | None, accumulate: bool, dtype: torch.dtype) -> Tensor:
        if not isinstance(wire, Tensor) or wire.dtype != torch.uint8:
            got = wire.dtype if isinstance(wire, Tensor) else f"of type {type(wire).__name__}"
            raise TypeError(f"decode with {self}: the wire is {got}; give the uint8 tensor that encode returned")
        check_plain(self, wire)
        if out is None:
            if accumulate:
                raise ValueError(f"decode with {self}: accumulate=True adds to out; give out=")
            out = torch.empty(n, dtype=dtype, device=wire.device)
            self._check_values("out", out, n, wire)
        else:
            self._check_values("out", out, n, wire)
            check_written(self, {"out": out}, {"wire": wire})
        expected = self.nbytes(n, out.dtype)
        if wire.numel() != expected:
            raise ValueError(
                f"decode with {self}: {n} values take {expected} bytes, got {wire.numel()}; "
                "pass the whole wire and its own n"
            )
        return out

    def _check_values(self, name: str, values: Tensor, n: int, like: Tensor) -> None:
        ops.check_floats(self, values)
        ops.check_same_device(self, name, values, like)
        if values.numel() != n:
            got = values.numel()
            raise ValueError(f"decode with {self}: {name} holds {got} values, not n={n}; give a tensor of {n}")


@dataclass(frozen=True)
class PlanCodec(Codec):
    """A codec whose work is one kernel plan. A subclass supplies `__str__` and `plan`."""

    @cached_property
    @abc.abstractmethod
    def plan(self) -> Plan:
        """The plan; made once."""

    @property
    def block(self) -> int:
        return self.plan.block

    @property
    def stochastic(self) -> bool:
        return self.plan.stochastic

    @property
    def bits_per_value(self) -> float:
        scales = self.plan.n_scales(self.plan.block) if self.plan.block else 0
        return self.plan.bits + (8.0 * self.plan.store.value * scales / self.plan.block if scales else 0.0)

    def nbytes(self, n: int, dtype: torch.dtype = torch.float32) -> int:
        return self.plan.layout(ops.check_count(self, n)).nbytes

    def explain(self) -> list[ops.Choice]:
        return ops.explain(self.plan)

    def limits(self, wire: Tensor, n: int) -> tuple[Tensor, Tensor] | None:
        if self.plan.bits == 1:
            return None  # every value is as far out as one bit can say
        ends = self.plan.format.grid_codes[[0, -1]].tolist()
        low, high = (self.decode(self._with_codes(wire, n, code), n) for code in ends)
        return low, high

    def _with_codes(self, wire: Tensor, n: int, code: int) -> Tensor:
        """The same scales under n times the same code."""
        eight = pack(torch.full((8,), code), self.plan.bits)
        changed = wire.clone()
        codes = changed[: self.plan.code_bytes(n)]
        codes.copy_(eight.repeat(-(-n // 8))[: len(codes)])
        return changed

    def plan_for(self, dtype: torch.dtype) -> AnyPlan:
        return self.plan
