"""Hugging Face Accelerate: attach to what `accelerator.prepare` returned. Needs the package accelerate."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from narrowcast.parallel.attachment import attach as attach_model
from narrowcast.parallel.attachment import is_sharded
from narrowcast.parallel.handle import Handle
from narrowcast.parallel.integrations import saved
from narrowcast.parallel.wrappers import inner_model

_attached: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""How many models each Accelerator has in its checkpoints."""


def attach(accelerator: Any, model: nn.Module, gradients: object, *, checkpoint: bool = True, **options: Any) -> Handle:
    """`nc.attach` with Accelerate's loss scaler; the residuals go into `accelerator.save_state` if `checkpoint`.

    model: what `accelerator.prepare` returned, compiled or not. Collective. On one process, where Accelerate wraps
    nothing, the handle has nothing to do. Checkpoints have `narrowcast.pt` where something is owed; one without it,
    made before narrowcast was there, can be loaded all the same.
    """
    inner, processes = inner_model(model), accelerator.num_processes
    if processes > 1 and not (isinstance(inner, DistributedDataParallel) or is_sharded(inner)):
        raise TypeError(
            f"attach: got {type(inner).__name__} of an Accelerator with {processes} processes "
            f"({accelerator.distributed_type}); give the model that prepare() returned, which is one of "
            "DistributedDataParallel or sharded by FSDP2 (fsdp_version=2)"
        )
    options.setdefault("scaler", accelerator.scaler)
    handle = attach_model(model, gradients, **options)
    if checkpoint:
        _keep_in_checkpoints(accelerator, handle)
    return handle


def _keep_in_checkpoints(accelerator: Any, handle: Handle) -> None:
    """By hooks: what is registered for checkpointing must be in every checkpoint that is loaded."""
    number = _attached[accelerator] = _attached.get(accelerator, -1) + 1
    name = saved.FILE if number == 0 else saved.FILE.replace(".", f"_{number}.")

    def save(_: list[nn.Module], __: list[Any], folder: str) -> None:
        each_node = accelerator.project_configuration.save_on_each_node
        writes = accelerator.is_local_main_process if each_node else accelerator.is_main_process
        saved.save(handle, Path(folder) / name, writes)

    def load(_: list[nn.Module], folder: str) -> None:
        saved.load(handle, Path(folder) / name, accelerator.device)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
