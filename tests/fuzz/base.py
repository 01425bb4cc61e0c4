"""What a kind of input is to the fuzzer, and how a text is broken.

An input is made by a generator of its own, from the kind's name, the seed and the input's number alone: what is found
can be made again without everything before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any


class Fault(AssertionError):
    """Something that must not be: says what."""


def require(condition: object, what: str) -> None:
    """Unlike `assert`, also under -O."""
    if not condition:
        raise Fault(what)


@dataclass(frozen=True)
class Kind:
    """A kind of input. `check` returns where it was taken or refused as it should be, and raises otherwise."""

    name: str
    weight: int
    """Its share of a run."""
    make: Callable[[Random], Any]
    check: Callable[[Any], None]

    def input(self, seed: int, number: int) -> Any:
        return self.make(Random(f"{self.name} {seed} {number}"))


NUMBERS = ("nan", "inf", "-inf", "-1", "0", "1e308", "-1e308", "1e-320", "1e400", "9" * 400, "99999999999", "-0.0")
VALUES = (
    *NUMBERS,
    *('""', '"x"', "[]", "[[]]", "{}", "true", "null", "2026-01-01", "[1,[2]]", '"\\u0000"', '"\\ud800"', "[nan]"),
    *('"' + "a" * 5000 + '"', "[" * 3000, "0x1f", "1_000", "١٢", "1 2", "'x'", '"""x"""', "3000000000", "0.1.2"),
)
CHARACTERS = "\x00\t\"',[]{}=#\\\x7f\xe9\u2028\ud7ff\n\r-+.e0"


def broken(text: str, source: Random, equals: str = "=") -> str:
    """A text with a few lines and characters wrong."""
    lines = text.split("\n")
    for _ in range(source.choice((1, 1, 1, 2, 4))):
        _break_one(lines, source.randrange(len(lines)), source, equals)
    return "\n".join(lines)


def _break_one(lines: list[str], at: int, source: Random, equals: str) -> None:
    line = lines[at]
    match source.randrange(8):
        case 0 | 1 if equals in line:
            lines[at] = f"{line.partition(equals)[0]}{equals} {source.choice(VALUES)}"
        case 2 if len(lines) > 1:
            lines.pop(at)
        case 3:
            lines.insert(at, source.choice(lines))
        case 4:
            lines[at] = line[: source.randrange(len(line) + 1)]
        case 5:
            lines[at] = replaced(line, source)
        case 6:
            lines[at] = line.replace(source.choice("0123456789"), source.choice(NUMBERS))
        case _:
            lines[at], lines[-1] = lines[-1], line


def replaced(text: str, source: Random) -> str:
    """One character taken out, put in or exchanged."""
    at = source.randrange(len(text) + 1)
    new = source.choice(("", source.choice(CHARACTERS), chr(source.randrange(32, 127))))
    return text[:at] + new + text[at + source.randrange(2) :]


def one_line(message: str, what: str) -> None:
    """What a person is told is one line, and no page."""
    require("\n" not in message, f"{what}: the message has several lines")
    require(len(message) < 2000, f"{what}: the message has {len(message)} characters")
