"""What an all-reduce costs, as its algorithm says it: bytes, latencies in a row, encodings and roundings.

Seconds come from `narrowcast.predict`, which knows the links and the codecs of a cluster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

MESSAGE_SHARE = 0.1
"""What each further message of a step costs, as a share of the latency: messages to several peers go at once."""
TREE_HOP = 3.5
"""What a hop of NCCL's double tree takes, in latencies of a ring's: a node waits for a chunk, adds it and hands it on.
It is what 4 nodes of 8 B200 need for 1 MiB (376 us); NCCL's own table has 1 for large messages and 2 for small ones."""
TREE_SHARE = 0.92
"""Of the bandwidth: what NCCL's tuner takes a tree to reach."""


def direct_steps(ranks: int) -> float:
    """Latencies of a message from everybody to everybody."""
    return 1.0 + MESSAGE_SHARE * max(0, ranks - 2)


@dataclass(frozen=True)
class Stage:
    """Part of an algorithm on one level: `sent` bytes for each byte of the tensor, in `steps` latencies."""

    level: int
    kind: str
    """Whose measured table applies."""
    sent: float
    """By one member of the level: by all ranks of a node together where it joins nodes."""
    steps: float
    as_is: bool = False
    """Travels as float32 whatever the wire."""
    inner: tuple[float, ...] = ()
    """What a member of each level further inside sends of it at the same time, the innermost first."""
    trips: float = 0.0
    """How often in a row bytes cross a link of the level, however many messages go at once; 0: as often as `steps`."""
    peers: float = 1.0
    """To how many others a member of the level sends at once: each has a connection of its own."""

    @property
    def own(self) -> float:
        """What a rank sends."""
        return self.inner[0] if self.inner else self.sent


@dataclass(frozen=True)
class Cost:
    """An all-reduce: its stages, and how often each value is encoded and decoded by a rank."""

    stages: tuple[Stage, ...]
    encodes: float
    decodes: float
    roundings: int
    codec_share: float = 1.0
    """The part of the tensor that a rank encodes."""
    chunked: bool = False
    """Whether codec and wire overlap, chunk by chunk, as in two_shot."""
    otherwise: tuple[Stage, ...] = ()
    """What the backend does instead of `stages` where that is quicker; empty: nothing."""


@dataclass(frozen=True)
class Placement:
    """Where the ranks of a call are, node by node in rank order."""

    world: int
    sizes: tuple[int, ...] = ()
    """Members of each level of links, from the inside out: devices of a node, nodes, racks. Empty: all links alike."""
    latencies: tuple[float, ...] = (1.0,)
    """Of a hop of each level, in those of the outermost."""
    nccl: bool = False
    """Whether NCCL carries the bytes: it adds up in a ring or in a tree, and gathers in a ring. Gloo has a ring for its
    own sums, and our wires are messages from rank to rank."""
    nvlink: bool = False
    """Whether the devices of a node are joined by more than PCIe: then a tree sends what they have added up."""

    @property
    def level(self) -> int:
        """The outermost level of links in use."""
        return max((level for level, size in enumerate(self.sizes) if size > 1), default=0)

    @property
    def inside(self) -> int:
        """Ranks of a node; 1 where all links are alike."""
        return self.sizes[0] if len(self.sizes) > 1 else 1

    @property
    def nodes(self) -> int:
        return -(-self.world // self.inside)

    def members(self, level: int) -> int:
        """Of all groups of a level together: ranks, nodes, racks; 1 above the outermost."""
        return 1 if level > self.level else max(1, -(-self.world // math.prod(self.sizes[:level])))

    @property
    def direct_bytes(self) -> tuple[float, ...]:
        """Sent by a member of each level for each byte, where every rank has a part for every other: a node sends what
        leaves it, of all its ranks.
        """
        below = (min(self.world, math.prod(self.sizes[:level])) for level in range(self.level + 1))
        return tuple(ranks * (self.world - ranks) / self.world for ranks in below)

    @property
    def ring_bytes(self) -> float:
        """Sent through every link for each byte of the tensor, by a ring: the least that a rank can send."""
        return 2 * ((self.world - 1) / self.world)

    @property
    def ring_steps(self) -> float:
        """A ring crosses to the next node once for each node, and goes on inside otherwise."""
        hops = (self.members(level) - self.members(level + 1) for level in range(self.level + 1))
        return sum(2.0 * hop * latency for hop, latency in zip(hops, self.latencies, strict=False))

    @property
    def halvings(self) -> int:
        """Exchanges with a partner at twice the distance each time."""
        return _halvings(self.world)

    def over_all_levels(
        self, kind: str, sent: Sequence[float], steps: float, trips: float = 0.0, peers: float = 1.0
    ) -> Stage:
        """A stage without regard to nodes, with what a member of each level sends."""
        return Stage(self.level, kind, sent[-1], steps, inner=tuple(sent[:-1]), trips=trips, peers=peers)

    def of_nodes(self) -> Placement:
        """One rank of each node."""
        return Placement(self.nodes, self.sizes[1:], self.latencies[1:] or (1.0,), self.nccl)

    def direct(self, kind: str) -> Stage:
        """A part of every rank to every other."""
        # of every rank of a member to every rank of the others
        below = math.prod(self.sizes[: self.level])
        peers = max(1, min(self.world, below) * (self.world - below))
        return self.over_all_levels(kind, self.direct_bytes, direct_steps(self.world), 1.0, peers)

    def ring(self, kind: str, passes: float = 2.0) -> Stage:
        """Around a ring of all ranks, so often as `passes` says: every link carries the same bytes."""
        sent = [self.ring_bytes * passes / 2] * (self.level + 1)
        trips = (self.members(self.level) - 1) * passes
        return self.over_all_levels(kind, sent, self.ring_steps * passes / 2, trips)

    def double_tree(self) -> Stage:
        """NCCL's other sum: a chain inside a node, two trees between nodes with half of the bytes each, up and down.

        Where PCIe joins the devices of a node NCCL was never seen to save bytes by it: it is taken for few bytes.
        """
        between = [_tree_bytes(self.members(level)) for level in range(1, self.level + 1)]
        sent = [2.0, *between] if self.nvlink and self.level else [self.ring_bytes] * (self.level + 1)
        hops = [self.inside - 1.0] if self.level else [float(self.halvings)]
        hops += [float(_halvings(-(-self.members(n) // self.members(n + 1)))) for n in range(1, self.level + 1)]
        steps = sum(2 * TREE_HOP * hop * latency for hop, latency in zip(hops, self.latencies, strict=False))
        return self.over_all_levels("double_tree", [bytes_ / TREE_SHARE for bytes_ in sent], steps)

    def gather(self, parts: float) -> Stage:
        """`parts` bytes of each rank to all, for each byte of the tensor: NCCL has a ring, we send messages."""
        if not self.nccl:
            sent = [parts * self.world * each for each in self.direct_bytes]
            return replace(self.direct("two_shot"), sent=sent[-1], inner=tuple(sent[:-1]))
        made = self.ring("two_shot", 1.0)
        # with one rank a node there is a tree for it, too (PAT)
        steps = made.steps if self.level else min(made.steps, TREE_HOP * self.halvings)
        trips = min(made.trips, steps) if self.level == 0 else made.trips
        return self.over_all_levels("two_shot", [parts * (self.world - 1)] * (self.level + 1), steps, trips)


def both(one: Stage, other: Stage) -> Stage:
    """One after the other."""
    inner = tuple(a + b for a, b in zip(one.inner, other.inner, strict=True))
    trips = (one.trips or one.steps) + (other.trips or other.steps)
    sent = one.sent + other.sent
    # as many as carry both in the same time, where what a peer is sent sets it
    peers = sent / (one.sent / one.peers + other.sent / other.peers) if sent else one.peers
    return replace(one, sent=sent, steps=one.steps + other.steps, inner=inner, trips=trips, peers=peers)


def _tree_bytes(nodes: int) -> float:
    """What the busiest of so many nodes sends for each byte: of the two trees it is within one, with two children from
    four nodes on, and a leaf of the other."""
    return {1: 0.0, 2: 1.0, 3: 1.5}.get(nodes, 2.0)


def _halvings(count: int) -> int:
    return math.ceil(math.log2(max(2, count))) if count > 1 else 0
