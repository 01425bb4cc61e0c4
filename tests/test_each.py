"""`each` runs every case, and fails where one does."""

from __future__ import annotations

import inspect

import pytest
from each import each

RAN: list[object] = []


@each("spec, n", [("a", 1), ("b", 2), ("c", 3)])
def odd(spec: str, n: int, capsys: object) -> None:
    RAN.append((spec, n, capsys))
    if n == 3:
        pytest.skip("three")
    with pytest.raises(ZeroDivisionError):
        1 / (n - 1)


def test_all_run_and_who_failed_is_named() -> None:
    RAN.clear()
    with pytest.raises(pytest.fail.Exception) as failure:
        odd(capsys=7)  # type: ignore[call-arg]
    assert RAN == [("a", 1, 7), ("b", 2, 7), ("c", 3, 7)]
    text = str(failure.value)
    assert "1 of 3 cases of spec, n failed:\n  ('b', 2)\n" in text
    assert "DID NOT RAISE" in text
    assert list(inspect.signature(odd).parameters) == ["capsys"]


def test_where_every_case_is_skipped_the_test_is() -> None:
    @each("why", ["one", "two"])
    def skips(why: str) -> None:
        pytest.skip(why)

    with pytest.raises(pytest.skip.Exception, match="one"):
        skips()


def test_no_cases_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="no cases of 'spec'"):
        each("spec", [])
