"""The notes that ranks leave for one another when a call fails: another version, or anything, is a ValueError."""

from __future__ import annotations

import json
from random import Random

from fuzz.base import VALUES, Kind, replaced, require

from narrowcast.collectives.runtime import agreement
from narrowcast.collectives.runtime.agreement import Failure

KEYS = ("call", "text", "error", "own", "extra")
ODD = (None, -1, 0, 1e308, 10**40, True, "", "x", "{}", "[]", "null", "\ud800", [], {}, [[1]], {"a": {}}, "{" * 3000)


def make(source: Random) -> str:
    call = json.dumps({"operation": "all_reduce", "spec": "int8/256", "sizes": [source.randrange(9)]})
    note = Failure(source.randrange(1 << 40), call, "RuntimeError: no memory\nmore", source.random() < 0.5)
    match source.randrange(4):
        case 0:
            return note.to_text()
        case 1:
            return source.choice(VALUES)
        case 2:
            return replaced(note.to_text(), source)
        case _:
            found = json.loads(note.to_text())
            for _ in range(source.randrange(1, 3)):
                found[source.choice(KEYS)] = source.choice(ODD)
            if source.random() < 0.3:
                found.pop(source.choice(KEYS), None)
            return json.dumps(found)


def check(text: str) -> None:
    try:
        found = Failure.read(text)
    except ValueError:
        found = None
    require(found is None or Failure.read(found.to_text()) == found, "a note is not what it was when it is written")
    told = agreement.explain(RuntimeError("closed"), {0: text, 1: Failure(1, "{}", "", False).to_text()})
    require(isinstance(told, RuntimeError), f"{type(told).__name__} instead of an error of the call")


KIND = Kind("notes", 7, make, check)
