"""A pool of eight processes for all tests of a file; under xdist one for each process that runs some of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from dist.pool import Pool, made_once


@pytest.fixture(scope="module")
def _pools() -> Iterator[Callable[[], Pool]]:
    """Not for longer: what one file leaves behind (groups of torch's that some ranks know, watchers) met another's."""
    with made_once() as current:
        yield current


@pytest.fixture
def pool(_pools: Callable[[], Pool]) -> Pool:
    return _pools()
