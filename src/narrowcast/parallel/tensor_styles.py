"""Tensor parallelism by `parallelize_module`: torch's own styles, their redistributions through codecs.

The classes take torch's arguments and `forward=`, `backward=` and `seed=`. DTensor shards the weights and computes as
ever; only where it would redistribute an activation or its gradient do our collectives run instead.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import style

from narrowcast.kernels import FLOATS
from narrowcast.parallel.tensor import PARTIAL, WHOLE, Layout, move
from narrowcast.parallel.wires import Direction, Spec, Wires, activation_codecs, remember


def redistribute(x: DTensor, target: Placement, wires: Wires) -> DTensor:
    """`x.redistribute` through codecs, of the gradient too, whatever layout that arrives in."""
    if x.dtype in FLOATS:
        return _Redistribute.apply(x, target, wires)
    if x.placements != (_normal(target, x.dim()),):
        wires.note(f"a tensor of {x.dtype} is redistributed by torch, as it is")
    return x.redistribute(placements=(target,))


def _enter(x: object, mesh: DeviceMesh, layout: Placement, desired: Placement, wires: Wires, what: object) -> DTensor:
    """A module's input in the layout that it desires; a plain tensor has `layout`."""
    if isinstance(x, DTensor):
        # as it should be already: its gradient, perhaps terms of a sum, is the business of whoever made it
        return x if x.placements == (_normal(desired, x.dim()),) else redistribute(x, desired, wires)
    if not isinstance(x, Tensor):
        raise TypeError(f"{type(what).__name__}: the input is {type(x).__name__}; give a tensor")
    # even where the layouts are the same: the gradient of what all ranks share comes as terms of a sum
    return redistribute(DTensor.from_local(x, mesh, (layout,), run_check=False), desired, wires)


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, target: Placement, wires: Wires) -> DTensor:
        ctx.source, ctx.wires = x.placements[0], wires
        return _move_local(x, target, wires, Direction.FORWARD)

    @staticmethod
    def backward(ctx: Any, *gradients: DTensor) -> tuple[DTensor | None, ...]:
        (gradient,) = gradients
        # the gradient of terms of a sum is that of the sum; DTensor asks for the same
        target = Replicate() if ctx.source.is_partial() else ctx.source
        return _move_local(gradient, target, ctx.wires, Direction.BACKWARD), None, None


def _move_local(x: DTensor, target: Placement, wires: Wires, direction: Direction) -> DTensor:
    source, local = x.placements[0], x._local_tensor
    if hasattr(source, "mask_buffer"):
        # rows of an embedding that other ranks hold: zeroed before the sum, as torch does
        source.mask_buffer.apply_mask(local)
        source.mask_buffer.release_mask()
    there = _layout(source, x.dim())
    length = x.shape[there] if isinstance(there, int) else None
    local = move(local, there, _layout(target, x.dim()), wires, direction, length)
    placements = (_normal(target, x.dim()),)
    return DTensor.from_local(local, x.device_mesh, placements, run_check=False, shape=x.shape, stride=x.stride())


def _layout(placement: Placement, dims: int) -> Layout:
    if isinstance(placement, Shard):
        return placement.dim % dims
    if isinstance(placement, Partial):
        if placement.reduce_op != "sum":
            raise ValueError(
                f"parallel styles: a partial {placement.reduce_op} cannot travel through codecs, only a sum"
            )
        return PARTIAL
    if isinstance(placement, Replicate):
        return WHOLE
    raise ValueError(f"parallel styles: layout {placement} is unknown; take Shard(dim), Replicate() or Partial()")


def _normal(placement: Placement, dims: int) -> Placement:
    return Shard(placement.dim % dims) if isinstance(placement, Shard) else placement


class _Narrow:
    """What the styles below share: specs, and wires of its own for each module that a style is applied to."""

    entry: Wires
    exit: Wires

    def __init__(self, *, forward: Spec = "as-is", backward: Spec | None = None, seed: int = 0, **layouts: Any) -> None:
        super().__init__(**layouts)
        # a wrong spec is refused now, not when the style is applied
        activation_codecs(type(self).__name__, forward, backward)
        self.forward, self.backward, self.seed = forward, backward, seed

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # torch's own _apply, of a copy of this style
        style_of_torch: Any = super(_Narrow, self._for_module(module, device_mesh))
        applied: nn.Module = style_of_torch._apply(module, device_mesh)
        return applied

    def _wires(self, module: nn.Module, mesh: DeviceMesh, name: str) -> Wires:
        wires = Wires(self.forward, self.backward, group=mesh.get_group(), name=name, seed=self.seed)
        remember(module, wires)
        return wires

    def _check_mesh(self, mesh: DeviceMesh) -> None:
        if mesh.ndim != 1:
            names = mesh.mesh_dim_names
            example = f"mesh[{names[-1]!r}]" if names else "a mesh with one dimension"
            raise ValueError(
                f"{type(self).__name__}: the mesh has {mesh.ndim} dimensions {names or tuple(mesh.shape)}; "
                f"tensor parallelism goes along one, give {example}"
            )

    def _for_module(self, module: nn.Module, mesh: DeviceMesh) -> Any:
        """A copy of the style for one module: it may be applied to many, each of which has noise and counters."""
        self._check_mesh(mesh)
        own = copy.copy(self)
        own.entry, own.exit = self._wires(module, mesh, "input"), self._wires(module, mesh, "output")
        return own


class _Layer(_Narrow):
    """The two ends of a layer with sharded weights. Torch's styles call these two functions by their names."""

    def _prepare_input_fn(
        self, layouts: Any, desired: Any, module: nn.Module, inputs: Any, mesh: DeviceMesh
    ) -> DTensor:
        return _enter(inputs[0], mesh, layouts[0], desired[0], self.entry, self)

    def _prepare_output_fn(
        self, layouts: Any, local: bool, module: nn.Module, output: DTensor, mesh: DeviceMesh
    ) -> Tensor:
        if output.placements != (_normal(layouts[0], output.dim()),):
            output = redistribute(output, layouts[0], self.exit)
        return output.to_local() if local else output


class ColwiseParallel(_Layer, style.ColwiseParallel):
    """torch's `ColwiseParallel`, its input and output through codecs."""


class RowwiseParallel(_Layer, style.RowwiseParallel):
    """torch's `RowwiseParallel`, its input and output through codecs."""


class SequenceParallel(_Narrow, style.SequenceParallel):
    """torch's `SequenceParallel`; a DTensor that comes with another layout is brought to the sequence's through codecs.

    A plain tensor is taken for the rank's own shard already, as torch does, and then nothing travels.
    """

    def _prepare_input_fn(self, sharding: Any, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> DTensor:  # type: ignore[override]
        return _enter(inputs[0], mesh, sharding[0], sharding[0], self.entry, self)


class PrepareModuleInput(_Narrow, style.PrepareModuleInput):
    """torch's `PrepareModuleInput`, its redistributions through codecs."""

    def _prepare_input_arg(
        self, input: Any, mesh: DeviceMesh, input_layout: Placement | None, desired_layout: Placement | None
    ) -> Any:
        if input_layout is None:
            return input
        entered = _enter(input, mesh, input_layout, desired_layout or input_layout, self.entry, self)
        return entered.to_local() if self.use_local_output else entered


class PrepareModuleOutput(_Narrow, style.PrepareModuleOutput):
    """torch's `PrepareModuleOutput`, its redistributions through codecs."""

    def _prepare_out_fn(self, outputs: Any, device_mesh: DeviceMesh) -> Any:
        results = outputs if isinstance(outputs, tuple) else (outputs,)
        if len(results) != len(self.output_layouts):
            raise ValueError(
                f"PrepareModuleOutput: the module gives {len(results)} outputs for {len(self.output_layouts)} "
                "output_layouts; give a layout, or None, for each"
            )
        triples = zip(results, self.output_layouts, self.desired_output_layouts, strict=True)
        prepared = tuple(self._prepare(x, device_mesh, layout, desired) for x, layout, desired in triples)
        return prepared[0] if len(prepared) == 1 else prepared

    def _prepare(self, x: Any, mesh: DeviceMesh, layout: Placement | None, desired: Placement) -> Any:
        if layout is None:
            return x
        entered = _enter(x, mesh, layout, desired, self.exit, self)
        return entered.to_local() if self.use_local_output else entered
