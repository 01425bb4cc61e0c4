"""The factors of low rank, and what ranks compute between sums of them: PowerSGD (Vogels et al. 2019) and ACP-SGD
(Zhang et al. 2023).

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
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from narrowcast.codecs.base import Codec
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

    @property
    def contents(self) -> list[Tensor]:
        """What must be the same on all ranks: names, sides and vectors, in the order of names."""
        kept = sorted(self._kept.items())
        written = "".join(f"{name}{SIDES[factor.on_left]} {tuple(factor.vectors.shape)}" for name, factor in kept)
        # the empty text has no buffer
        text = torch.tensor(list(written.encode()), dtype=torch.uint8)
        return [text, *(factor.vectors for _, factor in kept)]

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


def parts_of(
    xs: Sequence[Tensor],
    matrices: Sequence[Matrix],
    names: Sequence[str],
    codec: Codec,
    factors: KeptFactors,
    whole: Feedback | None,
) -> list[MatrixPart]:
    """The matrices of one rank, each with what is kept of it. whole: the feedback of all, one after another."""
    residuals: Sequence[Tensor | None] = [None] * len(xs)
    if whole is not None:
        residuals = whole.residual.split([matrix.numel for matrix in matrices])
    parts: list[MatrixPart] = []
    for x, name, matrix, residual in zip(xs, names, matrices, residuals, strict=True):
        feedback = None if whole is None or residual is None else Feedback(residual.view(matrix), whole.unit)
        kept = factors.of(name, matrix, codec, x.device)
        draw = partial(_draw, factors, name, codec.rank, x.device)
        parts.append(MatrixPart(x.view(matrix), feedback, kept, draw))
    return parts


def _draw(factors: KeptFactors, name: str, rank: int, device: torch.device, length: int, on_left: bool) -> Tensor:
    return factors.draw(name, rank, length, on_left, device)


def following(steps: Generator[Sent, Tensor, None], arrived: Tensor) -> Sent | None:
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
        sent = [one for one in (following(rank, total) for rank in ranks) if one is not None]


WARM_UP = 3
"""Calls after which a kept factor has found what it can of a matrix that stays the same."""


def once_warm(x_nm: Tensor, codec: Codec, noise: Noise) -> Tensor:
    """What comes back of one rank's matrix, in float32, when it was sent some times before. noise: of the factors."""
    matrix, kept, got = Matrix.of(x_nm.shape), KeptFactors(noise.seed), x_nm
    for call in range(WARM_UP):

        def send(values_1n: Tensor, _: list[int], number: int, call: int = call) -> Tensor:
            wire = codec.factors.encode_with(values_1n[0], noise.derive(call, number))
            return codec.factors.decode(wire, values_1n.shape[1])

        got = x_nm.detach().float().reshape(-1).clone()
        simulate_low_rank([parts_of([got], [matrix], ("",), codec, kept, None)], codec, 1.0, send)
    return got
