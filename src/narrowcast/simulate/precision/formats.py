"""Which format each role of a lowered model has, module by module, what role a tensor has, and where noise comes from.

A weight is a parameter, or what a lowered module's forward computes from parameters alone: `w.t().contiguous()`,
`w.detach()`, `torch.cat([a, b])`, `w * 0.5`. Whole numbers, booleans and constants made on the way (`torch.eye(4) + w`)
change nothing. All else is an activation: inputs, buffers, results of lowered operations, and what mixes them with
weights. So a product written with `@` has the roles that it has as F.linear.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.kernels import Accumulator, accumulator, derive
from narrowcast.simulate.precision.casts import LOWERED, Caster, Casting, What, apply_to_result, apply_together, caster
from narrowcast.simulate.precision.gemm import Accumulators

ROLES = ("weights", "activations", "gradients", "accumulate", "accumulate_backward")
NOTHING = Caster()
ACTIVATION, WEIGHT, OUTPUT, ROUNDED_OUTPUT = "activation", "weight", "output", "rounded output"
"""What a tensor is to an operation. A weight's gradient is cast on its way out; of an output only the gradient that
comes back is cast; a rounded one leaves an operation that has no accumulator of ours."""


@dataclass(frozen=True)
class Precision:
    """The formats of one module. With nothing given everything is float32, as torch computes it."""

    weights: Caster = NOTHING
    activations: Caster = NOTHING
    gradients: Caster = NOTHING
    accumulate: Accumulator = field(default_factory=lambda: accumulator("fp32"))
    accumulate_backward: Accumulator | None = None
    """None: as forward."""
    is_plain: bool = field(init=False, repr=False, compare=False)
    stochastic: bool = field(init=False, repr=False, compare=False)
    castings: dict[str, Casting] = field(init=False, repr=False, compare=False)
    """What is cast, by what a tensor is to an operation; without noise."""
    sums: Accumulators = field(init=False, repr=False, compare=False)
    """How to sum, without noise."""

    def __post_init__(self) -> None:
        """What follows from the formats: asked for at every operation."""
        sums = Accumulators(self.accumulate, self.backward_sums)
        casts = self.weights, self.activations, self.gradients
        rules = *casts, self.accumulate, self.backward_sums
        derived = {
            "is_plain": all(c.is_identity for c in casts) and sums.is_torch,
            "stochastic": any(rule.stochastic for rule in rules),
            "castings": {
                ACTIVATION: Casting(self.activations, NOTHING),
                WEIGHT: Casting(self.weights, self.gradients),
                OUTPUT: Casting(NOTHING, self.gradients),
                ROUNDED_OUTPUT: Casting(self.activations, self.gradients),
            },
            "sums": sums,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @property
    def backward_sums(self) -> Accumulator:
        return self.accumulate_backward or self.accumulate

    def __str__(self) -> str:
        if self.is_plain:
            return "as-is"
        casts = f"weights {self.weights}, activations {self.activations}, gradients {self.gradients}"
        back = "" if self.accumulate_backward is None else f", backward {self.accumulate_backward}"
        return f"{casts}, accumulate {self.accumulate}{back}"


def precision(base: Precision, roles: Mapping[str, Any]) -> Precision:
    """`base` with some roles changed."""
    unknown = sorted(set(roles) - set(ROLES))
    if unknown:
        raise ValueError(f"lower: unknown role {unknown[0]!r}; roles are {', '.join(ROLES)}")
    changes: dict[str, Any] = {role: caster(roles[role]) for role in ROLES[:3] if role in roles}
    for role in ROLES[3:]:
        if role in roles:
            changes[role] = None if roles[role] is None else accumulator(roles[role])
    if changes.get("accumulate", base.accumulate) is None:
        raise ValueError("lower: accumulate is a string such as 'fp32' or 'bf16+kahan', got None")
    return replace(base, **changes)


Overrides = Mapping[str, Mapping[str, What | Accumulator] | str | None]


def precisions(names: Sequence[str], base: Precision, overrides: Overrides) -> dict[str, Precision]:
    """Of each module by name. The first pattern that matches decides; "as-is" or None leaves a module alone."""
    patterns: dict[str, Precision] = {}
    for pattern, what in overrides.items():
        if isinstance(what, str) and what != "as-is":
            raise ValueError(f"lower: an override is a dict of roles or 'as-is', got {what!r}")
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"lower: override {pattern!r} matches no module; modules are {', '.join(names[:20])}")
        patterns[pattern] = Precision() if what is None or isinstance(what, str) else precision(base, what)
    return {
        name: next((own for pattern, own in patterns.items() if fnmatch.fnmatchcase(name, pattern)), base)
        for name in names
    }


@dataclass
class NoiseOrigin:
    """What a lowered model's noise depends on, besides module and call: the seed, the step, the worker."""

    seed: int
    step: int = 0
    worker: int = 0


@dataclass
class Site:
    """One lowered module: its formats, its noise, and what it has seen."""

    name: str
    number: int
    precision: Precision
    origin: NoiseOrigin
    calls: int = 0
    seen: dict[str, str] = field(default_factory=dict)
    """Function -> what became of it."""
    operands: set[str] = field(default_factory=set)
    """What was multiplied: "activation @ weight"."""

    def new_call(self) -> LoweredCall:
        """The noise of one operation: of (seed, step, worker, module, how many of its operations came before)."""
        if not self.precision.stochastic:
            return LoweredCall(self, 0)
        origin = self.origin
        seed = derive(origin.seed, LOWERED, origin.step, origin.worker, self.number, self.calls)
        self.calls += 1
        return LoweredCall(self, seed)


@dataclass
class LoweredCall:
    """One operation of a site; each cast in it draws from a slot of its own."""

    site: Site
    seed: int
    slots: int = 0

    def _slot(self) -> int:
        self.slots += 1
        return derive(self.seed, self.slots) if self.seed else 0

    def casting(self, role: str) -> Casting:
        """What becomes of the next tensor; noise goes by the order in which these are asked for."""
        how = self.site.precision.castings[role]
        return how._replace(seeds=(self._slot(), self._slot())) if self.seed else how

    def cast(self, result: Tensor, role: str) -> Tensor:
        """What the operation gave, on its way out."""
        return apply_to_result(result, self.casting(role), self.site.origin.step)

    def cast_together(self, *operands: tuple[Tensor, str]) -> list[Tensor]:
        """Every operand as what it is to the operation."""
        castings = [self.casting(role) for _, role in operands]
        return apply_together([x for x, _ in operands], castings, self.site.origin.step)

    @property
    def sums(self) -> Accumulators:
        how = self.site.precision.sums
        return replace(how, seed=self._slot()) if self.seed else how


MARK = "_narrowcast_role"
"""The attribute of a tensor that says what it is, which compilers trace and copies keep; without it: an activation."""
CONSTANT = "constant"
"""Computed from no tensor at all."""

_NEW = (Tensor.new_empty, Tensor.new_empty_strided, Tensor.new_full, Tensor.new_ones, Tensor.new_zeros)
FRESH = frozenset([*_NEW, *(f for name, f in vars(torch).items() if name.endswith("_like"))])
"""They take a shape and a type from a tensor, and no value."""
VALUES_OF_THE_FIRST = frozenset([Tensor.to, Tensor.type_as, Tensor.expand_as, Tensor.view_as, Tensor.reshape_as])


def _own_role(x: Tensor) -> str | None:
    return WEIGHT if isinstance(x, nn.Parameter) else getattr(x, MARK, None)


def _known_role(x: Tensor) -> str:
    """A weight, a constant or an activation; a view that nobody saw being made is what its base is."""
    role = _own_role(x)
    if role is None and x._base is not None:
        role = _own_role(x._base)
    return role or ACTIVATION


def role_of(x: Tensor) -> str:
    return WEIGHT if _known_role(x) == WEIGHT else ACTIVATION


def mark(x: Tensor, role: str) -> None:
    """Say what a tensor is, where that is not known: a compiler marks no part of a chunked tensor."""
    if not isinstance(x, nn.Parameter) and _known_role(x) != role:
        setattr(x, MARK, role)


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if not isinstance(values, tuple | list):
        return []
    return [x for one in values for x in _tensors(one)]


def _role_of_result(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    if func in FRESH:
        return CONSTANT
    operands = _tensors(args[:1] if func in VALUES_OF_THE_FIRST else (args, list(kwargs.values())))
    # an index picks values and is none, unless there is nothing else
    numbers = [x for x in operands if x.is_floating_point() or x.is_complex()] or operands
    roles = {_known_role(x) for x in numbers} - {CONSTANT}
    if not roles:
        return CONSTANT
    return WEIGHT if roles == {WEIGHT} else ACTIVATION


def follow(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Mark what `func` gave, or changed in place."""
    results = _tensors(args[:1] if result is None else result)
    if results:
        with torch._C.DisableTorchFunction():
            role = _role_of_result(func, args, kwargs)
            for x in results:
                mark(x, role)
