"""Where labels stand, so that none covers another."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

LINE = 13.5
"""From one label to the next below it."""
SIZE = 11.5
"""Of letters, as the style sheet has it."""
SLIM, WIDE = set("il.,:;/|'()[]ft1 ·"), set("mwMW@%×±")


def text_width(words: str, size: float = SIZE) -> float:
    """About how wide a label is at most: the fonts are the reader's."""
    return size * sum(0.46 if letter in SLIM else 0.95 if letter in WIDE else 0.66 for letter in words)


def spread(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move labels apart so that none covers another, keeping their order, within low ... high."""
    order = sorted(range(len(places)), key=places.__getitem__)
    moved = list(places)
    for previous, this in itertools.pairwise(order):
        moved[this] = max(moved[this], moved[previous] + gap)
    # what was pushed out at the end goes back, and pushes its neighbours
    limit = high
    for index in reversed(order):
        moved[index] = max(low, min(moved[index], limit))
        limit = moved[index] - gap
    return moved


def apart(ticks: Iterable[tuple[float, str]], least: float, most: float) -> list[tuple[float, str, float]]:
    """Numbers below an axis: place, words, and where their middle stands. Those that would cover another are left
    out, and those that would stick out of least ... most are moved in."""
    kept: list[tuple[float, str, float]] = []
    edge = -math.inf
    for at, words in sorted(ticks):
        half = text_width(words, 11.0) / 2
        middle = min(max(at, least + half), most - half)
        if middle - half >= edge:
            kept.append((at, words, middle))
            edge = middle + half + 5
    return kept


class Box(NamedTuple):
    """What a label, a mark or a drawing takes."""

    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: Box) -> bool:
        across = self.left < other.right and other.left < self.right
        return across and self.top < other.bottom and other.top < self.bottom

    def inside(self, other: Box) -> bool:
        across = other.left <= self.left and self.right <= other.right
        return across and other.top <= self.top and self.bottom <= other.bottom


def text_box(x: float, y: float, width: float, anchor: str) -> Box:
    left = x - {"start": 0.0, "middle": width / 2, "end": width}[anchor]
    return Box(left, y - 9, left + width, y + 3)


class Seat(NamedTuple):
    """Where a label stands; `far`: so far from its mark that a line should lead to it."""

    x: float
    y: float
    anchor: str
    far: bool


NEAR = ((9, 4, "start"), (0, -10, "middle"), (0, 18, "middle"), (-9, 4, "end"), (9, -8, "start"), (9, 17, "start"))
"""Where a label may stand beside its mark, best first."""
AROUND = [
    (radius * math.cos(angle), 4 + 0.8 * radius * math.sin(angle))
    for radius in (26, 40, 56, 74, 94)
    for angle in (math.pi * k / 8 for k in (12, 4, 13, 3, 11, 5, 14, 2, 10, 6, 15, 1, 9, 7, 0, 8))
]


def _seats(x: float, y: float) -> list[Seat]:
    beside = [Seat(x + dx, y + dy, anchor, False) for dx, dy, anchor in NEAR]
    away = [Seat(x + dx, y + dy, "start" if dx > 8 else "end" if dx < -8 else "middle", True) for dx, dy in AROUND]
    return [*beside, *away]


def place_labels(
    marks: Sequence[tuple[float, float]], names: Sequence[str], frame: Box, better_free: Sequence[Box] = ()
) -> list[Seat | None]:
    """Seats of labels beside their marks, inside of the frame, so that they cover neither marks nor one another, and
    where there is a choice not what is better left free. None: there is no room, and a legend has to do.
    """
    full = [Box(x - 5, y - 5, x + 5, y + 5) for x, y in marks]
    chosen: list[Seat | None] = []
    for (x, y), name in zip(marks, names, strict=True):
        width = text_width(name)
        boxes = [(seat, text_box(seat.x, seat.y, width, seat.anchor)) for seat in _seats(x, y)]
        free = [(seat, box) for seat, box in boxes if box.inside(frame) and not any(map(box.overlaps, full))]
        clear = (one for one in free if not any(map(one[1].overlaps, better_free)))
        seat, box = next(itertools.chain(clear, free), (None, None))
        full += [box] if box else []
        chosen.append(seat)
    return chosen
