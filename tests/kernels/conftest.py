"""The native library, for tests that need it.

One thread for torch in each process: pytest-xdist uses the cores, and two pools get in each other's way.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from laws.implementations import require_native

from narrowcast.kernels import native

torch.set_num_threads(1)


@pytest.fixture
def native_library() -> Iterator[None]:
    """The library, and afterwards the instruction set and the number of threads as they were."""
    require_native()
    before = native.isa()
    yield
    native.set_isa(before)
    torch.set_num_threads(1)
