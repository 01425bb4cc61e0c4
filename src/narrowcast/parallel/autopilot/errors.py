"""How much error is allowed, and how much a wire makes: samples of real gradients, and the bound on all of them.

The bound, in words: rounding may add BOUND of the energy that the gradient has anyhow, or of that of the noise between
batches, whichever is larger. What is small beside the noise of sampling batches cannot matter much. An error that
feedback sends later counts a tenth, and no tensor alone may lose more than CAP times its share. Energy is that of
values cut at CUT times their median: a few huge ones do not make up for all others that they push below a step.
`advise` calls the risk of a wire low by the same rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from narrowcast.codecs import Codec, error_report

BOUND = 0.01
"""Of the energy of gradients: a signal of 20 dB over rounding."""
FED_BACK = 0.1
"""What an error counts that comes later."""
CAP = 10.0
"""Of the bound, for one tensor: 10 dB."""
CUT = 6.0
"""Medians: four deviations of normal values."""
PIECES, PIECE = 4, 4096
"""Of a gradient, so many pieces of so many values are looked at, all blocks of wires whole."""
PAIRED = 128
"""Of them so many values are added over the ranks, which tells the noise between batches."""
HEAD = 3
"""Numbers before the errors."""


def counted(codec: Codec, error: float) -> float:
    """What the error of one encoding counts: both shots of a sum round, low rank once, and feedback sends it later."""
    return error * (1 if codec.rank else 2) * (FED_BACK if codec.feedback else 1.0)


def energy_of(x: Tensor) -> Tensor:
    """Of values, the largest of them cut; zeros do not count for the median."""
    size = x.detach().float().abs().flatten()
    some = size[size > 0]
    return size.clamp_max(CUT * some.median()).square().sum() if some.numel() else size.sum()


def allowed(energy: float, noise: float, bound: float = BOUND) -> float:
    """The counted error that gradients of so much energy may have, where batches differ by `noise`."""
    return bound * max(energy, noise)


def words(bound: float) -> str:
    """The rule for a reader."""
    return (
        f"rounding may add {100 * bound:.3g} % to the energy of the gradient or of the noise between batches, the "
        f"larger, values cut at {CUT:g} medians; an error that feedback sends later counts a tenth; no tensor loses "
        f"more than {100 * CAP * bound:.3g} %"
    )


def pieces(gradient: Tensor, turn: int) -> Tensor:
    """What is looked at of a gradient: pieces evenly spread, at other places in each turn. In float32, flat."""
    flat = gradient.detach().reshape(-1)
    if flat.numel() <= PIECES * PIECE:
        return flat.float()
    room = flat.numel() // PIECES
    # the last place ends where the room does: in as many turns as there are places every value is looked at
    start = min(turn % -(-room // PIECE) * PIECE, room - PIECE)
    return torch.cat([flat[first : first + PIECE] for first in range(start, flat.numel() - PIECE + 1, room)]).float()


def width(wires: int) -> int:
    """How many numbers `look` gives."""
    return HEAD + wires + PAIRED


def look(gradient: Tensor, codecs: Sequence[Codec], turn: int, unit: float = 1.0) -> Tensor:
    """A few numbers about a rank's gradient, to be summed: non-finite, energy, that of some values, each codec's
    error, and those values. Energies are those of the whole tensor, as its pieces have them. A codec of low rank looks
    at all of it. unit: what gradients are multiplied by, a loss scale, which may be another one at the next look.
    """
    some = pieces(gradient, turn)
    bad = (~some.isfinite()).any()
    some = some.nan_to_num(0.0, 0.0, 0.0)
    scale = gradient.numel() / max(some.numel(), 1)
    energy = energy_of(some) * scale
    lost = [_lost(gradient, some, codec, scale) for codec in codecs]
    paired = torch.zeros(PAIRED, dtype=torch.float32, device=some.device)
    chosen = some[:: max(1, some.numel() // PAIRED)][:PAIRED]
    paired[: chosen.numel()] = chosen
    numbers = torch.stack([energy, paired.square().sum(), *lost])
    # a sum of squares beyond float32 says no more than a NaN does, and would stay in every mean after it
    bad |= ~numbers.isfinite().all()
    return torch.cat([bad.float()[None], numbers.nan_to_num(0.0, 0.0, 0.0) / unit**2, paired / unit])


def _lost(gradient: Tensor, some: Tensor, codec: Codec, scale: float) -> Tensor:
    if codec.lossless:
        return some.new_zeros(())
    if codec.rank:
        report = error_report(gradient.detach().float().nan_to_num(0.0, 0.0, 0.0), codec)
        return some.new_tensor(report.mean_squared_error * gradient.numel())
    back = codec.decode(codec.encode(some), some.numel())
    return (back - some).square().sum() * scale


@dataclass(frozen=True)
class TensorErrors:
    """What all ranks know of a tensor's gradient: means over ranks."""

    energy: float
    noise: float
    """Of the difference between two ranks' batches, halved: what one batch adds to the mean of all."""
    lost: tuple[float, ...]
    """By wire, of one encoding."""
    bad: bool = False

    @classmethod
    def of(cls, sums: Sequence[float], wires: int, world: int) -> TensorErrors:
        """From what `look` gave, added over the ranks."""
        energy, own, values = sums[1] / world, sums[2] / world, sums[HEAD + wires :]
        of_mean = sum(value * value for value in values) / world**2
        # what the mean of the same values lacks of their energy is noise
        share = max(0.0, 1 - of_mean / own) * world / (world - 1) if world > 1 and own > 0 else 0.0
        return cls(energy, energy * share, tuple(lost / world for lost in sums[HEAD : HEAD + wires]), sums[0] > 0)

    def mixed(self, new: TensorErrors, weight: float = 0.5) -> TensorErrors:
        """With a later look: the mean of the two, since a batch is a sample. One that is not finite tells no more."""
        if new.bad:
            return replace(self, bad=True)
        lost = tuple((1 - weight) * a + weight * b for a, b in zip(self.lost, new.lost, strict=True))
        energy, noise = ((1 - weight) * a + weight * b for a, b in ((self.energy, new.energy), (self.noise, new.noise)))
        return TensorErrors(energy, noise, lost, new.bad)
