"""one_shot: everybody sends everything to everybody. One latency; for small tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowcast.collectives.algorithms.context import Call
from narrowcast.collectives.algorithms.cost import Cost, Placement
from narrowcast.collectives.algorithms.record import Algorithm, Order, Setting, register
from narrowcast.collectives.algorithms.workers import FIRST, Workers
from narrowcast.collectives.runtime.shots import Gather, Scatter, run_rounds
from narrowcast.collectives.segments import store


def run(call: Call) -> None:
    """Sum over all ranks in place.

    1. Encode the whole tensor once and send it to every peer. With error feedback, the residual of a sum before (after
       a call by two_shot) was made one of this rank's own values.
    2. Decode all W messages, our own too, and add them in float32 in rank order 0, 1, ...; a sum of finite values that
       is too large becomes the largest number, at each step, as in all algorithms. With error feedback, every rank's
       residual takes its share of what a result of 16 bits does not hold of the finished sum: the loss times gain / W.

    Bytes sent a rank: (W-1) nbytes(n). Roundings a value: 1. Passes over the data: 1 encode, W decodes.
    """
    run_rounds(call.exchange, [[OneShot(call)]])


class OneShot:
    """A call in which nothing is summed on the way: its wires travel in the second shot."""

    def __init__(self, call: Call) -> None:
        self._call, self._whole = call, (0, call.x.numel())
        self.first: list[int] = []
        self.second = [call.coder.nbytes(self._whole)] * call.exchange.world

    def encode(self, wires: Scatter) -> None:
        raise RuntimeError("internal: there is no first shot")

    def reduce(self, arrived: Tensor | None, wires: Gather) -> None:
        call = self._call
        call.encode(call.x, self._whole, FIRST, call.scales, call.feedback(FIRST, self._whole), wires.own)
        wires.send()

    def collect(self, wires: Gather) -> None:
        call, rows = self._call, wires.rows()
        if rows is not None and call.x.dtype == torch.float32:
            call.coder.sum(rows, self._whole, call.reduction, call.x)
            return
        total = call.exchange.floats(call.x.numel())
        if rows is not None:
            call.coder.sum(rows, self._whole, call.reduction, total)
        else:
            for rank in range(call.exchange.world):
                call.coder.decode(wires.arrived(rank), self._whole, total, accumulate=rank > 0)
            total = call.reduction.finish(total)
        store(call.x, total)
        if call.residuals is not None:
            call.residuals.keep(total, call.x, FIRST, self._whole, call.reduction.gain / call.exchange.world)


def simulate(workers: Workers) -> None:
    total = workers.reduction.finish(workers.sum_of_own([workers.whole]))
    store(workers.out, total)
    if (residuals := workers.residuals) is not None:
        residuals.keep(residuals.first_Wn, total, workers.out, workers.reduction.gain / workers.world)


def sent_bytes(setting: Setting) -> list[int]:
    return [(setting.world - 1) * setting.coder.nbytes((0, setting.coder.numel))] * setting.world


def cost(ranks: Placement) -> Cost:
    return Cost((ranks.gather(1.0),), encodes=1.0, decodes=float(ranks.world), roundings=1)


register(
    Algorithm(
        "one_shot",
        "everybody sends everything to everybody",
        bytes_sent="(W-1) nbytes(n)",
        roundings="1",
        phases="0",
        order=Order.RANKS,
        run=run,
        simulate=simulate,
        sent_bytes=sent_bytes,
        cost=cost,
        host_waits=False,
        shots=lambda call: [OneShot(call)],
        residual_shots=1,
    )
)
