"""Many small cases in one test: by itself each would cost pytest and xdist more than it computes."""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import pytest

SHOWN = 3


def each(names: str, cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As `pytest.mark.parametrize`, in one test. Every case runs; a failure lists all that failed, some in full."""
    keys, made = [name.strip() for name in names.split(",")], list(cases)
    if not made:
        raise ValueError(f"no cases of {names!r}: the test would pass whatever it says")

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run_all(**fixtures: Any) -> None:
            failed: list[tuple[Any, str]] = []
            skipped: list[str] = []
            for case in made:
                given = dict(zip(keys, case if len(keys) > 1 else (case,), strict=True))
                try:
                    test(**fixtures, **given)
                except pytest.skip.Exception as skip:
                    skipped.append(str(skip))
                except (Exception, pytest.fail.Exception):  # noqa: BLE001  shown below
                    failed.append((case, traceback.format_exc()))
            if failed:
                which = "\n".join(f"  {case!r}" for case, _ in failed)
                first = "\n".join(f"{case!r}:\n{text}" for case, text in failed[:SHOWN])
                pytest.fail(f"{len(failed)} of {len(made)} cases of {names} failed:\n{which}\n{first}", pytrace=False)
            if len(skipped) == len(made):
                pytest.skip(skipped[0])

        signature = inspect.signature(test)
        rest = [parameter for name, parameter in signature.parameters.items() if name not in keys]
        run_all.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]
        return run_all

    return decorate
