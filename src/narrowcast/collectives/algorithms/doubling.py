"""doubling: partners exchange all that they have, at twice the distance each time. log2(W) latencies in all."""

from __future__ import annotations

import math

from narrowcast.collectives.algorithms.context import Call
from narrowcast.collectives.algorithms.cost import Cost, Placement
from narrowcast.collectives.algorithms.record import Algorithm, Order, Setting, check_power_of_two, register
from narrowcast.collectives.algorithms.workers import Workers
from narrowcast.collectives.segments import store
from narrowcast.kernels import plus


def run(call: Call) -> None:
    """Sum over all ranks in place. W is a power of two.

    With distance d = 1, 2, 4, ..., W/2, where the d ranks of each group of neighbours hold the same sum:

    1. Encode the sum, with the noise of the group's first rank in phase log2(d), so that all of a group send the same
       bytes. Send it to the partner `rank ^ d`.
    2. Decode both messages, our own too, and add them in float32: a sum of two needs no order, so that both partners,
       and with them both groups, hold the same bits.

    Bytes sent a rank: log2(W) nbytes(n). Roundings a value: log2(W). Passes: log2(W) encodes, 2 log2(W) decodes.
    """
    exchange, coder, whole, rank = call.exchange, call.coder, (0, call.x.numel()), call.exchange.rank
    distances = distances_of(exchange.world)
    incoming = [exchange.receive(coder.nbytes(whole), rank ^ d, phase) for phase, d in enumerate(distances)]
    total = call.x
    for phase, d in enumerate(distances):
        call.origin = (rank // d * d, 0)
        wire = call.encode(total, whole, phase, call.sum_scales if phase else call.scales)
        exchange.send(wire, rank ^ d, phase)
        total = exchange.floats(call.x.numel())
        coder.decode(wire, whole, total)
        coder.decode(incoming[phase].get(), whole, total, accumulate=True)
    store(call.x, call.reduction.finish(total))
    exchange.finish()


def distances_of(world: int) -> list[int]:
    return [1 << phase for phase in range(world.bit_length() - 1)]


def simulate(workers: Workers) -> None:
    """A sum for each group instead of each worker."""
    whole, totals = workers.whole, [workers.x_Wn[worker] for worker in workers.seats]
    for phase, d in enumerate(distances_of(workers.world)):
        arrived = []
        for group, total in enumerate(totals):
            first, out = workers.seats[group * d], workers.new(whole)
            workers.passage(
                total, (first, whole), phase, workers.sum_scales(first) if phase else workers.scales[first], out
            )
            arrived.append(out)
        pairs = zip(arrived[::2], arrived[1::2], strict=True)
        totals = [workers.sums.rounded(plus(left, right), whole) for left, right in pairs]
    store(workers.out, workers.reduction.finish(totals[0]))


def sent_bytes(setting: Setting) -> list[int]:
    exchanges = len(distances_of(setting.world))
    return [exchanges * setting.coder.nbytes((0, setting.coder.numel))] * setting.world


def cost(ranks: Placement) -> Cost:
    """All ranks of a node send what they have through its card, once for each doubling of the nodes."""
    sent = [float(ranks.halvings)]
    for level in range(1, ranks.level + 1):
        members = ranks.members(level)
        sent.append(math.ceil(math.log2(members)) * ranks.world / members)
    stage = ranks.over_all_levels("two_shot", sent, float(ranks.halvings))
    return Cost((stage,), float(ranks.halvings), 2.0 * ranks.halvings, roundings=ranks.halvings)


register(
    Algorithm(
        "doubling",
        "partners exchange all that they have, at twice the distance each time",
        bytes_sent="log2 W nbytes(n)",
        roundings="log2 W",
        phases="0, 1, ..., log2 W - 1",
        order=Order.PAIRS,
        run=run,
        simulate=simulate,
        sent_bytes=sent_bytes,
        cost=cost,
        host_waits=False,
        check_world=lambda world, nodes: check_power_of_two("doubling", world),
    )
)
