"""Codecs whose work is one kernel plan: most of them."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from narrowcast.codecs.base import Codec
from narrowcast.kernels import AnyPlan, Plan, check_count, pack


@dataclass(frozen=True)
class PlanCodec(Codec):
    """A codec whose work is one kernel plan. A subclass supplies `__str__` and `plan`."""

    @cached_property
    @abc.abstractmethod
    def plan(self) -> Plan:
        """The plan; one object, since kernels keep on it what they derive."""

    @property
    def block(self) -> int:
        return self.plan.block

    @property
    def stochastic(self) -> bool:
        return self.plan.stochastic

    @property
    def code_bits(self) -> int:
        return self.plan.bits

    @property
    def bits_per_value(self) -> float:
        scales = self.plan.n_scales(self.plan.block) if self.plan.block else 0
        return self.plan.bits + (8.0 * self.plan.store.value * scales / self.plan.block if scales else 0.0)

    def nbytes(self, n: int, dtype: torch.dtype = torch.float32) -> int:
        return self.plan.layout(n if type(n) is int and n >= 0 else check_count(self, n)).nbytes

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
