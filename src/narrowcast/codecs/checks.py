"""What a codec's encode, decode and reduce may be called with. Kernels get an address and know nothing of strides and
of torch's negative bit: how values lie in memory is seen to here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from narrowcast.kernels import (
    ALIGNMENT,
    MASK,
    NO_NOISE,
    Feedback,
    Noise,
    check_floats,
    check_integer,
    check_plain,
    check_same_device,
    check_seed,
    check_written,
    overlap,
)

if TYPE_CHECKING:
    from narrowcast.codecs.base import Codec


def lies_plainly(x: Tensor, n: int, dtype: torch.dtype) -> bool:
    """Whether a kernel that gets the address of x has n such values there."""
    is_such = isinstance(x, Tensor) and x.dtype == dtype and x.numel() == n
    return is_such and x.layout is torch.strided and x.is_contiguous() and not x.is_neg()


def _description(x: Tensor) -> str:
    """What it is instead, for an error."""
    if not isinstance(x, Tensor):
        return type(x).__name__
    if x.layout is not torch.strided:
        return f"{x.numel()} of {x.dtype} in layout {x.layout}"
    return f"{x.numel()} of {x.dtype}" + ("" if x.is_contiguous() and not x.is_neg() else ", not contiguous")


def flat(x: Tensor) -> Tensor:
    """The values of x in row-major order as a kernel takes them: x itself, or a copy."""
    if x.dim() == 1 and x.is_contiguous() and not x.requires_grad and not x.is_neg():
        return x
    return x.detach().resolve_neg().reshape(-1).contiguous()


def kernel_feedback(codec: Codec, feedback: Feedback) -> Feedback:
    """With the codec's own decay, and flat: kernels would take another residual for a table to broadcast."""
    residual = feedback.residual
    if residual.dim() == 1 and codec.kept_percent == 100:
        return feedback
    return Feedback(residual if residual.dim() == 1 else residual.view(-1), feedback.unit, codec.decay)


def write_back(values: Tensor | None, out: Tensor | None) -> None:
    """Where `flat` had to copy `out`, put the values where they belong."""
    if values is not None and out is not None and values.data_ptr() != out.data_ptr():
        out.detach().copy_(values.view(out.shape))


def check_noise(codec: Codec, noise: Noise) -> Noise:
    """The same with plain integers."""
    if noise == NO_NOISE:
        return NO_NOISE
    seed, stream, offset = noise.seed, noise.stream, noise.offset
    if type(seed) is type(stream) is type(offset) is int and 0 <= seed <= MASK and 0 <= stream <= MASK:  # noqa: SIM102
        if offset >= 0 and offset % ALIGNMENT == 0:
            return noise
    seed, stream = check_seed(codec, noise.seed), check_seed(codec, noise.stream)
    rule = f"cut between blocks, at a multiple of {ALIGNMENT}"
    offset = check_integer(codec, f"offset: {rule}", noise.offset)
    if offset < 0 or offset % ALIGNMENT:
        raise ValueError(f"encode with {codec}: offset={offset}; {rule}")
    return Noise(seed, stream, offset)


def check_scale(codec: Codec, scale: Tensor, like: Tensor) -> Tensor:
    """The same as a kernel takes it."""
    if not codec.takes_scale:
        raise ValueError(
            f"encode with {codec}: scale= is for codecs with one float32 scale for the tensor; leave it out"
        )
    if not isinstance(scale, Tensor) or scale.dtype != torch.float32 or scale.numel() != 1:
        raise TypeError(f"encode with {codec}: scale must be a float32 tensor with one element, got {scale!r}")
    check_plain(codec, scale, "scale")
    check_same_device(codec, "scale", scale, like)
    scale = scale.resolve_neg()
    # a look at a scale on a GPU would wait for all that runs there
    if scale.is_cpu:
        _check_scale_range(codec, float(scale))
    return scale


def _check_scale_range(codec: Codec, scale: float) -> None:
    low, high = torch.finfo(torch.float32).tiny, codec.largest_scale
    if not (low <= scale <= high or scale == 0 or math.isnan(scale)):
        raise ValueError(f"encode with {codec}: scale={scale:g}; give 0, NaN or a number from {low:g} to {high:g}")


def check_feedback(codec: Codec, feedback: Feedback, n: int, like: Tensor) -> None:
    residual, unit, _ = feedback
    if not 0 < unit < math.inf:
        raise ValueError(f"encode with {codec}: unit={unit}; the residual is kept in units of a positive number")
    if not lies_plainly(residual, n, torch.float32):
        got = _description(residual)
        raise ValueError(f"encode with {codec}: the residual must be {n} contiguous float32, got {got}")
    check_plain(codec, residual, "residual")
    check_same_device(codec, "the residual", residual, like)


def wire_for(codec: Codec, nbytes: int, out: Tensor | None, like: Tensor) -> Tensor:
    """A new wire, or `out` where it can be one."""
    if out is None:
        return torch.empty(nbytes, dtype=torch.uint8, device=like.device)
    if not lies_plainly(out, nbytes, torch.uint8):
        raise ValueError(f"encode with {codec}: out must be {nbytes} contiguous uint8, got {_description(out)}")
    check_plain(codec, out, "out")
    check_same_device(codec, "out", out, like)
    return out


def check_wires(codec: Codec, wires: Tensor | Sequence[Tensor], n: int) -> Tensor:
    """The first wire, after a look at all."""
    if isinstance(wires, Tensor):
        check_plain(codec, wires)
    if not len(wires):
        raise ValueError(f"reduce with {codec}: got no wires; give one for each rank")
    if isinstance(wires, Tensor) and (wires.dim() != 2 or (wires.numel() and wires.stride(1) != 1)):
        raise ValueError(f"reduce with {codec}: got a tensor of shape {tuple(wires.shape)}; give one wire in each row")
    expected = codec.nbytes(n)
    for wire in wires if not isinstance(wires, Tensor) else wires[:1]:
        if not lies_plainly(wire, expected, torch.uint8):
            raise ValueError(
                f"reduce with {codec}: {n} values take {expected} bytes, got {_description(wire)}; "
                "pass whole wires, contiguous uint8, and their own n"
            )
        check_same_device(codec, "a wire", wire, wires[0])
        check_plain(codec, wire)
    return wires[0]


def check_reduced(
    codec: Codec, written: Mapping[str, Tensor | None], wires: Tensor | Sequence[Tensor], scale: Tensor | None
) -> None:
    """What a reduction writes must lie apart from each of its wires."""
    outputs = [x for x in written.values() if x is not None]
    if outputs:
        # row by row only where the rows' stretch of memory is touched at all
        together = isinstance(wires, Tensor) and not any(overlap(x, wires) for x in outputs)
        read = {} if together else {f"wire {rank}": wire for rank, wire in enumerate(wires)}
        check_written(codec, written, {**read, "scale": scale})


def check_values(codec: Codec, name: str, values: Tensor, n: int, like: Tensor) -> None:
    check_floats(codec, values)
    check_same_device(codec, name, values, like)
    if values.numel() != n:
        got = values.numel()
        raise ValueError(f"decode with {codec}: {name} holds {got} values, not n={n}; give a tensor of {n}")


def output_for(codec: Codec, wire: Tensor, n: int, out: Tensor | None, accumulate: bool, dtype: torch.dtype) -> Tensor:
    """New values, or `out` where it can hold them."""
    if not isinstance(wire, Tensor) or wire.dtype != torch.uint8:
        got = wire.dtype if isinstance(wire, Tensor) else f"of type {type(wire).__name__}"
        raise TypeError(f"decode with {codec}: the wire is {got}; give the uint8 tensor that encode returned")
    check_plain(codec, wire)
    if out is None:
        if accumulate:
            raise ValueError(f"decode with {codec}: accumulate=True adds to out; give out=")
        out = torch.empty(n, dtype=dtype, device=wire.device)
        check_values(codec, "out", out, n, wire)
    else:
        check_values(codec, "out", out, n, wire)
        check_written(codec, {"out": out}, {"wire": wire})
    expected = codec.nbytes(n, out.dtype)
    if wire.numel() != expected:
        raise ValueError(
            f"decode with {codec}: {n} values take {expected} bytes, got {wire.numel()}; "
            "pass the whole wire and its own n"
        )
    return out
