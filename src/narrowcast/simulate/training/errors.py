"""What the exchange of one step lost, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from narrowcast.codecs import SLACK, Codec
from narrowcast.collectives.segments import segment_ranges
from narrowcast.simulate.world.stack import stacked
from narrowcast.simulate.world.world import World


@dataclass(frozen=True)
class LayerError:
    """The mean gradient that workers got, against the exact mean of what they had (in double)."""

    name: str
    codec: str
    bias: float
    """Mean error in units of the exact mean's root mean square."""
    snr_db: float
    relative_error: float
    flushed: float
    """Share of values whose exact mean is not zero and that came back as zero."""
    saturated: float
    """Share of worker 0's values beyond what its first encoding can bring back."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def layer_errors(
    world: World, codec: Codec, names: Sequence[str], stack_Wn: Tensor, lengths: Sequence[int], result: Tensor
) -> list[LayerError]:
    """One entry for each tensor of a group; it makes the host wait for the device."""
    scales = world.scales(stacked("train", stack_Wn, world.n, lengths), codec, None)[0][0]
    found = []
    for number, (name, (low, high)) in enumerate(zip(names, segment_ranges(lengths), strict=True)):
        exact, got = stack_Wn[:, low:high].double().mean(dim=0).cpu(), result[low:high].double().cpu()
        scale = scales[number] if scales else None
        lost = _saturated(stack_Wn[0, low:high].cpu(), codec, None if scale is None else scale.cpu())
        found.append(_compared(name, codec, exact, got, lost))
    return found


def _compared(name: str, codec: Codec, exact: Tensor, got: Tensor, saturated: float) -> LayerError:
    both = exact.isfinite() & got.isfinite()
    kept, error = exact[both], (got - exact)[both]
    signal, noise, n = float(kept.square().sum()), float(error.square().sum()), max(len(kept), 1)
    level = math.sqrt(signal / n)
    return LayerError(
        name,
        str(codec),
        bias=float(error.sum()) / n / level if level else 0.0,
        snr_db=10 * math.log10(signal / noise) if signal and noise else math.inf if not noise else -math.inf,
        relative_error=math.sqrt(noise / signal) if signal else 0.0 if not noise else math.inf,
        flushed=float(((exact != 0) & (got == 0)).double().mean()),
        saturated=saturated,
    )


def _saturated(x: Tensor, codec: Codec, scale: Tensor | None) -> float:
    wire = codec.encode(x, scale=scale)
    limits = codec.limits(wire, x.numel())
    if limits is None:
        return 0.0
    wide, (low, high) = x.double(), (limit.double() for limit in limits)
    beyond = (wide > high + high.abs() * SLACK) | (wide < low - low.abs() * SLACK)
    return float((x.isfinite() & beyond).double().mean())
