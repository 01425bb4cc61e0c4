"""By low rank: which matrices travel together as DDP sends them, and what products take.

A call adds up the factors of its matrices, which is one sum or two of the codec that the spec names for them; the sums
cost what any others do. Around them a rank multiplies its matrices with few vectors, and makes vectors orthonormal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowcast.codecs import Codec, Matrix, error_report, factor_bytes
from narrowcast.codecs import codec as codec_named
from narrowcast.parallel import buckets as ddp
from narrowcast.parallel import policy
from narrowcast.predict.costs import Costs
from narrowcast.predict.model import Bucket, CallPlan, TensorTime, wire_sizes


@dataclass(frozen=True)
class ProductWork:
    """What a device does: bytes for each value of a matrix, without and with a residual, and kernels to launch."""

    product: tuple[int, int]
    finish: tuple[int, int]
    launches: tuple[int, int]
    """For a product, and to finish."""
    flops_a_byte: float
    """Of products, for each byte that a copy moves in the same time; 0: as the cluster's file says."""


# counted in kernels/low_rank.py; the products of one core of an EPYC make 20 Gflop/s where its copy moves 16 GB/s
ON_CPU = ProductWork((4, 8), (4, 16), (4, 8), 1.25)
ON_GPU = ProductWork((4, 8), (4, 16), (2, 10), 0.0)
VECTORS_A_READING = 4
GRAM_SCHMIDT = 8
"""Calls for a vector of it, and as many before, and two halving trees more; on a GPU it is one kernel after a copy."""


def low_rank_calls(made: Sequence[Bucket], wire: str, min_values: int, merged: bool = False) -> tuple[CallPlan, ...]:
    """What `attach` starts for DDP's buckets: matrices wait for one another until their factors have enough bytes."""
    codec, planned = codec_named(wire), list[CallPlan]()
    held: list[tuple[TensorTime, Matrix]] = []
    size = 0
    for number, bucket in enumerate(made):
        groups: dict[Codec, list[TensorTime]] = {}
        for tensor in bucket.tensors:
            groups.setdefault(choice_of(tensor, codec, min_values), []).append(tensor)
        for chosen, members in groups.items():
            if not chosen.rank:
                values = sum(tensor.numel for tensor in members)
                planned.append(CallPlan(values, bucket.ready, "fp32" if chosen.is_identity else str(chosen)))
                continue
            group = [(tensor, Matrix.of(tensor.shape)) for tensor in members]
            size, held = size + factor_bytes(codec, [matrix for _, matrix in group]), held + group
            if ddp.is_enough(size):
                planned.append(_joined(held, bucket.ready, wire))
                size, held = 0, []
        if held and number + 1 == len(made):
            planned.append(_joined(held, bucket.ready, wire))
    return _together(planned) if merged else tuple(planned)


def _together(planned: Sequence[CallPlan]) -> tuple[CallPlan, ...]:
    """Those by low rank, and the others as one call for each few that are small."""
    plain = [call for call in planned if not call.matrices]
    sizes = [wire_sizes(call.wire, (call.values,))[0] for call in plain]
    groups = [plain[first:end] for first, end in ddp.travel_together(sizes)]
    joined = [CallPlan(sum(call.values for call in group), group[-1].ready, group[0].wire) for group in groups]
    return tuple(sorted([call for call in planned if call.matrices] + joined, key=lambda call: call.ready))


def choice_of(tensor: TensorTime, codec: Codec, min_values: int) -> Codec:
    """What a tensor travels by."""
    if codec.rank and not tensor.shape and tensor.numel > 1 and tensor.numel >= min_values:
        raise ValueError(
            f"predict with {codec}: the bytes of low rank follow from shapes, and this model has none of "
            f"{tensor.name}; profile it again with `narrowcast profile`, or write shapes into its description, as in "
            "tensors = [[64, 3, 7, 7], [64]]"
        )
    info = policy.TensorInfo(tensor.name, tensor.shape or (tensor.numel,), torch.float32)
    return policy.choose(codec, info, 0, min_values).codec


def _joined(held: Sequence[tuple[TensorTime, Matrix]], ready: float, wire: str) -> CallPlan:
    return CallPlan(sum(tensor.numel for tensor, _ in held), ready, wire, tuple(matrix for _, matrix in held))


def product_seconds(made: Costs, wire: str, matrices: Sequence[Matrix]) -> Tensor:
    """What a rank computes around the sums of a call, [D]: as `probe` timed it, or from flops, bytes and launches."""
    codec = codec_named(wire)
    for speed in made.cluster.codecs:
        timed = codec_named(speed.wire)
        # what the factors travel by changes no product
        if timed.rank and (timed.transformed_by, timed.feedback) == (codec.transformed_by, codec.feedback):
            encode, decode, busy = made.timed(speed)
            sizes = torch.tensor([float(matrix.numel) for matrix in matrices], dtype=torch.float64)
            seconds, least = ((encode(n) + decode(n)) * busy * made.device_D[:, None] for n in (sizes, sizes[:1] * 0))
            if made.cluster.device.is_cpu:
                return seconds.sum(-1)
            # what a call takes however small its matrix is launching, which it does once, and a little for each more
            launches = (len(matrices) - 1) * _own_launches(codec, ON_GPU, _readings(codec, on_cpu=False))
            growing = (seconds - least).clamp_min(0).sum(-1)
            return least[:, 0] + growing + launches * made.cluster.device.launch_us / 1e6
    return computed_seconds(made, codec, matrices) * made.device_D


def computed_seconds(made: Costs, codec: Codec, matrices: Sequence[Matrix]) -> float:
    """Where nobody timed it."""
    device = made.cluster.device
    if device.memory_gbyte <= 0:
        problem = f"neither [[codec]] nor device.memory_gbyte says how fast {codec} is"
        raise ValueError(f"cluster {made.cluster.name}: {problem}")
    on_cpu, memory = device.is_cpu, device.memory_gbyte * 1e9
    work = ON_CPU if on_cpu else ON_GPU
    products = 1 if codec.sends_one_factor else 2
    values, flops = sum(matrix.numel for matrix in matrices), work.flops_a_byte * memory or device.flops
    readings = _readings(codec, on_cpu)
    moved = values * (products * readings * work.product[codec.feedback] + work.finish[codec.feedback]) / memory
    multiplied = values * 2 * codec.rank * (products + 1) / flops if flops else 0.0
    launches = len(matrices) * _own_launches(codec, work, readings)
    launches += sum(_gram_schmidt(codec, matrices, on_left, on_cpu) for on_left in (False, True)) * products // 2
    return moved + multiplied + launches * device.launch_us / 1e6


def _readings(codec: Codec, on_cpu: bool) -> int:
    """On a GPU some vectors share a reading of the matrix, on the CPU all do."""
    return 1 if on_cpu else -(-codec.rank // VECTORS_A_READING)


def _own_launches(codec: Codec, work: ProductWork, readings: int) -> int:
    """Of kernels that take one matrix alone."""
    products = 1 if codec.sends_one_factor else 2
    return products * readings * work.launches[0] + work.launches[1]


def _gram_schmidt(codec: Codec, matrices: Sequence[Matrix], on_left: bool, on_cpu: bool) -> int:
    """How many kernels make the factors of one side orthonormal: on the CPU those of one power of two go together."""
    if not on_cpu:
        return 2
    powers = {(matrix.length(on_left) - 1).bit_length() for matrix in matrices}
    return sum(GRAM_SCHMIDT + codec.rank * (GRAM_SCHMIDT + 2 * power) for power in powers)


def lost_db(gradient: Tensor, codec: Codec) -> float:
    """Energy of a gradient over that of what its wire, once warm, does not bring, in dB."""
    fit = codec.for_shape(gradient.shape)[0]
    return error_report(gradient.float() if fit.rank else gradient.float().flatten(), fit).snr_db
