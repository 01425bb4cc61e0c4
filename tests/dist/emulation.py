"""The all-reduce algorithms once more, all ranks in one process, written from their docstrings and nothing else.

An algorithm that is not written here is that of the simulator, its second writing in its own file.

W letters: xs holds one flat tensor a rank. A "passage" is encode and decode: what the other side gets to see.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

import narrowcast as nc
from narrowcast.codecs import Codec

Range = tuple[int, int]
Scales = list[Tensor | None] | None
CHUNK, MAX_CHUNKS = 256 << 10, 8


def cut(n: int, parts: int, align: int, begin: int = 0) -> list[Range]:
    """Nearly equal parts, cut at multiples of `align`."""
    units = math.ceil(n / align)
    cuts = [begin + min(units * p // parts * align, n) for p in range(parts + 1)]
    return [(cuts[p], cuts[p + 1]) for p in range(parts)]


def stream_of(*path: int, start: int = 0) -> int:
    """The stream of a path of numbers, as docs/wire-format.md defines it."""
    state = start
    for word in (0, *path):
        state = (state + word + 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
        state ^= state >> 31
    return state


def noise_at(low: int, seed: int, step: int, *path: int) -> dict[str, int]:
    """The noise of a part that begins at value `low` of the tensor; path: of the encoding inside the call."""
    stream = stream_of(*path, start=stream_of(step))
    if low % 16 == 0:
        return {"seed": seed, "stream": stream, "offset": low}
    return {"seed": seed, "stream": stream_of(low, start=stream)}


@dataclass
class Setting:
    """All that a call fixes for every rank."""

    codec: Codec
    segments: Sequence[int]
    dtype: torch.dtype = torch.float32
    seed: int = 0
    step: int = 0
    divide: float = 1.0
    multiply: float = 1.0
    nodes: Sequence[Sequence[int]] | None = None
    inner: str = "as-is"
    low: bool = False
    streams: tuple[int | None, int] = (None, 0)
    """A rank and a first phase for the noise, instead of the rank at hand and 0."""
    to: tuple[int, ...] = ()
    """The receiver and the tag of a message, for its noise."""
    sent: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        plain = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
        self.codec = nc.codec(plain[self.dtype]) if str(self.codec) == "as-is" else self.codec
        self.align = max(self.codec.block, 16)
        ends = torch.tensor([0, *self.segments]).cumsum(0).tolist()
        self.ranges = [(ends[i], ends[i + 1]) for i in range(len(self.segments))]
        self.aps = bool(getattr(self.codec, "aps", False))

    @property
    def numel(self) -> int:
        return sum(self.segments)

    def pieces(self, part: Range) -> list[tuple[int, Range]]:
        """Block codecs run over the flat whole, others over each segment."""
        if part[0] >= part[1]:
            return []
        if self.codec.block:
            return [(0, part)]
        inside = [(i, (max(low, part[0]), min(high, part[1]))) for i, (low, high) in enumerate(self.ranges)]
        return [(i, piece) for i, piece in inside if piece[0] < piece[1]]

    def nbytes(self, part: Range) -> int:
        return sum(self.codec.nbytes(high - low) for _, (low, high) in self.pieces(part))

    def passage(
        self,
        values: Tensor,
        part: Range,
        rank: int,
        phase: int,
        scales: Scales = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """What comes out of `values`, which belong to `part`, after encode and decode."""
        out = torch.empty(part[1] - part[0], dtype=dtype or torch.float32)
        owner, first = self.streams
        rank = rank if owner is None else owner
        for number, (low, high) in self.pieces(part):
            wire = self.codec.encode(
                values[low - part[0] : high - part[0]],
                scale=scales[number] if scales else None,
                **noise_at(low, self.seed, self.step, rank, first + phase, *self.to),
            )
            out[low - part[0] : high - part[0]] = self.codec.decode(wire, high - low, dtype=out.dtype)
        return out

    def finish(self, total: Tensor) -> Tensor:
        total = total / self.divide if self.divide != 1 else total
        return total * self.multiply if self.multiply != 1 else total

    def own_scales(self, x: Tensor) -> Scales:
        """For codecs with one scale for a tensor: that of the whole segment."""
        if not self.codec.takes_scale:
            return None
        return [self.codec.tensor_scale(x[low:high]) for low, high in self.ranges]

    def scales(self, xs: list[Tensor]) -> list[Scales]:
        """By rank: its own, or the agreed ones."""
        return [self.aps_scales(xs)] * len(xs) if self.aps else [self.own_scales(x) for x in xs]

    def aps_scales(self, xs: list[Tensor]) -> Scales:
        """papers.md 2.2: M = max ceil(log2(N * |g|)), s = ub - M; a value on the wire is its code times 2 ** -s."""
        scales: list[Tensor | None] = []
        for low, high in self.ranges:
            finite = torch.cat([x[low:high].double() for x in xs])
            finite = finite[finite.isfinite() & (finite.abs() >= 2.0**-100)].abs()
            if not finite.numel():
                scales.append(torch.zeros(1))
                continue
            agreed = math.ceil(math.log2(float(finite.max()) * len(xs)))
            least, largest = self.codec.plan.exponents
            upper = math.floor(math.log2(self.codec.format.max))
            scales.append(torch.tensor([2.0 ** min(max(agreed - upper, least), largest)]))
        return scales


def stored(total: Tensor, dtype: torch.dtype) -> Tensor:
    """A float32 sum in the tensor's own type; a finite one stays finite."""
    if dtype is torch.float32:
        return total
    limit = torch.finfo(dtype).max
    return torch.where(total.isinf(), total, total.clamp(-limit, limit)).to(dtype)


def summed(parts: list[Tensor]) -> Tensor:
    """In the order given, in float32."""
    total = parts[0].clone()
    for part in parts[1:]:
        total = total + part
    return total


def one_shot(s: Setting, xs: list[Tensor]) -> Tensor:
    whole, scales = (0, s.numel), s.scales(xs)
    s.sent = [(len(xs) - 1) * s.nbytes(whole)] * len(xs)
    return stored(s.finish(summed([s.passage(x, whole, r, 0, scales[r]) for r, x in enumerate(xs)])), s.dtype)


def two_shot(
    s: Setting, xs: list[Tensor], scales: list[Scales] | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    world, out = len(xs), torch.empty(s.numel, dtype=dtype or s.dtype)
    scales = scales or s.scales(xs)
    shards = cut(s.numel, world, s.align)
    chunks = max(1, min(MAX_CHUNKS, max(s.nbytes(shard) for shard in shards) // CHUNK))
    s.sent = [0] * world
    for owner, (begin, end) in enumerate(shards):
        for part in cut(end - begin, chunks, s.align, begin):
            low, high = part
            total = s.finish(summed([s.passage(x[low:high], part, r, 0, scales[r]) for r, x in enumerate(xs)]))
            out[low:high] = s.passage(total, part, owner, 1, scales[owner] if s.aps else None, out.dtype)
            for rank in range(world):
                s.sent[rank] += s.nbytes(part) * ((world - 1) if rank == owner else 1)
    return out


def ring(s: Setting, xs: list[Tensor]) -> Tensor:
    world, out, scales = len(xs), torch.empty(s.numel, dtype=s.dtype), s.scales(xs)
    shards = cut(s.numel, world, s.align)
    s.sent = [0] * world
    for shard, part in enumerate(shards):
        low, high = part
        order = [(shard + 1 + k) % world for k in range(world)]
        arrived = s.passage(xs[order[0]][low:high], part, order[0], 0, scales[order[0]])
        for rank in order[1:]:
            own = xs[rank][low:high].float()
            own = s.passage(own, part, rank, 1, scales[rank]) if s.low else own
            total = own + arrived
            last = rank == shard
            dtype = s.dtype if last else torch.float32
            shared = scales[rank] if s.aps else None
            arrived = s.passage(s.finish(total) if last else total, part, rank, 0, shared, dtype)
        out[low:high] = arrived
        for k, rank in enumerate(order):
            s.sent[rank] += s.nbytes(part) * (1 if k in (world - 1, world - 2) else 2)
    return out


def tree(s: Setting, xs: list[Tensor]) -> Tensor:
    world, scales = len(xs), s.scales(xs)
    shards = cut(s.numel, world, s.align)
    totals, held = [x.float().clone() for x in xs], [list(range(world)) for _ in xs]
    s.sent, distance = [0] * world, world // 2
    while distance:
        before, first = [t.clone() for t in totals], distance == world // 2
        mine = [[k for k in held[r] if k & distance == r & distance] for r in range(world)]
        for rank in range(world):
            partner, part = rank ^ distance, (shards[mine[rank][0]][0], shards[mine[rank][-1]][1])
            low, high = part
            use = scales[partner] if first or s.aps else None
            totals[rank][low:high] = before[rank][low:high] + s.passage(
                before[partner][low:high], part, partner, 0, use
            )
            s.sent[partner] += s.nbytes(part)
        held, distance = mine, distance // 2
    out = torch.empty(s.numel, dtype=s.dtype)
    for rank, (low, high) in enumerate(shards):
        total = s.finish(totals[rank][low:high])
        out[low:high] = s.passage(total, (low, high), rank, 1, scales[rank] if s.aps else None, s.dtype)
    for rank in range(world):
        known, distance = [rank], 1
        while distance < world:
            s.sent[rank] += sum(s.nbytes(shards[k]) for k in known)
            known, distance = known + [k ^ distance for k in known], 2 * distance
    return out


def doubling(s: Setting, xs: list[Tensor]) -> Tensor:
    whole, scales, held = (0, s.numel), s.scales(xs), list(xs)
    rounds = int(math.log2(len(xs)))
    for k in range(rounds):
        sent = []
        for rank, total in enumerate(held):
            first = rank - rank % 2**k
            sent.append(s.passage(total, whole, first, k, scales[rank] if k == 0 or s.aps else None))
        held = [sent[rank] + sent[rank ^ 2**k] for rank in range(len(xs))]
    assert all(torch.equal(total.nan_to_num(), held[0].nan_to_num()) for total in held)
    s.sent = [rounds * s.nbytes(whole)] * len(xs)
    return stored(s.finish(held[0]), s.dtype)


def hierarchical(s: Setting, xs: list[Tensor]) -> Tensor:
    assert s.nodes
    inner = Setting(nc.codec(s.inner), s.segments, s.dtype, s.seed, s.step)
    out, size = torch.empty(s.numel, dtype=s.dtype), len(s.nodes[0])
    parts = cut(s.numel, size, math.lcm(inner.align, s.align))
    agreed, s.sent = s.aps_scales(xs) if s.aps else None, [0] * len(xs)
    for place, part in enumerate(parts):
        low, high = part
        inside = [i for i, (a, b) in enumerate(s.ranges) if max(a, low) < min(b, high)]
        lengths = [min(s.ranges[i][1], high) - max(s.ranges[i][0], low) for i in inside]
        column = [node[place] for node in s.nodes]
        totals = [summed([inner.passage(xs[r][low:high], part, r, 0) for r in node]) for node in s.nodes]
        total = _across(s, column, lengths, totals, [agreed[i] for i in inside] if agreed else None)
        # every node encodes the same total with the noise of the first node's member
        out[low:high] = inner.passage(total, part, s.nodes[0][place], 1, dtype=s.dtype)
        for node in s.nodes:
            for k, rank in enumerate(node):
                s.sent[rank] += inner.nbytes(part) * ((size - 1) if k == place else 1)
    return out


def _across(s: Setting, column: list[int], lengths: list[int], totals: list[Tensor], agreed: Scales) -> Tensor:
    """two_shot between the nodes, on float32 sums; the noise is that of the rank in the whole group."""
    outer = replace(s, segments=lengths, dtype=torch.float32, sent=[])
    world, shards = len(column), cut(sum(lengths), len(column), outer.align)
    out = torch.empty(sum(lengths))
    for owner, part in enumerate(shards):
        low, high = part
        arrived = []
        for k, rank in enumerate(column):
            outer.streams = (rank, 2)
            arrived.append(outer.passage(totals[k][low:high], part, rank, 0, agreed))
            s.sent[rank] += outer.nbytes(part) * ((world - 1) if k == owner else 1)
        outer.streams = (column[owner], 2)
        out[low:high] = outer.passage(s.finish(summed(arrived)), part, column[owner], 1, agreed)
    return out


def shared_scale(s: Setting, xs: list[Tensor]) -> Tensor:
    world, block = len(xs), s.codec.block
    levels, out = 127 // world, torch.empty(s.numel)
    for low in range(0, s.numel, block):
        rows = [x[low : low + block].float() for x in xs]
        top = torch.stack([row.abs().max() for row in rows]).max()
        scale = top / levels if top >= 2.0**-100 else torch.zeros(())
        inverse = 1 / scale if scale > 0 else scale
        codes = sum((row * inverse).round().clamp(-levels, levels) for row in rows)
        out[low : low + block] = codes * scale
    blocks = -(-s.numel // block)
    s.sent = [2 * (world - 1) * (blocks * block + 4 * blocks) // world + world - 1] * world
    return stored(s.finish(out), s.dtype)


def native(s: Setting, xs: list[Tensor]) -> Tensor:
    """For inputs whose sum is exact in any order."""
    wires = [s.passage(x, (0, s.numel), r, 0, dtype=s.dtype) for r, x in enumerate(xs)]
    size, world = s.codec.nbytes(s.numel), len(xs)
    s.sent = [2 * (world - 1) * size // world + world - 1] * world
    return stored(s.finish(summed([w.float() for w in wires])), s.dtype)


EMULATED: dict[str, Callable[[Setting, list[Tensor]], Tensor]] = {
    "one_shot": one_shot,
    "two_shot": two_shot,
    "ring": ring,
    "tree": tree,
    "doubling": doubling,
    "hierarchical": hierarchical,
    "shared_scale": shared_scale,
    "native": native,
}


def simulated(name: str, s: Setting, xs: list[Tensor]) -> Tensor:
    accumulate = "low" if s.low else "fp32"
    options = {"nodes": s.nodes, "inner": s.inner, "accumulate": accumulate, "seed": s.seed}
    world = nc.simulate.World(len(xs), name, s.codec, **options)
    s.sent = world.sent_bytes(s.segments, s.dtype)
    op = s.multiply if s.divide == 1 else "avg"
    return world.all_reduce(torch.stack(xs), op, step=s.step, segments=s.segments)[0]


def all_reduce(name: str, s: Setting, xs: list[Tensor]) -> Tensor:
    """The result on every rank; `s.sent` then holds the bytes that each sent."""
    if len(xs) == 1 or not s.numel:
        s.sent = [0] * len(xs)
        return stored(s.finish(xs[0].float()), s.dtype)
    if name not in EMULATED:
        return simulated(name, s, xs)
    out = EMULATED[name](s, xs)
    if s.aps:
        s.sent = [bytes_ + 4 * (len(xs) - 1) * len(s.segments) for bytes_ in s.sent]
    return out
