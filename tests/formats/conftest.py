"""Tests against other libraries run on the reference, which is the oracle of all kernels, and on the native kernels."""

from __future__ import annotations

import pytest
from laws import implementations


@pytest.fixture(params=["reference", "native"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    implementations.use(request.param, monkeypatch)
    return str(request.param)


@pytest.fixture
def reference_only(monkeypatch: pytest.MonkeyPatch) -> None:
    implementations.use("reference", monkeypatch)
