"""hierarchical: as it is (or with one codec) inside a node, with another codec between nodes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from narrowcast.codecs import codec as codec_named
from narrowcast.collectives import primitives
from narrowcast.collectives.algorithms import two_shot
from narrowcast.collectives.algorithms.context import Call, Reduction
from narrowcast.collectives.algorithms.cost import Cost, Placement, Stage, both
from narrowcast.collectives.algorithms.record import Algorithm, Nodes, Order, Setting, register
from narrowcast.collectives.algorithms.workers import Part, Workers
from narrowcast.collectives.residuals import Residuals, add_lost, empty_into
from narrowcast.collectives.segments import Coder, Range, Scales, concrete, split, take

BETWEEN = 2
"""The first phase of the noise between nodes; that inside a node has 0 and 1."""


def run(call: Call) -> None:
    """Sum over all ranks in place; `call.nodes` lists the ranks of each node.

    1. Inside each node, reduce-scatter: member i sums shard i of the node, in the node's order (inner codec).
    2. Members i of all nodes all-reduce that sum by two_shot, in the order of the nodes (outer codec).
    3. Inside each node, all-gather (inner codec).

    With error feedback member i's residual `first` goes along in step 1 for the shards of the other members, which
    renews it there, and in step 2 for shard i: what its own values of shard i lose in step 1 is added to it before. An
    inner codec that loses and has no feedback takes it in for the other shards and renews nothing. `second` is that of
    step 2, and takes what step 3 loses of the owner's part: all, or without inner feedback what 16 bits do not hold.

    With k ranks a node and m nodes, bytes sent a rank: 2 (k-1)/k inner(n) inside, 2 (m-1)/m outer(n/k) between nodes.
    Roundings a value: 2, and 2 more where the inner codec is lossy.
    """
    rank, nodes = call.exchange.rank, call.nodes or ()
    node = next(list(members) for members in nodes if rank in members)
    place = node.index(rank)
    inside = replace(
        call,
        codec=call.inner or codec_named("as-is"),
        exchange=call.exchange.among(node),
        reduction=Reduction(),
        residuals=None,
        origin=(rank, 0),
        scales=None,
    )
    parts = parts_of(inside.coder, call.coder, len(node))
    part = parts[place]
    total = _reduce_inside(inside, parts, call.residuals)

    lengths, scales = _cut(call.coder, part, call.sum_scales)
    between = replace(
        call,
        x=total,
        # `as-is` is the tensor's own type, also where the sum is float32
        codec=concrete(call.codec, call.x.dtype),
        exchange=call.exchange.among([members[place] for members in nodes]),
        segments=lengths,
        residuals=None if call.residuals is None else call.residuals.over(part),
        origin=(rank, BETWEEN),
        scales=scales,
    )
    two_shot.run(between)

    # all nodes encode the same sum, so with the same noise: identical bits on all ranks
    wire = primitives.all_gather(replace(inside, origin=(nodes[0][place], 0)), parts, total)
    if between.residuals is not None and _gather_loses(inside.coder):
        exact = total if keeps_residuals(inside.coder) else _decoded(inside, wire, part)
        low, high = between.coder.shards(between.exchange.world)[between.exchange.rank]
        shard, got = between.residuals.of(1, (low, high)), take(call.x, part)[low:high]
        add_lost(shard.residual, exact[low:high], got, 1.0, shard.unit)
    call.times.inside_bytes += inside.exchange.sent_bytes
    call.exchange.sent_bytes += inside.exchange.sent_bytes + between.exchange.sent_bytes


def _reduce_inside(inside: Call, parts: list[Range], residuals: Residuals | None) -> Tensor:
    """Step 1: the sum of this rank's part."""
    if residuals is None:
        return primitives.reduce_scatter(inside, parts)
    own = take(residuals.first, parts[inside.exchange.rank])
    waiting = own.clone()
    own.zero_()
    if keeps_residuals(inside.coder):
        total = primitives.reduce_scatter(replace(inside, residuals=residuals), parts)
    else:
        total = primitives.reduce_scatter(replace(inside, x=residuals.empty_into(inside.x.float(), 0)), parts)
    own.add_(waiting)
    return total


def _decoded(inside: Call, wire: Tensor, part: Range) -> Tensor:
    """The values of a message, in float32 whatever the type of the result."""
    values = inside.exchange.floats(part[1] - part[0])
    inside.coder.decode(wire, part, values)
    return values


def keeps_residuals(inner: Coder) -> bool:
    """Whether what is lost inside a node is kept: with feedback, and where 16 bits of the tensor's own type lose it."""
    return inner.codec.feedback or inner.codec.lossless or inner.is_identity(inner.dtype)


def _gather_loses(inner: Coder) -> bool:
    """Whether the all-gather inside a node loses anything that is kept."""
    return inner.dtype != torch.float32 or inner.codec.feedback


def parts_of(inner: Coder, outer: Coder, members: int) -> list[Range]:
    """A part for each member of a node, cut where both codecs allow it."""
    return split((0, outer.numel), members, math.lcm(inner.align, outer.align))


def _cut(coder: Coder, part: Range, scales: Scales) -> tuple[list[int], Scales]:
    """The lengths of the segments inside a part, and their scales where sums have them."""
    pieces = list(coder.segments_in(part))
    return [high - low for _, (low, high) in pieces], scales and [scales[number] for number, _ in pieces]


def check_nodes(world: int, nodes: Nodes | None) -> None:
    if not nodes:
        raise ValueError("all_reduce: algorithm 'hierarchical' needs nodes=, a list of the ranks of each node")
    listed = [list(members) for members in nodes]
    if sorted(rank for members in listed for rank in members) != list(range(world)):
        raise ValueError(f"all_reduce: nodes={listed} must name each of the ranks 0 to {world - 1} once")
    if len({len(members) for members in listed}) > 1:
        raise ValueError(f"all_reduce: nodes={listed} differ in size; 'hierarchical' needs equally many ranks a node")


def simulate(workers: Workers) -> None:
    """`workers.inner` inside a node, `workers.coder` between nodes."""
    inner = workers.inner
    assert inner is not None
    parts = parts_of(inner, workers.coder, len(workers.nodes[0]))
    columns = [[workers.seats[node[place]] for node in workers.nodes] for place in range(len(parts))]
    if workers.residuals is not None:
        workers.residuals.hand_over(_owned(workers.coder, parts, columns))
    for part, column in zip(parts, columns, strict=True):
        if part[0] == part[1]:
            continue
        totals = _sums_inside(workers, inner, column, part)
        total, out = _sum_between(workers, column, totals, part), take(workers.out, part)
        # every node encodes the same sum, with the noise of the first node's member
        noise = workers.noise(column[0], 1)
        inner.passage(total, part, noise, None, out)
        if workers.residuals is not None and _gather_loses(inner):
            if not keeps_residuals(inner):
                inner.passage(total.clone(), part, noise, None, total)
            second = workers.residuals.second(part)
            add_lost(second.residual, total, out, 1.0, second.unit)


def _owned(outer: Coder, parts: Sequence[Range], columns: Sequence[Sequence[int]]) -> list[Part]:
    """Every worker and the part of the result that it encodes between nodes."""
    owned = []
    for part, column in zip(parts, columns, strict=True):
        shards = _outer_coder(outer, part).shards(len(column))
        owned += [(worker, (part[0] + low, part[0] + high)) for worker, (low, high) in zip(column, shards, strict=True)]
    return owned


def _outer_coder(outer: Coder, part: Range) -> Coder:
    """Of the sum of a part inside a node."""
    return Coder(outer.codec, _cut(outer, part, None)[0], torch.float32)


def _sums_inside(workers: Workers, inner: Coder, column: Sequence[int], part: Range) -> Tensor:
    """The sum of one part inside each node. column: who gets it, in each of them."""
    low, high = part
    kept = workers.residuals
    if kept is None:
        return torch.stack([_sum_inside(workers, inner, node, part) for node in workers.nodes])
    rows = torch.tensor(column, device=kept.first_Wn.device)
    waiting = kept.first_Wn[rows, low:high]
    kept.first_Wn[rows, low:high] = 0.0
    totals = torch.stack([_sum_inside(workers, inner, node, part) for node in workers.nodes])
    kept.first_Wn[rows, low:high] += waiting
    return totals


def _sum_inside(workers: Workers, inner: Coder, node: Sequence[int], part: Range) -> Tensor:
    """The sum of one part inside a node, in the node's order."""
    total, running, is_plain = workers.new(part), workers.sums.begin(part), workers.sums.is_plain
    for number, place in enumerate(node):
        worker = workers.seats[place]
        values, noise = take(workers.x_Wn[worker], part), workers.noise(worker, 0)
        feedback = workers.residuals.first(worker, part) if workers.residuals is not None else None
        if feedback is not None and not keeps_residuals(inner):
            values, feedback = empty_into(values.float(), feedback.residual, feedback.unit), None
        inner.passage(values, part, noise, None, total, is_plain and number > 0, feedback)
        if not is_plain:
            running.add(total)
    return total if is_plain else running.result()


def _sum_between(workers: Workers, column: Sequence[int], totals: Tensor, part: Range) -> Tensor:
    """two_shot between the nodes; each row of `totals` belongs to the worker of `column` in its place."""
    between = Workers(
        totals,
        torch.empty_like(totals[0]),
        _outer_coder(workers.coder, part),
        seats=range(len(column)),
        noise=lambda row, phase: workers.noise(column[row], BETWEEN + phase),
        scales=[_cut(workers.coder, part, workers.sum_scales(0))[1]] * len(column),
        reduction=workers.reduction,
        sums=workers.sums.over(part),
    )
    if workers.residuals is not None:
        between.residuals = workers.residuals.over(part, column, between.owned_shards())
    two_shot.simulate(between)
    if workers.residuals is not None and between.residuals is not None:
        workers.residuals.put_back(part, column, between.residuals)
    return between.out


def sent_bytes(setting: Setting) -> list[int]:
    return [inside + between for inside, between in zip(*level_bytes(setting), strict=True)]


def level_bytes(setting: Setting) -> tuple[list[int], list[int]]:
    """By worker: what it sends inside its node, and what between nodes."""
    outer, inner, nodes = setting.coder, setting.inner, setting.nodes
    assert inner is not None
    parts = parts_of(inner, outer, len(nodes[0]))
    inside, outside = [0] * setting.world, [0] * setting.world
    sizes = [inner.nbytes(part) for part in parts]
    for place, part in enumerate(parts):
        between = two_shot.sent_bytes(Setting(_outer_coder(outer, part), len(nodes)))
        for node, count in zip(nodes, between, strict=True):
            inside[node[place]] = sum(sizes) + (len(node) - 2) * sizes[place]
            outside[node[place]] = count
    return inside, outside


def _between(ranks: Placement) -> Stage:
    """Two shots of one rank of each node; all k groups of them share the links."""
    outer = ranks.of_nodes()
    made = both(outer.direct("two_shot"), outer.gather(1 / outer.world))
    own = made.own / ranks.inside
    return replace(made, level=made.level + 1, inner=(own, *made.inner))


def cost(ranks: Placement) -> Cost:
    """Inside a node as it is; every rank sends its n/k outside, and the k of them share the node's link."""
    k, m = ranks.inside, ranks.nodes
    scatter, gather = (
        Stage(0, kind, (k - 1) / k, float(k - 1), as_is=True) for kind in ("reduce_scatter", "all_gather")
    )
    between = (_between(ranks),) if m > 1 else ()
    stages = (scatter, *between, gather) if k > 1 else between
    return Cost(stages, encodes=1 + 1 / m, decodes=2.0, roundings=2, codec_share=1 / k)


register(
    Algorithm(
        "hierarchical",
        "as it is or through `inner` inside a node, two_shot between nodes",
        bytes_sent="inside 2 (k-1)/k inner(n), between 2 (m-1)/m outer(n/k)",
        roundings="2, and 2 more where `inner` is lossy",
        phases="inner 0 and 1, outer 2 and 3",
        order=Order.RANKS,
        run=run,
        simulate=simulate,
        sent_bytes=sent_bytes,
        cost=cost,
        host_waits=False,
        residual_shots=2,
        check_world=check_nodes,
        takes_nodes=True,
    )
)
