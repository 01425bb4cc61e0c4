"""Which format each role of a lowered model has, module by module, and where its noise comes from."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from narrowcast.kernels.accumulator import Accumulator, accumulator
from narrowcast.simulate.caster import Caster, What, caster
from narrowcast.simulate.casts import apply_casts
from narrowcast.simulate.gemm import Sums
from narrowcast.simulate.seeds import derive

ROLES = ("weights", "activations", "gradients", "accumulate", "accumulate_backward")
NOTHING = Caster()


@dataclass(frozen=True)
class Precision:
    """The formats of one module. With nothing given everything is float32, as torch computes it."""

    weights: Caster = NOTHING
    activations: Caster = NOTHING
    gradients: Caster = NOTHING
    accumulate: Accumulator = field(default_factory=lambda: accumulator("fp32"))
    accumulate_backward: Accumulator | None = None
    """None: as forward."""

    @property
    def backward_sums(self) -> Accumulator:
        return self.accumulate_backward or self.accumulate

    @property
    def is_plain(self) -> bool:
        casts = self.weights, self.activations, self.gradients
        return all(c.is_identity for c in casts) and self.accumulate.is_torch and self.backward_sums.is_torch

    @property
    def stochastic(self) -> bool:
        casts = self.weights, self.activations, self.gradients, self.accumulate, self.backward_sums
        return any(c.stochastic for c in casts)

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


class Chosen:
    """The precision of each module by name. The first pattern that matches decides; "as-is" or None leaves it alone."""

    def __init__(self, base: Precision, overrides: Overrides) -> None:
        self.base = base
        self.patterns = {pattern: self._precision(what) for pattern, what in overrides.items()}
        self.used: set[str] = set()

    def _precision(self, what: Mapping[str, Any] | str | None) -> Precision:
        if what is None or what == "as-is":
            return Precision()
        if isinstance(what, str):
            raise ValueError(f"lower: an override is a dict of roles or 'as-is', got {what!r}")
        return precision(self.base, what)

    def of(self, name: str) -> Precision:
        for pattern, found in self.patterns.items():
            if fnmatch.fnmatchcase(name, pattern):
                self.used.add(pattern)
                return found
        return self.base

    def check_used(self, names: list[str]) -> None:
        """A pattern that matches nothing is a mistake."""
        unused = [p for p in self.patterns if not any(fnmatch.fnmatchcase(name, p) for name in names)]
        if unused:
            raise ValueError(f"lower: override {unused[0]!r} matches no module; modules are {', '.join(names[:20])}")


@dataclass
class Clock:
    """What a lowered model's noise is a function of, beside the module and the call: the seed and the step."""

    seed: int
    step: int = 0


@dataclass
class Site:
    """One lowered module: its formats, its noise, and what it has seen."""

    name: str
    number: int
    precision: Precision
    clock: Clock
    calls: int = 0
    seen: dict[str, str] = field(default_factory=dict)
    """Function -> what became of it."""

    def new_call(self) -> Call:
        """The noise of one operation: of (seed, step, module, how many operations of this step came before)."""
        if not self.precision.stochastic:
            return Call(self, 0)
        found = derive(self.clock.seed, self.clock.step, self.number, self.calls)
        self.calls += 1
        return Call(self, found)


@dataclass
class Call:
    """One operation of a site; each cast in it draws from a slot of its own."""

    site: Site
    seed: int
    slots: int = 0

    def _slot(self) -> int:
        self.slots += 1
        return derive(self.seed, self.slots) if self.seed else 0

    def _cast(self, x: Tensor, forward: Caster, backward: Caster) -> Tensor:
        return apply_casts(x, forward, backward, (self._slot(), self._slot()), self.site.clock.step)

    def activation(self, x: Tensor) -> Tensor:
        return self._cast(x, self.site.precision.activations, NOTHING)

    def weight(self, w: Tensor) -> Tensor:
        """A weight on its way in; its gradient is cast on its way out."""
        return self._cast(w, self.site.precision.weights, self.site.precision.gradients)

    def operand(self, x: Tensor) -> Tensor:
        """A weight where x is a parameter or a view of one, else an activation."""
        is_weight = isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter)
        return self.weight(x) if is_weight else self.activation(x)

    def output(self, y: Tensor) -> Tensor:
        """What leaves; the gradient that comes back is cast."""
        return self._cast(y, NOTHING, self.site.precision.gradients)

    def rounded_output(self, y: Tensor) -> Tensor:
        """What leaves an operation that has no accumulator of ours."""
        return self._cast(y, self.site.precision.activations, self.site.precision.gradients)

    @property
    def sums(self) -> Sums:
        precision = self.site.precision
        return Sums(precision.accumulate, precision.backward_sums, self._slot())
