"""The state of `LocalSGD` by parameter name, sharded as the parameters are: for any checkpoint format."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from narrowcast.codecs import Matrix
from narrowcast.parallel.fsdp.optimizer_check import parameters_of
from narrowcast.parallel.local_sgd.fragments import Clock, float_buffers
from narrowcast.parallel.local_sgd.replica import Replica, Values
from narrowcast.parallel.local_sgd.sending import Flight
from narrowcast.parallel.ranks import local_part
from narrowcast.parallel.residuals import check_factors

State = dict[str, Any]
Tensors = Mapping[str, Tensor]
Keys = Mapping[Tensor, set[str]]
RESIDUALS = "owed"
"""The key of the residuals in a checkpoint, as it is in those that exist."""
UNDER_WAY, DUE, NEVER = "under way", "due", -1
"""The results that are to land, and the steps after which each does."""
FACTORS = "factors"
"""Of low rank: the same on all workers. Checkpoints of older versions have none."""


def like(parameter: Tensor, part: Tensor) -> Tensor:
    """This rank's part as a tensor that is sharded as the parameter is."""
    if not hasattr(parameter, "to_local"):
        return part.view(parameter.shape).clone()
    from torch.distributed.tensor import DTensor

    shape, stride = parameter.shape, parameter.stride()
    local = part.view(local_part(parameter).shape).clone()
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def blank(outer: Optimizer) -> dict[Tensor, dict[str, Any]]:
    """The state that the outer optimizer will have after its first step, by anchor; the values mean nothing.

    Of a copy: the optimizer itself, its hooks and those of all optimizers must not know.
    """
    stepped = copy.deepcopy(outer)
    ours, theirs = parameters_of(outer), parameters_of(stepped)
    for anchor in theirs:
        anchor.grad = torch.zeros_like(anchor)
    inspect.unwrap(type(stepped).step)(stepped)
    return {anchor: stepped.state.get(twin, {}) for anchor, twin in zip(ours, theirs, strict=True)}


def own_keys(outer: Optimizer) -> dict[Tensor, set[str]]:
    """The state that an optimizer has now, by anchor."""
    return {anchor: set(outer.state.get(anchor, ())) for anchor in parameters_of(outer)}


@dataclass(frozen=True)
class Beside:
    """What a checkpoint has beside the worker itself."""

    residuals: Tensors
    factors: Mapping[str, Tensor]
    clock: Clock
    flights: Sequence[Flight]
    """All of which have arrived."""


def to_save(own: Replica, kept: Beside) -> State:
    """A checkpoint. Before the first exchange it has places for the state to come, for whoever fills it."""
    outer, anchors, clock = own.outer, own.anchors, kept.clock
    places = {} if clock.exchanges else blank(outer)
    states = {
        name: _by_key(name, own.parameters[name], anchor, {**places.get(anchor, {}), **outer.state.get(anchor, {})})
        for name, anchor in anchors.items()
    }
    groups = [{key: v for key, v in group.items() if key != "params"} for group in outer.param_groups]
    state: State = {
        "anchors": {name: like(own.parameters[name], anchor) for name, anchor in anchors.items()},
        RESIDUALS: {name: like(own.parameters[name], part) for name, part in kept.residuals.items()},
        FACTORS: dict(kept.factors),
        "outer": {name: state for name, state in states.items() if state},
        "groups": copy.deepcopy(groups),
        "counters": {"steps": clock.steps, "exchanges": clock.exchanges},
    }
    if not own.updates.blocks:
        state["counters"] = {"steps": clock.steps, "exchanges": clock.exchanges, "begun": clock.begun}
        state["rounds"] = list(clock.rounds)
    return state | (_under_way(own, kept.flights) if own.updates.delay else {})


def _under_way(own: Replica, flights: Sequence[Flight]) -> State:
    """By parameter and buffer, with places for those that are not under way."""
    due, values = dict[str, int](), Values()
    for flight in flights:
        due |= dict.fromkeys([*flight.gradients, *flight.buffers], flight.due)
        values |= {**flight.gradients, **flight.buffers}
    floats = float_buffers(own.model)
    blank_ = {name: torch.zeros_like(value) for name, value in {**own.anchors, **floats}.items()}
    shaped = {name: like(own.parameters.get(name, value), values.get(name, value)) for name, value in blank_.items()}
    return {UNDER_WAY: shaped, DUE: {name: due.get(name, NEVER) for name in shaped}}


def flights_of(own: Replica, state: State) -> list[Flight]:
    """What was under way, as having arrived; it lands when it was to."""
    names_at: dict[int, list[str]] = {}
    for name, step in state.get(DUE, {}).items():
        if step != NEVER:
            names_at.setdefault(int(step), []).append(name)
    flights = []
    for step, names in sorted(names_at.items()):
        parts = {name: local_part(state[UNDER_WAY][name]).clone() for name in names}
        gradients = {n: part.to(own.anchors[n].device) for n, part in parts.items() if n in own.anchors}
        flights.append(Flight(step, gradients, {n: part for n, part in parts.items() if n not in own.anchors}))
    return flights


def tensors_of_workers(state: State) -> list[Tensor]:
    """What differs between workers that average with neighbours: anchors, momenta, and what is under way."""
    outer = [value for by_key in state["outer"].values() for value in by_key.values()]
    found = [*state["anchors"].values(), *state.get(UNDER_WAY, {}).values(), *outer]
    # those of a single value, too; counts of steps among them are the same on all, and so is their mean
    return [local_part(value) for value in found if isinstance(value, Tensor) and value.is_floating_point()]


def _by_key(name: str, parameter: Tensor, anchor: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
    copied = {}
    for key, value in state.items():
        if not isinstance(value, Tensor):
            copied[key] = copy.deepcopy(value)
        elif value.shape == anchor.shape:
            copied[key] = like(parameter, value)
        else:
            _check_whole(name, key, parameter, value)
            copied[key] = value.clone()
    return copied


def _check_whole(name: str, key: str, parameter: Tensor, value: Tensor) -> None:
    """A part's own statistics have no meaning for another sharding, nor a place in a file that all ranks write."""
    if value.numel() > 1 and local_part(parameter).shape != parameter.shape:
        raise ValueError(
            f"state_dict: the outer optimizer keeps {key} of shape {tuple(value.shape)} for a part of {name}, which is "
            "sharded; take an outer optimizer whose state has the parameter's shape (SGD, Adam)"
        )


def load(own: Replica, fresh: Keys, state: State) -> dict[str, Tensor]:
    """Fill anchors and outer optimizer; returns the residuals, by name. fresh: the keys of an optimizer without steps.

    A state from before the first exchange has places that an optimizer fills in its first step, and must find empty.
    """
    anchors = own.anchors
    check(own.parameters, state)
    begun = bool(state["counters"]["exchanges"])
    kept: dict[Tensor, dict[str, Any]] = {}
    for name, anchor in anchors.items():
        anchor.copy_(_part(state["anchors"][name], anchor))
        theirs = state["outer"].get(name, {})
        kept[anchor] = {k: _part(v, anchor) for k, v in theirs.items() if begun or k in fresh.get(anchor, ())}
    _load_optimizer(own.outer, kept, state["groups"])
    return {name: _part(value, anchors[name]).flatten() for name, value in state[RESIDUALS].items()}


def _load_optimizer(outer: Optimizer, kept: Mapping[Tensor, dict[str, Any]], groups: Sequence[State]) -> None:
    """By its own method, which knows what must lie on which device."""
    numbers = {anchor: number for number, anchor in enumerate(parameters_of(outer))}
    pairs = zip(outer.param_groups, groups, strict=True)
    state = {numbers[anchor]: values for anchor, values in kept.items() if values and anchor in numbers}
    # what the optimizer has now and a state of an older version has not stays
    merged = [{**now, **theirs, "params": [numbers[p] for p in now["params"]]} for now, theirs in pairs]
    outer.load_state_dict({"state": state, "param_groups": merged})


def _part(value: Any, anchor: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return value
    part = local_part(value).clone()
    # a number, such as a count of steps, stays one beside a parameter of one value
    return part.view(anchor.shape) if part.dim() and part.numel() == anchor.numel() else part


def check(parameters: Tensors, state: State) -> None:
    """Refuse the state of another model."""
    missing = sorted(set(parameters) ^ set(state["anchors"]))
    if missing:
        raise ValueError(f"load_state_dict: the state and the model do not share {missing[0]!r}; load the model's own")
    for name, parameter in parameters.items():
        theirs = tuple(state["anchors"][name].shape)
        if theirs != tuple(parameter.shape):
            raise ValueError(f"load_state_dict: {name} has shape {tuple(parameter.shape)}, the state for it {theirs}")
    check_factors(state.get(FACTORS, {}), matrices_of(parameters))


def matrices_of(parameters: Tensors) -> dict[str, Matrix]:
    """The parameters that are matrices, by name."""
    return {name: Matrix.of(p.shape) for name, p in parameters.items() if p.dim() > 1 and p.numel()}
