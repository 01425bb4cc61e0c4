"""Sums of matrices by low rank: PowerSGD (Vogels et al. 2019) and ACP-SGD (Zhang et al. 2023).

A matrix M of n rows and m columns is what a rank has and its residual. A factor has r vectors; that of the
last call is kept, the first one comes from the counter-based generator. PowerSGD, for all matrices of a call at once:

1. Q' = the kept right factor, orthonormal. P = M Q', summed over ranks through the codec of the factors.
2. P' = P, orthonormal. Q = M^T P', summed in the same way, and kept.
3. Every rank has M' = P' Q^T. The residual is M - M' (with a sum, not a mean: less this rank's share of M').

ACP-SGD keeps the factor that travelled last, makes it orthonormal and sends the other one: P at one step, Q at the
next.

Q' is orthonormal, unlike in the paper, where Q is used as it came: M Q and M Q' span the same, and Gram-Schmidt gives
the same P' for both, but P' then comes from vectors that are no multiples of each other, which a codec of few bits
needs. A vector of the kept factor that is zero (Gram-Schmidt found it to be one of the others, or the matrix was zero)
is drawn anew. A NaN or Inf makes its whole matrix NaN on every rank, and those whose factors share a block with it; the
residual stays as it was, and so does the kept factor (with ACP-SGD, which needs that of the other side, it is drawn
anew).

All that ranks compute from what arrived they compute alike: `kernels.low_rank` states the order of every sum.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.codecs import codec as codec_named
from narrowcast.collectives.algorithms import record
from narrowcast.collectives.algorithms.context import Reduction
from narrowcast.collectives.algorithms.record import Nodes
from narrowcast.collectives.flat import Flat
from narrowcast.collectives.prepared import AllReduce, prepared
from narrowcast.collectives.residuals import Residuals
from narrowcast.collectives.runtime import agreement
from narrowcast.collectives.runtime.channel import Channel
from narrowcast.collectives.runtime.messages import Exchange
from narrowcast.collectives.segments import Times, host_waits, segment_ranges
from narrowcast.collectives.work import Work
from narrowcast.kernels import Feedback, Noise, low_rank


class Matrix(NamedTuple):
    """The shape of a tensor as a matrix, row by row in memory."""

    rows: int
    columns: int

    @classmethod
    def of(cls, shape: Sequence[int]) -> Matrix:
        """Of a tensor that is contiguous: its first dimension, and all others."""
        return cls(shape[0], torch.Size(shape[1:]).numel())

    def length(self, on_left: bool) -> int:
        """Of the vectors of a factor."""
        return self.rows if on_left else self.columns

    @property
    def numel(self) -> int:
        return self.rows * self.columns


def factor_bytes(codec: Codec, matrices: Sequence[Matrix]) -> int:
    """Of what a call sends of such matrices, about: all factors go together."""
    both = [sum(codec.rank * m.length(on_left) for m in matrices) for on_left in (True, False)]
    sizes = [codec.factors.nbytes(count) for count in both]
    return sum(sizes) // 2 if codec.sends_one_factor else sum(sizes)


@dataclass
class KeptFactor:
    """Of one matrix: what the next call starts from."""

    vectors: Tensor
    """r x n on the left, r x m on the right."""
    on_left: bool

    def renew(self, vectors: Tensor, on_left: bool, drawn: Tensor, is_sound: Tensor) -> None:
        """Keep what arrived; where that is not sound, what there was. Nothing waits for the device."""
        zero = (vectors == 0).all(dim=1, keepdim=True)
        fresh = torch.where(zero, drawn, vectors)
        before = self.vectors if on_left == self.on_left else drawn
        self.vectors, self.on_left = torch.where(is_sound, fresh, before), on_left


SIDES = ":right factor", ":left factor"
"""What follows the name of a matrix in a state."""


def name_and_side(key: str) -> tuple[str, bool]:
    """Of a factor in a state: its matrix, and whether it is the left one."""
    name, _, _ = key.rpartition(":")
    return name, key.endswith(SIDES[True])


class KeptFactors:
    """Those of a model, by the name of the matrix: the same on every rank."""

    def __init__(self, seed: int) -> None:
        self._noise = Noise(seed)
        self.origin = str(seed)
        """What all later factors follow from, which must be the same on all ranks: the seed, and a loaded state."""
        self._kept: dict[str, KeptFactor] = {}
        self._drawn: dict[tuple[object, ...], Tensor] = {}

    def of(self, name: str, matrix: Matrix, codec: Codec, device: torch.device) -> KeptFactor:
        """That of one matrix; where there is none, or one of another shape, from the generator."""
        kept = self._kept.get(name)
        on_left = kept is not None and kept.on_left and codec.sends_one_factor
        length = matrix.length(on_left)
        fits = kept is not None and kept.on_left == on_left and kept.vectors.shape[1] == length
        if kept is None or not fits or kept.vectors.shape[0] != codec.rank or kept.vectors.device != device:
            drawn = self.draw(name, codec.rank, length, on_left, device)
            vectors = drawn
            if kept is not None and fits:  # of another rank: what there is of it
                vectors = torch.cat([kept.vectors.to(device), drawn[len(kept.vectors) :]])[: codec.rank]
            kept = self._kept[name] = KeptFactor(vectors, on_left)
        return kept

    def draw(self, name: str, rank: int, length: int, on_left: bool, device: torch.device) -> Tensor:
        """Vectors that no other matrix has, from the generator; kept, since every call asks."""
        key = name, rank, length, on_left, device
        drawn = self._drawn.get(key)
        if drawn is None:
            word = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
            noise = self._noise.derive(word, on_left)
            drawn = self._drawn[key] = low_rank.random_factor(rank, length, noise, device)
        return drawn

    def state_dict(self) -> dict[str, Tensor]:
        """The factor of each matrix, by its name and side."""
        return {f"{name}{SIDES[kept.on_left]}": kept.vectors.clone() for name, kept in self._kept.items()}

    @staticmethod
    def places(name: str, matrix: Matrix, codec: Codec, device: torch.device) -> dict[str, Tensor]:
        """Where a state has the factor of a matrix, for whoever fills it: zeros, which stand for none."""
        sides = (False, True) if codec.sends_one_factor else (False,)
        shapes = {f"{name}{SIDES[on_left]}": (codec.rank, matrix.length(on_left)) for on_left in sides}
        return {key: torch.zeros(shape, dtype=torch.float32, device=device) for key, shape in shapes.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from these, on whatever device the matrices will be."""
        self._kept.clear()
        digest = hashlib.sha256(str(self._noise.seed).encode())
        # one of zeros, or that is not finite, is no start for anything: it is drawn, as one that is missing is
        sound = {key: vectors for key, vectors in state.items() if vectors.any() and vectors.isfinite().all()}
        for key, vectors in sorted(sound.items()):
            name, on_left = name_and_side(key)
            self._kept[name] = KeptFactor(vectors.float().clone(), on_left)
            digest.update(f"{key} {tuple(vectors.shape)}".encode())
            digest.update(self._kept[name].vectors.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        self.origin = digest.hexdigest()

    @staticmethod
    def split(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """A state without the factors, and the factors."""
        factors = {key: value for key, value in state.items() if key.endswith(SIDES)}
        return {key: value for key, value in state.items() if key not in factors}, factors


class MatrixPart(NamedTuple):
    """One matrix of one rank in a call."""

    x_nm: Tensor
    """Contiguous; read, and then the result."""
    feedback: Feedback | None
    kept: KeptFactor
    draw: Callable[[int, bool], Tensor]
    """Vectors of a length for a side, from the generator."""


class Sent(NamedTuple):
    """Factors that are to be summed: one after another, and of which side each is."""

    values: Tensor
    on_left: tuple[bool, ...]


def exchanged_factors(parts: Sequence[MatrixPart], codec: Codec, share: float) -> Generator[Sent, Tensor, None]:
    """What one rank computes: yields the factors that it sends and takes their sums, which are the same everywhere."""
    sent_left = tuple(not part.kept.on_left for part in parts)
    held = low_rank.orthonormal([part.kept.vectors for part in parts])
    if not codec.sends_one_factor:
        arrived = yield _factors(parts, held, sent_left)
        held = low_rank.orthonormal(_split(arrived, parts, sent_left))
        sent_left = tuple(not on_left for on_left in sent_left)
    arrived = yield _factors(parts, held, sent_left)
    for part, on_left, own, sum_ in zip(parts, sent_left, held, _split(arrived, parts, sent_left), strict=True):
        is_sound = sum_.isfinite().all()
        vectors = low_rank.within_reach(sum_)
        last = torch.where(is_sound, vectors, torch.nan)
        pair = (last, own) if on_left else (own, last)
        low_rank.finish(part.x_nm, part.feedback, *pair, share)
        part.kept.renew(vectors, on_left, part.draw(vectors.shape[1], on_left), is_sound)


def _factors(parts: Sequence[MatrixPart], held: Sequence[Tensor], on_left: tuple[bool, ...]) -> Sent:
    """The products with the factor that a rank holds, on the other side."""
    products = [
        (low_rank.left if is_left else low_rank.right)(part.x_nm, part.feedback, vectors)
        for part, vectors, is_left in zip(parts, held, on_left, strict=True)
    ]
    return Sent(torch.cat([product.reshape(-1) for product in products]), on_left)


def _split(values: Tensor, parts: Sequence[MatrixPart], on_left: Sequence[bool]) -> list[Tensor]:
    lengths = [Matrix(*part.x_nm.shape).length(is_left) for part, is_left in zip(parts, on_left, strict=True)]
    ranks = [len(part.kept.vectors) for part in parts]
    pieces = values.split([rank * length for rank, length in zip(ranks, lengths, strict=True)])
    return [piece.view(rank, length) for piece, rank, length in zip(pieces, ranks, lengths, strict=True)]


@dataclass(frozen=True)
class LowRankReduce:
    """A low-rank all-reduce that was looked at: what the calls of one kind have in common."""

    codec: Codec
    matrices: tuple[Matrix, ...]
    world: int
    reduction: Reduction
    algorithm: str = "auto"
    seed: int = 0
    nodes: Nodes | None = None
    inner: Codec | str = "as-is"

    def __post_init__(self) -> None:
        for on_left in (True, False):  # raises where it cannot be done
            self.factor_call((on_left,) * len(self.matrices))

    def factor_call(self, on_left: Sequence[bool]) -> AllReduce:
        """The all-reduce of factors of these sides."""
        sides = zip(self.matrices, on_left, strict=True)
        lengths = tuple(self.codec.rank * matrix.length(is_left) for matrix, is_left in sides)
        # what is lost inside of a node is in the residual of the whole
        inner = replace(codec_named(self.inner), feedback=False)
        how: dict[str, Any] = {"algorithm": self.algorithm, "seed": self.seed, "nodes": self.nodes, "inner": inner}
        return prepared(self.codec.factors, lengths, torch.float32, self.world, self.reduction, **how)

    @staticmethod
    def share_of(reduction: Reduction, world: int) -> float:
        """Of a result that is one rank's: what its residual is less by."""
        return reduction.gain / world

    def wire_bytes(self) -> int:
        """Of all factors that a call sends, about."""
        return factor_bytes(self.codec, self.matrices)

    def text(self, on_left: Sequence[bool], origin: str) -> str:
        """The signature: that of its last sum, and which matrices they are factors of. origin: of kept factors."""
        signature = {**agreement.read(self.factor_call(on_left).text), "call": "all_reduce by low rank"}
        matrices = [list(matrix) for matrix in self.matrices]
        return agreement.to_text(signature | {"spec": str(self.codec), "matrices": matrices, "factors": origin})


@dataclass
class LowRankCall:
    """A call to be started, by itself or together with others of its codec. xs: contiguous, of the kind's matrices."""

    kind: LowRankReduce
    xs: list[Tensor]
    step: tuple[int, ...]
    names: tuple[str, ...]
    factors: KeptFactors
    residuals: Residuals | None = None
    times: Times = field(default_factory=Times)

    def parts(self) -> list[MatrixPart]:
        """Each matrix with what is kept of it."""
        whole = None if self.residuals is None else self.residuals.of(0, (0, sum(x.numel() for x in self.xs)))
        return parts_of(self.xs, self.kind.matrices, self.names, self.kind.codec, self.factors, whole)

    def alone(self) -> None:
        """In a world of one nothing is rounded."""
        ranges = segment_ranges([matrix.numel for matrix in self.kind.matrices])
        for x, part in zip(self.xs, ranges, strict=True):
            residuals = None if self.residuals is None else self.residuals.over(part)
            record.reduce_alone(x.view(-1), x.view(-1), self.kind.reduction, residuals)

    @property
    def device(self) -> torch.device:
        return self.xs[0].device

    @property
    def memory(self) -> list[Tensor]:
        return self.xs if self.residuals is None else [*self.xs, self.residuals.first, self.residuals.second]


def parts_of(
    xs: Sequence[Tensor],
    matrices: Sequence[Matrix],
    names: Sequence[str],
    codec: Codec,
    factors: KeptFactors,
    whole: Feedback | None,
) -> list[MatrixPart]:
    """The matrices of one rank, each with what is kept of it. whole: the feedback of all, one after another."""
    ranges, parts = segment_ranges([matrix.numel for matrix in matrices]), []
    for x, name, matrix, (low, high) in zip(xs, names, matrices, ranges, strict=True):
        feedback = None if whole is None else Feedback(whole.residual[low:high].view(matrix), whole.unit)
        kept = factors.of(name, matrix, codec, x.device)
        draw = partial(_draw, factors, name, codec.rank, x.device)
        parts.append(MatrixPart(x.view(matrix), feedback, kept, draw))
    return parts


def _draw(factors: KeptFactors, name: str, rank: int, device: torch.device, length: int, on_left: bool) -> Tensor:
    return factors.draw(name, rank, length, on_left, device)


def joined(kinds: Sequence[LowRankReduce]) -> LowRankReduce:
    """The kind of calls that travel as one."""
    first = kinds[0]
    options = first.world, first.reduction, first.algorithm, first.seed, first.nodes, first.inner
    return first if len(kinds) == 1 else LowRankReduce(first.codec, sum((k.matrices for k in kinds), ()), *options)


def start_low_rank(channel: Channel, calls: Sequence[LowRankCall]) -> Work:
    """Submit calls of one codec, type and device: their factors travel together, in one sum or two."""
    kind, parts = joined([call.kind for call in calls]), [part for call in calls for part in call.parts()]
    # a call that is new is agreed on by this: the sides of the last factors that it sends
    ends_left = tuple(part.kept.on_left != kind.codec.sends_one_factor for part in parts)
    memory = [tensor for call in calls for tensor in call.memory] + [part.kept.vectors for part in parts]
    first = kind.factor_call(ends_left)
    waits = record.ALGORITHMS[first.algorithm].host_waits
    waits = waits or host_waits((kind.codec.factors, first.inner), parts[0].x_nm.device, torch.float32)
    text = kind.text(ends_left, calls[0].factors.origin)
    return channel.submit(text, partial(_run, kind, calls, parts), memory, waits=waits)


def _run(kind: LowRankReduce, calls: Sequence[LowRankCall], parts: Sequence[MatrixPart], exchange: Exchange) -> None:
    if exchange.world == 1:
        for call in calls:
            call.alone()
        return
    for call in calls:
        if call.residuals is not None:
            call.residuals.fold(kind.reduction.gain)
    times, began = calls[0].times, time.perf_counter()
    sums = 1 if kind.codec.sends_one_factor else 2
    steps = exchanged_factors(parts, kind.codec, kind.share_of(kind.reduction, kind.world))
    sent = next(steps)
    for number in range(sums):
        is_last = number + 1 == sums
        way = exchange if is_last else exchange.before_the_last()
        times.encode += time.perf_counter() - began
        one = kind.factor_call(sent.on_left)
        noise = one.noise_of((*calls[0].step, number))
        record.run(one.algorithm, one.call(Flat([sent.values]), noise, None, times, way))
        if not is_last:
            exchange.sent_bytes += way.sent_bytes
        began = time.perf_counter()
        sent = _next(steps, sent.values) or sent
    times.decode += time.perf_counter() - began


def _next(steps: Generator[Sent, Tensor, None], arrived: Tensor) -> Sent | None:
    """What is sent next; None where all was."""
    try:
        return steps.send(arrived)
    except StopIteration:
        return None


def simulate_low_rank(
    workers: Sequence[Sequence[MatrixPart]], codec: Codec, share: float, add: Callable[[Tensor, list[int], int], Tensor]
) -> None:
    """The same with all ranks in one process. add: W x values, their segments and the number of the sum -> the sum."""
    ranks = [exchanged_factors(parts, codec, share) for parts in workers]
    sent = [next(rank) for rank in ranks]
    for number in range(1 if codec.sends_one_factor else 2):
        shapes = [Matrix(*part.x_nm.shape) for part in workers[0]]
        lengths = [codec.rank * m.length(side) for m, side in zip(shapes, sent[0].on_left, strict=True)]
        total = add(torch.stack([one.values for one in sent]), lengths, number)
        following = [_next(rank, total) for rank in ranks]
        sent = [one for one in following if one is not None]
