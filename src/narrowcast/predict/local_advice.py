"""Local updates in words: which wire keeps workers computing, what the link would have to carry, what else would do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from narrowcast.codecs import codec as codec_named
from narrowcast.predict.local import AIM, LocalPrediction, LocalPredictor
from narrowcast.predict.rounds import LocalSetup

WIRES = ("fp32", "bf16", "int8/256", "int4/128+ef", "int2/4096+top64+ef95")


@dataclass(frozen=True)
class LocalAdvice:
    """What to do, and why."""

    verdict: str
    """use, cannot-tell or too-slow."""
    wire: str
    text: str
    predictions: tuple[LocalPrediction, ...]
    """Of each wire as it was asked for, most bits first."""
    blocking: LocalPrediction
    """Of the wire with one exchange of the whole model that all wait for."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "wire": self.wire,
            "text": self.text,
            "predictions": [one.as_dict() for one in self.predictions],
            "blocking": self.blocking.as_dict(),
        }


def advise_local(predictor: LocalPredictor, setup: LocalSetup, wires: Sequence[str] = WIRES) -> LocalAdvice:
    """Of wires that surely keep workers computing for 95 % of the time the one with the most bits."""
    by_bits = sorted(dict.fromkeys(wires), key=lambda wire: -codec_named(wire).bits_per_value)
    setups = [replace(setup, wire=wire) for wire in by_bits]
    made = [predictor.predict(one) for one in setups]
    sure = [one for one in made if one.share_interval[0] >= AIM]
    maybe = [one for one in made if one.share >= AIM]
    best = sure[0] if sure else max(made, key=lambda one: (one.share_interval[0], one.share))
    blocking = predictor.predict(replace(setup, wire=best.wire).blocking)
    verdict = "use" if sure else "cannot-tell" if maybe else "too-slow"
    return LocalAdvice(verdict, best.wire, _words(verdict, best, made, blocking), tuple(made), blocking)


def _words(verdict: str, best: LocalPrediction, made: Sequence[LocalPrediction], blocking: LocalPrediction) -> str:
    heads = {
        "use": f"use `{best.wire}`, {schedule(best)}",
        "cannot-tell": f"cannot tell: `{best.wire}`, {schedule(best)}, may do, but not surely",
        "too-slow": f"too slow: of these wires `{best.wire}`, {schedule(best)}, is best",
    }
    lines = [f"{heads[verdict]}: {_who(best)} compute {shares(best)} of the time", _exchange(best), _bytes(best)]
    if blocking.fragments != best.fragments or blocking.delay != best.delay:
        lines.append(f"in one piece that all wait for, they would compute {shares(blocking)}; {_would(blocking)}")
    if verdict != "use":
        lines.append(f"what would do: {_would(best)}")
    lines += [f"`{one.wire}`: {shares(one)}; {_would(one)}" for one in made if one is not best]
    if not best.measured:
        lines.append(f"the cluster {best.cluster} was not measured; `narrowcast probe` narrows the interval")
    lines.append("what rounds and few bits do to the loss is not predicted: docs/local-sgd.md")
    return "\n".join(lines)


def _who(one: LocalPrediction) -> str:
    each = f" of {one.devices // one.workers} devices" if one.devices > one.workers else ""
    return f"{one.workers} workers{each}"


def schedule(one: LocalPrediction) -> str:
    """When what travels, and with whom."""
    words = f"every {one.every} steps"
    if one.fragments > 1:
        words += f" in {one.fragments} fragments"
    words += f" under the next {one.delay} steps" if one.delay else ", waited for"
    return words if one.mixing == "all" else f"{words}, mixing {one.mixing}"


def shares(one: LocalPrediction) -> str:
    low, high = (_percent(end) for end in one.share_interval)
    return f"{_percent(one.share)} % ({low}-{high})"


def _percent(share: float) -> str:
    """Rounded down: 100 is all."""
    return f"{math.floor(1000 * share + 1e-6) / 10:g}"


def _exchange(one: LocalPrediction) -> str:
    low, high = (seconds(end) for end in one.exchange_interval)
    size = f"{one.exchange_bytes / 1e6:.3g} MB of a worker"
    return (
        f"an exchange of {size} takes {seconds(one.exchange)} ({low}-{high}); a step takes {seconds(one.compute)} alone"
    )


def _bytes(one: LocalPrediction) -> str:
    low, high = (f"{end / 1e9:.3g}" for end in one.day_interval)
    a_day = f"{one.bytes_a_day / 1e9:.3g} GB a day and worker ({low}-{high})"
    return f"it sends {a_day}, {one.bytes_a_parameter_and_step:.3g} bytes a parameter and step"


def _would(one: LocalPrediction) -> str:
    """What it takes to compute for 95 % of the time."""
    ways = [f"{between(one.needed_gbit, one.needed_interval)} Gb/s"] if math.isfinite(one.needed_gbit) else []
    ways += [f"every={one.needed_every}", *([f"a delay of {one.hiding_delay} steps"] if one.hiding_delay else [])]
    never = "" if math.isfinite(one.needed_gbit) else "; no bandwidth does: latencies, codecs and TCP's windows stay"
    return f"{100 * AIM:g} % take {' or '.join(ways)}{never}"


def between(value: float, ends: tuple[float, float]) -> str:
    """A number with its interval."""
    shown, low, high = ("never" if math.isinf(end) else f"{end:.3g}" for end in (value, *ends))
    return f"{shown} ({low}-{high})" if low != high or low != shown else shown


def seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"
