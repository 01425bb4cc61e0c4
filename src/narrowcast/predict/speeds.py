"""How fast codecs are where a cluster was not probed: shares of a copy's bytes a second, by what is done to values.

Of one thread of an EPYC with AVX-512, and of an H200: `narrowcast bench codecs` counts so, a codec's bytes read and
written. Where a file has a timing of the wire itself, or of another with the same transform, that is taken.
"""

from __future__ import annotations

from typing import NamedTuple

from narrowcast.codecs import Codec
from narrowcast.codecs import codec as codec_named
from narrowcast.predict.cluster import Cluster, CodecSpeed


class CopyShare(NamedTuple):
    """Of the copy's bytes a second."""

    encode: float
    decode: float


class WireSpeed(NamedTuple):
    """What is known of how fast a wire's codec is."""

    timed: CodecSpeed | None
    """Of it, or of one that is much like it; else `share` of a copy."""
    share: CopyShare
    bits: float
    feedback: bool


WHOLE = CopyShare(1.0, 1.0)
"""A codec without a transform reads and writes at the speed of memory, about."""
ON_CPU = {"top": CopyShare(0.23, 0.63), "rot": CopyShare(0.42, 0.59), "spike": CopyShare(0.34, 0.52)}
# bench/results/gpu-h200-new-wires-2026-11-16.txt
ON_GPU = {"top": CopyShare(0.41, 0.67), "rot": CopyShare(0.90, 0.95), "spike": CopyShare(0.89, 0.93)}


CASTS = ("bf16", "fp16")
ALWAYS = ("fp32", "as-is", *CASTS)
"""What no system's codec has a part in."""


def option_of(wire: str | Codec) -> str:
    """The name of what is done to values before they are encoded, without its number; empty where nothing is."""
    codec = codec_named(wire) if isinstance(wire, str) else wire
    return codec.transformed_by.rstrip("0123456789")


def is_covered(wire: str, cluster: Cluster) -> bool:
    """Whether the system whose codecs the cluster has says how fast a wire is; all are covered where there is none."""
    alike = (option_of(speed.wire) == option_of(wire) for speed in cluster.codecs)
    return not cluster.codec_system or wire in ALWAYS or any(alike)


def check_covered(wire: str, cluster: Cluster) -> None:
    """ValueError rather than our own speeds, which are not what was asked for."""
    if is_covered(wire, cluster):
        return
    own = ", ".join(speed.wire for speed in cluster.codecs)
    options = sorted({option_of(speed.wire) for speed in cluster.codecs})
    alike = " or ".join(f"with +{option}" if option else "without a transform" for option in options)
    raise ValueError(
        f"--codec-system {cluster.codec_system}: does not say how fast {wire} is; it has timed {own}: take that, "
        f"another wire {alike}, or {', '.join(ALWAYS)}"
    )


def timed_like(wire: str, cluster: Cluster) -> CodecSpeed | None:
    """The timings of a wire; else of one with the same transform and about as many bits; None where there is none."""
    check_covered(wire, cluster)
    own = next((speed for speed in cluster.codecs if speed.wire == wire), None)
    if own is not None:
        return own
    alike = [speed for speed in cluster.codecs if option_of(speed.wire) == option_of(wire)]
    if wire in ALWAYS and cluster.device.memory_gbyte:
        # a codec that somebody found slow says nothing about casts, nor about sums of what is not encoded
        alike = [speed for speed in alike if speed.wire in ALWAYS]
    if not alike:
        return None
    own_bits = codec_named(wire).bits_per_value
    plain = [speed for speed in alike if not codec_named(speed.wire).feedback and speed.wire != "fp32"]
    return min(plain or alike, key=lambda speed: abs(codec_named(speed.wire).bits_per_value - own_bits))


def speed_of(wire: str, cluster: Cluster) -> WireSpeed:
    """All that `Costs` asks of a wire's codec; ValueError where neither a timing nor the speed of memory tells it."""
    timed, codec = timed_like(wire, cluster), codec_named(wire)
    share = share_of(codec, cluster) if timed is None else WHOLE
    return WireSpeed(timed, share, codec.bits_per_value, codec.feedback)


def share_of(codec: Codec, cluster: Cluster) -> CopyShare:
    """What a codec reaches of the copy on the cluster's devices; ValueError where nobody knows."""
    if cluster.device.memory_gbyte <= 0:
        problem = f"neither [[codec]] nor device.memory_gbyte says how fast {codec} is"
        raise ValueError(f"cluster {cluster.name}: {problem}")
    option = option_of(codec)
    if not option:
        return WHOLE
    shares = ON_CPU if cluster.device.is_cpu else ON_GPU
    if option not in shares:
        raise ValueError(
            f"cluster {cluster.name}: nobody has measured how fast +{option} is; `narrowcast probe --wires {codec}` "
            "does"
        )
    return shares[option]
