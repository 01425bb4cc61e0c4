"""One codec on the tensors of all workers: what the other side gets to see, without sending anything.

Shapes: W workers, n values (the segments of a call one after another), S segments.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from narrowcast.codecs import Codec, largest_finite
from narrowcast.collectives.aps import NOTHING
from narrowcast.collectives.segments import Coder, Range, segment_ranges
from narrowcast.kernels import TINY, Noise, plus

Scales = list[Tensor | None] | None
"""One scale for each segment, or none."""


class Wire:
    """A codec on flat tensors of `sum(segments)` values; the messages live in one buffer that is used again."""

    def __init__(self, codec: Codec, segments: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.coder = Coder(codec, segments, dtype)
        self.codec = self.coder.codec
        self._bytes = torch.empty(0, dtype=torch.uint8, device=device)

    @property
    def has_blocks(self) -> bool:
        """Whether parts of a tensor may be encoded together: the bytes of blocks do not depend on their neighbours."""
        return not self.coder.whole_segments

    @property
    def is_agreed(self) -> bool:
        """Whether all workers use the same scales, for sums too (APS)."""
        return self.codec.agrees_on_scales

    def through(
        self, values: Tensor, part: Range, noise: Noise, scales: Scales, out: Tensor, accumulate: bool = False
    ) -> None:
        """Encode and decode `values`, which are those of `part`, into `out`; or add them to it."""
        if self._is_identity(values.dtype):
            out.copy_(plus(out, values.float()) if accumulate else values)
            return
        wire = self._message(self.coder.nbytes(part))
        self.coder.encode(values, part, wire, noise, scales)
        self.coder.decode(wire, part, out, accumulate)

    def _is_identity(self, dtype: torch.dtype) -> bool:
        return self.codec.stored_dtype(dtype) == dtype

    def _message(self, nbytes: int) -> Tensor:
        if self._bytes.numel() < nbytes:
            self._bytes = self._bytes.new_empty(nbytes)
        return self._bytes[:nbytes]


# ---- one scale for a tensor ------------------------------------------------------------------------------------------


def largest_WS(x_Wn: Tensor, segments: Sequence[int]) -> Tensor:
    """The largest finite magnitude of each segment of each worker's values, as float32."""
    parts = [x_Wn[:, low:high] for low, high in segment_ranges(segments)]
    if x_Wn.is_cpu:
        return torch.stack([torch.stack([largest_finite(row) for row in part]) for part in parts], dim=1)
    # without a look at the result: that would make the host wait for the device
    return torch.stack([_largest_W(part) for part in parts], dim=1)


def _largest_W(x_Wn: Tensor) -> Tensor:
    if not x_Wn.shape[1]:
        return x_Wn.new_zeros(len(x_Wn), dtype=torch.float32)
    return torch.where(x_Wn.isfinite(), x_Wn, 0.0).abs().amax(dim=1).float()


def own_scales(codec: Codec, top_WS: Tensor) -> list[Scales]:
    """By worker: the scales of its own segments, for codecs that take one from outside; else None."""
    if not codec.takes_scale:
        return [None] * len(top_WS)
    # on the CPU, whose division is the one that counts
    scale_WS = codec.scale_of(top_WS.cpu().view(-1)).view(top_WS.shape).to(top_WS.device)
    return [list(scale_S.view(-1, 1).unbind()) for scale_S in scale_WS]


def agreed_scale_S(codec: Codec, top_WS: Tensor) -> Tensor:
    """The power of two of each segment that all workers agree on (`narrowcast.collectives.aps`), on the device."""
    mantissa, power = torch.frexp(top_WS.double() * len(top_WS))
    exponent_WS = torch.where(mantissa == 0.5, power - 1, power)
    exponent_S = torch.where(top_WS < TINY, NOTHING, exponent_WS).amax(dim=0)
    return torch.where(exponent_S == NOTHING, 0.0, codec.scale_of_exponent(exponent_S))
