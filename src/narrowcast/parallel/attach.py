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
from narrowcast.parallel.ddp.handle import attach_ddp
from narrowcast.parallel.handle import Handle


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

    gradients: a spec, a mapping of name patterns to specs, a `schedule`, a function of (tensor info, step), or "auto":
    watch a few steps, measure the link, take 16 or 8 bits where they pay (`explain()` and the log say why; DDP only).
    parameters: the same for FSDP2's all-gather of parameters; by default they travel as they are. between: the same for
    gradients between the replicas of HSDP; by default as `gradients`.
    scaler: a GradScaler, so that error feedback survives changes of the loss scale. nodes: of a DDP model, the ranks of
    each node as a list, the number of ranks a node, or "auto", by the names of hosts: then `gradients` says what
    travels between nodes, and inner, a spec, what does inside of them (by default gradients as they are).
    sample_every: measure what the codecs lose every so many steps (0: never). strict: raise where a tensor cannot be
    compressed.

    Keep the model as long as you train: the handle does not keep it alive.
    """
    model = uncompiled(model)
    options: dict[str, Any] = {"scaler": scaler, "min_values": min_values, "seed": seed, "sample_every": sample_every}
    if is_sharded(model):
        from narrowcast.parallel.fsdp.handle import attach_fsdp

        _refuse("group", group, None, "the groups are those of its mesh")
        for name, value in (("nodes", nodes), ("inner", inner)):
            _refuse(name, value, None, "shard over a 2-D mesh (replicas, shards) and give between=")
        _refuse("algorithm", algorithm, "auto", "there is one way to reduce and scatter")
        return attach_fsdp(model, gradients, strict, parameters=parameters, between=between, **options)
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"attach: got {type(model).__name__}; wrap the model in DistributedDataParallel first, or shard it with "
            "fully_shard"
        )
    if parameters is not None or between is not None:
        raise ValueError("attach: parameters= and between= are for FSDP2; DDP sends gradients alone, leave them out")
    options |= {"group": group, "nodes": nodes, "inner": inner, "algorithm": algorithm}
    return attach_ddp(model, gradients, strict, **options)


def _refuse(name: str, value: object, default: object, instead: str) -> None:
    """An argument that means nothing to FSDP2."""
    if value is not default and not (isinstance(value, str) and value == default):
        raise ValueError(f"attach: {name}={value!r} is for DDP; with FSDP2 {instead}")


def uncompiled(model: torch.nn.Module) -> torch.nn.Module:
    """The model that torch.compile was given: it wraps one in a module of its own."""
    original: torch.nn.Module = getattr(model, "_orig_mod", model)
    return original


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether `fully_shard` was called on a module of this model. Nobody did without importing it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(module, fsdp.FSDPModule) for module in model.modules())
