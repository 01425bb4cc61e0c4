"""Fixtures for every test: poisoned memory where kernels are tested, and one way of running hypothesis."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

# No deadline: a slow machine is no fault. Where CI runs, the same examples every time: a red run can be repeated.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")

# Where narrowcast-research is not installed (a tree on the path alone), the variable names it.
if not metadata.entry_points(group="narrowcast.plugins"):
    os.environ.setdefault("NARROWCAST_PLUGINS", "narrowcast_research")

TESTS = Path(__file__).parent
MANY_PROCESSES = ("study", "lab")
"""Tests that start several processes each: side by side they take six times as long on two cores, and time out."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One worker takes them, one after another (`--dist loadgroup`)."""
    for item in items:
        if item.path.is_relative_to(TESTS) and item.path.relative_to(TESTS).parts[0] in MANY_PROCESSES:
            item.add_marker(pytest.mark.xdist_group("many processes"))


POISONED = ("kernels", "codecs", "laws", "gpu")


def poison(x: torch.Tensor) -> torch.Tensor:
    """Fill fresh memory with what nobody would take for a result: NaN, or 0xA5 in bytes."""
    if x.is_floating_point() or x.is_complex():
        return x.fill_(float("nan"))
    if x.dtype is torch.bool:
        return x.fill_(True)
    return x.fill_(0xA5 if x.dtype is torch.uint8 else torch.iinfo(x.dtype).min)


def poisoning(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def allocate_poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        return poison(allocate(*args, **kwargs))

    return allocate_poisoned


@pytest.fixture(scope="session")
def dynamo_has_its_tables() -> None:
    """Dynamo lists torch's functions once for the life of the process: it must see the real ones."""
    torch.compile(torch.neg, backend="eager")(torch.ones(1))


@pytest.fixture(autouse=True)
def poisoned_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In tests of kernels and codecs an element that nobody wrote shows itself."""
    if request.path.relative_to(TESTS).parts[0] not in POISONED:
        return
    request.getfixturevalue("dynamo_has_its_tables")
    for owner, name in [
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
    ]:
        monkeypatch.setattr(owner, name, poisoning(getattr(owner, name)))
