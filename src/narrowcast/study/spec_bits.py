"""What the spec of a wire says about its bits; a spec that this version does not know stands for itself."""

from __future__ import annotations

import math

from narrowcast.codecs import codec
from narrowcast.study.analysis import formatting


def wire_bits(wire: str) -> float:
    """Bits a value on the wire, scales included; an unknown spec counts as 32."""
    try:
        return codec(wire).bits_per_value
    except ValueError:
        return 32.0


def code_bits(wire: str) -> float:
    """Bits of a code, scales apart: 1 for onebit/16, whose wire has 5. Infinite for an unknown spec."""
    try:
        found = codec(wire)
    except ValueError:
        return math.inf
    return found.code_bits


def bits_name(wire: str) -> str:
    """`8 bits` for int8/256, `float32` for all that has 32; an unknown spec as it is."""
    bits = code_bits(wire)
    if math.isinf(bits):
        return wire
    return "float32" if bits == 32 else formatting.count(int(bits), "bit")
