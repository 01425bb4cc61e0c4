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
from narrowcast.collectives.algorithms.cost import Cost, Placement, Stage, direct_steps
from narrowcast.collectives.algorithms.record import Algorithm, Nodes, Order, Setting, register
from narrowcast.collectives.algorithms.workers import Workers
from narrowcast.collectives.segments import Coder, Range, Scales, concrete, split, take

BETWEEN = 2
"""The first phase of the noise between nodes; that inside a node has 0 and 1."""


def run(call: Call) -> None:
    """Sum over all ranks in place; `call.nodes` lists the ranks of each node.

    1. Inside each node, reduce-scatter: member i sums shard i of the node, in the node's order (inner codec).
    2. Members i of all nodes all-reduce that sum by two_shot, in the order of the nodes (outer codec).
    3. Inside each node, all-gather (inner codec).

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
    total = primitives.reduce_scatter(inside, parts)

    lengths, scales = _cut(call.coder, parts[place], call.sum_scales)
    between = replace(
        call,
        x=total,
        # `as-is` is the tensor's own type, also where the sum is float32
        codec=concrete(call.codec, call.x.dtype),
        exchange=call.exchange.among([members[place] for members in nodes]),
        segments=lengths,
        origin=(rank, BETWEEN),
        scales=scales,
    )
    two_shot.run(between)

    # all nodes encode the same sum, so with the same noise: identical bits on all ranks
    primitives.all_gather(replace(inside, origin=(nodes[0][place], 0)), parts, total)
    call.exchange.sent_bytes += inside.exchange.sent_bytes + between.exchange.sent_bytes


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
    for place, part in enumerate(parts_of(inner, workers.coder, len(workers.nodes[0]))):
        if part[0] == part[1]:
            continue
        totals = torch.stack([_sum_inside(workers, inner, node, part) for node in workers.nodes])
        column = [workers.seats[node[place]] for node in workers.nodes]
        total = _sum_between(workers, column, totals, part)
        # every node encodes the same sum, with the noise of the first node's member
        inner.passage(total, part, workers.noise(column[0], 1), None, take(workers.out, part))


def _sum_inside(workers: Workers, inner: Coder, node: Sequence[int], part: Range) -> Tensor:
    """The sum of one part inside a node, in the node's order."""
    total, running, is_plain = workers.new(part), workers.sums.begin(part), workers.sums.is_plain
    for number, place in enumerate(node):
        worker = workers.seats[place]
        values, noise = take(workers.x_Wn[worker], part), workers.noise(worker, 0)
        inner.passage(values, part, noise, None, total, accumulate=is_plain and number > 0)
        if not is_plain:
            running.add(total)
    return total if is_plain else running.result()


def _sum_between(workers: Workers, column: Sequence[int], totals: Tensor, part: Range) -> Tensor:
    """two_shot between the nodes; each row of `totals` belongs to the worker of `column` in its place."""
    lengths, scales = _cut(workers.coder, part, workers.sum_scales(0))
    between = Workers(
        totals,
        torch.empty_like(totals[0]),
        Coder(workers.coder.codec, lengths, torch.float32),
        seats=range(len(column)),
        noise=lambda row, phase: workers.noise(column[row], BETWEEN + phase),
        scales=[scales] * len(column),
        reduction=workers.reduction,
        sums=workers.sums.over(part),
    )
    two_shot.simulate(between)
    return between.out


def sent_bytes(setting: Setting) -> list[int]:
    outer, inner, nodes = setting.coder, setting.inner, setting.nodes
    assert inner is not None
    sent, parts = [0] * setting.world, parts_of(inner, outer, len(nodes[0]))
    sizes = [inner.nbytes(part) for part in parts]
    for place, part in enumerate(parts):
        lengths, _ = _cut(outer, part, None)
        between = two_shot.sent_bytes(Setting(Coder(outer.codec, lengths, torch.float32), len(nodes)))
        for node, count in zip(nodes, between, strict=True):
            sent[node[place]] = sum(sizes) + (len(node) - 2) * sizes[place] + count
    return sent


def cost(ranks: Placement) -> Cost:
    """Inside a node as it is; every rank sends its n/k outside, and the k of them share the node's link."""
    k, m = ranks.inside, ranks.nodes
    scatter, gather = (
        Stage(0, kind, (k - 1) / k, float(k - 1), as_is=True) for kind in ("reduce_scatter", "all_gather")
    )
    sent = 2 * ((m - 1) / m)
    between = (Stage(1, "two_shot", sent, 2.0 * direct_steps(m), own=sent / k),) if m > 1 else ()
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
        check_world=check_nodes,
        takes_nodes=True,
    )
)
