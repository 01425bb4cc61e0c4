"""Seconds of bytes on one kind of link: from measured tables, or latency + bytes / bandwidth.

Shapes: D versions of the measurements (see curve.py), N sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from narrowcast.predict.cluster import Level
from narrowcast.predict.curve import Curve


@dataclass
class Link:
    """A level in every version of its measurements."""

    level: Level
    factor_D: Tensor
    tables: dict[str, tuple[Curve, float]]
    """By collective: seconds against bytes a member, and the latencies that are in them."""
    gbit_D: Tensor

    def seconds(self, kind: str, sent_N: Tensor, steps: float) -> Tensor:
        """Seconds to send so many bytes a member in so many steps, [D, N]."""
        return self.moving(kind, sent_N) + self.latency(steps)

    def latency(self, steps: float) -> float:
        return self.level.latency_us / 1e6 * steps

    def moving(self, kind: str, sent_N: Tensor) -> Tensor:
        """What `sent_N` bytes take beyond latencies, [D, N]; below 0 where a table is quicker than those."""
        found = self.tables.get(kind) or self.tables.get("all_reduce" if kind == "two_shot" else "two_shot")
        if found is None:
            return sent_N * 8 / (self.gbit_D[:, None] * 1e9) * self.factor_D[:, None]
        table, known = found
        whole = table(sent_N) * self.factor_D[:, None]
        fixed = torch.full_like(whole, self.latency(known)).minimum(whole)
        # on another link the bytes take longer or shorter; what the processors do for them does not
        slower_D1 = (self.level.measured_gbit / self.gbit_D)[:, None]
        wire = sent_N * 8 / (self.level.measured_gbit * 1e9) * self.factor_D[:, None]
        saved = (wire * (1 - slower_D1)).minimum(whole - fixed)
        return whole - saved - self.latency(known)
