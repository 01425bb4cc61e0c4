"""Package fronts whose names are imported at their first use, so that `import narrowcast` stays free.

For mypy the front imports the same names under TYPE_CHECKING; a test compares the two lists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_front(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package.

    homes: the module of each public name, "module:name" where it has another name there, "module:" for
    the module itself.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home, colon, there = homes[name].partition(":")
        module = import_module(f"{package}.{home}")
        return module if colon and not there else getattr(module, there or name)

    return get, lambda: list(homes), list(homes)
