"""One case of a study: its axes, and what every figure and sentence asks of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from narrowcast.parallel import MIN_VALUES
from narrowcast.study.analysis import formatting
from narrowcast.study.execution.results import Line
from narrowcast.study.spec_bits import is_lossy

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

DEFAULT_ALGORITHM = "auto"
"""What `attach` takes where nobody says otherwise."""
NOTHING = "nothing was compressed: no finding"
HALF = 0.5
"""Where less than this share of the values was compressed, whoever reads about it is told."""


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Items by key, in the order in which keys first appear."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


AXES = (
    *("kind", "source", "model", "data", "wire", "algorithm", "workers"),
    *("rate_name", "transport", "parallel", "cluster", "layout", "error"),
)


def _field(name: str) -> Any:
    return property(lambda case: case.line.get(name))


@dataclass(frozen=True)
class Finding:
    """A case: the axes that every one has."""

    line: Line = field(repr=False)

    kind, source, model, data, wire, algorithm, workers = map(_field, AXES[:7])
    rate_name, transport, parallel, cluster, layout, error = map(_field, AXES[7:])

    @property
    def hosts(self) -> str | None:
        """`2x2` where several workers share a host; None where each has its own."""
        return self.layout if "x" in str(self.layout) else None

    @property
    def rate_bits(self) -> float:
        """Of the link, in bits/s; infinite where it has no limit."""
        rate = self.line.get("rate")
        return math.inf if rate is None else float(rate)

    @property
    def min_values(self) -> int:
        """Tensors with fewer values travelled as they are; lines that do not say so have the usual number."""
        least = self.line.get("min_values")
        return MIN_VALUES if least is None else int(least)

    @property
    def place(self) -> tuple[Any, ...]:
        """Everything but wire and algorithm: within it wires are compared."""
        names = ("source", "cluster", "model", "data", "workers", "layout", "rate_name", "transport", "parallel")
        return (*(self.line.get(name) for name in names), self.min_values)

    @property
    def compressed(self) -> float | None:
        """The share of the values that was compressed; None: an older line, which does not say."""
        return (self.line.get("compressed") or {}).get("values")

    @property
    def untouched(self) -> bool:
        """Whether a wire that is meant to compress found nothing to compress: the training is then the plain one."""
        return self.compressed == 0 and is_lossy(self.wire)

    @property
    def mostly_plain(self) -> bool:
        """Whether less than half of the values took a wire that is meant to compress."""
        return self.compressed is not None and self.compressed < HALF and is_lossy(self.wire)


def percent(finding: Finding) -> str:
    return f"{formatting.significant(100 * (finding.compressed or 0.0), 2)} %"


def share_words(finding: Finding) -> list[str]:
    """`31 % of the values compressed`, where it is less than half of them."""
    if finding.untouched:
        return [NOTHING]
    return [f"{percent(finding)} of the values compressed"] if finding.mostly_plain else []


F = TypeVar("F", bound=Finding)


def one_algorithm(same: Sequence[F]) -> F:
    """The default algorithm where it was run, else the first of the study file. Never the fastest: that is luck."""
    return next((finding for finding in same if finding.algorithm == DEFAULT_ALGORITHM), same[0])


def one_each(findings: Iterable[F], wire: str) -> list[F]:
    """Of this wire one finding for each place, with the algorithm that counts."""
    places = grouped((finding for finding in findings if finding.wire == wire), lambda finding: finding.place)
    return [one_algorithm(same) for same in places.values()]
