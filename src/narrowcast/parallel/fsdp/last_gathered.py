"""What all ranks have last decoded of a unit's parameters: `+diff` sends how the shard differs from it.

Whoever sends does what everybody does with its bytes, so it knows to the bit what the others have. What rounding
removes of one difference is a part of the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.collectives import Range
from narrowcast.parallel.policy import AS_IS

Runs = Sequence[tuple[Codec, Range]]
Key = tuple[tuple[tuple[Codec, Range], ...], torch.dtype]


class LastGathered:
    """The rows of an all-gather, of those runs that travel as differences."""

    def __init__(self) -> None:
        self._key: Key | None = None
        self._rows: dict[Range, Tensor] = {}

    def forget(self) -> None:
        """The next gather is as it is: the parameters may be others than they were."""
        self._key, self._rows = None, {}

    def knows(self, runs: Runs, dtype: torch.dtype) -> bool:
        """Whether the last gather left what differences of such runs need."""
        return self._key == (tuple(runs), dtype)

    def learn(self, runs: Runs, rows_WL: Tensor) -> None:
        """Begin with what was gathered as it is."""
        self._key = tuple(runs), rows_WL.dtype
        spans = [span for codec, span in runs if codec.differences]
        self._rows = {span: _finite(rows_WL[:, span[0] : span[1]]) for span in spans}

    def difference(self, values: Tensor, row: int, span: Range) -> Tensor:
        """What is sent of a run of a row."""
        return values.float() - self._rows[span][row].float()

    def begin(self, out: Tensor, row: int, span: Range) -> None:
        """What a decoded difference is added to."""
        out.copy_(self._rows[span][row])

    def keep(self, out: Tensor, row: int, span: Range) -> None:
        """What came of it."""
        self._rows[span][row].copy_(_finite(out))

    @property
    def memory(self) -> list[Tensor]:
        return list(self._rows.values())


def _finite(values: Tensor) -> Tensor:
    """A copy in which what is not finite is zero: it arrives once, and does not stay in every difference after it."""
    return torch.where(values.isfinite(), values, 0.0)


def without_differences(codecs: Iterable[Codec]) -> list[Codec]:
    """How tensors travel while nobody knows what others have: exactly, where differences follow."""
    return [AS_IS if codec.differences else codec for codec in codecs]
