"""Every kind of input that comes from outside of a process."""

from __future__ import annotations

from fuzz import files, notes, results, specs, states, wires
from fuzz.base import Kind

KINDS: dict[str, Kind] = {
    kind.name: kind for kind in (wires.KIND, specs.KIND, *files.KINDS, results.KIND, notes.KIND, states.KIND)
}


def shares(count: int) -> dict[str, int]:
    """How many of `count` inputs each kind gets, at least one each."""
    whole = sum(kind.weight for kind in KINDS.values())
    found = {name: max(1, count * kind.weight // whole) for name, kind in KINDS.items()}
    first = next(iter(found))
    found[first] += max(0, count - sum(found.values()))
    return found
