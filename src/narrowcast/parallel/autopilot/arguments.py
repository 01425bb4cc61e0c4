"""`nc.auto`: the autopilot with its arguments checked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeGuard

from narrowcast.codecs import Codec
from narrowcast.codecs import codec as codec_named
from narrowcast.parallel.autopilot import errors as rule
from narrowcast.parallel.autopilot.history import SIXTEEN
from narrowcast.parallel.autopilot.pilot import BEAT, Autopilot
from narrowcast.parallel.policy import AS_IS

CANDIDATES = ("int8/256", "int4/128+ef", "int4/128+rot+ef")
"""Beside the values as they are and 16 bits. Fewer bits cost accuracy in the trainings of docs/convergence.md."""
MIN_BITS = 4.0


def auto(
    error: float = rule.BOUND,
    candidates: Sequence[str] = CANDIDATES,
    min_bits: float = MIN_BITS,
    every: int | None = None,
    dry_run: bool = False,
) -> Autopilot:
    """The policy of `attach(model, "auto")`: the wire of every tensor by the error it makes and the time it takes here.

    error: what rounding may add to the energy of the gradient, or of the noise between batches. candidates: specs to
    choose from, beside values as they are and 16 bits; those under min_bits a value are left out. every: steps
    between looks at all gradients; by default as often as 0.2 % of the time allows. dry_run: say what it would do.
    """
    _check(error, candidates, min_bits, every)
    found = [codec_named(spec) for spec in candidates]
    for codec in found:
        if codec.differences or codec.agrees_on_scales:
            raise ValueError(f"auto: candidates has {codec}, whose error is not that of one rank; leave it out")
    known = AS_IS, codec_named(SIXTEEN)
    few = [codec for codec in dict.fromkeys(found) if codec.bits_per_value < min_bits and codec not in known]
    if few and candidates is not CANDIDATES:
        spec, bits = few[0], few[0].bits_per_value
        raise ValueError(
            f"auto: candidates has {spec}, of {bits:.3g} bits a value; give min_bits={bits:.3g} or less, too"
        )
    kept = [codec for codec in dict.fromkeys(found) if codec not in (*known, *few)]
    return Autopilot([*known, *kept], error, every, dry_run)


def _check(error: object, candidates: object, min_bits: object, every: object) -> None:
    if not _is_number(error) or not 0 < error < 1:
        raise ValueError(f"auto: error={error!r}; give a share of the gradient's energy, between 0 and 1")
    if isinstance(candidates, str | Codec) or not isinstance(candidates, Iterable):
        raise TypeError(f"auto: candidates={candidates!r}; give a list of specs, as ['int8/256', 'int4/128+ef']")
    if not _is_number(min_bits):
        raise ValueError(f"auto: min_bits={min_bits!r}; give a number of bits a value, 0 for any")
    if every is not None and (type(every) is not int or every < BEAT or every % BEAT):
        raise ValueError(f"auto: every={every!r}; give a multiple of {BEAT} steps, or leave it out")


def _is_number(x: object) -> TypeGuard[float]:
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)
