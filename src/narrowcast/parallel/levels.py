"""Two levels of links: which ranks share a node, and what travels inside of nodes and between them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from narrowcast.codecs import Codec
from narrowcast.codecs import codec as codec_named
from narrowcast.collectives import Channel, Coder, level_bytes, record
from narrowcast.kernels import FLOATS
from narrowcast.parallel.policy import AS_IS, ASKED_FOR, CodecChoice
from narrowcast.parallel.seeds import seed_of
from narrowcast.parallel.stats import TensorRow

INSIDE, BETWEEN = "inside", "between"
"""The roles of a gradient where there are nodes."""
AUTO = "auto"

NodeList = tuple[tuple[int, ...], ...]
Sent = tuple[torch.dtype, int, CodecChoice]
"""Of a gradient: its type, its values, its codec."""


def list_nodes(what: str, nodes: object, world: int) -> NodeList | None:
    """The ranks of each node: as they are listed, or so many equal groups of neighbours. what: who asks."""
    if nodes is None:
        return None
    if isinstance(nodes, int) and not isinstance(nodes, bool):
        if nodes < 1 or world % nodes:
            raise ValueError(
                f"{what}: nodes={nodes} nodes of equal size cannot be made of {world} ranks; give a divisor of {world} "
                "(the number of nodes, not of ranks a node), or list the ranks of each node"
            )
        size = world // nodes
        return tuple(tuple(range(first, first + size)) for first in range(0, world, size))
    if isinstance(nodes, str) or not isinstance(nodes, Sequence):
        raise ValueError(f"{what}: nodes={nodes!r}; give the number of nodes, or a list of the ranks of each")
    return tuple(tuple(members) for members in nodes)


def nodes_by_host(channel: Channel) -> NodeList:
    """Ranks share a node whose hosts have one name and that one torchrun started (GROUP_RANK). Collective."""
    where = f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}"
    mine = torch.tensor([seed_of(where) >> 1])
    hosts = [int(host) for host in channel.gather(mine, call="nodes='auto'")]
    return tuple(tuple(r for r, host in enumerate(hosts) if host == name) for name in dict.fromkeys(hosts))


def _equal_nodes(channel: Channel) -> NodeList:
    """Of nodes="auto"; raises on every rank where they are not of one size. Collective."""
    found = nodes_by_host(channel)
    if len(set(map(len, found))) > 1:
        listed = [list(members) for members in found]
        raise ValueError(
            f"attach: nodes='auto' found nodes of different sizes by the names of hosts and GROUP_RANK: {listed}; "
            "start equally many ranks on each, or list the ranks of each node"
        )
    return found


def inner_codec(what: str, nodes: object, inner: str | Codec | None) -> Codec:
    """The codec inside of nodes; as it is where none was given."""
    if inner is None:
        return AS_IS
    codec = codec_named(inner)
    if nodes is None:
        raise ValueError(
            f"{what}: inner={codec} is the wire inside of nodes; give nodes=, the number of nodes, 'auto' or a list of "
            "the ranks of each, or leave out inner="
        )
    return codec


def inside_of(codec: Codec, inner: Codec) -> Codec:
    """The codec inside of nodes of what has this one between them: what stays as it is does so everywhere."""
    return AS_IS if codec.factors.lossless else inner


@dataclass(frozen=True)
class Levels:
    """What `nodes=` and `inner=` of `attach` come to."""

    nodes: NodeList | None = None
    inner: Codec = AS_IS

    @classmethod
    def of(cls, nodes: object, inner: str | Codec | None, channel: Channel) -> Levels:
        """Collective where nodes="auto"."""
        inside = inner_codec("attach", nodes, inner)
        is_auto = isinstance(nodes, str) and nodes == AUTO
        return cls(_equal_nodes(channel) if is_auto else list_nodes("attach", nodes, channel.world), inside)

    def rows(self, row: TensorRow, choice: CodecChoice, dtype: torch.dtype) -> list[TensorRow]:
        """The row of a gradient; one for each level where both have a codec."""
        if self.inner.lossless:
            return [row]
        inner = inside_of(choice.codec, self.inner)
        why = choice.why or (ASKED_FOR if inner.lossless else "")
        return [
            TensorRow.of(row.name, row.numel, CodecChoice(inner, why), dtype, INSIDE),
            TensorRow.of(row.name, row.numel, choice, dtype, BETWEEN),
        ]

    def notes(self, gradients: Iterable[Sent], rank: int) -> list[str]:
        """What a rank sends on each level in a step, as if each codec had one bucket."""
        if self.nodes is None:
            return []
        lengths: dict[tuple[torch.dtype, Codec], list[int]] = {}
        for dtype, numel, choice in gradients:
            if dtype in FLOATS:
                lengths.setdefault((dtype, choice.codec), []).append(numel)
        sent = [self._bytes(codec, of_codec, dtype, rank) for (dtype, codec), of_codec in lengths.items()]
        inside, between = (sum(level) for level in zip(*sent, strict=True)) if sent else (0, 0)
        count, size = len(self.nodes), len(self.nodes[0])
        return [
            f"inside of nodes of {size} ranks: {self.inner}, about {inside} bytes a rank and step",
            f"between {count} nodes: the wires above, about {between} bytes a rank and step",
        ]

    def _bytes(self, codec: Codec, lengths: list[int], dtype: torch.dtype, rank: int) -> tuple[int, int]:
        outer, inner = (Coder(one, lengths, dtype) for one in (codec, inside_of(codec, self.inner)))
        nodes = self.nodes or ()
        setting = record.Setting(outer, sum(map(len, nodes)), nodes, inner)
        inside, between = level_bytes(setting)
        return inside[rank], between[rank]
