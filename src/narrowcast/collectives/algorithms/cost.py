"""What an all-reduce costs, as its algorithm says it: bytes, latencies in a row, encodings and roundings.

Seconds come from `narrowcast.predict`, which knows the links and the codecs of a cluster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MESSAGE_SHARE = 0.1
"""What each further message of a step costs, as a share of the latency: messages to several peers go at once."""


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
    steps: float
    as_is: bool = False
    """Travels as float32 whatever the wire."""
    own: float | None = None
    """What one member sends of it, through its port inside the node; None: `sent`. Between nodes `sent` is a node's."""


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


@dataclass(frozen=True)
class Placement:
    """Where the ranks of a call are, node by node in rank order."""

    world: int
    inside: int
    """Ranks of a node."""
    nodes: int
    level: int = 0
    """Of the link that limits a flat algorithm: 1 between nodes; 0 inside a node, or where all links are alike."""
    inner_latency: float = 1.0
    """Of a hop inside a node, in latencies of the link between nodes."""
    backend_has_trees: bool = False
    """Whether the backend's own sum may take a tree: NCCL's may, Gloo has a ring."""

    @property
    def peers(self) -> int:
        """Messages through one network card where everybody sends to everybody: those of a node that leave it."""
        return (self.world - self.inside) * self.inside if self.level else self.world - 1

    @property
    def ring_bytes(self) -> float:
        """Sent by a rank for each byte of the tensor, by a ring: the least that an all-reduce can send."""
        return 2 * ((self.world - 1) / self.world)

    @property
    def ring_steps(self) -> float:
        """A ring crosses to the next node once for each node, and goes on inside otherwise."""
        if self.level == 0:
            return 2.0 * (self.inside * self.nodes - 1)
        return 2.0 * (self.nodes - 1) + 2.0 * self.nodes * (self.inside - 1) * self.inner_latency

    @property
    def backend_steps(self) -> float:
        """Of the backend's own sum: a ring or a double tree, whichever has the shorter latency."""
        if not self.backend_has_trees:
            return self.ring_steps
        chain = 2.0 * (self.inside - 1) * (self.inner_latency if self.nodes > 1 else 1.0)
        across = 2.0 * math.ceil(math.log2(self.nodes)) if self.nodes > 1 else 0.0
        return min(self.ring_steps, chain + across)

    @property
    def halvings(self) -> int:
        """Exchanges with a partner at twice the distance each time."""
        return math.ceil(math.log2(max(2, self.world)))
