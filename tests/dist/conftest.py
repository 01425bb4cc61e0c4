"""One pool of eight processes for all tests of this folder; under xdist one for each process that runs some of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from dist.pool import Pool, made_once


@pytest.fixture(scope="session")
def _pools() -> Iterator[Callable[[], Pool]]:
    with made_once() as current:
        yield current


@pytest.fixture
def pool(_pools: Callable[[], Pool]) -> Pool:
    return _pools()
