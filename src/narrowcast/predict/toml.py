"""The part of TOML that our files use, with the line of every value, so that an error can name it.

Tables, arrays of tables, strings, numbers, true and false, and arrays, which may go over lines. `tomllib` reads the
same files (a test compares), but it came with Python 3.11 and forgets lines.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

HEADER = re.compile(r"^(\[\[?)\s*([\w.-]+)\s*(\]\]?)\s*(?:#.*)?$")
KEY = re.compile(r"^([\w-]+)\s*=\s*")
TOKEN = re.compile(r'\s*(?:(?P<text>"(?:[^"\\]|\\.)*")|(?P<mark>[\[\],])|(?P<word>[^\s\[\],#"]+)|(?P<comment>#.*))')

WHOLE = re.compile(r"[+-]?[0-9]+")
REAL = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|inf|nan)")
LARGEST = (1 << 63) - 1
"""TOML's whole numbers have 64 bits; a larger one is a slip of the keyboard that no float can hold."""
DEEPEST = 16
"""Arrays in arrays; ours have two."""
SHOWN = 60
"""Characters of what is wrong that a message repeats."""
LONGEST = 1000
"""Characters of a message."""


class FileError(ValueError):
    """A file that cannot be used: says which, where and why."""


def placed(name: object, line: int, what: str) -> FileError:
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
        raise placed(self.name, self.lines.get(around, 1), f"{path}: {what}")


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


def parse(text: str, name: str = "<text>") -> Document:
    """Read a file's text; FileError with name and line where it is no such TOML."""
    return _Parser(text, name).run()


class _Parser:
    def __init__(self, text: str, name: str) -> None:
        self.rows, self.at = text.splitlines(), 0
        self.document = Document(name)
        self.table, self.path = self.document.values, ""

    def fail(self, what: str) -> NoReturn:
        raise placed(self.document.name, self.at + 1, what)

    def run(self) -> Document:
        while self.at < len(self.rows):
            row = self.rows[self.at].strip()
            if row and not row.startswith("#"):
                self._header(row) if row.startswith("[") else self._pair(row)
            self.at += 1
        return self.document

    def _header(self, row: str) -> None:
        found = HEADER.match(row)
        if found is None or len(found[1]) != len(found[3]):
            self.fail(f"a table is written [name] or [[name]], got {brief(row)}")
        keys = found[2].split(".")
        self.table, self.path = self.document.values, ""
        for key in keys[:-1]:
            self._enter(key)
        self._open(keys[-1], many=found[1] == "[[")
        self.document.lines[self.path] = self.at + 1

    def _enter(self, key: str) -> None:
        """Go into a table, or into the last one of an array of tables."""
        inner = self.table.setdefault(key, {})
        self.path = f"{self.path}.{key}".lstrip(".")
        if isinstance(inner, list) and inner:
            self.path, inner = f"{self.path}.{len(inner) - 1}", inner[-1]
        if not isinstance(inner, dict):
            self.fail(f"{self.path} is a value and cannot be a table too")
        self.table = inner

    def _open(self, key: str, many: bool) -> None:
        if many:
            found = self.table.setdefault(key, [])
            if not isinstance(found, list):
                self.fail(f"{key} was a single table before; write [{key}] once or [[{key}]] always")
            found.append({})
        elif key in self.table:
            self.fail(f"the table [{key}] stands here a second time")
        self._enter(key)

    def _pair(self, row: str) -> None:
        found = KEY.match(row)
        if found is None:
            self.fail(f"a line is `key = value`, a [table] or a # comment, got {brief(row)}")
        key = found[1]
        if key in self.table:
            self.fail(f"{key} stands here a second time")
        path = f"{self.path}.{key}".lstrip(".")
        self.document.lines[path] = self.at + 1
        self.table[key] = self._value(row[found.end() :], path)

    def _value(self, rest: str, path: str) -> Any:
        """A scalar, or an array that may go on over several lines."""
        tokens, depth = [], 0
        while True:
            for kind, token in self._tokens(rest):
                depth += (kind, token) == ("mark", "[")
                depth -= (kind, token) == ("mark", "]")
                if depth > DEEPEST:
                    self.fail(f"{path}: arrays lie {depth} deep in one another; {DEEPEST} are allowed")
                tokens.append((kind, token, self.at + 1))
            if depth <= 0:
                break
            self.at += 1
            if self.at >= len(self.rows):
                self.fail(f"the array {path} does not end")
            rest = self.rows[self.at]
        value, used = self._read(tokens, 0, path)
        if used != len(tokens):
            self.fail(f"{path} has more than one value: {tokens[used][1]}")
        return value

    def _tokens(self, rest: str) -> list[tuple[str, str]]:
        found, at = [], 0
        rest = rest.rstrip()
        while at < len(rest):
            match = TOKEN.match(rest, at)
            if match is None:
                self.fail(f'cannot read {brief(rest[at:].strip())}; strings need "quotes"')
            assert match.lastgroup is not None
            if match.lastgroup == "comment":
                break
            found.append((match.lastgroup, match[match.lastgroup]))
            at = match.end()
        return found

    def _read(self, tokens: list[tuple[str, str, int]], at: int, path: str) -> tuple[Any, int]:
        if at >= len(tokens):
            self.fail(f"{path} has no value")
        kind, token, line = tokens[at]
        self.document.lines.setdefault(path, line)
        if (kind, token) != ("mark", "["):
            return self._scalar(kind, token, path), at + 1
        items: list[Any] = []
        at += 1
        while tokens[at][1] != "]" or tokens[at][0] != "mark":
            value, at = self._read(tokens, at, f"{path}.{len(items)}")
            items.append(value)
            if tokens[at][:2] == ("mark", ","):
                at += 1
        return items, at + 1

    def _scalar(self, kind: str, token: str, path: str) -> Any:
        if kind == "text":
            return self._text(token, path)
        if token in ("true", "false"):
            return token == "true"
        plain = token.replace("_", "")
        if REAL.fullmatch(plain) is None:
            self.fail(f'{path}: {brief(token)} is no number, no true or false and no "string"')
        if WHOLE.fullmatch(plain) is None:
            return float(plain)
        if len(plain.lstrip("+-0")) > len(str(LARGEST)) or abs(int(plain)) > LARGEST:
            self.fail(f"{path}: {brief(token)} is too large; a whole number is at most {LARGEST}")
        return int(plain)

    def _text(self, token: str, path: str) -> str:
        try:
            found = str(json.loads(token))
            found.encode()  # half of a surrogate pair is no character
        except ValueError as error:
            self.fail(f"{path}: {brief(token)} is no string ({error})")
        return found


# ---- writing ---------------------------------------------------------------------------------------------------------


def scalar(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, float):
        return f"{value:.6g}" if value != int(value) or abs(value) > 1e15 else f"{value:.1f}"
    return str(value)


def array(values: Sequence[object]) -> str:
    return "[" + ", ".join(array(v) if isinstance(v, (list, tuple)) else scalar(v) for v in values) + "]"


def pairs(values: Mapping[str, object]) -> list[str]:
    """`key = value` lines; an array of arrays has a line for each."""
    lines: list[str] = []
    for key, value in values.items():
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], (list, tuple)):
            lines += [f"{key} = [", *(f"  {array(row)}," for row in value), "]"]
        else:
            lines.append(f"{key} = {array(value) if isinstance(value, (list, tuple)) else scalar(value)}")
    return lines
