"""Law 8 over what members wrote down: what was wanted is what was sent and what is in their residuals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

Record = dict[str, Any]
Key = tuple[int, int]
"""An exchange, and the set of members in whose time it was tried."""


def law(records: Mapping[int, Sequence[Record]]) -> dict[str, Any]:
    """For each exchange: by how much of what was wanted the two differ; and whether failed attempts changed nothing."""
    tries: dict[Key, dict[int, Record]] = defaultdict(dict)
    for host, own in records.items():
        for place, record in enumerate(own):
            if record["kind"] == "begins":
                tries[record["exchange"], record["attempt"]][host] = outcome(own, place)
    made = [attempt for attempt in tries.values() if any("sent" in one for one in attempt.values())]
    failed = [one for attempt in tries.values() if attempt not in made for one in attempt.values()]
    whole = [a for a in made if all("residual" in one for one in a.values()) and len(a) == members(a)]
    back = [one for one in failed if "residual" in one]
    return {
        "exchanges": len(made),
        "checked": len(whole),
        "off": max(map(difference, whole), default=None),
        "largest residual": max(
            (size("residual", a) / size("wanted", a) for a in whole if size("wanted", a)), default=None
        ),
        "failed attempts": len(failed),
        "of which survived": len(back),
        "of which all residuals came back": sum(one["residual"] == one["had"] for one in back),
        "anchors differ": different(records),
    }


def outcome(own: Sequence[Record], place: int) -> Record:
    """An attempt with what came of it: what was sent, and its worker's residual then, if that lived to say so."""
    later = (r for r in own[place + 1 :] if r["kind"] in ("got", "begins"))
    after = next(later, {})
    if after.get("kind") == "begins" and after.get("life") == own[place].get("life"):
        return own[place] | {"residual": after["had"]}
    return own[place] | {key: after[key] for key in ("sent", "residual") if after.get("kind") == "got"}


def members(attempt: Mapping[int, Record]) -> int:
    return max(int(one["members"]) for one in attempt.values())


def size(what: str, attempt: Mapping[int, Record]) -> float:
    return float(torch.tensor([one[what] for one in attempt.values()]).abs().sum())


def difference(attempt: Mapping[int, Record]) -> float:
    """As a share of what was wanted."""
    wanted, residual = (
        torch.tensor([one[k] for one in attempt.values()]).double().sum(0) for k in ("wanted", "residual")
    )
    sent = next(torch.tensor(one["sent"]).double() for one in attempt.values() if "sent" in one)
    whole = size("wanted", attempt)
    return float((wanted - sent - residual).abs().sum()) / whole if whole else 0.0


def different(records: Mapping[int, Sequence[Record]]) -> int:
    """Exchanges after which two members did not hold the same bits."""
    found: dict[int, set[str]] = defaultdict(set)
    for record in (r for own in records.values() for r in own if r["kind"] == "exchange"):
        found[record["exchange"]].add(record["anchors"])
    return sum(len(digests) > 1 for digests in found.values())
