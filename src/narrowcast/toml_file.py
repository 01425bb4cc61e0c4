"""TOML files of ours: read by `tomllib`, with the line of every value, so that an error can name it; and written.

`tomllib` tells the line of what is no TOML and forgets all others. A second look at a text that it has read finds
them: words and brackets are then known to be in order.
"""

from __future__ import annotations

import itertools
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}|\'\'\'.*?\'{3,5}|"(?:\\.|[^"\\])*"|\'[^\']*\'|#[^\n]*|\n|[\[\]{},=]|[^\s\[\]{},=#"\']+',
    re.DOTALL,
)
PLACE = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")
LARGEST = (1 << 63) - 1
"""TOML's whole numbers have 64 bits; a larger one is a slip of the keyboard that no float can hold."""
MANY_DIGITS = re.compile(r"[0-9_]{4300}")
"""Of a whole number that Python does not read."""
SMALLEST = 1e-15
"""Of numbers above something: nearer to it products of a few of them are no numbers any more."""
SHOWN = 60
"""Characters of what is wrong that a message repeats."""
LONGEST = 1000
"""Characters of a message."""


class FileError(ValueError):
    """A file that cannot be used: says which, where and why."""


def error_at(name: object, line: int, what: str) -> FileError:
    """With file and line in front, and as long as a person reads: a file may hold a word of a million letters."""
    return FileError(f"{name}:{line}: {what if len(what) <= LONGEST else what[:LONGEST] + ' ...'}")


@dataclass
class Document:
    """Values by key; `lines` says where each stands, by its path: "level.0.bandwidth_gbps"."""

    name: str
    values: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)

    def fail(self, path: str, what: str) -> NoReturn:
        """Raise with the line of a value, or of the nearest table around it."""
        around = path
        while around and around not in self.lines:
            around = around.rpartition(".")[0]
        raise error_at(self.name, self.lines.get(around, 1), f"{path}: {what}")


@dataclass(frozen=True)
class Section:
    """One table of a document: what is missing, unknown or out of range in it fails with its line."""

    document: Document
    values: dict[str, Any]
    path: str = ""

    def path_of(self, key: str) -> str:
        return f"{self.path}.{key}".lstrip(".")

    def fail(self, key: str, what: str) -> NoReturn:
        self.document.fail(self.path_of(key), what)

    def check_keys(self, *names: str) -> None:
        for key in self.values:
            if key not in names:
                self.fail(key, f"unknown; there are {', '.join(names)}")

    def check_format(self, version: int) -> None:
        if self.values.get("format") != version:
            self.fail("format", f"this version reads format = {version}, got {brief(self.values.get('format'))}")

    def table(self, key: str) -> Section:
        inner = self.values.get(key, {})
        if not isinstance(inner, dict):
            self.fail(key, f"write [{key}], once, and its keys below")
        return Section(self.document, inner, self.path_of(key))

    def tables(self, key: str) -> list[Section]:
        listed = self.values.get(key, [])
        if not isinstance(listed, list) or not all(isinstance(table, dict) for table in listed):
            self.fail(key, f"write [[{key}]]: there may be several")
        return [Section(self.document, table, self.path_of(f"{key}.{i}")) for i, table in enumerate(listed)]

    def truth(self, key: str) -> bool:
        value = self.values.get(key, False)
        if not isinstance(value, bool):
            self.fail(key, f"must be true or false, got {brief(value)}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self.values.get(key, default)
        if not isinstance(value, str):
            self.fail(key, "is missing" if value is None else f'must be a "string", got {brief(value)}')
        return value

    def number(
        self, key: str, default: float | None = None, low: float = 0.0, above: float | None = None, most: float = 1e18
    ) -> float:
        """From `low`, or beyond `above`, to `most`; as it stands there, whole or not."""
        value = self.values.get(key, default)
        if value is None:
            self.fail(key, "is missing; give a number")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
            self.fail(key, f"must be a number, got {brief(value)}")
        if value > most:
            self.fail(key, f"must be {most:g} or less, got {value:g}")
        if value < (low if above is None else above + SMALLEST):
            self.fail(key, f"must be {f'{low:g} or more' if above is None else f'more than {above:g}'}, got {value!r}")
        return value

    def floats(self, *keys: str, low: float = 0.0, most: float = 1e18) -> list[float]:
        """Several numbers that must be there, in one range."""
        return [float(self.number(key, low=low, most=most)) for key in keys]

    def whole(self, key: str, default: int, low: int = 0, most: float = 1e18) -> int:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= most:
            self.fail(key, f"must be a whole number, {low} or more, got {brief(value)}")
        return value


def read_text(path: str | Path, name: str | Path | None = None) -> str:
    """A file's text; FileError with its name where it is none, or cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise FileError(f"{name or path}:{line}: no text in UTF-8 ({error.reason})") from None
    except OSError as error:
        raise FileError(f"{name or path}: cannot be read ({error.strerror})") from None


def brief(value: object) -> str:
    """A value as a message shows it: the beginning of a long one."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"


def parse_toml(text: str, name: str = "<text>") -> Document:
    """Read a file's text; FileError with name and line where it is no TOML."""
    try:
        values = tomllib.loads(text)
        document = Document(name, values, _LineFinder(text).run())
        _check_numbers(document, values, "")
    except FileError:
        raise
    except tomllib.TOMLDecodeError as error:
        place, rows = PLACE.search(str(error)), text.rstrip("\n").split("\n")
        line = min(int(place[1]) if place and place[1] else len(rows), len(rows))
        what = f"no TOML: {PLACE.sub('', str(error))}, in {brief(rows[line - 1].strip())}"
        raise error_at(name, line, what) from None
    except RecursionError:
        raise error_at(name, _deepest_line(text), "too many arrays or tables lie in one another") from None
    except ValueError as error:
        digits = MANY_DIGITS.search(text)
        raise error_at(name, text.count("\n", 0, digits.start() if digits else 0) + 1, str(error)) from None
    return document


def _deepest_line(text: str) -> int:
    depths = list(itertools.accumulate((letter in "[{") - (letter in "]}") for letter in text))
    return text.count("\n", 0, depths.index(max(depths))) + 1


def _check_numbers(document: Document, value: object, path: str) -> None:
    if isinstance(value, int) and abs(value) > LARGEST:
        document.fail(path, f"{brief(value)} is too large; a whole number is at most {LARGEST}")
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            _check_numbers(document, inner, f"{path}.{key}".lstrip("."))


class _LineFinder:
    """Where each table, key and item of an array stands, in a text that is TOML.

    A key in quotes that has a dot in it is not found; its errors then name the line of the table around it.
    """

    def __init__(self, text: str) -> None:
        self.tokens: list[tuple[str, int]] = []
        line = 1
        for match in TOKEN.finditer(text):
            if not match[0].startswith("#"):
                self.tokens.append((match[0], line))
            line += match[0].count("\n")
        self.tokens.append(("\n", line))
        self.at = 0
        self.lines: dict[str, int] = {}
        self.counts: dict[str, int] = {}
        """How many tables each array of tables has so far."""

    def run(self) -> dict[str, int]:
        table = ""
        while self.at < len(self.tokens):
            if self._skip("\n"):
                continue
            table = self._header() if self.tokens[self.at][0] == "[" else self._pair(table)
        return self.lines

    def _skip(self, *tokens: str) -> bool:
        """Step over one of these, if it comes next."""
        if self.tokens[self.at][0] in tokens:
            self.at += 1
            return True
        return False

    def _keys(self, end: str) -> list[str]:
        """The keys of a dotted name, up to a token that is stepped over, too."""
        words = []
        while not self._skip(end):
            words.append(self.tokens[self.at][0])
            self.at += 1
        return [key.strip("\"'") for key in "".join(words).split(".")]

    def _header(self) -> str:
        line = self.tokens[self.at][1]
        self._skip("[")
        many = self._skip("[")
        path = ""
        keys = self._keys("]")
        for number, key in enumerate(keys, 1):
            path = f"{path}.{key}".lstrip(".")
            if number == len(keys) and many:
                self.counts[path] = self.counts.get(path, 0) + 1
            if path in self.counts:
                path += f".{self.counts[path] - 1}"
        self._skip("]")
        self.lines[path] = line
        return path

    def _pair(self, table: str) -> str:
        line = self.tokens[self.at][1]
        path = table
        for key in self._keys("="):
            path = f"{path}.{key}".lstrip(".")
            self.lines.setdefault(path, line)
        self._value(path)
        return table

    def _value(self, path: str) -> None:
        self.lines.setdefault(path, self.tokens[self.at][1])
        if self._skip("["):
            number = 0
            while not self._skip("]"):
                if not self._skip("\n", ","):
                    self._value(f"{path}.{number}")
                    number += 1
        elif self._skip("{"):
            while not self._skip("}"):
                if not self._skip("\n", ","):
                    self._pair(path)
        else:
            # a date and its time are two words
            while self.tokens[self.at][0] not in ("\n", ",", "]", "}"):
                self.at += 1


def _scalar(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, float):
        return f"{value:.6g}" if value != int(value) or abs(value) > 1e15 else f"{value:.1f}"
    return str(value)


def _array(values: Sequence[object]) -> str:
    return "[" + ", ".join(_array(v) if isinstance(v, list | tuple) else _scalar(v) for v in values) + "]"


def toml_lines(values: Mapping[str, object]) -> list[str]:
    """`key = value` lines; an array of arrays has a line for each."""
    lines: list[str] = []
    for key, value in values.items():
        if isinstance(value, list | tuple) and value and isinstance(value[0], list | tuple):
            lines += [f"{key} = [", *(f"  {_array(row)}," for row in value), "]"]
        else:
            lines.append(f"{key} = {_array(value) if isinstance(value, list | tuple) else _scalar(value)}")
    return lines
