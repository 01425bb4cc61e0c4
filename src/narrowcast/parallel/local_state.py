"""The state of `LocalSGD` by parameter name, sharded as the parameters are: for any checkpoint format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

State = dict[str, Any]
Tensors = Mapping[str, Tensor]


def local_part(tensor: Tensor) -> Tensor:
    """The part that this rank holds; a write into it is a write into the tensor."""
    with torch.no_grad():
        local = getattr(tensor, "to_local", None)
        return local() if local is not None else tensor.detach()


def like(parameter: Tensor, part: Tensor) -> Tensor:
    """This rank's part as a tensor that is sharded as the parameter is."""
    if not hasattr(parameter, "to_local"):
        return part.view(parameter.shape).clone()
    from torch.distributed.tensor import DTensor

    shape, stride = parameter.shape, parameter.stride()
    local = part.view(local_part(parameter).shape).clone()
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def begin(outer: Optimizer) -> None:
    """Make the outer optimizer's state where it has none yet, so that a checkpoint has a place for it."""
    if outer.state or not outer.param_groups:
        return
    anchors = [p for group in outer.param_groups for p in group["params"]]
    before, rates = [a.clone() for a in anchors], [group["lr"] for group in outer.param_groups]
    for anchor in anchors:
        anchor.grad = torch.zeros_like(anchor)
    for group in outer.param_groups:
        group["lr"] = 0.0
    outer.step()
    outer.zero_grad()
    for group, rate in zip(outer.param_groups, rates, strict=True):
        group["lr"] = rate
    for anchor, value in zip(anchors, before, strict=True):
        anchor.copy_(value)
        for key, kept in outer.state[anchor].items():
            # nothing has happened yet
            outer.state[anchor][key] = torch.zeros_like(kept) if isinstance(kept, Tensor) else type(kept)()


def saved(parameters: Tensors, anchors: Tensors, owed: Tensors, outer: Optimizer, counters: dict[str, int]) -> State:
    begin(outer)
    kept = {name: _by_key(parameters[name], outer.state[anchor]) for name, anchor in anchors.items()}
    groups = [{key: v for key, v in group.items() if key != "params"} for group in outer.param_groups]
    return {
        "anchors": {name: like(parameters[name], anchor) for name, anchor in anchors.items()},
        "owed": {name: like(parameters[name], part) for name, part in owed.items()},
        "outer": {name: state for name, state in kept.items() if state},
        "groups": groups,
        "counters": counters,
    }


def _by_key(parameter: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
    numel = local_part(parameter).numel()
    return {k: like(parameter, v) if isinstance(v, Tensor) and v.numel() == numel else v for k, v in state.items()}


def load(parameters: Tensors, anchors: Tensors, outer: Optimizer, state: State) -> dict[str, Tensor]:
    """Fill anchors and outer optimizer; returns what is owed, by name."""
    check(parameters, state)
    for name, anchor in anchors.items():
        anchor.copy_(_part(state["anchors"][name], anchor))
        kept = state["outer"].get(name, {})
        outer.state[anchor] = {key: _part(value, anchor) for key, value in kept.items()}
    for group, theirs in zip(outer.param_groups, state["groups"], strict=True):
        group.update(theirs)
    return {name: _part(value, anchors[name]).flatten() for name, value in state["owed"].items()}


def _part(value: Any, anchor: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return value
    part = local_part(value).clone()
    return part.view(anchor.shape) if part.numel() == anchor.numel() else part


def check(parameters: Tensors, state: State) -> None:
    """Refuse the state of another model."""
    missing = sorted(set(parameters) ^ set(state["anchors"]))
    if missing:
        raise ValueError(f"load_state_dict: the state and the model do not share {missing[0]!r}; load the model's own")
    for name, parameter in parameters.items():
        theirs = tuple(state["anchors"][name].shape)
        if theirs != tuple(parameter.shape):
            raise ValueError(f"load_state_dict: {name} has shape {tuple(parameter.shape)}, the state for it {theirs}")
