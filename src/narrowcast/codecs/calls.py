"""What `Codec.encode`, `decode`, `reduce` and their kin do when they run.

A kernel on a GPU takes microseconds, so the host must not take many more. Each call first asks, in one breath, whether
everything is as it mostly is: plain contiguous memory of the right types and sizes on one device, nothing in the way of
anything else. Only where the answer is no do the checks look at one thing after another, to copy it or to refuse it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from narrowcast.codecs.checks import (
    check_feedback,
    check_noise,
    check_reduced,
    check_scale,
    check_values,
    check_wires,
    flat,
    kernel_feedback,
    output_for,
    wire_for,
    write_back,
)
from narrowcast.kernels import (
    FLOATS,
    Feedback,
    Finish,
    Noise,
    Stretch,
    are_plain_rows,
    check_count,
    check_floats,
    check_written,
    mark_written,
    ops,
    stands_alone,
)

if TYPE_CHECKING:
    from narrowcast.codecs.base import Codec

Wires = Tensor | Sequence[Tensor]


def encode(
    codec: Codec, x: Tensor, noise: Noise, scale: Tensor | None, feedback: Feedback | None, out: Tensor | None
) -> Tensor:
    """See `Codec.encode`."""
    if not _encodes_as_given(codec, x, scale, feedback, out):
        return _encode_carefully(codec, x, noise, scale, feedback, out)
    noise, dtype, residual = check_noise(codec, noise), x.dtype, None
    if feedback is not None:
        dtype, residual = torch.float32, feedback.residual
    wire = out
    if wire is None:
        wire = torch.empty(codec.nbytes(x.numel(), dtype), dtype=torch.uint8, device=x.device)
    kept = None if feedback is None else kernel_feedback(codec, feedback)
    ops.encode(codec.plan_for(dtype), x if x.dim() == 1 else x.view(-1), wire, noise, scale, kept)
    mark_written(out, residual)
    return wire


def _encodes_as_given(
    codec: Codec, x: Tensor, scale: Tensor | None, feedback: Feedback | None, out: Tensor | None
) -> bool:
    """Whether nothing of this must be copied or refused."""
    if type(x) is not Tensor or x.dtype not in FLOATS or not (x.is_cuda or x.is_cpu):
        return False
    taken: list[Stretch] = []
    device, n, dtype = x.device, x.numel(), x.dtype
    if not stands_alone(x, n, dtype, device, taken):
        return False
    if feedback is not None:
        dtype = torch.float32
    nbytes = 0 if out is None else codec.nbytes(n, dtype)
    return _writes_as_given(codec, n, nbytes, device, taken, scale, feedback, out)


def _writes_as_given(
    codec: Codec,
    n: int,
    nbytes: int,
    device: torch.device,
    taken: list[Stretch],
    scale: Tensor | None,
    feedback: Feedback | None,
    out: Tensor | None,
) -> bool:
    if out is not None and not stands_alone(out, nbytes, torch.uint8, device, taken):
        return False
    if feedback is not None:
        residual, unit, _ = feedback
        if not (0 < unit < math.inf and stands_alone(residual, n, torch.float32, device, taken)):
            return False
    # a scale on the host is looked at
    return scale is None or (
        codec.takes_scale and device.type == "cuda" and stands_alone(scale, 1, torch.float32, device, taken)
    )


def _encode_carefully(
    codec: Codec, x: Tensor, noise: Noise, scale: Tensor | None, feedback: Feedback | None, out: Tensor | None
) -> Tensor:
    check_floats(codec, x)
    noise = check_noise(codec, noise)
    if scale is not None:
        scale = check_scale(codec, scale, x)
    n, dtype, residual = x.numel(), x.dtype, None
    if feedback is not None:
        check_feedback(codec, feedback, n, x)
        dtype, residual = torch.float32, feedback.residual
    wire = wire_for(codec, codec.nbytes(n, dtype), out, x)
    if out is not None or residual is not None:
        check_written(codec, {"out": out, "residual": residual}, {"x": x, "scale": scale})
    if n:
        kept = None if feedback is None else kernel_feedback(codec, feedback)
        ops.encode(codec.plan_for(dtype), flat(x), wire, noise, scale, kept)
        mark_written(out, residual)
    return wire


def reduce(
    codec: Codec,
    wires: Wires,
    n: int,
    noise: Noise,
    scale: Tensor | None,
    feedback: Feedback | None,
    finish: Finish,
    out: Tensor | None,
    decoded: Tensor | None,
) -> Tensor:
    """See `Codec.reduce`."""
    if not _reduces_as_given(codec, wires, n, scale, feedback, out, decoded):
        return _reduce_carefully(codec, wires, n, noise, scale, feedback, finish, out, decoded)
    assert isinstance(wires, Tensor)
    noise, wire, values = check_noise(codec, noise), out, decoded
    if wire is None:
        wire = torch.empty(wires.shape[1], dtype=torch.uint8, device=wires.device)
    if values is not None and values.dim() != 1:
        values = values.view(-1)
    kept = None if feedback is None else kernel_feedback(codec, feedback)
    ops.reduce(codec.plan_for(torch.float32), wires, n, wire, noise, scale, kept, finish, values)
    mark_written(out, None if feedback is None else feedback.residual, decoded)
    return wire


def _reduces_as_given(
    codec: Codec,
    wires: Wires,
    n: int,
    scale: Tensor | None,
    feedback: Feedback | None,
    out: Tensor | None,
    decoded: Tensor | None,
) -> bool:
    """Whether nothing of this must be copied or refused; a list of wires must on a GPU."""
    taken: list[Stretch] = []
    if type(wires) is not Tensor or type(n) is not int or n <= 0 or not (wires.is_cuda or wires.is_cpu):
        return False
    device, nbytes = wires.device, codec.nbytes(n)
    if not are_plain_rows(wires, nbytes, taken):
        return False
    if decoded is not None and not _holds_as_given(decoded, n, device, taken):
        return False
    return _writes_as_given(codec, n, nbytes, device, taken, scale, feedback, out)


def _holds_as_given(values: Tensor, n: int, device: torch.device, taken: list[Stretch]) -> bool:
    is_such = type(values) is Tensor and values.dtype in FLOATS
    return is_such and stands_alone(values, n, values.dtype, device, taken)


def _reduce_carefully(
    codec: Codec,
    wires: Wires,
    n: int,
    noise: Noise,
    scale: Tensor | None,
    feedback: Feedback | None,
    finish: Finish,
    out: Tensor | None,
    decoded: Tensor | None,
) -> Tensor:
    n = check_count(codec, n)
    first = check_wires(codec, wires, n)
    noise = check_noise(codec, noise)
    if scale is not None:
        scale = check_scale(codec, scale, first)
    if feedback is not None:
        check_feedback(codec, feedback, n, first)
    if decoded is not None:
        check_values(codec, "decoded", decoded, n, first)
    wire, residual = wire_for(codec, codec.nbytes(n), out, first), None if feedback is None else feedback.residual
    check_reduced(codec, {"out": out, "residual": residual, "decoded": decoded}, wires, scale)
    if n:
        values, kept = None if decoded is None else flat(decoded), feedback and kernel_feedback(codec, feedback)
        ops.reduce(codec.plan_for(torch.float32), wires, n, wire, noise, scale, kept, finish, values)
        write_back(values, decoded)
        mark_written(out, residual, decoded)
    return wire


def decode(codec: Codec, wire: Tensor, n: int, out: Tensor | None, accumulate: bool, dtype: torch.dtype) -> Tensor:
    """See `Codec.decode`."""
    if out is None or not _decodes_as_given(codec, wire, n, out):
        return _decode_carefully(codec, wire, n, out, accumulate, dtype)
    ops.decode(codec.plan_for(out.dtype), wire, n, out if out.dim() == 1 else out.view(-1), accumulate)
    mark_written(out)
    return out


def _decodes_as_given(codec: Codec, wire: Tensor, n: int, out: Tensor) -> bool:
    """Whether nothing of this must be copied or refused."""
    if type(out) is not Tensor or out.dtype not in FLOATS or type(n) is not int or not (out.is_cuda or out.is_cpu):
        return False
    taken: list[Stretch] = []
    device = out.device
    if not stands_alone(out, n, out.dtype, device, taken):
        return False
    return stands_alone(wire, codec.nbytes(n, out.dtype), torch.uint8, device, taken) and wire.dim() == 1


def _decode_carefully(
    codec: Codec, wire: Tensor, n: int, out: Tensor | None, accumulate: bool, dtype: torch.dtype
) -> Tensor:
    n, is_new = check_count(codec, n), out is None
    out = output_for(codec, wire, n, out, accumulate, dtype)
    if n:
        values = flat(out)
        ops.decode(codec.plan_for(out.dtype), wire.contiguous(), n, values, accumulate)
        write_back(values, out)
        if not is_new:
            mark_written(out)
    return out
