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
    the module itself. A leading dot means the package around this one, as in imports.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home, colon, there = homes[name].partition(":")
        module = import_module(f".{home}", package)
        return module if colon and not there else getattr(module, there or name)

    return get, lambda: list(homes), list(homes)


def homes_of(modules: Mapping[str, str]) -> dict[str, str]:
    """`homes` for `lazy_front`, from the names of each module in one string, "public:name there" where they differ."""
    names = ((module, name.partition(":")) for module, listed in modules.items() for name in listed.split())
    return {name: f"{module}:{there}" if there else module for module, (name, _, there) in names}
