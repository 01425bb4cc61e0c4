"""What was computed yesterday is computed today."""

from __future__ import annotations

import pytest
from golden import hashes


@pytest.mark.parametrize("section", hashes.EXACT, ids=lambda section: section.__name__)
def test_the_hashes_are_those_of_the_file(section: hashes.Section) -> None:
    """A difference that is meant: `python -m golden --write` in tests/, and a line in the CHANGELOG."""
    assert hashes.compared([section]) == []
