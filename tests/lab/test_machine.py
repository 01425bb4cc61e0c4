"""Where no lab can be built, the error says what to do; importing the lab does nothing at all."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from test_import_is_free import probe

from narrowcast.lab import Lab, LabError


def test_without_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LabError, match="needs root; got user 1000; use sudo"), Lab(2):
        pass


def test_on_another_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(LabError, match="use a Linux machine"), Lab(2):
        pass


def test_import_is_free(tmp_path: Path) -> None:
    found = probe("narrowcast.lab", tmp_path)
    assert (found["events"], found["changed"], found["modules"]) == ([], [], ["narrowcast"])
