"""Hugging Face Accelerate: attach to what `accelerator.prepare` returned. Needs the package accelerate."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from narrowcast.parallel.attach import attach as attach_model
from narrowcast.parallel.attach import is_sharded, uncompiled
from narrowcast.parallel.handle import Handle
from narrowcast.parallel.residuals import WholeResiduals


def attach(accelerator: Any, model: nn.Module, gradients: object, *, checkpoint: bool = True, **options: Any) -> Handle:
    """`nc.attach` with Accelerate's loss scaler; the residuals go into `accelerator.save_state` if `checkpoint`.

    model: what `accelerator.prepare` returned. Collective. On one process Accelerate wraps nothing, so there is
    nothing to attach to.
    """
    if not (isinstance(uncompiled(model), DistributedDataParallel) or is_sharded(model)):
        kind, processes = type(model).__name__, accelerator.num_processes
        raise TypeError(
            f"attach: got {kind} of an Accelerator with {processes} process(es); give the model that prepare() "
            "returned, on several processes"
        )
    options.setdefault("scaler", accelerator.scaler)
    handle = attach_model(model, gradients, **options)
    if checkpoint:
        # with save_on_each_node the first process of each node writes, and otherwise that of the first
        accelerator.register_for_checkpointing(WholeResiduals(handle, writes=accelerator.is_local_main_process))
    return handle
