"""Error feedback: what rounding removed is kept and added to the next tensor; in the long run nothing is lost."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from narrowcast.codecs.base import Codec
from narrowcast.kernels import check_floats


@dataclass
class ErrorFeedback:
    """A codec with the residual of one tensor that is sent again and again."""

    codec: Codec
    residual: Tensor | None = field(default=None, repr=False)
    """What rounding removed so far and nothing has sent yet (float32, flat); None before the first step."""

    def encode(
        self,
        x: Tensor,
        *,
        seed: int = 0,
        stream: int = 0,
        offset: int = 0,
        scale: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """The wire of x + decay * residual; afterwards sent + residual = x + decay * old residual, to 1 ulp.

        Where what comes back is not finite (a NaN or Inf in the block) the residual stays as it was.
        """
        check_floats("ErrorFeedback", x)
        if self.residual is None:
            self.residual = torch.zeros(x.numel(), dtype=torch.float32, device=x.device)
        if self.residual.numel() != x.numel():
            raise ValueError(
                f"ErrorFeedback: got {x.numel()} values, the residual has {self.residual.numel()}; "
                "use one ErrorFeedback for each tensor"
            )
        residual = self.residual.clone()  # whoever holds the old one, say for a checkpoint, keeps it
        wire = self.codec.encode(x, seed=seed, stream=stream, offset=offset, scale=scale, residual=residual, out=out)
        self.residual = residual
        return wire
