"""Ranks that disagree find out before bytes move: every new kind of call is compared over all ranks, once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from narrowcast.collectives.transport import Transport, TransportError

VERSION = "1"
"""Of the messages: ranks with another one are told apart before anything is sent."""

Signature = Mapping[str, object]


class DisagreementError(RuntimeError):
    """Ranks called different things."""


def written(signature: Signature) -> str:
    return json.dumps(signature, sort_keys=True, default=str)


def agree(transport: Transport, text: str) -> None:
    """Compare this call with everybody's; raise on every rank where one differs, and name it."""
    texts = transport.share(text)
    if len(set(texts)) > 1:
        found = dict(enumerate(json.loads(t) for t in texts))
        raise DisagreementError(
            f"ranks disagree about this call, so nothing was sent; {differences(found)}. Make all ranks call the same."
        )


def differences(signatures: Mapping[int, dict[str, object]]) -> str:
    """Which ranks differ from the most common call, and in what."""
    common = json.loads(Counter(written(s) for s in signatures.values()).most_common(1)[0][0])
    lines = []
    for rank, signature in signatures.items():
        fields = sorted(set(common) | set(signature))
        different = [
            f"{f}={signature.get(f)!r} (others {common.get(f)!r})" for f in fields if signature.get(f) != common.get(f)
        ]
        if different:
            lines.append(f"rank {rank}: {', '.join(different)}")
    return "; ".join(lines)


@dataclass(frozen=True)
class Failure:
    """The note that a rank leaves for the others when a call failed: where it was, and what it saw."""

    call: int
    text: str
    error: str
    own: bool
    """Whether the fault is its own (torch out of memory raises RuntimeError), and not a connection that closed."""

    @classmethod
    def of(cls, call: int, text: str, error: BaseException) -> Failure:
        own = not isinstance(error, TransportError | TimeoutError)
        return cls(call, text, f"{type(error).__name__}: {error}", own)

    def written(self) -> str:
        return json.dumps(asdict(self))

    @property
    def brief(self) -> str:
        return self.error.splitlines()[0][:200]


def explained(error: BaseException, notes: Mapping[int, str]) -> BaseException:
    """An error of the transport, with what the other ranks say about it: a connection that closed tells nothing."""
    failures = {rank: Failure(**json.loads(note)) for rank, note in notes.items()}
    guilty = "; ".join(f"rank {rank} failed with {f.brief}" for rank, f in failures.items() if f.own)
    if guilty:
        return RuntimeError(f"{guilty} (this rank saw: {error})")
    last = max((f.call for f in failures.values()), default=0)
    calls = {rank: json.loads(f.text) for rank, f in failures.items() if f.call == last}
    if len({written(call) for call in calls.values()}) > 1:
        return DisagreementError(
            f"ranks were in different calls; {differences(calls)}. Make all ranks call the same, in the same order "
            f"(this rank saw: {error})"
        )
    return error
