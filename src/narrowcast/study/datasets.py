"""What the networks learn from: data sets by name, text that every Python brings along, or the user's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from narrowcast import data as library
from narrowcast.data import SOURCES
from narrowcast.predict import profile as profiling

TEXT = "text"
NAMES = (*SOURCES, TEXT)
LENGTH = 32
"""Characters of a piece of text."""
TEST_SHARE = 6
"""One piece of text in so many is kept for the test."""
SPLIT_SEED = 20180326


@dataclass(frozen=True)
class Examples(library.Dataset):
    """Float inputs and labels; a label may be a number, or a row with one for each position."""

    @property
    def shape(self) -> Sequence[int]:
        """Of one input."""
        return tuple(self.x_train.shape[1:])

    @property
    def positions(self) -> int:
        """How many labels one example has."""
        return int(self.y_train[0].numel())

    def head(self, train: int, test: int | None = None) -> Examples:
        """The first so many; 0: all."""
        counts = {"train": train or None, "test": test or None}
        return replace(self, **{key: part[: counts[key[2:]]] for key, part in self.tensors().items()})


def takes(name: str) -> str | None:
    """Whether a data set is pictures or text; None: the user's own, so nobody knows."""
    if ":" in name:
        return None
    return "text" if name == TEXT else "pictures"


@lru_cache(maxsize=4)
def load(name: str, train: int = 0, test: int = 0) -> Examples:
    """By name; a data set that is not here is fetched first."""
    if ":" in name:
        return _own(name).head(train, test)
    if name == TEXT:
        return _text().head(train, test)
    try:
        stored = library.load(name)  # what is here needs no place to write to
    except library.DataError:
        stored = library.get(name)
    return Examples(**vars(stored.normalised())).head(train, test)


def _own(name: str) -> Examples:
    named = profiling.find(name)
    made = named() if callable(named) else named
    parts = {key: getattr(made, key, None) for key in ("x_train", "y_train", "x_test", "y_test")}
    tensors = {key: part for key, part in parts.items() if isinstance(part, Tensor)}
    for key in (key for key in parts if key not in tensors):
        raise profiling.ModelError(f"data: {name} has no tensor {key}; it needs x_train, y_train, x_test and y_test")
    for part in ("train", "test"):
        x, y = (len(tensors[f"{key}_{part}"]) for key in ("x", "y"))
        if x != y or not x:
            raise profiling.ModelError(
                f"data: {name} has {x} rows in x_{part}, {y} in y_{part}; give as many, one at least"
            )
    classes = int(getattr(made, "classes", 0) or tensors["y_train"].max() + 1)
    return Examples(name, classes=classes, **tensors)


def _text() -> Examples:
    """Pieces of the help pages in an order of their own; the label of each character is the next one."""
    codes = library.help_text()
    letters, numbers = codes.unique(return_inverse=True)
    count = (len(numbers) - 1) // LENGTH
    x = numbers[: count * LENGTH].view(count, LENGTH)
    y = numbers[1 : count * LENGTH + 1].view(count, LENGTH)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(SPLIT_SEED))
    test, train = order[: count // TEST_SHARE], order[count // TEST_SHARE :]
    return Examples(TEXT, x[train].float(), y[train], x[test].float(), y[test], len(letters))
