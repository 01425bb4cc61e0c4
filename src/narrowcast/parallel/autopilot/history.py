"""What was decided at which step: lines of JSON, and a policy that does the same again."""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from narrowcast.codecs import codec as codec_named
from narrowcast.codecs import refuse_differences
from narrowcast.parallel.autopilot.times import HALF, PLAIN, WIRES
from narrowcast.parallel.policy import AS_IS, TensorInfo

VERSION = 1
SIXTEEN = "bf16"
"""What the backend's 16 bits are, written as a wire."""
ROADS = (PLAIN, HALF, WIRES)
KEYS = {"version": int, "step": int, "road": str, "wires": dict, "reason": str, "numbers": dict}
"""Of a line: from which step on, how everything travels, why, and what was measured."""
GIVE = "give a file that `handle.history()` was written to, by `nc.parallel.lines`"
PathLike = str | os.PathLike[str]
Wires = Mapping[str, str]
"""By tensor; those that are not named travel as they are."""


@dataclass(frozen=True)
class Decided:
    """From a step on, how the gradients travel."""

    step: int
    road: str = PLAIN
    wires: Wires = field(default_factory=dict)
    reason: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Seconds of a step as predicted and measured, counted error and its bound, ...: none of them is needed again."""

    def wire_of(self, info: TensorInfo) -> str:
        """Of any tensor: the backend's 16 bits take whole buckets of float32, small tensors too."""
        halved = self.road == HALF and info.dtype == torch.float32
        return self.wires.get(info.name, SIXTEEN if halved else AS_IS.spec)

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> Decided:
        """The inverse of `as_dict`, of an entry that was looked at."""
        numbers = {key: math.nan if value is None else float(value) for key, value in entry["numbers"].items()}
        return cls(entry["step"], entry["road"], entry["wires"], entry["reason"], numbers)

    def as_dict(self) -> dict[str, Any]:
        numbers = {key: value if math.isfinite(value) else None for key, value in self.numbers.items()}
        own = {"step": self.step, "road": self.road, "wires": dict(self.wires), "reason": self.reason}
        return {"version": VERSION, **own, "numbers": numbers}


def lines(history: Iterable[Mapping[str, Any]]) -> str:
    """What `handle.history()` gives, as the text of a file for `nc.replay`."""
    return "".join(json.dumps(entry) + "\n" for entry in history)


def read(path: PathLike) -> list[Decided]:
    """The decisions of a file, which must be as `lines` writes them."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"replay: {path} is no text ({error}); {GIVE}") from error
    found = [_decision(f"replay: {path}, line {number}", line) for number, line in enumerate(text.splitlines(), 1)]
    steps = [one.step for one in found]
    if not found or steps != sorted(set(steps)):
        shown = f"{steps[:8]}"[:-1] + (", ...]" if len(steps) > 8 else "]")
        raise ValueError(f"replay: {path}: steps are {shown}; give the lines of a history as they were written")
    return found


def _decision(where: str, line: str) -> Decided:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is no JSON ({error}); {GIVE}") from None
    if not isinstance(entry, dict) or set(entry) != set(KEYS):
        got = sorted(entry) if isinstance(entry, dict) else type(entry).__name__
        raise ValueError(f"{where} has {got}; a decision has {sorted(KEYS)}")
    for key, kind in KEYS.items():
        if type(entry[key]) is not kind:
            raise ValueError(f"{where}: {key} is {entry[key]!r}; it must be {kind.__name__}")
    if entry["version"] != VERSION:
        raise ValueError(f"{where} has version {entry['version']}; this narrowcast reads {VERSION}")
    if entry["step"] < 0 or entry["road"] not in ROADS:
        raise ValueError(f"{where}: step {entry['step']} by {entry['road']!r}; roads are {', '.join(ROADS)}")
    if entry["road"] != WIRES and any(wire != AS_IS.spec for wire in entry["wires"].values()):
        raise ValueError(f"{where}: road {entry['road']} takes all tensors alike, and wires are named; take them out")
    for name, wire in entry["wires"].items():
        _check_wire(f"{where}: the wire of {name}", wire)
    for key, value in entry["numbers"].items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
        if value is not None and not is_number:
            raise ValueError(f"{where}: {key} is {value!r}; it must be a number, or null")
    return Decided.from_dict(entry)


def _check_wire(what: str, wire: object) -> None:
    if not isinstance(wire, str):
        raise ValueError(f"{what} is {wire!r}; it must be a spec")
    try:
        refuse_differences("gradients", codec_named(wire))
    except ValueError as error:
        raise ValueError(f"{what} is {wire!r}: {error}") from None


def replay(path: PathLike) -> Replay:
    """A policy that repeats what an autopilot decided, from a file with the lines of `handle.history()`.

    The same model, data, seeds and number of ranks give the same bits. On a GPU low rank and the backend's own sums
    give them as far as those do.
    """
    return Replay(read(path))


def half_road() -> Replay:
    """All gradients through the backend's own sum in bfloat16, as torch's hook does it: to compare with."""
    return Replay([Decided(0, HALF)])


class Replay:
    """The decisions of a history, at the steps at which they were made."""

    alone = True

    def __init__(self, history: Sequence[Decided]) -> None:
        self._decisions = list(history)

    @property
    def spelled(self) -> str:
        """The same where the decisions are."""
        digest = hashlib.sha256(lines(self.history()).encode()).hexdigest()
        return f"a replay of {len(self._decisions)} decisions, {digest[:16]}"

    def check_names(self, names: Collection[str]) -> None:
        """Refuse the history of another model."""
        other = sorted({name for name, _ in self.all_wires()} - set(names))
        if other:
            more = f" and {len(other) - 1} more" if len(other) > 1 else ""
            raise ValueError(
                f"replay: the history has a wire for {other[0]!r}{more}, and this model no such parameter that is "
                "trained; give the history of this model"
            )

    def all_wires(self) -> set[tuple[str, str]]:
        """With the tensors that have them at some step."""
        return {pair for one in self._decisions for pair in one.wires.items()}

    def has_road(self, road: str) -> bool:
        return any(one.road == road for one in self._decisions)

    def at(self, step: int) -> Decided:
        """What holds at a step."""
        before = [one for one in self._decisions if one.step <= step]
        return before[-1] if before else Decided(0)

    def __call__(self, info: TensorInfo, step: int) -> str:
        return self.at(step).wire_of(info)

    def due(self, step: int) -> bool:
        return False

    def observe(self, loss: float) -> None:
        """Nothing depends on it."""

    def history(self) -> list[dict[str, Any]]:
        return [one.as_dict() for one in self._decisions]

    def notes(self) -> list[str]:
        return [f"auto: {len(self._decisions)} decisions are repeated, the last one of step {self._decisions[-1].step}"]

    def counters(self) -> dict[str, float]:
        return {}
