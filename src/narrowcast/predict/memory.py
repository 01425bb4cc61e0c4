"""What a rank must hold for a setup: parameters, gradients, optimizer, residuals and our buffers. Not activations."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from narrowcast.codecs import codec as codec_named
from narrowcast.predict.model import Profile, TensorTime, ddp_buckets, wire_sizes
from narrowcast.predict.parallelism import MICRO_BATCHES, SPLIT
from narrowcast.predict.sharded import units_of
from narrowcast.predict.step import Setup

VALUE = 4
"""Bytes: parameters, gradients and residuals are float32."""
MOMENTS = 2
"""Values of Adam for each parameter."""
WIRES = 3
"""What leaves, what arrives and what is gathered of the largest call."""
AHEAD = 2
"""Units of FSDP that are whole at once: the one that computes, and the next one."""

SHARDED = ("fsdp", "hsdp")


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank."""

    parameters: float
    gradients: float
    optimizer: float
    residuals: float
    buffers: float

    @property
    def total(self) -> float:
        return sum(asdict(self).values())


def needed(profile: Profile, setup: Setup, mode: str, inside: int) -> Memory:
    """For a way to share the work; inside: the ranks of a node, which hsdp shards over."""
    summed = _summed(profile, mode)
    whole = sum(tensor.numel for tensor in summed)
    held = whole + (profile.numel - whole) / (inside if mode == "hsdp" else setup.world)
    buffers = _buffers(profile, setup, mode, summed) if setup.world > 1 else 0.0
    residuals = _residuals(setup, profile.numel if mode in SHARDED else whole, mode in SHARDED)
    return Memory(VALUE * held, VALUE * held, VALUE * MOMENTS * held, residuals, buffers)


def _summed(profile: Profile, mode: str) -> tuple[TensorTime, ...]:
    """What every rank holds whole, and whose gradients it adds up with the others; of the rest it holds its part."""
    if mode in (*SHARDED, "tensor", "pipeline", "model"):
        return ()
    if mode == "hybrid":
        return tuple(tensor for tensor in profile.tensors if not tensor.name.startswith(SPLIT))
    return profile.tensors


def _buffers(profile: Profile, setup: Setup, mode: str, summed: tuple[TensorTime, ...]) -> float:
    """DDP keeps a copy of all gradients in its buckets, FSDP whole parameters and gradients of some units; and the
    wires of the largest call."""
    if mode in SHARDED:
        calls = [unit.values for unit in units_of(profile.tensors)] or [0]
        copied = (AHEAD + 1) * max(calls)
    else:
        calls = [bucket.values for bucket in ddp_buckets(summed)] if summed else []
        copied = sum(tensor.numel for tensor in summed)
    samples = {"tensor": setup.world, "pipeline": 1 / MICRO_BATCHES, "model": 1, "hybrid": 1}.get(mode, 0)
    largest = max(*calls, int(samples * profile.batch * profile.activations), 0)
    # the backend adds float32 up in place, and the factors of low rank are a hundredth of a matrix
    small = setup.wire in ("fp32", "as-is") or codec_named(setup.wire).rank or not largest
    return float(VALUE * copied + (0 if small else WIRES * wire_sizes(setup.wire, (largest,))[0]))


def _residuals(setup: Setup, sent: float, sharded: bool) -> float:
    """Of all gradients that a rank sends, and of the sums that it owns."""
    if setup.world == 1 or not codec_named(setup.wire).feedback:
        return 0.0
    return VALUE * (sent + (0.0 if sharded else sent / setup.world))
