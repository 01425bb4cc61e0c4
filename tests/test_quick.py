"""`make quick` picks tests that there are."""

from __future__ import annotations

import pytest
from quick import AREAS, ROOT, SPANNING, chosen


@pytest.mark.parametrize("area", AREAS)
def test_an_area_that_exists_has_tests_that_exist(area: str) -> None:
    if (ROOT / area).exists():
        missing = [path for path in (area, *AREAS[area], *SPANNING) if not (ROOT / path.partition("::")[0]).exists()]
        assert missing == []


def test_what_changed_is_tested_once_and_with_it_what_spans_all() -> None:
    paths = ["src/narrowcast/codecs/spec.py", "tests/codecs/test_specs.py", "tests/gpu/check_cuda.py", "README.md"]
    assert chosen(paths) == ["tests/codecs", *SPANNING]
    assert chosen(["tests/study/test_file.py"]) == ["tests/study/test_file.py", *SPANNING]
    assert chosen([]) == list(SPANNING)
