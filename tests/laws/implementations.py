"""Which implementation a test runs. An oracle that is compared with one of them says nothing about the other."""

from __future__ import annotations

import os

import pytest

from narrowcast.kernels import dispatch, native, ops, reference


def require_native() -> None:
    """Without the library a test is skipped with the reason; under `make` and in CI it fails."""
    library, why = native.load()
    if library is None:
        must_be_there = os.environ.get("CI") or os.environ.get("MAKELEVEL")
        (pytest.fail if must_be_there else pytest.skip)(f"no native library: {why}")


def use(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run `name` ("reference" or "native") until the test ends."""
    if name == "native":
        require_native()
        return
    monkeypatch.setattr(dispatch, "IMPLEMENTATIONS", [reference])
    # what plans and rounders keep was chosen before
    monkeypatch.setattr(dispatch, "kernels_for", dispatch.choose_kernels)
    monkeypatch.setattr(ops.Rounder, "kernel_for", ops.Rounder.choose_kernel)
