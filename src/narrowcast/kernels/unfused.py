"""Error feedback and reduction out of encode and decode: what a fused kernel must equal, and what the CPU runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from narrowcast.kernels.arithmetic import NO_FINISH, Feedback, Finish
from narrowcast.kernels.noise import NO_NOISE, Noise


def encode_each(
    encode: Callable[..., None],
    plan: Any,
    x: Tensor,
    per: int,
    wires: Tensor,
    noise: Noise = NO_NOISE,
    feedback: Feedback | None = None,
) -> None:
    """See `kernels.ops.encode_rows`: one after another."""
    for row, wire in enumerate(wires):
        values = slice(row * per, (row + 1) * per)
        kept = None if feedback is None else feedback.part(values)
        encode(plan, x[values], wire, noise.after(row * per), None, kept)


def decode_each(decode: Callable[..., None], plan: Any, wires: Tensor, per: int, out: Tensor) -> None:
    """See `kernels.ops.decode_rows`: one after another."""
    for row, wire in enumerate(wires):
        decode(plan, wire, per, out[row * per : (row + 1) * per], False)


@dataclass(frozen=True)
class Unfused:
    """The kernels of an implementation that has but an encode (plan, x, wire, noise, scale) and a decode."""

    encode_alone: Callable[[Any, Tensor, Tensor, Noise, Tensor | None], None]
    decode: Callable[..., None]

    def encode(
        self,
        plan: Any,
        x: Tensor,
        wire: Tensor,
        noise: Noise = NO_NOISE,
        scale: Tensor | None = None,
        feedback: Feedback | None = None,
    ) -> None:
        """See `kernels.ops.encode`."""
        if feedback is None:
            self.encode_alone(plan, x, wire, noise, scale)
            return
        expected = feedback.add_to(x)
        self.encode_alone(plan, expected, wire, noise, scale)
        sent = torch.empty_like(expected)
        self.decode(plan, wire, expected.numel(), sent, False)
        feedback.keep(expected, sent)

    def reduce(
        self,
        plan: Any,
        wires: Tensor | Sequence[Tensor],
        n: int,
        wire: Tensor,
        noise: Noise = NO_NOISE,
        scale: Tensor | None = None,
        feedback: Feedback | None = None,
        finish: Finish = NO_FINISH,
        out: Tensor | None = None,
    ) -> None:
        """Decode all wires into one float32 sum, in order; encode that."""
        total = torch.empty(n)
        self.sum_wires(plan, wires, n, total)
        self.encode(plan, finish.apply(total), wire, noise, scale, feedback)
        if out is not None:
            self.decode(plan, wire, n, out, False)

    def sum_wires(
        self, plan: Any, wires: Tensor | Sequence[Tensor], n: int, out: Tensor, finish: Finish = NO_FINISH
    ) -> None:
        """See `kernels.ops.sum_wires`."""
        for number, one in enumerate(wires):
            self.decode(plan, one, n, out, number > 0)
        if finish != NO_FINISH:
            out.copy_(finish.apply(out))

    def encode_rows(
        self,
        plan: Any,
        x: Tensor,
        per: int,
        wires: Tensor,
        noise: Noise = NO_NOISE,
        feedback: Feedback | None = None,
    ) -> None:
        """See `kernels.ops.encode_rows`."""
        encode_each(self.encode, plan, x, per, wires, noise, feedback)

    def decode_rows(self, plan: Any, wires: Tensor, per: int, out: Tensor) -> None:
        """See `kernels.ops.decode_rows`."""
        decode_each(self.decode, plan, wires, per, out)
