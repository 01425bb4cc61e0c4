"""The lab's tests build real namespaces. Where that cannot be done they are skipped and say why; in CI they fail."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from lab.helpers import interfaces, wait_until

from narrowcast.lab import LabError
from narrowcast.lab.lab import check_machine


@pytest.fixture
def needs_lab() -> Iterator[None]:
    """For tests that build a lab: it can be built here, and the machine's own interfaces stay as they were."""
    try:
        check_machine()
    except LabError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))
    before = interfaces()
    yield
    assert wait_until(lambda: interfaces() == before), f"{interfaces()}, but before the test {before}"
