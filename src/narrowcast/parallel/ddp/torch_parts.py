"""DDP's private parts: the list of them, and the check that this torch has them."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from narrowcast.parallel import private

OWNER = "DDP"
JOIN = ("_join_config.enable",)
"""What a hook needs."""
JOINED = ("_divide_by_initial_world_size",)
"""What it needs in a model's `join()`, which brings it."""
HOOKS = ("_comm_hooks", "mixed_precision")
"""What `attach` needs beside that."""
UNUSED = ("reducer._get_local_used_map", "parameters_to_ignore")
"""What error feedback needs where a pass may leave parameters out."""
MIXED = ("reducer._run_allreduce_hook",)
"""What it needs where the model has mixed precision; "reducer" is what that one's hook asks for, too."""
MIXED_STATE = ("ddp_weakref",)
"""Of the state of mixed precision's hook."""
BUCKETS = ("_compute_bucket_assignment_by_size",)
"""Of torch.distributed: what simulations and predictions need, to have the buckets that DDP has."""


def check_state(model: DistributedDataParallel) -> None:
    """For a hook without `attach`; the model may be an object that stands in for one."""
    private.check("autograd", torch, private.AUTOGRAD)
    private.check(OWNER, model, JOIN)
    # an option of torch._dynamo, which versions may drop: there is nothing to refuse then
    if getattr(model, "_use_python_reducer", False):
        raise RuntimeError(
            'attach: the model was made with torch._dynamo.config.optimize_ddp = "python_reducer", which sums each '
            'parameter by itself and has no buckets for a hook; set it to "ddp_optimizer", the default, before DDP(...)'
        )


def check(model: DistributedDataParallel) -> None:
    """Raise where this torch keeps something elsewhere: before anything is sent."""
    check_state(model)
    private.check(OWNER, model, HOOKS)
    if model.find_unused_parameters or model.static_graph:
        private.check(OWNER, model, UNUSED)
    if model.mixed_precision is not None:
        private.check(OWNER, model, MIXED)
        for _, state in model._comm_hooks[:1]:
            private.check("the mixed precision of DDP", state, MIXED_STATE)


def divides_by_live_ranks(model: DistributedDataParallel) -> bool:
    """Whether the model is in `join(divide_by_initial_world_size=False)`."""
    if not model._join_config.enable:
        return False
    private.check(OWNER, model, JOINED)
    return not model._divide_by_initial_world_size
