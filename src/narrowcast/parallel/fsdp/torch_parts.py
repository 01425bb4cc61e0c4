"""FSDP2's private parts: the one place that reaches for them, and the check that this torch has them.

`fully_shard` makes a parameter group of a module. Where versions of torch differ, this file knows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from narrowcast.parallel import private

OWNER = "FSDP2"

try:
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
        DefaultAllGather,
        DefaultReduceScatter,
        _get_gradient_divide_factors,
    )
    from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo, HSDPMeshInfo
except ImportError as error:
    raise private.elsewhere(OWNER, f"classes ({error})") from error

TORCH = (*private.AUTOGRAD, "autograd.Variable._execution_engine.queue_callback")
MODULE = ("_get_fsdp_state",)
STATE = ("_fsdp_param_groups|_fsdp_param_group", "_state_ctx.post_backward_final_callback_queued")
GROUP = (
    "fsdp_params",
    "modules",
    "mesh_info.mesh",
    "post_forward_mesh_info",
    "all_reduce_grads",
    "gradient_divide_factor",
    "force_sum_reduction_for_comms",
    "_reduce_scatter_comm",
    "_all_gather_comm",
    "_all_reduce_hook",
)
SHARDED = ("mesh_info.shard_mesh_dim", "mesh_info.shard_process_group")
REPLICATED = ("mesh_info.replicate_process_group",)
PARAMETER = (
    "_module_info.module",
    "_module_info.param_name",
    "_orig_size",
    "fsdp_placement.dim",
    "mp_policy.param_dtype",
    "mp_policy.reduce_dtype",
    "sharded_param",
    "sharded_size",
    "to_sharded_dtensor",
    "device",
)
GRADIENT_TYPE = ("_has_sharded_grad_dtype_override",)
"""Of a parameter that has a `sharded_grad_dtype`, as all have since 2.15."""
LATER = ("unsharded_param",)
"""Properties of a parameter that can be read while it is gathered, and must be there now."""


def check(model: nn.Module) -> None:
    """Raise where this torch keeps something elsewhere: before anything is sent."""
    private.check("autograd", torch, TORCH)
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        private.check(OWNER, module, MODULE)
        private.check(OWNER, module._get_fsdp_state(), STATE)
        for group in _param_groups(module):
            _check_group(group)


def _check_group(group: Any) -> None:
    private.check(OWNER, group, GROUP)
    for kind, parts in ((FSDPMeshInfo, SHARDED), (HSDPMeshInfo, REPLICATED)):
        if isinstance(group.mesh_info, kind):
            private.check(OWNER, group, parts)
    for parameter in group.fsdp_params:
        private.check(OWNER, parameter, (*PARAMETER, *(GRADIENT_TYPE if _has_gradient_type(parameter) else ())))
        private.check(OWNER, type(parameter), LATER)


def _has_gradient_type(parameter: Any) -> bool:
    return hasattr(parameter, "sharded_grad_dtype")


class Parameter:
    """torch's FSDPParam."""

    def __init__(self, private: Any) -> None:
        self.private = private
        self.device: torch.device = private.device
        self.shape: tuple[int, ...] = tuple(private._orig_size)
        self.dim: int = private.fsdp_placement.dim

    @property
    def place(self) -> tuple[nn.Module, str]:
        """The module that has it, and under which name."""
        return self.private._module_info.module, self.private._module_info.param_name

    @property
    def sharded_param(self) -> nn.Parameter:
        return self.private.sharded_param

    @property
    def sharded_size(self) -> torch.Size:
        return self.private.sharded_size

    @property
    def unsharded_param(self) -> nn.Parameter:
        return self.private.unsharded_param

    @property
    def unsharded_if_made(self) -> nn.Parameter | None:
        """The gathered parameter, gathered now or not; it is made by the first forward pass and then stays."""
        return getattr(self.private, "_unsharded_param", None)

    @property
    def gather_dtype(self) -> torch.dtype:
        """The type in which it is gathered."""
        return self.private.mp_policy.param_dtype or self.sharded_param.dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The type in which its gradient travels, others of the group aside."""
        mixed = self.private.mp_policy
        if mixed.reduce_dtype is not None:
            return mixed.reduce_dtype
        if not _has_gradient_type(self.private):  # before 2.15 gradients travel in the type of the computation
            return self.gather_dtype
        if self.private._has_sharded_grad_dtype_override:
            return self.private.sharded_grad_dtype or self.gather_dtype
        return self.sharded_param.dtype

    def to_sharded_dtensor(self, part: Tensor) -> Tensor:
        return self.private.to_sharded_dtensor(part)


class ParameterGroup:
    """torch's FSDPParamGroup."""

    def __init__(self, private: Any, state: Any) -> None:
        self.private, self._state = private, state
        self.parameters = [Parameter(parameter) for parameter in private.fsdp_params]

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return self.private.modules

    @property
    def mesh(self) -> Any:
        return self.private.mesh_info

    @property
    def all_reduce_grads(self) -> bool:
        return self.private.all_reduce_grads

    @property
    def reshards_after_forward(self) -> bool:
        """Whether its parameters are gathered again for backward. Of a root that was told nothing FSDP says so, and
        decides otherwise in its first forward pass.
        """
        return self.private.post_forward_mesh_info is not None

    @property
    def gradient_divide_factor(self) -> float | None:
        return self.private.gradient_divide_factor

    def divisor_before(self, dtype: torch.dtype, device: torch.device) -> float:
        """What FSDP divides gradients of a type by before their reduce-scatter; the rest it divides the sum by.

        Only float16 has one, which grows with the number of ranks: their sum must stay finite.
        """
        group, factor = self.mesh.shard_process_group, self.gradient_divide_factor
        forced = self.private.force_sum_reduction_for_comms
        before, *_ = _get_gradient_divide_factors(group, None, dtype, device.type, factor, forced)
        return float(before or 1.0)

    @property
    def collectives(self) -> tuple[ReduceScatter, AllGather, Callable[[Tensor], None] | None]:
        """Its reduce-scatter, its all-gather, and its hook for an all-reduce."""
        return self.private._reduce_scatter_comm, self.private._all_gather_comm, self.private._all_reduce_hook

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The type of the gradients when they travel."""
        trainable = {p.reduce_dtype for p in self.parameters if p.sharded_param.requires_grad}
        return reduce(torch.promote_types, trainable) if trainable else self.parameters[0].reduce_dtype

    @property
    def order(self) -> list[int]:
        """In which order the parameters lie in a reduce-scatter: since 2.15 by the type of their gradients."""
        indices: list[int] = getattr(self.private, "_reduce_scatter_param_indices", [])
        return indices or list(range(len(self.parameters)))

    @property
    def in_backward(self) -> bool:
        """Whether FSDP is in a backward pass, from the first gradient to the end of the outermost pass.

        Since 2.15 the caller may say when that is, after autograd's end.
        """
        context = self._state._state_ctx
        by_hand = getattr(context, "manual_backward_finalization_active", None)
        return bool(context.post_backward_final_callback_queued or by_hand)

    def take_over_replicas(self) -> Callable[[], None]:
        """Stop FSDP's own all-reduce between replicas, which has no hook; returns the way back."""
        group, old, after = self.private, self.private.mesh_info, self.private.post_forward_mesh_info
        # newer versions of torch have more to hand over
        newer = {name: getattr(old, name) for name in ("dp_mesh_dims", "spmd_mesh") if hasattr(old, name)}
        new = FSDPMeshInfo(old.mesh, shard_mesh_dim=old.shard_mesh_dim, **newer)
        if hasattr(old, "reduce_scatter_process_group"):
            new.reduce_scatter_process_group = old.reduce_scatter_process_group
        group.mesh_info = new
        if after is old:
            group.post_forward_mesh_info = new

        def back() -> None:
            group.mesh_info = old
            if group.post_forward_mesh_info is new:
                group.post_forward_mesh_info = old

        return back


def _param_groups(module: FSDPModule) -> list[Any]:
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def param_groups(module: FSDPModule) -> list[ParameterGroup]:
    """What a module shards by itself: one group, or several since torch has per-parameter meshes (after 2.11)."""
    return [ParameterGroup(group, module._get_fsdp_state()) for group in _param_groups(module)]


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Inside a backward pass: call this when it is over."""
    if private.in_autograd():
        torch.autograd.Variable._execution_engine.queue_callback(call)


__all__ = (
    "AllGather",
    "DDPMeshInfo",
    "DefaultAllGather",
    "DefaultReduceScatter",
    "FSDPMeshInfo",
    "HSDPMeshInfo",
    "Parameter",
    "ParameterGroup",
    "ReduceScatter",
    "at_end_of_backward",
    "check",
    "param_groups",
)
