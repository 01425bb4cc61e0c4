"""What an autopilot learnt, in plain values, for a checkpoint: all that a later decision may depend on."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

from narrowcast.parallel.autopilot.errors import TensorErrors
from narrowcast.parallel.autopilot.history import Decided
from narrowcast.parallel.autopilot.plan import StepPlan
from narrowcast.parallel.autopilot.times import Fit, Layout
from narrowcast.parallel.autopilot.trial import Trial

if TYPE_CHECKING:
    from narrowcast.parallel.autopilot.pilot import Autopilot

PLAIN = (
    *("_patience", "_odd", "_deaf", "_deaf_until", "_retries", "_fresh", "_step_seconds"),
    *("_solved", "_doubts", "_refine", "_stalls", "_recent", "_plain_seconds"),
)
MEASURED = ("factors", "common", "per_bit", "drag", "cooled")


def saved(pilot: Autopilot) -> dict[str, Any]:
    known, trial = pilot.known, pilot._trial
    state: dict[str, Any] = {
        "plain": {key: getattr(pilot, key) for key in PLAIN},
        "budget": vars(pilot.budget),
        "known": {key: getattr(known, key) for key in MEASURED[:-1]} | {"cooled": sorted(known.cooled)},
        "candidates": [str(codec) for codec in known.codecs],
        "errors": {name: [e.energy, e.noise, list(e.lost), e.bad] for name, e in known.errors.items()},
        "fits": {name: [fit.latency, fit.per_value] for name, fit in known.fits.items()},
        "layout": list(astuple(known.layout)),
        "trial": None if trial is None else vars(trial) | {k: _pair(getattr(trial, k)) for k in ("before", "after")},
        "history": pilot.history(),
        "flush": pilot.flush.as_dict(),
        "plan": _pair(pilot.plan),
        "refused": [[_pair(plan), until] for plan, until in pilot._refused.items()],
        "alarm": pilot._alarm.state(),
    }
    # what was saved stays as it is while the run goes on
    return copy.deepcopy(state)


def load(pilot: Autopilot, state: Mapping[str, Any]) -> None:
    known, state = pilot.known, copy.deepcopy(dict(state))
    mine = [str(codec) for codec in known.codecs]
    if state["candidates"] != mine:
        raise ValueError(
            f"auto: the state is of candidates {', '.join(state['candidates'])}, and here they are {', '.join(mine)}; "
            "give the same ones, or start without the state"
        )
    strange = sorted(set(state["errors"]) - set(pilot._tensors))
    if strange and pilot._tensors:
        raise ValueError(
            f"auto: the state is of a model with {strange[0]!r}, which here is no tensor that may change; give the "
            "state of this model and min_values, or start without it"
        )
    for key, value in state["plain"].items():
        setattr(pilot, key, value)
    vars(pilot.budget).update(state["budget"])
    for key, value in state["known"].items():
        setattr(known, key, frozenset(value) if key == "cooled" else value)
    known.errors = {n: TensorErrors(e, m, tuple(lost), b) for n, (e, m, lost, b) in state["errors"].items()}
    known.fits = {name: Fit(*fit) for name, fit in state["fits"].items()}
    ready, buckets, values = state["layout"]
    known.layout = Layout(tuple(ready), tuple(map(tuple, buckets)), tuple(values))
    trial = state["trial"]
    if trial is not None:
        trial = Trial(**trial | {key: _plan(trial[key]) for key in ("before", "after")})
    pilot._trial = trial
    pilot._refused = {_plan(pair): until for pair, until in state["refused"]}
    pilot.take_up([Decided.from_dict(one) for one in state["history"]], Decided.from_dict(state["flush"]))
    pilot.plan = _plan(state["plan"])
    pilot._alarm.load(state["alarm"])


def _pair(plan: StepPlan) -> list[Any]:
    return [plan.road, [list(one) for one in plan.wires]]


def _plan(pair: Sequence[Any]) -> StepPlan:
    road, wires = pair
    return StepPlan(road, tuple((name, wire) for name, wire in wires))
