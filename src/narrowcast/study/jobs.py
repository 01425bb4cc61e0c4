"""What the processes of a study tell one another: typed jobs one way, results the other, a line of JSON each.

What does not fit the fields is refused with the place and the reason, before anything runs.
"""

from __future__ import annotations

import json
import types
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from typing import Any, Self, Union, get_args, get_origin, get_type_hints

from narrowcast.study.cases import Case, Setting


class JobError(ValueError):
    """A job or a message that is none: says where and why."""


@dataclass(frozen=True)
class JobMessage:
    """Travels as one line of JSON with the name of its class."""

    def to_json(self) -> str:
        return json.dumps({"type": type(self).__name__, **asdict(self)})

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """A value of this class, or of one that inherits from it."""
        try:
            values = json.loads(text)
        except ValueError as error:
            raise JobError(f"{cls.__name__}: no JSON ({error})") from None
        known = {kind.__name__: kind for kind in (cls, *cls.__subclasses__())}
        name = values.pop("type", None) if isinstance(values, dict) else None
        if name not in known:
            raise JobError(f"{cls.__name__}: expected an object of type {' or '.join(known)}, got {name!r}")
        message: Self = _read_object(known[name], values, name)
        return message


def _read_object(kind: type[Any], values: object, path: str) -> Any:
    if not isinstance(values, dict):
        raise JobError(f"{path}: expected an object, got {values!r}")
    hints = get_type_hints(kind)
    if missing := {f.name for f in fields(kind) if f.default is MISSING} - set(values):
        raise JobError(f"{path}: {', '.join(sorted(missing))} is missing")
    if unknown := set(values) - set(hints):
        raise JobError(f"{path}: {', '.join(sorted(unknown))} is unknown; there are {', '.join(hints)}")
    return kind(**{key: _read(hints[key], value, f"{path}.{key}") for key, value in values.items()})


def _read(hint: Any, value: Any, path: str) -> Any:
    """`value` as a field of this type: lists become tuples, objects the dataclasses that they stand for."""
    if get_origin(hint) in (Union, types.UnionType):
        inner = [one for one in get_args(hint) if one is not type(None)]
        return None if value is None else _read(inner[0], value, path)
    if get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise JobError(f"{path}: expected a list, got {value!r}")
        return tuple(_read(get_args(hint)[0], item, f"{path}.{number}") for number, item in enumerate(value))
    if is_dataclass(hint):
        return _read_object(hint, value, path)  # type: ignore[arg-type]
    expected = get_origin(hint) or hint
    right = isinstance(value, int | float) if expected is float else isinstance(value, expected)
    if not right or (isinstance(value, bool) and expected is not bool):
        raise JobError(f"{path}: expected {expected.__name__}, got {value!r}")
    return value


@dataclass(frozen=True)
class RankJob(JobMessage):
    """What every rank of one start of ranks measures."""

    name: str
    transport: str
    deadline: float | None
    """Seconds since the epoch at which no new setting begins."""
    probe_seconds: float
    probe_wires: tuple[str, ...]
    settings: tuple[Setting, ...]
    interface: str | None = None
    """Whose bytes are counted; None: nobody's."""


@dataclass(frozen=True)
class TorchrunJob(JobMessage):
    """A job for processes that torchrun has started, and the port where its ranks meet."""

    job: RankJob
    port: int


@dataclass(frozen=True)
class TrainingJob(JobMessage):
    """One training in the simulator."""

    case: Case


@dataclass(frozen=True)
class TrainingResult(JobMessage):
    """How a training went: the result fields of a line, or why there are none."""

    case: str
    result: dict[str, Any] | None = None
    error: str = ""


@dataclass(frozen=True)
class RankMessage(JobMessage):
    """What ranks tell the study, as it happens."""


@dataclass(frozen=True)
class LinkMeasured(RankMessage):
    """The text of a cluster file."""

    cluster: str


@dataclass(frozen=True)
class SettingBegins(RankMessage):
    """The setting of this number is measured now."""

    number: int


@dataclass(frozen=True)
class CaseMeasured(RankMessage):
    """The result fields of one case, and the text of the profile that belongs to it."""

    setting: int
    case: str
    result: dict[str, Any]
    profile: str | None = None


@dataclass(frozen=True)
class RankFailed(RankMessage):
    """Why a rank ends."""

    error: str
