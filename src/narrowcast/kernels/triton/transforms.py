"""Transforms before a plan, on GPUs: a kernel for each direction, and the inner plan's own between."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from narrowcast.kernels.arithmetic import NO_FINISH, Feedback, Finish, decode_each, encode_each
from narrowcast.kernels.noise import NO_NOISE, Noise
from narrowcast.kernels.plan import Method, Plan, TransformPlan
from narrowcast.kernels.reference.rotation import Rotation
from narrowcast.kernels.triton import launch, sparse, top
from narrowcast.kernels.triton.recipe import DTYPES
from narrowcast.kernels.triton.shapes import MAX_IN_TILE, Tuning, pow2

KERNELS: dict[str, tuple[Any, Any]] = {
    "top": (top.top_forward, top.top_inverse),
    "spike": (sparse.spike_forward, sparse.spike_inverse),
}
"""By the transform's name: what takes apart, and what puts together."""
MAX_SIZE = 1 << 14
"""What a program's registers hold."""
WARP_VALUES = 1024
STEPS = {Rotation.name}
"""Transforms that are a step of the inner plan's own kernels, whatever that is."""
MAX_STEP_SPIKES, MAX_STEP_BITS = 4, 32
"""So many spikes of a block, with so many bits of places, may be one, too."""


class BlockNumbers:
    """The numbers of a plan for n values."""

    def __init__(self, plan: TransformPlan, n: int) -> None:
        transform = plan.transform
        self.size = transform.block
        self.whole, self.rest = divmod(n, self.size)
        self.blocks = self.whole + (self.rest > 0)
        full, last = transform.written(self.size), transform.written(self.rest)
        self.numbers = [one for pair in zip(full, last, strict=True) for one in pair]
        self.most, bytes_ = full[0], (full[3], last[3], full[4], last[4])
        self.width = pow2(self.size)
        self.room = min(self.width, 2 << self.most.bit_length()) + self.width // min(self.width, 16)
        """For places and bits of a block while the largest are looked for."""
        self.lows, self.highs = pow2(max(1, *bytes_[:2])), pow2(max(1, *bytes_[2:]))
        self.marks = pow2(max(8 * bytes_[2], 8 * bytes_[3], full[0]))
        self.options = Tuning(0, min(16, max(1, self.width // WARP_VALUES))).options()
        self.forward_options = Tuning(0, 1, 96).options() if transform.name == "top" else self.options


def is_step(plan: TransformPlan) -> bool:
    """Whether launch.py does all of a plan, in the kernels of the inner one."""
    if plan.transform.name in STEPS:
        return True
    inner = plan.inner
    if plan.transform.name != "spike" or not isinstance(inner, Plan) or inner.method is not Method.SCALED:
        return False
    spikes, bits = plan.transform.written(plan.block)[:2]
    return plan.block <= MAX_IN_TILE and spikes <= MAX_STEP_SPIKES and spikes * bits <= MAX_STEP_BITS


def why_not(plan: TransformPlan) -> str | None:
    """What speaks against the transform; its inner plan is another matter."""
    if is_step(plan):
        return None
    if plan.transform.name not in KERNELS:
        return f"+{plan.transform.name} is on the CPU only"
    if plan.block > MAX_SIZE:
        return f"blocks of more than {MAX_SIZE} values with +{plan.transform.name} are on the CPU only"
    return None


def _forward(
    plan: TransformPlan, x: Tensor, wire: Tensor, noise: Noise, feedback: Feedback | None, finish: Finish
) -> Tensor | None:
    """Encode; what was wanted comes back where there is a residual."""
    n = x.numel()
    shape, layout = BlockNumbers(plan, n), plan.layout(n)
    residual, _, _ = feedback or (x, 1.0, 1.0)
    kind = 0 if feedback is None else launch.unit_kind(feedback.unit, feedback.decay)
    kept = torch.empty(plan.transform.count(n), dtype=torch.float32, device=x.device)
    places = torch.empty(shape.blocks * shape.room, dtype=torch.int16, device=x.device)
    wanted = None if feedback is None else torch.empty(n, dtype=torch.float32, device=x.device)
    wire[plan.code_bytes(n) : layout.side] = 0
    with launch.on_device_of(x):
        KERNELS[plan.transform.name][0][(shape.blocks,)](
            x, residual, kept if wanted is None else wanted, kept, wire[layout.side :], places, shape.whole, shape.rest,
            *shape.numbers, float(finish.divide), float(finish.multiply),
            1.0 if feedback is None else float(feedback.weight), shape.size, shape.width, shape.lows, shape.highs,
            shape.most.bit_length(), DTYPES[x.dtype], wanted is not None, kind, finish.divide != 1.0,
            finish.multiply != 1.0, **shape.forward_options,
        )  # fmt: skip
    launch.encode(plan.inner, kept, wire[: layout.inner], plan.inner_noise(noise))
    return wanted


def _inverse(
    plan: TransformPlan,
    wire: Tensor,
    n: int,
    out: Tensor | None,
    accumulate: bool = False,
    finish: Finish = NO_FINISH,
    wanted: Tensor | None = None,
    feedback: Feedback | None = None,
) -> None:
    shape, layout = BlockNumbers(plan, n), plan.layout(n)
    kept = torch.empty(plan.transform.count(n), dtype=torch.float32, device=wire.device)
    launch.decode(plan.inner, wire[: layout.inner], len(kept), kept)
    unit, kind = 1.0, 0
    if feedback is not None:
        kind = launch.unit_kind(feedback.unit, feedback.decay)
        unit = float(feedback.unit) if kind == 2 else 1.0 / feedback.unit
    with launch.on_device_of(wire):
        KERNELS[plan.transform.name][1][(shape.blocks,)](
            kept if out is None else out, kept if wanted is None else wanted,
            kept if feedback is None else feedback.residual, kept, wire[layout.side :], shape.whole, shape.rest,
            *shape.numbers, float(finish.divide), float(finish.multiply), unit, shape.size, shape.width, shape.marks,
            0 if out is None else DTYPES[out.dtype], accumulate, out is not None, feedback is not None, kind,
            finish.divide != 1.0, finish.multiply != 1.0, **shape.options,
        )  # fmt: skip


def encode(
    plan: TransformPlan,
    x: Tensor,
    wire: Tensor,
    noise: Noise = NO_NOISE,
    scale: Tensor | None = None,
    feedback: Feedback | None = None,
) -> None:
    """See `kernels.ops.encode`."""
    _encode(plan, x, wire, noise, feedback, NO_FINISH, None)


def _encode(
    plan: TransformPlan,
    x: Tensor,
    wire: Tensor,
    noise: Noise,
    feedback: Feedback | None,
    finish: Finish,
    out: Tensor | None,
) -> None:
    if x.numel():
        wanted = _forward(plan, x, wire, noise, feedback, finish)
        if feedback is not None or out is not None:
            _inverse(plan, wire, x.numel(), out, wanted=wanted, feedback=feedback)


def decode(plan: TransformPlan, wire: Tensor, n: int, out: Tensor, accumulate: bool = False) -> None:
    """See `kernels.ops.decode`."""
    if n:
        _inverse(plan, wire, n, out, accumulate)


def sum_wires(plan: TransformPlan, wires: Tensor, n: int, out: Tensor, finish: Finish = NO_FINISH) -> None:
    """See `kernels.ops.sum_wires`."""
    for number, wire in enumerate(wires if n else ()):
        _inverse(plan, wire, n, out, number > 0, finish if number == len(wires) - 1 else NO_FINISH)


def reduce(
    plan: TransformPlan,
    wires: Tensor,
    n: int,
    wire: Tensor,
    noise: Noise = NO_NOISE,
    scale: Tensor | None = None,
    feedback: Feedback | None = None,
    finish: Finish = NO_FINISH,
    out: Tensor | None = None,
) -> None:
    """See `kernels.ops.reduce`."""
    total = torch.empty(n, dtype=torch.float32, device=wire.device)
    sum_wires(plan, wires, n, total)
    _encode(plan, total, wire, noise, feedback, finish, out)


def encode_rows(
    plan: TransformPlan,
    x: Tensor,
    per: int,
    wires: Tensor,
    noise: Noise = NO_NOISE,
    feedback: Feedback | None = None,
    pitch: int = 0,
) -> None:
    """See `kernels.ops.encode_rows`."""
    encode_each(encode, plan, x, per, wires, noise, feedback, pitch)


def decode_rows(plan: TransformPlan, wires: Tensor, per: int, out: Tensor, pitch: int = 0) -> None:
    """See `kernels.ops.decode_rows`."""
    decode_each(decode, plan, wires, per, out, pitch)
