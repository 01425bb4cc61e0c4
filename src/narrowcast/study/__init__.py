"""Can low-precision communication improve training with no loss of accuracy? A file asks, `run` answers.

Names are imported at their first use, so that `import narrowcast` stays free.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

HOMES = {
    "StudyFile": "file",
    "Grid": "file",
    "load": "file",
    "parse": "file",
    "builtins": "file",
    "Case": "cases",
    "expand": "cases",
    "run": "run.runner",
    "Options": "run.runner",
    "Results": "run.results",
}
"""Every public name and the file that holds it."""

__all__ = list(HOMES)


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
