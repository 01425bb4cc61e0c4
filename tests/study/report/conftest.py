"""One made-up study with everything in it, and its report, for all tests that only read them."""

from __future__ import annotations

from pathlib import Path

import pytest
from study.report import made_up

from narrowcast.study.report import write_report


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_up.write(tmp_path_factory.mktemp("study"), made_up.study())


@pytest.fixture(scope="session")
def page(folder: Path) -> Path:
    return write_report(folder)
