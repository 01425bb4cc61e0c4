"""Ranks that disagree find out before bytes move: every new kind of call is compared over all ranks, once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from narrowcast.collectives.transports.base import Transport, TransportError

VERSION = "2"
"""Of the messages: ranks with another one are told apart before anything is sent."""

LONGEST = 1 << 24
"""Characters of what another rank wrote."""

Signature = Mapping[str, object]


class DisagreementError(RuntimeError):
    """Ranks called different things."""


def to_text(signature: Signature) -> str:
    """As ranks compare it."""
    return json.dumps(signature, sort_keys=True, default=str)


def name_of(text: str) -> str:
    """What a call is called in errors."""
    return str(read(text).get("call", "a call"))


def read(text: str) -> dict[str, object]:
    """What another rank wrote, a signature or a note; ValueError where it is no object of JSON."""
    if len(text) > LONGEST:
        raise ValueError(f"it is {len(text)} characters long, and no more than {LONGEST} are read")
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {text[:80]!r}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"it is no object: {text[:80]!r}")
    return fields


def agree(transport: Transport, text: str) -> None:
    """Compare this call with everybody's; raise on every rank where one differs, and name it."""
    try:
        texts = transport.share(text)
    except (TransportError, TimeoutError) as error:
        raise type(error)(f"{name_of(text)}, which every rank has to call: {error}") from error
    if len(set(texts)) > 1:
        signatures = {rank: _read_or_quote(theirs) for rank, theirs in enumerate(texts)}
        raise DisagreementError(
            f"ranks disagree about this call, so nothing was sent; {differences(signatures)}. "
            "Make all ranks call the same."
        )


def _read_or_quote(text: str) -> dict[str, object]:
    try:
        return read(text)
    except ValueError:
        return {"call": text[:80]}


def different_calls(calls: Mapping[int, str]) -> DisagreementError:
    """The error of ranks that are in different calls of one channel, by rank, where all must be in the same."""
    signatures = {rank: _read_or_quote(text) for rank, text in calls.items()}
    names = sorted({str(call.get("call")) for call in signatures.values()})
    rule = f" Collective: {' and '.join(names)}; every rank has to call each." if len(names) > 1 else ""
    return DisagreementError(
        f"ranks were in different calls; {differences(signatures)}. "
        f"Make all ranks call the same, in the same order.{rule}"
    )


def differences(signatures: Mapping[int, dict[str, object]]) -> str:
    """Which ranks differ from the most common call, and in what."""
    common = json.loads(Counter(to_text(s) for s in signatures.values()).most_common(1)[0][0])
    lines = []
    for rank, signature in signatures.items():
        different = [f for f in sorted(set(common) | set(signature)) if signature.get(f) != common.get(f)]
        if "call" in different:  # then the rest means something else
            different = ["call"]
        if different:
            shown = (f"{f}={_cut(signature.get(f))} (others {_cut(common.get(f))})" for f in different)
            lines.append(f"rank {rank}: {', '.join(shown)}")
    return "; ".join(lines)


def _cut(value: object) -> str:
    """A field in an error: there may be thousands of segments."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


@dataclass(frozen=True)
class Failure:
    """The note that a rank leaves for the others when a call failed: where it was, and what it saw."""

    call: int
    text: str
    error: str
    own: bool
    """Whether the fault is its own (torch out of memory raises RuntimeError), and not a connection that closed, nor one
    of all ranks together.
    """

    @classmethod
    def of(cls, call: int, text: str, error: BaseException) -> Failure:
        own = not isinstance(error, TransportError | TimeoutError | DisagreementError)
        return cls(call, text, f"{type(error).__name__}: {error}", own)

    @classmethod
    def read(cls, text: str) -> Failure:
        """What another rank wrote, which may be of another version or anything; ValueError where it is no note."""
        note = read(text)
        for name, kind in (("call", int), ("text", str), ("error", str), ("own", bool)):
            if type(note.get(name)) is not kind:
                raise ValueError(f"its field {name} is to be {kind.__name__}, got {type(note.get(name)).__name__}")
        read(str(note["text"]))
        return cls(**{field.name: note[field.name] for field in fields(cls)})  # type: ignore[arg-type]

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @property
    def brief(self) -> str:
        return next(iter(self.error.splitlines()), "an error without a text")[:400]


def explain(error: BaseException, notes: Mapping[int, str]) -> BaseException:
    """An error of the transport, with what the other ranks say about it: a connection that closed tells nothing."""
    read_notes = {rank: _read_note(note) for rank, note in notes.items()}
    failures = {rank: note for rank, note in read_notes.items() if isinstance(note, Failure)}
    guilty = [f"rank {rank} failed with {f.brief}" for rank, f in failures.items() if f.own]
    unread = {rank: why for rank, why in read_notes.items() if isinstance(why, str)}
    guilty += [f"rank {rank} left a note that cannot be read: {why}" for rank, why in unread.items()]
    if guilty:
        return RuntimeError(f"{'; '.join(guilty)} (this rank saw: {error})")
    last = max((f.call for f in failures.values()), default=0)
    calls = {rank: f.text for rank, f in failures.items() if f.call == last}
    if len(set(calls.values())) > 1:
        return DisagreementError(f"{different_calls(calls)} (this rank saw: {error})")
    disagreements = ((r, f) for r, f in failures.items() if f.error.startswith(DisagreementError.__name__))
    return next((DisagreementError(f"rank {rank}: {failure.brief}") for rank, failure in disagreements), error)


def _read_note(note: str) -> Failure | str:
    """A note, or why it is none."""
    try:
        return Failure.read(note)
    except ValueError as error:
        return str(error)
