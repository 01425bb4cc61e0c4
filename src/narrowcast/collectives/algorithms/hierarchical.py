"""hierarchical: as it is (or with one codec) inside a node, with another codec between nodes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from narrowcast.codecs import codec as codec_named
from narrowcast.collectives import primitives
from narrowcast.collectives.algorithms.context import Call, Reduction
from narrowcast.collectives.algorithms.two_shot import two_shot
from narrowcast.collectives.segments import Coder, Range, concrete, split


def hierarchical(call: Call, scales: list[Tensor | None] | None = None) -> None:
    """Sum over all ranks in place; `call.nodes` lists the ranks of each node.

    1. Inside each node, reduce-scatter: member i sums shard i of the node, in the node's order (inner codec).
    2. Members i of all nodes all-reduce that sum by two_shot, in the order of the nodes (outer codec).
    3. Inside each node, all-gather (inner codec).

    With k ranks a node and m nodes, bytes sent a rank: 2 (k-1)/k inner(n) inside, 2 (m-1)/m outer(n/k) between nodes.
    Roundings a value: 2, and 2 more where the inner codec is lossy.
    """
    nodes = checked_nodes(call.nodes, call.exchange.world)
    node = next(members for members in nodes if call.exchange.rank in members)
    place = node.index(call.exchange.rank)
    inner = call.inner or codec_named("as-is")
    rank = call.exchange.rank
    inside = replace(
        call, codec=inner, exchange=call.exchange.among(node), reduction=Reduction(), residuals=None, origin=(rank, 0)
    )
    across = call.exchange.among([members[place] for members in nodes])

    # cut where both codecs allow it
    parts = split((0, call.x.numel()), len(node), math.lcm(inside.coder().align, call.coder().align))
    mine = parts[place]
    total = primitives.reduce_scatter(inside, parts)
    lengths = _lengths(call.coder(), mine)
    # `as-is` is the tensor's own type, also where the sum is float32
    codec = concrete(call.codec, call.x.dtype)
    between = replace(call, x=total, codec=codec, exchange=across, segments=lengths, origin=(rank, 2))
    two_shot(between, _inside(call, mine, scales))
    # all nodes encode the same sum, so with the same noise: identical bits on all ranks
    primitives.all_gather(replace(inside, origin=(nodes[0][place], 0)), parts, total)
    call.exchange.sent_bytes += inside.exchange.sent_bytes + across.sent_bytes


def checked_nodes(nodes: Sequence[Sequence[int]] | None, world: int) -> list[list[int]]:
    if not nodes:
        raise ValueError("all_reduce: algorithm 'hierarchical' needs nodes=, a list of the ranks of each node")
    listed = [list(members) for members in nodes]
    if sorted(rank for members in listed for rank in members) != list(range(world)):
        raise ValueError(f"all_reduce: nodes={listed} must name each of the ranks 0 to {world - 1} once")
    if len({len(members) for members in listed}) > 1:
        raise ValueError(f"all_reduce: nodes={listed} differ in size; 'hierarchical' needs equally many ranks a node")
    return listed


def _lengths(coder: Coder, part: Range) -> list[int]:
    """Lengths of the segments inside a part."""
    cuts = [(max(low, part[0]), min(high, part[1])) for low, high in coder.segments]
    return [high - low for low, high in cuts if low < high]


def _inside(call: Call, part: Range, scales: list[Tensor | None] | None) -> list[Tensor | None] | None:
    """The agreed scales of the segments inside a part; those of one rank's own data do not hold for a sum."""
    if scales is None or not call.codec.agrees_on_scales:
        return None
    segments = call.coder().segments
    return [s for s, (low, high) in zip(scales, segments, strict=True) if max(low, part[0]) < min(high, part[1])]
