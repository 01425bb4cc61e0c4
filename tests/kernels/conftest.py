"""The native library, for tests that need it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from laws.implementations import require_native

from narrowcast.kernels import native


@pytest.fixture
def native_library() -> Iterator[None]:
    """The library, and afterwards the instruction set and the number of threads as they were."""
    require_native()
    before = native.isa()
    yield
    native.set_isa(before)
    torch.set_num_threads(1)
