"""Two precisions by size: the largest tensors get the lower one and lose it where they overflow (Lee 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.codecs import Codec
from narrowcast.codecs import codec as codec_named
from narrowcast.parallel import TensorInfo, Watching

Seen = Mapping[str, tuple[float, ...]]


class Assignment(Watching):
    """`low` for the largest tensors until they hold `share` of all values, `high` for the rest.

    A tensor more than `tolerance` of whose values exceed what `low` can hold, on all ranks together, is promoted to
    `high` for good. `low` has a constant scale, as in `e4m3fn@0.001`: with a scale of its own nothing overflows.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        low: str | Codec = "e4m3fn@0.001",
        high: str | Codec = "bf16",
        share: float = 0.9,
        tolerance: float = 0.0,
        promote: bool = True,
    ) -> None:
        self.low, self.high, self.tolerance, self.promote = codec_named(low), codec_named(high), tolerance, promote
        if self.low.constant_scale is None:
            raise ValueError(f"Assignment: low={self.low} never overflows; give a constant scale, as in e4m3fn@0.001")
        if not 0 < share <= 1:
            raise ValueError(f"Assignment: share={share}; give a share of the values between 0 and 1")
        self.demoted = _largest_first(model, share)
        self.promoted: dict[str, int] = {}
        """The tensors that overflowed, and at which step."""
        self._limit = self.low.largest_value

    def __call__(self, info: TensorInfo, step: int) -> Codec:
        return self.low if info.name in self.demoted and info.name not in self.promoted else self.high

    def look(self, info: TensorInfo, gradient: Tensor) -> tuple[float, ...]:
        """How many values `low` cannot hold, non-finite ones included, and how many there are."""
        if self(info, 0) is not self.low:
            return 0.0, float(gradient.numel())
        held = torch.count_nonzero(gradient.detach().abs() <= self._limit)
        return float(gradient.numel() - held), float(gradient.numel())

    def decide(self, step: int, seen: Seen, world: int) -> None:
        if not self.promote:
            return
        for name, (over, values) in seen.items():
            if over > self.tolerance * values and name in self.demoted:
                self.promoted.setdefault(name, step)

    def state_dict(self) -> dict[str, Any]:
        return {"demoted": sorted(self.demoted), "promoted": dict(self.promoted)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.demoted, self.promoted = frozenset(state["demoted"]), dict(state["promoted"])


def _largest_first(model: nn.Module, share: float) -> frozenset[str]:
    """The names of the largest tensors that hold `share` of the values; of equals the first in the model."""
    sizes = {name.removeprefix("module."): p.numel() for name, p in model.named_parameters() if p.requires_grad}
    wanted, chosen = share * sum(sizes.values()), []
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        if wanted <= 0:
            break
        chosen.append(name)
        wanted -= sizes[name]
    return frozenset(chosen)
