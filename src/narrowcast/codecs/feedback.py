"""Error feedback: what rounding removed is kept and added to the next tensor; in the long run nothing is lost."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from narrowcast.codecs.base import Codec
from narrowcast.kernels import check_floats


def refuse_differences(what: str, codec: Codec) -> None:
    """For all that is sent to somebody who does not keep what came before. what: who asks."""
    if codec.differences:
        raise ValueError(
            f"{what} with {codec}: +diff is for FSDP2's parameters=, of which every rank keeps what it last decoded; "
            "leave it out"
        )


def refuse_low_rank(what: str, codec: Codec) -> None:
    """For all that does not sum matrices over ranks again and again. what: who asks."""
    if codec.rank:
        raise ValueError(
            f"{what} with {codec}: low rank is for gradients (`attach`, `LocalSGD`), which are summed step after step "
            f"and keep a factor from one to the next; take {codec.factors}"
        )


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
