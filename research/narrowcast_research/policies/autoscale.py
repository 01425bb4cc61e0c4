"""FP8-LM's automatic scaling of gradients: one factor that falls at once and grows slowly (Peng et al., 2023)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.codecs import codec as codec_named
from narrowcast.formats import format as format_named
from narrowcast.parallel import TensorInfo, Watching

Seen = Mapping[str, tuple[float, ...]]
LARGEST, SMALLEST = 2.0**60, 2.0**-60


class AutoScale(Watching):
    """Gradients times mu in `format`, where mu adapts: halved when more than `threshold` of the values are at the
    format's largest one, grown by a factor of two over `growth` steps otherwise.

    On the wire mu is the power of two below it, so that scaling is exact and the wire changes rarely. One factor serves
    all tensors, or each tensor has its own (`per_tensor`): better precision, but more and smaller messages.
    """

    def __init__(
        self,
        format: str = "e4m3fn",
        *,
        start: float = 1.0,
        threshold: float = 1e-5,
        growth: int = 1000,
        per_tensor: bool = False,
    ) -> None:
        if not SMALLEST <= start <= LARGEST:
            raise ValueError(f"AutoScale: start={start}; give a factor between 2^-60 and 2^60")
        if growth < 1:
            raise ValueError(f"AutoScale: growth={growth}; give the steps in which the factor doubles")
        codec_named(f"{format}@1")
        self.format, self.start, self.threshold, self.growth = format, start, threshold, growth
        self.per_tensor, self.factors = per_tensor, dict[str, float]()
        self._largest = format_named(format).max

    def _key(self, name: str) -> str:
        return name if self.per_tensor else ""

    def factor(self, name: str = "") -> float:
        """What gradients are multiplied by on the wire at present."""
        return 2.0 ** math.floor(math.log2(self.factors.get(self._key(name), self.start)))

    def __call__(self, info: TensorInfo, step: int) -> Codec:
        # a spec's scale is what codes are multiplied by, hence the inverse
        return codec_named(f"{self.format}@{_plain(1 / self.factor(info.name))}")

    def look(self, info: TensorInfo, gradient: Tensor) -> tuple[float, ...]:
        """How many values are at the largest one of the format, or above, and how many there are."""
        limit = self._largest / self.factor(info.name)
        at_limit = torch.count_nonzero(gradient.detach().abs() >= limit)
        return float(at_limit), float(gradient.numel())

    def decide(self, step: int, seen: Seen, world: int) -> None:
        counts: dict[str, tuple[float, float]] = {}
        for name, (at_limit, values) in seen.items():
            before = counts.get(self._key(name), (0.0, 0.0))
            counts[self._key(name)] = before[0] + at_limit, before[1] + values
        for key, (at_limit, values) in counts.items():
            factor = self.factors.get(key, self.start)
            too_many = at_limit > self.threshold * values
            factor *= 0.5 if too_many else 2 ** (1 / self.growth)
            self.factors[key] = min(max(factor, SMALLEST), LARGEST)

    def state_dict(self) -> dict[str, Any]:
        return {"factors": dict(self.factors)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.factors = dict(state["factors"])


def _plain(factor: float) -> str:
    """A power of two as a spec writes numbers."""
    return f"{factor:.17g}".replace("e+", "e")
