"""What the caller of a collective gave, looked at in the caller's thread: a wrong call must not reach the others."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast.codecs import Codec, refuse_differences, refuse_low_rank
from narrowcast.codecs import codec as codec_named
from narrowcast.collectives.algorithms import record
from narrowcast.collectives.algorithms.context import Flat
from narrowcast.collectives.residuals import Residuals
from narrowcast.collectives.runtime.channel import Channel
from narrowcast.kernels import FLOATS, check_integer, check_plain, shares_places

Tensors = Tensor | Sequence[Tensor]
Spec = str | Codec
AS_IS = codec_named("as-is")


def inputs(what: str, tensors: Tensors, like: Tensors | None = None) -> list[Tensor]:
    """As a list. `like` are the other tensors of the call, which must have the same type."""
    listed = _as_list(what, tensors)
    for tensor in listed:
        if tensor.dtype not in FLOATS:
            raise TypeError(
                f"{what}: got {tensor.dtype}; codecs take float32, float16 and bfloat16, use torch.distributed"
            )
        check_plain(what, tensor)
    alike = listed if like is None else listed + _as_list(what, like)
    if len(alike) > 1 and len({(t.dtype, t.device) for t in alike}) > 1:
        raise TypeError(f"{what}: all tensors of one call must have one dtype and one device")
    return listed


def outputs(what: str, tensors: Tensors, like: Tensors | None = None) -> list[Tensor]:
    """The same for tensors that are written: each of their elements has a place of its own."""
    listed = inputs(what, tensors, like)
    for tensor in listed:
        if shares_places(tensor):
            raise ValueError(
                f"{what}: elements of a tensor of shape {list(tensor.shape)} and strides {list(tensor.stride())} share "
                "their memory, so there is no place for the result; give a copy (clone, contiguous)"
            )
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise ValueError(
                f"{what}: got a tensor of inference_mode outside of it; call in inference_mode, or clone it"
            )
    return listed


def _as_list(what: str, tensors: Tensors) -> list[Tensor]:
    if isinstance(tensors, Tensor):
        return [tensors]
    listed = list(tensors) if isinstance(tensors, Sequence) else [tensors]
    for entry in listed:
        if not isinstance(entry, Tensor):
            raise TypeError(f"{what}: takes a tensor or a flat list of tensors, got {_kind(tensors)} of {_kind(entry)}")
    return listed


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def plain_codec(what: str, spec: Spec) -> Codec:
    """A codec for calls that keep nothing from one to the next."""
    codec = codec_named(spec)
    refuse_low_rank(what, codec)
    refuse_differences(what, codec)
    if codec.feedback:
        raise ValueError(f"{what} with {codec}: only all_reduce has error feedback; leave out +ef")
    return codec


def check_algorithm(
    name: str,
    codec: Codec,
    world: int,
    nodes: Sequence[Sequence[int]] | None = None,
    *,
    inner: Codec = AS_IS,
    accumulator: str = "float32",
    feedback: bool = False,
) -> None:
    """Refuse what an algorithm cannot do: all that it demands of a call, in one place. feedback: it has residuals."""
    record.check(name, codec, world, nodes)
    if accumulator not in ("float32", "low"):
        raise ValueError(f"all_reduce: accumulator={accumulator!r}; take 'float32' or 'low'")
    if accumulator == "low":
        record.check_accumulator(name, "all_reduce: accumulator", "adds in float32")
    if feedback:
        record.check_feedback(name)
    record.check_inner(codec, inner)
    if not record.ALGORITHMS[name].takes_nodes and inner != AS_IS:
        raise ValueError(
            f"all_reduce: inner={inner} is the spec inside a node, and {name!r} knows no nodes; "
            "give nodes=, or leave out inner="
        )


def check_residuals(residuals: Residuals | None, codec: Codec, algorithm: str, flat: Flat) -> None:
    """They are there where the codec needs them, and have one place for each value."""
    if residuals is None:
        if codec.feedback:
            raise ValueError(
                f"all_reduce with {codec}: +ef needs residuals=, which keep from call to call what is lost"
            )
        return
    for name, residual in (("first", residuals.first), ("second", residuals.second)):
        is_needed = name == "first" or record.ALGORITHMS[algorithm].residual_shots == 2
        if residual.numel() == 0 and not is_needed:
            continue
        is_flat = residual.dim() == 1 and residual.is_contiguous() and residual.dtype == torch.float32
        if not is_flat or residual.numel() != flat.numel or residual.device != flat.device:
            raise ValueError(
                f"all_reduce: residuals.{name} must be {flat.numel} float32 values in one row on {flat.device} for "
                f"{algorithm!r}, got {residual.dtype} of shape {list(residual.shape)} on {residual.device}; "
                f"make it with Residuals.zeros({flat.numel}, device=...)"
            )
    if not (residuals.unit > 0 and math.isfinite(residuals.unit)):
        raise ValueError(f"all_reduce: residuals.unit={residuals.unit}; residuals are kept in units above 0")


def peer_rank(what: str, channel: Channel, group: dist.ProcessGroup | None, rank: int | None, own: int | None) -> int:
    peer = group_rank(what, channel, group, rank, own)
    if peer == channel.rank:
        raise ValueError(f"{what}: rank {peer} is this one; give another rank of the group")
    return peer


def group_rank(what: str, channel: Channel, group: dist.ProcessGroup | None, rank: int | None, own: int | None) -> int:
    """The rank in the group; `own` is that already."""
    if (rank is None) == (own is None):
        raise ValueError(f"{what}: give either the global rank or its group_ twin, not both and not neither")
    if rank is not None:
        own = rank if group is None else dist.get_group_rank(group, rank)
    assert own is not None
    if not 0 <= own < channel.world:
        raise ValueError(f"{what}: there is no rank {own} in a group of {channel.world}")
    return own


def split_sizes(what: str, flat: Flat, one_tensor: bool, sizes: Sequence[int] | None, world: int) -> list[int]:
    if sizes is None:
        return parts(what, flat, one_tensor, world)
    listed = [check_integer(what, "split sizes are integers", size) for size in sizes]
    if len(listed) != world or sum(listed) != flat.numel or min(listed) < 0:
        raise ValueError(
            f"{what}: split sizes {listed} must be {world} numbers that add up to {flat.numel}, none below 0"
        )
    return listed


def parts(what: str, flat: Flat, one_tensor: bool, world: int) -> list[int]:
    """The length of each rank's part."""
    if not one_tensor:
        if len(flat.lengths) != world:
            raise ValueError(f"{what}: got a list of {len(flat.lengths)} tensors for {world} ranks; give one for each")
        return flat.lengths
    if flat.numel % world:
        raise ValueError(f"{what}: {flat.numel} values do not divide into {world} parts; pad, or give a list")
    return [flat.numel // world] * world


def expect(what: str, flat: Flat, numel: int) -> None:
    if flat.numel != numel:
        raise ValueError(f"{what}: this rank's part has {numel} values, the tensor given for it {flat.numel}")
