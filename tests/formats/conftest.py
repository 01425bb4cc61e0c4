"""Tests against other libraries run on the reference, which is the oracle of all kernels, and on the native kernels.

One thread for torch in each process: pytest-xdist uses the cores, and two pools get in each other's way.
"""

from __future__ import annotations

import pytest
import torch
from laws import implementations

torch.set_num_threads(1)


@pytest.fixture(params=["reference", "native"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    implementations.use(request.param, monkeypatch)
    return str(request.param)


@pytest.fixture
def reference_only(monkeypatch: pytest.MonkeyPatch) -> None:
    implementations.use("reference", monkeypatch)
