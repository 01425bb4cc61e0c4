"""What a rank must hold for a setup: parameters, gradients, optimizer, residuals and our buffers. Not activations."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from narrowcast.codecs import codec as codec_named
from narrowcast.predict.model import Profile, ddp_buckets, wire_sizes
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
    shards = {"fsdp": setup.world, "hsdp": inside, "tensor": setup.world, "pipeline": setup.world}.get(mode, 1)
    held, sharded = profile.numel / shards, mode in ("fsdp", "hsdp")
    calls = [unit.values for unit in (units_of if sharded else ddp_buckets)(profile.tensors)] or [0]
    buffers = 0.0
    if setup.world > 1:
        whole = AHEAD * max(calls) + max(calls) if sharded else held
        # the backend adds float32 up in place, and the factors of low rank are a hundredth of a matrix
        small = setup.wire in ("fp32", "as-is") or codec_named(setup.wire).rank
        wires = 0 if small else WIRES * wire_sizes(setup.wire, (max(calls),))[0]
        # DDP keeps a copy of all gradients in its buckets, FSDP whole parameters and gradients of some units
        buffers = float(VALUE * whole + wires)
    return Memory(
        VALUE * held, VALUE * held, VALUE * MOMENTS * held, _residuals(profile, setup, held, sharded), buffers
    )


def _residuals(profile: Profile, setup: Setup, held: float, sharded: bool) -> float:
    """Of all that a rank sends, and of the sums that it owns."""
    if setup.world == 1 or not codec_named(setup.wire).feedback:
        return 0.0
    sent = profile.numel if sharded else held
    return VALUE * (sent + (0.0 if sharded else held / setup.world))
