"""`attach`: one line, for a DDP and for an FSDP2 model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from narrowcast.codecs import Codec
from narrowcast.parallel import policy
from narrowcast.parallel.autopilot import auto
from narrowcast.parallel.ddp.handle import attach_ddp
from narrowcast.parallel.handle import Handle
from narrowcast.parallel.idle import attach_idle, processes
from narrowcast.parallel.wrappers import inner_model


def attach(
    model: torch.nn.Module,
    gradients: object,
    *,
    parameters: object = None,
    between: object = None,
    scaler: torch.amp.GradScaler | None = None,
    group: dist.ProcessGroup | None = None,
    nodes: int | str | Sequence[Sequence[int]] | None = None,
    inner: str | Codec | None = None,
    algorithm: str = "auto",
    min_values: int = policy.MIN_VALUES,
    seed: int = 0,
    sample_every: int = 0,
    strict: bool = False,
) -> Handle:
    """Send the gradients of a DDP or FSDP2 model through codecs. Collective over the model's ranks.

    gradients: "auto", which finds the wire of each tensor while training (`nc.auto()` with its arguments; `explain()`
    and the log say what and why), a spec, a mapping of name patterns to specs, a `schedule`, a function of (tensor
    info, step), or `nc.replay(file)`.
    parameters: the same for FSDP2's all-gather of parameters; by default they travel as they are. between: the same for
    gradients between the replicas of HSDP; by default as `gradients`.
    scaler: a GradScaler, so that error feedback survives changes of the loss scale. nodes: of a DDP model, the ranks of
    each node as a list, the number of nodes (equal groups of neighbours), or "auto", by the names of hosts and
    torchrun's GROUP_RANK: then `gradients` says what travels between nodes, and inner, a spec, what does inside of them
    (by default gradients as they are).
    sample_every: measure what the codecs lose every so many steps (0: never). strict: raise where a tensor cannot be
    compressed.

    Keep the model as long as you train: the handle does not keep it alive. What torch.compile, Fabric and Accelerate
    put around it is looked through. On one process a plain model will do: its handle has nothing to do.
    """
    model = inner_model(model)
    if isinstance(gradients, str) and gradients == "auto":
        gradients = auto()
    options: dict[str, Any] = {"scaler": scaler, "min_values": min_values, "seed": seed, "sample_every": sample_every}
    if is_sharded(model):
        from narrowcast.parallel.fsdp.handle import attach_fsdp

        _refuse("group", group, None, "the groups are those of its mesh")
        for name, value in (("nodes", nodes), ("inner", inner)):
            _refuse(name, value, None, "shard over a 2-D mesh (replicas, shards) and give between=")
        _refuse("algorithm", algorithm, "auto", "there is one way to reduce and scatter")
        return attach_fsdp(model, gradients, strict, parameters=parameters, between=between, **options)
    if not isinstance(model, DistributedDataParallel):
        if processes(group) > 1:
            raise TypeError(_not_parallel(model, group))
        return attach_idle(model, gradients, strict, parameters=parameters, min_values=min_values, seed=seed)
    if parameters is not None or between is not None:
        raise ValueError("attach: parameters= and between= are for FSDP2; DDP sends gradients alone, leave them out")
    options |= {"group": group, "nodes": nodes, "inner": inner, "algorithm": algorithm}
    return attach_ddp(model, gradients, strict, **options)


def _refuse(name: str, value: object, default: object, instead: str) -> None:
    """An argument that means nothing to FSDP2."""
    if value is not default and not (isinstance(value, str) and value == default):
        raise ValueError(f"attach: {name}={value!r} is for DDP; with FSDP2 {instead}")


def _not_parallel(model: torch.nn.Module, group: dist.ProcessGroup | None) -> str:
    kind, what = type(model).__name__, "wrap the model in DistributedDataParallel first, or shard it with fully_shard"
    if _is_replicated(model):
        return (
            f"attach: got a {kind} of replicate(), which makes its DDP in the first forward pass; before that, call "
            "model.register_comm_hook(HookState(model, gradients), nc.ddp_hook), with HookState of "
            "narrowcast.parallel.integrations, or wrap the model in DistributedDataParallel instead"
        )
    if not (dist.is_available() and dist.is_initialized()):
        what = f"call torch.distributed.init_process_group, then {what}"
    return f"attach: got a plain {kind} in one of {processes(group)} processes; {what}"


def _is_replicated(model: torch.nn.Module) -> bool:
    """Whether torch's `replicate` was called on it: a class of that module is among its own."""
    replicate = sys.modules.get("torch.distributed._composable.replicate")
    return isinstance(model, getattr(replicate, "DDP", ()))


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether `fully_shard` was called on a module of this model. Nobody did without importing it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(module, fsdp.FSDPModule) for module in model.modules())
